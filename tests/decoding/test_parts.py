"""Readings in parts: put together again they are what was read, bit by bit, whatever the methods remember."""

import functools

import jax
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.parts import cut, joined
from jaxspec.decoding.prompt import read
from jaxspec.drafters import METHODS
from jaxspec.generation.job import decoding_of
from jaxspec.methods import (
    PPD,
    Amphista,
    DFlash,
    DraftModel,
    Eagle,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    SelfSpeculative,
    Suffix,
    TokenRecycling,
)
from tests.helpers.methods import union

W, CAPACITY = 8, 64
TEXT = np.random.default_rng(0).integers(0, 16, 4 * W)
REMEMBERS = (
    [Suffix(), Eagle(depth=2, reads=(0, 1, 2)), DraftModel(length=2), TokenRecycling(), PPD(distances=2)],
    [DFlash(block=3, layers=1), Hydra(heads=2, prefix_attention=True), Amphista(heads=2), SelfSpeculative()],
    [Medusa(heads=2), Lookahead(window=3)],
    [Jacobi()],
)


@pytest.mark.parametrize("methods", REMEMBERS, ids=lambda methods: "+".join(method.name for method in methods))
def test_parts_join_to_what_was_read(tiny, methods):
    drafter = union(methods, tiny, 8)
    decoding = decoding_of(drafter, 1, SamplingConfig())
    further = functools.partial(read, tiny.base, decoding, capacity=CAPACITY)
    chunks = [(chunk[None], np.array([W], np.int32), np.zeros(1, np.uint32)) for chunk in TEXT.reshape(-1, W)]
    reading, parts = None, []
    for chunk in chunks[:-1]:
        reading = further(reading, *chunk)
        parts.append(cut(decoding, reading))
    again = joined(tiny.base, decoding, parts, CAPACITY)
    assert again.lengths.tolist() == [3 * W]
    jax.tree.map(np.testing.assert_array_equal, again, reading)
    cold, warm = further(reading, *chunks[-1]), further(again, *chunks[-1])
    jax.tree.map(np.testing.assert_array_equal, warm, cold)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(parts))  # each may be joined again


def test_every_state_is_covered():
    """A method that remembers in a way of its own has an entry here."""
    covered = {type(method).init_state for methods in REMEMBERS for method in methods}
    assert {method.init_state for method in METHODS.values()} <= covered | {METHODS["autoregressive"].init_state}


def test_a_part_is_as_large_as_its_chunk(tiny):
    """Of keys and values it has W slots, of what a method remembers of each position W + 1."""
    drafter = union([Suffix(), Eagle(depth=2, reads=(0, 1, 2))], tiny, 8)
    decoding = decoding_of(drafter, 1, SamplingConfig())
    chunk = (TEXT[None, :W], np.array([W], np.int32), np.zeros(1, np.uint32))
    part = cut(decoding, read(tiny.base, decoding, None, *chunk, capacity=CAPACITY))
    assert {x.shape[2] for x in jax.tree.leaves(part.cache)} == {W}
    text, eagle = part.method_states
    assert text.own.shape == (1, W + 1)
    assert {x.shape[2] for x in jax.tree.leaves(eagle["cache"])} == {W + 1}
