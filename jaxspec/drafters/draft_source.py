"""Another base as a draft model: loaded for the base that it drafts for, and refused where it has other tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxspec.config import MeshConfig
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError
from jaxspec.methods.draft_model import DraftModel
from jaxspec.model.decoder import abstract_params
from jaxspec.parallel.sharding import mesh_of
from jaxspec.weights.load import load_model
from jaxspec.weights.model import Model
from jaxspec.weights.params import parameter_count

_LENGTH = 16  # tokens of a draft at most


def draft_source(draft: Model | str | Path, model: Model, **settings: Any) -> tuple[Source, str]:
    """A base that drafts for another one, and a warning, if there is one.

    Args:
      draft: the draft model, or its name or path, to be loaded on the same devices and in the same dtype; its
        weights are floats.
      model: whom it drafts for.
      settings: of `DraftModel`, other than the defaults.

    Raises:
      UserError: there is no such base, or it has other tokens; the message says which differ.
    """
    if not isinstance(draft, Model):
        mesh = mesh_of(model.params)
        draft = load_model(str(draft), model.loaded_dtype, MeshConfig(**mesh.shape) if mesh else MeshConfig())
    _check_vocabulary(draft, model)
    warning, reads = "", draft.config.max_positions
    ours, theirs = (parameter_count(abstract_params(each.config)) for each in (draft, model))
    if ours >= theirs:
        warning = f"warning: draft model {draft.name!r} is no smaller than the base: it will not pay"
    elif reads < model.config.max_positions:
        warning = (
            f"warning: draft model {draft.name!r} has learned texts of {reads} tokens, and drafts badly behind that"
        )
    method = DraftModel(length=_LENGTH, shapes=draft.config, **settings)
    return Source(method, draft.params, model.config, weights=draft.fingerprint), warning


def _check_vocabulary(draft: Model, model: Model) -> None:
    """Raise UserError unless all ids that both have stand for the same tokens. Beyond them one may be padded."""
    sizes = draft.config.vocab_size, model.config.vocab_size
    if draft.tokenizer and model.tokenizer:
        differ = _differences(draft.tokenizer.get_vocab(), model.tokenizer.get_vocab(), min(sizes))
        what = f"another tokenizer than {model.name!r}: {differ}" if differ else ""
    else:
        what = f"a vocabulary of {sizes[0]} tokens, {model.name!r} one of {sizes[1]}" if sizes[0] != sizes[1] else ""
    if what:
        raise UserError(f"draft model {draft.name!r} has {what}; a draft model needs the base's own tokens")


def _differences(draft: dict[str, int], base: dict[str, int], size: int) -> str:
    """The ids below `size` that stand for other tokens: how many, and the first of them; empty where none does."""
    there, here = ({number: token for token, number in vocabulary.items()} for vocabulary in (draft, base))
    ids = [number for number in sorted(there | here) if number < size and there.get(number) != here.get(number)]
    shown = ", ".join(f"{i} is {there.get(i, 'none')!r} there and {here.get(i, 'none')!r} here" for i in ids[:3])
    return f"{len(ids)} tokens differ ({shown}{', ...' if len(ids) > 3 else ''})" if ids else ""
