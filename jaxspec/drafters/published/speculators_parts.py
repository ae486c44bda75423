"""What the forms of the package `speculators` share: keys around a layer's config, and how many tokens are proposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.imported import COMMON_KEYS
from jaxspec.drafters.published.layers import LAYER_KEYS
from jaxspec.errors import UserError
from jaxspec.weights.families import hf_config
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

FAMILIES = ("llama", "qwen3")
_KEYS = (
    *("architectures", "speculators_model_type", "speculators_version", "speculators_config", "auto_map"),
    *("transformer_layer_config", "draft_vocab_size", "target_hidden_size", "torch_dtype"),
)
_SWITCHES = ("has_no_defaults_at_init", "enable_sp_ulysses")  # of its training, which say nothing when off
_VERSION = "0.9.0"


def checked_keys(folder: PublishedFolder, own: tuple[str, ...], defaults: Mapping[str, Any] = {}) -> tuple[Keys, Keys]:
    """The keys of config.json and those of the layer.

    Args:
      folder: of the drafter.
      own: keys of this kind of drafter alone.
      defaults: values of those that may be left out.

    Raises:
      UserError: a key that nobody knows.
    """
    switches = (name for name in _SWITCHES if folder.config.get(name) is False)
    folder.check_keys((*_KEYS, *own, *COMMON_KEYS, *switches))
    keys = Keys(folder.config, {"draft_vocab_size": 32000, **defaults}, folder.config_file)
    layer = keys.part("transformer_layer_config")
    folder.check_keys(LAYER_KEYS, layer.content, "transformer_layer_config.")
    return keys, layer


def leave_training_tensors(folder: PublishedFolder) -> None:
    """The base's, which its training needs, may be there."""
    folder.leave("verifier_norm.weight", "verifier_lm_head.weight")


def proposed_tokens(keys: Keys, algorithm: str, default: int) -> int:
    """How many tokens the first way to propose drafts. Raises UserError for another algorithm."""
    keys = keys.part("speculators_config")
    if keys.get("algorithm", algorithm) != algorithm:
        raise UserError(f"{keys.where}: algorithm {keys.get('algorithm')!r:.60} is not {algorithm}")
    proposals = keys.get("proposal_methods")
    if proposals is None or proposals == []:
        return default
    if not isinstance(proposals, list) or not all(isinstance(each, dict) for each in proposals):
        raise keys.error("proposal_methods", "a list of objects")
    first = Keys(proposals[0], {"speculative_tokens": default}, f"{keys.where}: proposal_methods")
    return first.count("speculative_tokens", 64)


def written_config(algorithm: str, architecture: str, tokens: int, model: Model) -> dict[str, Any]:
    """The keys that say what a drafter is, for which base, and how many tokens it proposes."""
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": model.name, "architectures": hf_config(model.config)["architectures"]},
        },
    }
