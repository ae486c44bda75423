"""What all may use of settings: the base's shapes, how to sample, how devices share the work.

Frozen dataclasses. A method's settings are the method itself (`jaxspec.methods`), those of training stand in
`jaxspec.training.settings`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any, Literal

from flax.traverse_util import flatten_dict


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies for contexts longer than those of pretraining.

    Attributes:
      kind: `linear` (positions divided by `factor`), `dynamic` (NTK: the base grows once a position passes
        `original_max_positions`), `llama3` (low frequencies divided by `factor`, high ones kept), `yarn` (the same
        with another blend) or `longrope` (every frequency divided by a factor of its own).
      factor: how many times longer the context becomes.
      original_max_positions: context length of pretraining, in tokens (all but `linear`).
      low_freq_factor: `llama3`: wavelengths above original / low_freq_factor are divided by `factor`.
      high_freq_factor: `llama3`: wavelengths below original / high_freq_factor are kept.
      attention_factor: `yarn` and `longrope`: rotated queries and keys are multiplied by it.
      beta_fast: `yarn`: frequencies that turn more often than this within the original context are kept.
      beta_slow: `yarn`: those that turn less often are divided by `factor`.
      truncate: `yarn`: the dimensions between which it blends are whole numbers.
      short_factors: `longrope`: one per frequency, for texts that fit into the original context.
      long_factors: `longrope`: one per frequency, for longer texts.
    """

    kind: str
    factor: float
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __repr__(self) -> str:
        """Without the settings of kinds that came later, where they are the default: fingerprints contain it."""
        fields = dataclasses.fields(self)
        shown = fields[:5] + tuple(f for f in fields[5:] if getattr(self, f.name) != f.default)
        return f"RopeScaling({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a LLaMA-style decoder. Families differ by these values, not by code.

    Attributes:
      vocab_size: V, rows of the embedding.
      hidden_size: D, model width.
      intermediate_size: width of the MLP.
      num_layers: L.
      num_heads: H, query heads.
      num_kv_heads: K, key/value heads; H / K queries share one (grouped-query attention).
      head_dim: Dh, width of one head.
      max_positions: longest context the base was made for, in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are stretched, if they are.
      rms_norm_eps: epsilon inside the norms, of either kind.
      tie_embeddings: the vocabulary projection is the transposed embedding.
      qkv_bias: query, key and value projections carry a bias (Qwen2).
      head_norms: queries and keys are normalised per head, before they are rotated (Qwen3).
      sliding_window: a row sees at most this many newest positions, itself included (Mistral); None: all.
      first_window_layer: layers below this index see everything in spite of `sliding_window` (Qwen2 and 3).
      full_layers: so do these layers (Gemma).
      local_rope_theta: layers with a window rotate with this base, unstretched (Gemma 3); None: with `rope_theta`.
      rotary_dim: first dimensions of every head that are rotated (Phi-4 mini); None: all.
      norm: `rms`, or `layer` for LayerNorm with a bias (Falcon).
      norms: where each half of a layer is normalised: `before`, `after` (OLMo 2) or `around`, both (Gemma).
      joint_norms: queries and keys are normalised, each over all heads together (OLMo 2).
      parallel: attention and MLP read the same rows, and both are added to them (Falcon).
      shared_norm: of the two norms before parallel halves there is only the attention's (Falcon 7B).
      o_bias: the output projection of attention carries a bias.
      mlp_bias: the MLP's projections carry a bias.
      gated: the MLP has a gate.
      activation: of the gate, or of the MLP without one: `silu`, `gelu`, or `gelu_tanh`, its approximation.
      score_scale: attention scores are multiplied by it; None: Dh ** -0.5.
      score_cap: attention scores s become cap * tanh(s / cap) (Gemma 2).
      logit_cap: so do logits.
      embedding_scale: embeddings are multiplied by it (Gemma, Granite).
      residual_scale: what each half of a layer adds is multiplied by it (Granite).
      logit_scale: logits are multiplied by it (Granite).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    sliding_window: int | None = None
    first_window_layer: int = 0
    full_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    rotary_dim: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norms: Literal["before", "after", "around"] = "before"
    joint_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ModelConfig:
        """The inverse of `dataclasses.asdict` and JSON, which makes lists of tuples."""
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        scaling = fields.get("rope_scaling")
        if scaling:
            tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in scaling.items()}
            fields["rope_scaling"] = RopeScaling(**tuples)
        return cls(**fields)

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, or None."""
        has_none = layer < self.first_window_layer or layer in self.full_layers
        return None if has_none else self.sliding_window

    def of_layers(self, layers: Sequence[int]) -> ModelConfig:
        """The shapes of a decoder that consists of some of the layers, in ascending order."""
        windows = window_fields(self.sliding_window, [self.window(layer) is not None for layer in layers])
        return dataclasses.replace(self, num_layers=len(layers), **windows)

    @property
    def rotary_size(self) -> int:
        """Dimensions of every head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def rotary_factor(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return self.rope_scaling.attention_factor if self.rope_scaling else 1.0

    def plain_layers(self) -> ModelConfig:
        """The same with layers as LLaMA's: norms before each half, one half after the other, plain scores.

        Methods make layers of their own in this shape. They can start as the base's where those have it too: where this
        returns the same.
        """
        return dataclasses.replace(
            self,
            norm="rms",
            norms="before",
            joint_norms=False,
            parallel=False,
            shared_norm=False,
            local_rope_theta=None,
            score_scale=None,
            score_cap=None,
            residual_scale=1.0,
        )


def window_fields(window: int | None, sliding: Sequence[bool]) -> dict[str, Any]:
    """The fields of a ModelConfig that say which of its layers have a sliding window, one way for each pattern.

    Args:
      window: its size.
      sliding: by layer.
    """
    if not any(sliding):
        return {"sliding_window": None, "first_window_layer": 0, "full_layers": ()}
    first, full = sliding.index(True), tuple(i for i, slides in enumerate(sliding) if not slides)
    if all(sliding[first:]):
        return {"sliding_window": window, "first_window_layer": first, "full_layers": ()}
    return {"sliding_window": window, "first_window_layer": 0, "full_layers": full}


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a next token is drawn. Filters apply in the order of the fields, as Hugging Face does.

    Attributes:
      temperature: logits are divided by it; 0 is greedy and ignores the filters.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all.
      min_p: drop tokens less probable than this fraction of the most probable one; 0 drops none.
      repetition_penalty: before all that, divides positive logits of tokens that the prompt or the answer has, and
        multiplies negative ones; 1 changes none.
      presence_penalty: then subtracted from logits of tokens that the answer has.
      frequency_penalty: likewise, as many times as the answer has them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalises(self) -> bool:
        """Whether what a text has already changes what comes next."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices share the work, and how: their number is the product of the three axes.

    Attributes:
      data: copies that divide the batch.
      fsdp: parts that the weights are divided into, with gradients and optimizer state; every layer's weights are
        gathered where they are used. Divides the batch as well.
      tensor: parts that heads, MLPs and the vocabulary are divided into; every layer ends in sums over them.
      zero: what `fsdp` divides: 3, everything; 2, gradients and optimizer state, while the weights stay whole.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: Literal[2, 3] = 3

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.data * self.fsdp * self.tensor


def command_line(words: Sequence[str], settings: dict[str, Any], default: object) -> str:
    """The command that gives an entry point these settings, without those that are the default.

    Args:
      words: the command itself.
      settings: as JSON holds the fields of the options' dataclass, nested ones nested.
      default: the dataclass with its defaults.
    """
    line, defaults = list(words), flatten_dict(dataclasses.asdict(default), sep=".")
    for name, value in flatten_dict(settings, sep=".").items():
        option, usual = name.replace("_", "-"), defaults[name]
        if value == (list(usual) if isinstance(usual, tuple) else usual):
            continue
        if isinstance(value, bool):
            line.append(f"--{option}" if value else f"--no-{option}")
        else:
            line += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(line)
