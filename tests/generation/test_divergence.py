"""Divergences are found where they are, with the gap that decided."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxspec.config import RopeScaling, SamplingConfig
from jaxspec.decoding.sampling import make_sampler
from jaxspec.generation.divergence import first_divergence
from jaxspec.model.attention import causal_context
from tests.helpers.model import log_probabilities
from tests.helpers.tiny import TINY, make_tiny


def test_identical_answers_do_not_diverge(tiny):
    assert first_divergence(tiny, [1, 2], [3, 4], [3, 4]) is None


def test_the_gap_is_between_the_two_tokens(tiny):
    prompt, reference = [1, 2, 3], [4, 5, 6, 7]
    log_p = log_probabilities(tiny, prompt + reference[:3])[-1]
    found = first_divergence(tiny, prompt, [4, 5, 0, 7], reference)
    assert found.index == 2 and found.tokens == (0, 6)
    np.testing.assert_allclose(found.gap, abs(log_p[0] - log_p[6]), rtol=1e-4)


def test_with_sampling_the_noise_counts(tiny):
    sampling, prompt = SamplingConfig(0.5), [1, 2, 3]
    log_p = log_probabilities(tiny, [*prompt, 8])[-1]
    noise = make_sampler(sampling).noise(jnp.array([9], jnp.uint32), jnp.array([[3]]), jnp.arange(16))[0, 0]
    scores = log_p / 0.5 + noise
    found = first_divergence(tiny, prompt, [2], [8], sampling, 9)
    np.testing.assert_allclose(found.gap, abs(scores[2] - scores[8]), rtol=1e-4)


def test_an_answer_that_is_too_short_is_no_near_tie(tiny):
    found = first_divergence(tiny, [1], [2], [2, 3])
    assert found.index == 1 and found.tokens == (-1, 3) and found.gap == float("inf")
    assert found.as_json() == {"index": 1, "tokens": (-1, 3), "gap": None}


def test_frequencies_are_those_of_the_whole_text():
    """An answer that may grow beyond the original context is judged by the long ones, as it was decoded."""
    scaling = RopeScaling("longrope", 4.0, 12, short_factors=(1.0,) * 4, long_factors=(1.5, 2.0, 3.0, 4.0))
    model, prompt, other = make_tiny(dataclasses.replace(TINY, rope_scaling=scaling)), [1, 2, 3], [9]
    first, text = [1], np.array([prompt], np.int32)
    gaps = []
    for limit in (9, 10):
        base = model.base.for_texts(np.array([len(prompt) + limit]))
        hidden, _ = base.rows(base.embed(text), causal_context(*text.shape))
        logits = np.asarray(base.logits(hidden))[0, -1]
        found = first_divergence(model, prompt, first, other, max_new_tokens=limit)
        np.testing.assert_allclose(found.gap, abs(logits[first[0]] - logits[other[0]]), rtol=1e-4)
        gaps.append(found.gap)
    assert abs(gaps[0] - gaps[1]) > 1e-3
