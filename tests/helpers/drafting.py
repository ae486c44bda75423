"""Drafts and what methods draft with, without a loop around them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.drafting.draft import Draft, Drafting
from jaxspec.drafting.method import Seen
from jaxspec.drafting.sampling import make_sampler


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
    return Drafting(trainable or {}, base, tree, sampler, seeds, root, position, active, **sizes)


def offered_after(method, text, depth=3, trainable=None):
    """{path: chance of its last token} of what a method that looks up offers behind a text."""
    position = jnp.array([len(text) - 1])
    drafting = drafting_of(None, [text[-1]], position, trainable, width=8, depth=depth)
    seen = Seen(jnp.array([text]), jnp.zeros((1, len(text) - 1, 1)), jnp.zeros(1, jnp.int32), position)
    return paths_of(method.offer(drafting, method.observe(drafting, seen, method.empty_state(None, 1, 63))), depth)


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
