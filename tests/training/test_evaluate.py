"""Accuracies and perplexities against counting by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.method import Facts, Method
from jaxspec.methods import PPD
from jaxspec.training.data import AnsweredPrompt, make_batch
from jaxspec.training.evaluate import answer_entropies, evaluate, lost_distances, perplexity
from tests.helpers.model import plain, quick_jit

_CHAIN = np.random.default_rng(1).dirichlet(np.full(16, 0.5), 16)  # [before, token], of texts that Doubtful predicts


@dataclasses.dataclass(frozen=True)
class Doubtful(Method):
    """Says exactly how texts go on, and takes something off the log of every chance."""

    doubt: float = 0.0

    def facts(self, config):
        return Facts(1)

    def predictions(self, trainable, base, batch):
        before = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.points, 0) + 1, axis=1)
        return jnp.log(jnp.array(_CHAIN, jnp.float32))[before][:, :, None]

    def predictions_and_factors(self, trainable, base, batch):
        return self.predictions(trainable, base, batch), jnp.full((*batch.points.shape, 1, 1), -self.doubt)


def test_evaluation_counts_every_position(tiny):
    """One answer has more insertion points than are run at once, one has none."""
    rng, method = np.random.default_rng(0), PPD(ensemble=2)
    answers = [
        AnsweredPrompt([1] * n, rng.integers(0, 16, length).tolist()) for n, length in ((3, 290), (5, 1), (2, 9))
    ]
    points = [list(range(len(a.prompt_tokens), len(a.prompt_tokens + a.answer_tokens) - 2)) for a in answers]
    trainable = method.init(jax.random.key(0), tiny.base)
    logits = quick_jit(method.predictions)(trainable, tiny.base, make_batch(answers, points, 300, 300))
    hits, counted, ranks = np.zeros((3, 10)), np.zeros(3), []
    for answer, at, predicted in zip(answers, points, np.asarray(logits), strict=True):
        ranks.append(np.full((len(at), 3), -1))
        text = answer.prompt_tokens + answer.answer_tokens
        for p, by_distance in zip(at, predicted, strict=False):
            for d in range(1, min(3, len(text) - p - 2) + 1):
                rank = list(np.argsort(-by_distance[d - 1])).index(text[p + d + 1])
                counted[d - 1] += 1
                ranks[-1][p - at[0], d - 1] = rank
                if rank < 10:
                    hits[d - 1, rank] += 1
    accuracy = evaluate(method, trainable, tiny.base, answers)
    assert accuracy.positions == counted[0] == 288 + 7
    np.testing.assert_allclose(accuracy.by_rank, hits / counted[:, None], atol=1e-6)
    for found, counted_by_hand in zip(accuracy.ranks, sorted(ranks, key=len), strict=True):
        np.testing.assert_array_equal(found, counted_by_hand)


def test_a_factor_of_chances_is_calibrated_with_them(tiny):
    """Decoding calibrates what a method offers, factor included: what is one amount too low everywhere is raised."""
    rng, text = np.random.default_rng(0), [3]
    for _ in range(600):
        text.append(int(rng.choice(16, p=_CHAIN[text[-1]])))
    answers = [AnsweredPrompt(text[:1], text[1:])]
    [[a, b]], [[a_doubting, b_doubting]] = (
        evaluate(Doubtful(doubt), {}, tiny.base, answers).calibration for doubt in (0.0, 1.0)
    )
    assert a == pytest.approx(1, abs=0.2) and a_doubting == pytest.approx(a, abs=0.05)
    assert b_doubting == pytest.approx(b + a, abs=0.05)


def test_perplexity_by_hand(tiny):
    """Answers of unequal lengths: prompts and padding do not count, every answer token does, the first included."""
    answers = [AnsweredPrompt([1, 2, 3], [4, 5, 6, 7]), AnsweredPrompt([9], [8]), AnsweredPrompt([3, 3], [1, 2])]
    text = make_batch(answers, [[]] * 3, 7, 0).tokens
    likely = np.asarray(jax.nn.log_softmax(plain(tiny.base, text)))
    entropy = [
        [
            -likely[row, at - 1, text[row, at]]
            for at in range(len(a.prompt_tokens), len(a.prompt_tokens + a.answer_tokens))
        ]
        for row, a in enumerate(answers)
    ]
    found = answer_entropies(tiny.base, answers)
    np.testing.assert_allclose(found, [(sum(entropy[row]), len(entropy[row])) for row in (1, 2, 0)], rtol=1e-4)
    assert perplexity(found) == pytest.approx(np.exp(np.mean(np.concatenate(entropy))), rel=1e-4)


@pytest.mark.parametrize(
    ("tops", "lost"),
    [
        ((0.5, 0.3, 0.2), []),
        ((0.46, 0.02, 0.28), [2]),
        ((0.34, 0.22, 0.01), [3]),
        ((0.5, 0.34, 0.12, 0.26), [3]),
        ((0.1, 0.14, 0.16), [1]),
        ((0.1, 0.26, 0.1), [1, 3]),
    ],
)
def test_lost_distances(tops, lost):
    assert lost_distances([[top] + [0.0] * 9 for top in tops]) == lost
