"""Drafts and what methods draft with, without a loop around them."""

import jax
import jax.numpy as jnp

from jaxspec.config import SamplingConfig
from jaxspec.drafting.draft import Draft, Drafting
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
    return Drafting(trainable or {}, base, tree, sampler, seeds, root, position, **sizes)
