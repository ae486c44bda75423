"""What reading shares among the forms: keys that say nothing, checks of the base, and the adapter that is made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Method
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import method_plan
from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.errors import UserError
from jaxspec.trees.plan import plan_to_json
from jaxspec.weights.model import Model

# What transformers, of whichever version, may write into any config.json, and no drafter depends on.
COMMON_KEYS = (
    *("_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures", "bad_words_ids"),
    *("begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size"),
    *("decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task"),
    *("forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id"),
    *("length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups"),
    *("num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores"),
    *("pad_token_id", "prefix", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty"),
    *("return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params"),
    *("temperature", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k"),
    *("top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16"),
)
# By distance and rank, how often a drafter that reads the text up to its own token is right, where it was not measured.
USUAL = tuple(
    tuple(0.93**distance * share for share in (0.62, 0.11, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.005, 0.005))
    for distance in range(16)
)
# Settings of a base whose heads compute something that no published form does, with the values that change nothing.
_PLAIN = {"embedding_scale": 1.0, "logit_cap": None, "logit_scale": 1.0}


def check_sizes(folder: PublishedFolder, width: int, tokens: int | None, model: Model) -> None:
    """Raise UserError for a drafter of another base, with the sizes of both; tokens: None where it has no such size."""
    ours = (model.config.hidden_size, model.config.vocab_size)
    if (width, ours[1] if tokens is None else tokens) == ours:
        return
    theirs = f"width {width}" + ("" if tokens is None else f" with {tokens} tokens")
    raise UserError(
        f"{folder.path}: a drafter for a base of {theirs}; {model.name!r} has width {ours[0]} and {ours[1]} tokens"
    )


def check_plain(model: Model, form: str) -> None:
    """Raise UserError for a base that scales embeddings or changes logits, which other software does not in heads."""
    for name, usual in _PLAIN.items():
        if getattr(model.config, name) != usual:
            raise UserError(f"the form {form} is not for bases with {name} {getattr(model.config, name)!r}")


def count_parts(folder: PublishedFolder, begin: str = "") -> int:
    """How many heads tensors `begin` + `0.`, `1.` and so on belong to: configs are known to say less."""
    numbers = {name.removeprefix(begin).split(".")[0] for name in folder.tensors if name.startswith(begin)}
    return sum(number.isdecimal() for number in numbers)


def projection_shape(folder: PublishedFolder, name: str, model: Model) -> tuple[int, int]:
    """The shape [V, D] that a vocabulary projection must have. Raises UserError for another base's, with both sizes."""
    shape = folder.shape(name)
    if shape is not None and len(shape) == 2:
        check_sizes(folder, shape[1], shape[0], model)
    return model.config.vocab_size, model.config.hidden_size


def take(folder: PublishedFolder, name: str, shape: Sequence[int]) -> np.ndarray:
    """A tensor in float32; a matrix, [out, in] there, as [in, out]."""
    tensor = folder.take(name, shape).astype(np.float32)
    return tensor.T if tensor.ndim == 2 else tensor


def make_adapter(
    folder: PublishedFolder,
    model: Model,
    form: str,
    method: Method,
    trainable: PyTree,
    usual: Sequence[Sequence[float]] = USUAL,
    frequent: np.ndarray | None = None,
) -> Adapter:
    """The adapter of a folder all of whose tensors were taken.

    Args:
      folder: that was read.
      model: the base.
      form: its name.
      method: with the settings that the folder says.
      trainable: the pytree, float32.
      usual: [M'][K], by distance and rank, how often such drafters are right, where this one was not measured: for a
        first tree. Distances beyond are like the last.
      frequent: ids of the tokens that it drafts; None for all.

    Raises:
      UserError: a tensor was left unread.
    """
    folder.check_all_taken()
    count = method.facts(model.config).distances
    accuracy = [list(usual[min(d, len(usual) - 1)]) for d in range(count)]
    info = {
        "base": model.name,
        "draft_vocabulary": 0 if frequent is None else len(frequent),
        "tree": plan_to_json(method_plan(method, model.config, "sparse:16", accuracy)),
        "published": {"form": form, "dtype": folder.dtype()},
    }
    return Adapter(method, trainable, model.fingerprint, info, frequent)
