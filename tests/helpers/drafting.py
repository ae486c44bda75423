"""Drafts and what methods draft with, without a loop around them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import Draft, DraftContext
from jaxspec.decoding.method import ReadChunk
from jaxspec.decoding.sampling import make_sampler
from jaxspec.generation.prompts import pad_predictions
from tests.helpers.model import quick_jit


def batched(tree):
    """A tree's arrays with a batch axis of one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def draft_of(tree, tokens, valid=None, drawn=None):
    """What verifies tokens [B, N] in a tree with a batch axis; all are valid unless it is said."""
    tokens = jnp.asarray(tokens)
    valid = jnp.ones(tokens.shape, bool) if valid is None else valid
    return Draft(tree, tokens, valid, jnp.zeros_like(tokens), None, drawn)


def drafting_of(tree, root, position, trainable=None, base=None, sampling=SamplingConfig(), **sizes):
    """What drafts behind the tokens `root` [B] at `position` [B], greedy unless it is said."""
    sizes = {"width": tree.max_rank, "depth": tree.max_depth} | sizes if tree is not None else sizes
    seeds, sampler = jnp.zeros(len(root), jnp.uint32), make_sampler(sampling)
    root, position = jnp.asarray(root, jnp.int32), jnp.asarray(position, jnp.int32)
    active = jnp.ones(len(root), bool)
    return DraftContext(trainable or {}, base, tree, sampler, seeds, root, position, active, **sizes)


@functools.partial(quick_jit, static_argnames=("method", "depth", "width", "sampling"))
def offer_after(method, text, position, trainable=None, depth=3, width=8, sampling=SamplingConfig(), predicted=None):
    """What a method that looks up offers behind texts [B, T], of which `position` [B] is the last token's.

    `predicted` [B, E] is what is expected of their answers.
    """
    root = jnp.take_along_axis(text, position[:, None], axis=1)[:, 0]
    context = drafting_of(None, root, position, trainable, sampling=sampling, width=width, depth=depth)
    chunk = ReadChunk(text, jnp.zeros((*text[:, 1:].shape, 1)), jnp.zeros_like(position), position)
    state = method.init_state(None, len(text), 63)
    state = state if predicted is None else method.expect(state, predicted)
    return method.offer(context, method.observe(context, chunk, state))


def offered_after(method, text, depth=3, trainable=None, width=8, predicted=None):
    """{path: chance of its last token} of the same behind one text."""
    predicted = None if predicted is None else pad_predictions([predicted], 16)
    padded = np.array([[*text, *[7] * 24][:24]], np.int32)  # of one length, so that a method is compiled once
    return paths_of(
        offer_after(method, padded, np.array([len(text) - 1]), trainable, depth, width, predicted=predicted), depth
    )


def paths_of(offer, depth):
    """The same of an offer to one row."""
    tokens, log_p = np.asarray(offer.tokens)[0], np.asarray(offer.log_p)[0]
    known, parent = np.broadcast_to(offer.known, offer.tokens.shape)[0], np.asarray(offer.parent)[0]
    paths, above = {}, {0: ()}
    for d in range(depth):
        here = {w: (*above[parent[d, w] if d else 0], int(tokens[d, w])) for w in np.flatnonzero(known[d])}
        paths |= {path: float(np.exp(log_p[d, w])) for w, path in here.items()}
        above = here
    return paths
