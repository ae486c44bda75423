"""Accuracies and perplexities against counting by hand."""

import jax
import numpy as np
import pytest

import jaxspec.training.evaluate
from jaxspec.drafting.method import Batch
from jaxspec.model.base import Base
from jaxspec.training.data import Answer, prepare_answers
from jaxspec.training.evaluate import answer_entropies, evaluate, lost_distances, perplexity
from jaxspec.training.examples import select_prompts


@pytest.mark.parametrize("at_once", [4, 256])
def test_evaluation_counts_every_position(model, config, monkeypatch, at_once):
    """Against counting by hand, one position at a time."""
    monkeypatch.setattr(jaxspec.training.evaluate, "_POINTS", at_once)
    held_out, _ = prepare_answers(model, config.data, select_prompts(model, config.data), lambda done, tokens: None)
    base, method = Base(model.params, model.decoder), config.method
    trainable = method.init(jax.random.key(0), base)
    accuracy = evaluate(method, trainable, base, held_out)
    hits, counted = np.zeros((3, 10)), np.zeros(3)
    for answer in held_out:
        text = answer.prompt_tokens + answer.answer_tokens
        points = list(range(len(answer.prompt_tokens), len(text) - 2))
        if not points:
            continue
        batch = Batch(*(np.array([x], np.int32) for x in (text, len(text), len(answer.prompt_tokens), points)))
        logits = np.asarray(method.predictions(trainable, base, batch))[0]
        for group, p in enumerate(points):
            for d in range(1, 4):
                if p + d + 1 < len(text):
                    rank = list(np.argsort(-logits[group, d - 1])).index(text[p + d + 1])
                    counted[d - 1] += 1
                    if rank < 10:
                        hits[d - 1, rank] += 1
    assert accuracy.positions == counted[0]
    np.testing.assert_allclose(accuracy.by_rank, hits / counted[:, None], atol=1e-6)


def test_perplexity_by_hand(model):
    """Answers of unequal lengths: prompts and padding do not count, every answer token does, the first included."""
    answers = [Answer([1, 2, 3], [4, 5, 6, 7]), Answer([9], [8]), Answer([3, 3], [1, 2])]
    entropy = []
    for answer in answers:
        text = np.array([answer.prompt_tokens + answer.answer_tokens])
        logits = model.decoder.apply({"params": model.params}, text)[0]
        said = jax.nn.log_softmax(logits)[np.arange(text.size - 1), text[0, 1:]]
        entropy += (-said[len(answer.prompt_tokens) - 1 :]).tolist()
    assert len(entropy) == 7
    found = answer_entropies(model.base, answers)
    np.testing.assert_allclose(found, [(entropy[4], 1), (sum(entropy[5:]), 2), (sum(entropy[:4]), 4)], rtol=1e-4)
    assert perplexity(found) == pytest.approx(np.exp(np.mean(entropy)), rel=1e-4)


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
