"""config.json of a base: to its shapes and back, by the table of families (`jaxspec.weights.family_table`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxspec.config import ModelConfig, window_fields
from jaxspec.errors import UserError, suggest
from jaxspec.files import read_json
from jaxspec.weights.family import UNREAD, Family
from jaxspec.weights.family_table import FAMILIES
from jaxspec.weights.float8 import reads_float8
from jaxspec.weights.keys import FULL, SLIDING, Keys
from jaxspec.weights.published import Published
from jaxspec.weights.rope_keys import read_rope, write_rope

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_WORDS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def parse_config(content: dict, where: str = "config.json") -> ModelConfig:
    """The shapes that the content of a Hugging Face config.json gives; `where` names it in messages.

    Raises:
      UserError: a family or a setting that the decoder does not have, an impossible value, or a missing key.
    """
    name, family = _family_of(content, where)
    keys = Keys(content, _DEFAULTS | family.defaults, where, family.names)
    _refuse_unread(keys, name, family)
    if family.part:
        part = keys.part(family.part)
        keys = Keys(part.content, keys.defaults, part.where, family.names)
        _refuse_unread(keys, name, family)
    hidden, layers = keys.count("hidden_size", 10**6), keys.count("num_hidden_layers", 1000)
    heads = keys.count("num_attention_heads", 10**4)
    head_dim = keys.optional_count("head_dim", 10**4) if family.own_head_dim else None
    if not head_dim and hidden % heads:
        raise keys.error("num_attention_heads", f"a divisor of hidden_size {hidden}")
    head_dim = head_dim or hidden // heads
    width = None if keys.get("intermediate_size") or not family.mlp_factor else family.mlp_factor * hidden
    fields = dict(
        vocab_size=keys.count("vocab_size", 10**7),
        hidden_size=hidden,
        intermediate_size=width or keys.count("intermediate_size", 10**7),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.optional_count("num_key_value_heads", 10**4) or heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        activation=keys.choice("hidden_act", _ACTIVATIONS),
    )
    rope = read_rope(keys, head_dim, family.local_rope, family.partial_rope)
    config = ModelConfig(**fields | rope | _windows(keys, family, layers) | family.read(keys))
    if heads % config.num_kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of the {heads} heads")
    if head_dim % 2:
        raise UserError(f"{keys.where}: head_dim must be even, got {head_dim}")
    return config


def read_config(folder: Path) -> ModelConfig:
    """The shapes of a base from its config.json. Raises UserError as `parse_config`, or where it cannot be read."""
    file = folder / "config.json"
    return parse_config(read_json(file), str(file))


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a base: the inverse of `parse_config`.

    Raises UserError where no family that can be written has what the base has.
    """
    name = _family_for(config)
    family = FAMILIES[name]
    written = {
        "model_type": name,
        "architectures": [family.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        **write_rope(config),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": config.first_window_layer,
        "hidden_act": _WORDS[config.activation],
    }
    if family.layer_types:
        written["layer_types"] = [FULL if config.window(i) is None else SLIDING for i in range(config.num_layers)]
    if not family.own_head_dim:
        del written["head_dim"]
    written |= family.write(config)
    content = {family.names.get(key, key): value for key, value in written.items()}
    fields = (field.name for field in dataclasses.fields(config))
    again = parse_config(content)
    if other := [field for field in fields if getattr(again, field) != getattr(config, field)]:
        changed = ", ".join(other)
        raise UserError(f"the base cannot be written: as {name!r}, the family nearest to it, it has another {changed}")
    return content


def published_form(config: ModelConfig, content: dict) -> Published:
    """The form of the files beside a config.json with this content, whose shapes are `config`."""
    return _family_of(content, "config.json")[1].published(config)


def _family_of(content: dict, where: str) -> tuple[str, Family]:
    name = content.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return name, FAMILIES[name]
    hint = suggest(name, FAMILIES) if isinstance(name, str) else ""
    known = ", ".join(FAMILIES)
    raise UserError(f"{where}: model_type {name!r:.80} is not supported{hint}; supported: {known} (see docs/models.md)")


def _family_for(config: ModelConfig) -> str:
    """The family that has what a base has."""
    if config.norm == "layer":
        return "falcon"
    if config.norms == "after":
        return "olmo2"
    if config.norms == "around":
        return "gemma3_text" if config.head_norms else "gemma2"
    if (config.embedding_scale, config.residual_scale, config.logit_scale) != (1, 1, 1) or config.score_scale:
        return "granite"
    if config.rotary_dim and not config.rope_scaling:
        return "glm" if config.qkv_bias else "phi3"
    if config.rotary_dim or (config.rope_scaling and config.rope_scaling.kind == "longrope"):
        return "phi3"
    if config.head_norms:
        return "qwen3"
    if config.qkv_bias and not config.o_bias:
        return "qwen2"
    return "mistral" if config.sliding_window else "llama"


def _refuse_unread(keys: Keys, name: str, family: Family) -> None:
    """Raise UserError for a key that would change what is computed, and is not read."""
    quantization = keys.get("quantization_config")
    readable = isinstance(quantization, dict) and reads_float8(quantization)
    if quantization is not None and not readable:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UserError(
            f"{keys.where}: quantization_config {method!r:.40} is not supported, only float8 weights with scales; "
            "load unquantised weights"
        )
    for key, usual in (UNREAD | family.unread).items():
        value = keys.get(key)
        if value is not None and value != usual:
            raise UserError(f"{keys.where}: {key} {value!r:.80} is not supported for {name}, only {usual!r}")


def _windows(keys: Keys, family: Family, layers: int) -> dict[str, Any]:
    """Which layers have a window: as `layer_types` says, else by the family's rule."""
    window, types = family.window(keys), keys.get("layer_types")
    usual = family.pattern(keys, layers) if window else [False] * layers
    if types is None:
        sliding = usual
    elif isinstance(types, list) and len(types) == layers and all(kind in (FULL, SLIDING) for kind in types):
        sliding = [kind == SLIDING for kind in types]
    else:
        raise keys.error("layer_types", f"a list of {layers} of {FULL} and {SLIDING}")
    if any(sliding) and not window:
        raise UserError(f"{keys.where}: layer_types has {SLIDING}, and for this family no sliding_window is in use")
    if sliding != usual and not family.layer_types:
        raise UserError(f"{keys.where}: layer_types has {FULL}, and this family has sliding_window in every layer")
    return window_fields(window, sliding)
