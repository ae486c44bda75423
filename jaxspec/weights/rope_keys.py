"""How a config.json says how positions rotate: today's `rope_parameters`, or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from typing import Any

from jaxspec.config import ModelConfig, RopeScaling
from jaxspec.errors import UserError
from jaxspec.weights.keys import FULL, MOST_POSITIONS, SLIDING, Keys

_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
FACTORS = (1.0, 1e6)  # by which a context grows
BASES = (1.001, 1e12)  # of frequencies, which a base of 1 would make all alike


def read_rope(keys: Keys, head_dim: int, per_kind: bool = False, partial: bool = False) -> dict[str, Any]:
    """The fields of a ModelConfig that say how positions rotate, and `max_positions`.

    Args:
      keys: of the config.json.
      head_dim: Dh.
      per_kind: layers with a window may have a base of their own.
      partial: the family can rotate a part of every head.

    Raises:
      UserError: a kind of scaling, or a combination, that the decoder does not have.
    """
    trained = keys.count("max_position_embeddings", MOST_POSITIONS)
    rope = keys.part("rope_parameters")
    rope = rope if rope.content else keys.part("rope_scaling")
    local = None
    if per_kind:
        rope, local = _per_kind(keys, rope)
    elif nested := [key for key, value in rope.content.items() if isinstance(value, dict)]:
        raise UserError(f"{rope.where}: a rotation for {nested[0]} alone is not supported for this family")
    share = rope.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0))
    if share is None or share == 1:
        size = head_dim
    elif not partial or not isinstance(share, int | float) or not 0 < share < 1 or not _rotates(int(head_dim * share)):
        allowed = "from 0 to 1 that rotates 2, 4 or more dimensions" if partial else "1 for this family"
        raise UserError(f"{keys.where}: partial_rotary_factor must be {allowed}, got {share!r}")
    else:
        size = int(head_dim * share)
    scaling = _scaling(keys, rope, trained, size)
    if local is not None and scaling is not None and scaling.attention_factor != 1.0:
        raise UserError(f"{rope.where}: {scaling.kind} is not supported for layers beside others with a window")
    theta = rope if rope.get("rope_theta") is not None else keys
    return dict(
        rope_theta=theta.number("rope_theta", *BASES),
        rope_scaling=scaling,
        local_rope_theta=local,
        rotary_dim=None if size == head_dim else size,
        max_positions=longest(keys, scaling, trained),
    )


def _rotates(size: int) -> bool:
    """Whether so many dimensions can be rotated, in pairs."""
    return size > 0 and size % 2 == 0


def _per_kind(keys: Keys, rope: Keys) -> tuple[Keys, float]:
    """The rotation of layers that see everything, and the base of those with a window."""
    if FULL not in rope.content and SLIDING not in rope.content:
        return rope, keys.number("rope_local_base_freq", *BASES)
    full, sliding = rope.part(FULL), rope.part(SLIDING)
    if sliding.get("rope_type", "default") != "default":
        raise UserError(f"{sliding.where}: rope_type {sliding.get('rope_type')!r} is not supported, only default")
    known = sliding if sliding.get("rope_theta") is not None else keys
    return full, known.number("rope_theta" if known is sliding else "rope_local_base_freq", *BASES)


def _scaling(keys: Keys, rope: Keys, trained: int, size: int) -> RopeScaling | None:
    kind = next((rope.get(key) for key in ("rope_type", "type") if rope.get(key) is not None), "default")
    if kind == "su" or (kind == "yarn" and "short_factor" in rope.content):  # what Phi-3 called it at first
        kind = "longrope"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UserError(f"{rope.where}: rope scaling {kind!r:.80} is not supported; supported: {', '.join(_KINDS)}")
    if kind == "linear":
        return RopeScaling(kind, rope.number("factor", *FACTORS))
    if kind == "dynamic":
        return dynamic_scaling(rope, "factor", trained, size)
    original = _original(keys, rope, trained)
    if kind == "llama3":
        low, high = (rope.number(key) if key in rope.content else usual for key, usual in _LLAMA3)
        if low >= high:
            raise UserError(f"{rope.where}: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        factor = rope.number("factor", *FACTORS)
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    factor = max(trained / original, 1.0) if rope.get("factor") is None else rope.number("factor", *FACTORS)
    if kind == "yarn":
        fast, slow = rope.optional_number("beta_fast") or 32.0, rope.optional_number("beta_slow") or 1.0
        if fast <= slow:
            raise UserError(f"{rope.where}: beta_fast {fast:g} must be above beta_slow {slow:g}")
        return RopeScaling(
            kind,
            factor,
            original,
            attention_factor=_yarn_attention(rope, factor),
            beta_fast=fast,
            beta_slow=slow,
            truncate=rope.flag("truncate") if "truncate" in rope.content else True,
        )
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind,
        factor,
        original,
        attention_factor=rope.optional_number("attention_factor") or usual,
        short_factors=rope.numbers("short_factor", size // 2),
        long_factors=rope.numbers("long_factor", size // 2),
    )


_LLAMA3 = (("low_freq_factor", 1.0), ("high_freq_factor", 4.0))


def dynamic_scaling(rope: Keys, key: str, trained: int, size: int) -> RopeScaling:
    """The scaling `dynamic`, which counts from `max_position_embeddings`, as in transformers.

    Args:
      rope: where the factor is.
      key: of the factor.
      trained: `max_position_embeddings`.
      size: rotated dimensions of a head, at least 4.

    Raises:
      UserError: fewer dimensions, or an impossible factor.
    """
    if size < 4:
        raise UserError(f"{rope.where}: dynamic scaling needs at least 4 rotated dimensions, there are {size}")
    return RopeScaling("dynamic", rope.number(key, *FACTORS), trained)


def _original(keys: Keys, rope: Keys, trained: int) -> int:
    """The context of pretraining, which some families say outside of `rope_parameters`."""
    key = "original_max_position_embeddings"
    given = {k.count(key, MOST_POSITIONS, least=2) for k in (rope, keys) if k.get(key) is not None}
    if len(given) > 1:
        raise UserError(f"{keys.where}: {key} is {keys.get(key)}, and {rope.get(key)} in {rope.where.split(': ')[-1]}")
    return given.pop() if given else trained


def _yarn_attention(rope: Keys, factor: float) -> float:
    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    above, below = (rope.number(key) if rope.get(key) else None for key in ("mscale", "mscale_all_dim"))
    return grown(above) / grown(below) if above and below else grown(1.0)


def longest(keys: Keys, scaling: RopeScaling | None, trained: int) -> int:
    """Tokens of context, stretched: `max_position_embeddings`, unless that is the context of pretraining."""
    return min(_stretched(keys, scaling, trained), MOST_POSITIONS)


def _stretched(keys: Keys, scaling: RopeScaling | None, trained: int) -> int:
    if scaling and scaling.kind == "dynamic":
        return int(trained * scaling.factor)
    if scaling and scaling.kind == "yarn":
        return max(trained, int(scaling.original_max_positions * scaling.factor))
    if scaling and scaling.kind == "linear":  # Vicuna's 16k models say both
        return max(trained, keys.optional_count("max_sequence_length", MOST_POSITIONS) or 0)
    return trained


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_rope`: keys of a config.json, in today's style and in the older one."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    s, trained = config.rope_scaling, config.max_positions
    if s:
        trained = s.original_max_positions if s.kind == "dynamic" else trained
        rope |= {"rope_type": s.kind, "factor": s.factor}
        if s.kind not in ("linear", "dynamic"):
            rope["original_max_position_embeddings"] = s.original_max_positions
        if s.kind == "llama3":
            rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
        if s.kind in ("yarn", "longrope"):
            rope["attention_factor"] = s.attention_factor
        if s.kind == "yarn":
            rope |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
        if s.kind == "longrope":
            rope |= {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors)}
    keys = {"max_position_embeddings": trained, "rope_theta": config.rope_theta, "rope_scaling": rope if s else None}
    if config.rotary_dim:
        rope["partial_rotary_factor"] = keys["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if s and s.kind == "longrope":
        keys["original_max_position_embeddings"] = s.original_max_positions
    if config.local_rope_theta is not None:
        sliding = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        return keys | {
            "rope_parameters": {FULL: rope, SLIDING: sliding},
            "rope_local_base_freq": config.local_rope_theta,
        }
    return keys | {"rope_parameters": rope}
