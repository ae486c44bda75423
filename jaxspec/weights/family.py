"""What a family of decoders is, for `jaxspec.weights.family_table`, which has them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.weights.keys import MOST_POSITIONS, Keys
from jaxspec.weights.published import Published

Fields = dict[str, Any]

# keys of every family that change what is computed, unless they have these values or are null: nothing reads them
UNREAD: Fields = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "use_bidirectional_attention": False,
    "pruned_heads": {},
}


def all_but_one(period: int, layers: int) -> list[bool]:
    """Which layers have a window, where the last of every period has none."""
    return [bool((i + 1) % period) for i in range(layers)]


def attention_bias(keys: Keys) -> Fields:
    """Biases of all four projections of attention."""
    bias = keys.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def window(keys: Keys) -> int | None:
    """The size of windows, or None."""
    return keys.optional_count("sliding_window", MOST_POSITIONS)


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family apart.

    Attributes:
      architecture: what transformers calls it.
      defaults: of the keys that a config.json may leave out.
      read: keys to the fields of a ModelConfig that are not every family's.
      write: the inverse: such fields to keys.
      window: keys to the length of windows; None where there are none.
      pattern: which layers have one, by keys and the number of layers.
      layer_types: a config may choose these layers.
      published: the form of a base's files.
      names: this family's names of keys, by LLaMA's.
      own_head_dim: the width of a head can be another one than hidden_size / num_attention_heads.
      mlp_factor: width of the MLP in hidden sizes, where a config does not say it.
      local_rope: layers with a window may rotate with a base of their own.
      partial_rope: a part of every head may be rotated.
      unread: further keys that are refused, with the values that change nothing.
      part: key of the object that holds the decoder's keys, where that is not the whole config.json.
    """

    architecture: str
    defaults: Fields = dataclasses.field(default_factory=dict)
    read: Callable[[Keys], Fields] = lambda keys: {}
    write: Callable[[ModelConfig], Fields] = lambda config: {}
    window: Callable[[Keys], int | None] = lambda keys: None
    pattern: Callable[[Keys, int], list[bool]] = lambda keys, layers: [True] * layers
    layer_types: bool = False
    published: Callable[[ModelConfig], Published] = lambda config: Published()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_head_dim: bool = True
    mlp_factor: int | None = None
    local_rope: bool = False
    partial_rope: bool = False
    unread: Fields = dataclasses.field(default_factory=dict)
    part: str = ""
