"""Which tokens a published drafter drafts, and the base's embeddings and projection as files have them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.published.folder import PublishedFolder
from jaxspec.errors import UserError
from jaxspec.model.quantized import dense
from jaxspec.parallel.processes import host
from jaxspec.weights.model import Model

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# Relative difference from the base's weights up to which copies are these: rounding to 16 bits makes 0.001 or less, and
# of a base in 8 or 4 bits the weights before that are not known.
_ROUNDED, _QUANTISED = 0.004, 0.3


def read_vocabulary(folder: PublishedFolder, count: int, vocab_size: int) -> np.ndarray | None:
    """Ids of the `count` tokens that it drafts, in the order of its projection; None for all. `d2t` holds offsets."""
    there = [name for name in ("d2t", "t2d") if folder.shape(name) is not None]
    if len(there) == 1:
        missing = "t2d" if there == ["d2t"] else "d2t"
        raise UserError(f"{folder.path}: tensor {there[0]!r} is there without {missing!r}")
    if not there:
        if count != vocab_size:
            raise UserError(f"{folder.path}: it drafts {count} of {vocab_size} tokens, and tensor 'd2t' is missing")
        return None
    ids = folder.take("d2t", (count,), whole=True).astype(np.int64) + np.arange(count)
    if len(np.unique(ids)) < count or ids.min() < 0 or ids.max() >= vocab_size:
        raise UserError(f"{folder.path}: tensor 'd2t' must lead to different tokens below {vocab_size}")
    drafted = np.flatnonzero(folder.take("t2d", (vocab_size,), whole=True))
    if not np.array_equal(np.sort(ids), drafted):
        raise UserError(f"{folder.path}: tensors 'd2t' and 't2d' name different tokens")
    return None if count == vocab_size and np.array_equal(ids, np.arange(count)) else ids.astype(np.int32)


def written_vocabulary(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors that say which tokens are drafted: ids [V'] in ascending order."""
    drafted = np.zeros(vocab_size, bool)
    drafted[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": drafted}


def base_embedding(model: Model) -> np.ndarray:
    """The base's embeddings [V, D] as its files have them, float32."""
    x = model.base.embed(jnp.arange(model.config.vocab_size)[None])[0]
    return host(x).astype(np.float32) / np.float32(model.config.embedding_scale)


def base_head(model: Model, ids: np.ndarray) -> np.ndarray:
    """Rows [V', D] of the base's projection, float32."""
    columns = model.base.drafting(jnp.asarray(ids, jnp.int32)).draft_vocabulary.columns
    return host(dense(columns)).astype(np.float32).T


def is_copy(theirs: np.ndarray, ours: np.ndarray, model: Model) -> bool:
    """Whether weights of a file are the base's, up to rounding."""
    limit = _QUANTISED if model.weights else _ROUNDED
    return bool(np.linalg.norm(theirs - ours) <= limit * np.linalg.norm(ours))
