"""PPD as its author publishes it: prompt tuning of the package PEFT, with further keys and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.decoding.draft import PyTree
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.drafters.published.form import Form, Interpretation
from jaxspec.drafters.published.imported import check_plain, check_sizes, make_adapter, projection_shape, take
from jaxspec.errors import UserError
from jaxspec.methods import PPD
from jaxspec.weights.keys import Keys
from jaxspec.weights.model import Model

_SPECIAL, _VIRTUAL, _ALL = "num_special_tokens", "virtual_tokens_per_special_token", "num_virtual_tokens"
_SETTINGS = (_SPECIAL, _VIRTUAL, _ALL, "num_exits", "vt_attention_type", "aggregation_type")
_SIZES = {"token_dim": "hidden_size", "num_layers": "num_layers", "num_attention_heads": "num_heads"}  # of the base
_UNREAD = (  # of PEFT, and of training
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "prompt_tuning_init"),
    *("prompt_tuning_init_text", "prompt_tuning_init_state_dict_path", "revision", "task_type", "tokenizer_kwargs"),
    *("tokenizer_name_or_path", "use_cache", "prefix_virtual_tokens"),
)
_MOST = 1024
_MASKS = {"decoder": "causal", "encoder": "alone", "ensemble": "ensemble"}  # the released code's by our names
_AGGREGATIONS = {"mean": "average", "weighted": "learned"}
_USUAL = (
    (0.40, 0.14, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01),
    (0.22, 0.10, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02, 0.02, 0.01),
    (0.15, 0.08, 0.06, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02, 0.01),
)


def _recognises(config: Mapping[str, Any]) -> bool:
    return _SPECIAL in config and _VIRTUAL in config


def _read(folder: PublishedFolder, model: Model) -> list[Interpretation]:
    if folder.config.get("peft_type") != "PROMPT_TUNING":
        raise UserError(f"{folder.config_file}: peft_type {folder.config.get('peft_type')!r:.60} is not PROMPT_TUNING")
    if folder.config.get("prefix_virtual_tokens"):
        tokens = folder.config["prefix_virtual_tokens"]
        raise UserError(f"{folder.config_file}: prefix_virtual_tokens {tokens!r:.60} is not supported")
    folder.check_keys((*_SETTINGS, *_SIZES, *_UNREAD, "num_transformer_submodules", *_off(folder)))
    check_plain(model, "ppd")
    defaults = {"num_exits": 1, "vt_attention_type": "decoder", "aggregation_type": "mean"}
    keys = Keys(folder.config, defaults, folder.config_file)
    _check_base(folder, keys, model)
    distances, ensemble = keys.count(_SPECIAL, _MOST), keys.count(_VIRTUAL, _MOST)
    if keys.get(_ALL) not in (None, distances * ensemble):
        raise UserError(f"{keys.where}: {_ALL} {keys.get(_ALL)!r:.60} is not {distances} times {ensemble}")
    aggregation, head = keys.choice("aggregation_type", _AGGREGATIONS), keys.flag("use_custom_lm_head")
    exits = keys.count("num_exits", model.config.num_layers)
    method = PPD(
        distances=distances,
        ensemble=ensemble,
        mask=keys.choice("vt_attention_type", _MASKS),
        aggregation=aggregation if ensemble > 1 else "average",  # one row has no weight there
        multi_exit=exits,
        exit_norm=exits == 1,
        head="one_stage" if head else "none",
    )
    trainable = _read_tensors(folder, model, method, aggregation == "learned")
    return [Interpretation("", make_adapter(folder, model, "ppd", method, trainable, _USUAL))]


def _off(folder: PublishedFolder) -> tuple[str, ...]:
    """Keys that only say something when they are on. Raises UserError for the one that is not supported."""
    if folder.config.get("use_prefix_tuning"):
        raise UserError(
            f"{folder.config_file}: use_prefix_tuning is not supported: its prompt tokens stand further away than "
            "the tokens that they predict"
        )
    return "use_prefix_tuning", "use_custom_lm_head"


def _check_base(folder: PublishedFolder, keys: Keys, model: Model) -> None:
    """Raise UserError for prompt tokens of another base, with the sizes of both."""
    check_sizes(folder, keys.optional_count("token_dim", 10**6) or model.config.hidden_size, None, model)
    for key, ours in _SIZES.items():
        if keys.get(key) not in (None, size := getattr(model.config, ours)):
            raise UserError(f"{keys.where}: {key} {keys.get(key)!r:.60} is another base's, {model.name!r} has {size}")
    if keys.get("num_transformer_submodules") not in (None, 1):
        raise UserError(
            f"{keys.where}: num_transformer_submodules {keys.get('num_transformer_submodules')!r:.60} is not supported"
        )


def _read_tensors(folder: PublishedFolder, model: Model, method: PPD, weighted: bool) -> PyTree:
    """Prompt tokens, those of one distance together; weights of their logits; a projection of their own."""
    M, n, D = method.distances, method.ensemble, model.config.hidden_size
    prompts = folder.take("prompt_embeddings", (M * n, D)).astype(np.float32)
    trainable = {"embeddings": prompts.reshape(M, n, D)}
    if weighted:
        weights = np.concatenate([folder.take(f"{d}.weight", (1, n)).astype(np.float32) for d in range(M)])
        if n == 1 and np.any(weights != 1):
            raise UserError(f"{folder.path}: weights other than 1 of one prompt token per distance are not supported")
        trainable |= {"weights": weights} if n > 1 else {}
    if method.head != "none":
        trainable["head"] = take(folder, "weight", projection_shape(folder, "weight", model))
    return trainable


FORM = Form(
    "ppd",
    "PPD of its author, prompt tuning of PEFT",
    _recognises,
    _read,
    weights=("adapter_model.safetensors", "adapter_model.bin"),
    further=("weighting_layers.pt", "custom_lm_head.pt"),
)
