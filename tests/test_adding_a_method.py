"""The page on adding a method: its code is two whole methods, both lossless."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec import generate, load_drafter
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Rejection
from jaxspec.decoding.method import Batch
from jaxspec.drafters import METHODS
from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.drafter import autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.prompts import pad_tokens
from tests.helpers.tiny import make_prompts

PAGE = Path("docs/adding-a-method.md")


@pytest.fixture(autouse=True)
def methods_of_the_page():
    """The blocks of code that define and list a method."""
    known = dict(METHODS)
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if "METHODS[" in block:
            exec(block, {"__name__": "page"})
    yield
    METHODS.clear()
    METHODS.update(known)


@pytest.mark.parametrize(
    ("sampling", "batch_size"),
    [(SamplingConfig(), 1), pytest.param(SamplingConfig(0.8), 4, marks=pytest.mark.slow)],
    ids=["greedy", "sampling"],
)
def test_the_method_is_lossless_and_drafts(tiny, sampling, batch_size):
    prompts = make_prompts(8)
    plain = generate(autoregressive(tiny), prompts, 40, sampling=sampling, seed=3)
    ours = generate(
        load_drafter("bigram", tiny, tree="own"), prompts, 40, sampling=sampling, seed=3, batch_size=batch_size
    )
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    assert sum(sum(a.accepted) for a in ours) > 0


def test_it_drafts_what_followed_the_newest_token(tiny):
    """Every answer takes as many steps as the same rule needs in plain Python."""
    prompts = make_prompts(8)
    for prompt, answer in zip(prompts, generate(load_drafter("bigram", tiny, tree="own"), prompts, 40), strict=True):
        assert answer.steps == steps_by_hand(prompt, answer.tokens)


def steps_by_hand(prompt, tokens):
    text, newest, steps = prompt + tokens, len(prompt), 0
    while newest < len(text) - 1:
        last = max((i for i in range(newest) if text[i] == text[newest]), default=newest)
        draft = text[last + 1 : newest + 1][:3]
        right = next(
            (i for i, token in enumerate(draft) if text[newest + 1 + i : newest + 2 + i] != [token]), len(draft)
        )
        newest, steps = newest + right + 1, steps + 1
    return steps


def test_rejection_takes_a_draft_that_was_not_drawn(tiny):
    sampling = SamplingConfig(0.8)
    plain = generate(autoregressive(tiny), make_prompts(4), 24, sampling=sampling)
    ours = generate(load_drafter("bigram", tiny), make_prompts(4), 24, sampling=sampling, acceptance=Rejection())
    assert [a.tokens for a in ours] == [a.tokens for a in plain]


def test_what_it_takes_and_what_not(tiny, tmp_path):
    assert load_drafter("bigram", tiny, tree="chain:2").plan.depth == 2
    assert load_drafter("bigram", tiny).shape.sizes  # chosen in every step
    with pytest.raises(UserError, match="bigram takes no adapter"):
        load_drafter("bigram", tiny, tmp_path)
    with pytest.raises(UserError, match="bigram is not trained and has no draft vocabulary, got 8"):
        load_drafter("bigram", tiny, draft_vocabulary=8)
    with pytest.raises(UserError, match="'chain:4' is too deep: bigram has candidates for 3 distances"):
        load_drafter("bigram", tiny, tree="chain:4")


def test_the_trained_method_learns_and_is_lossless(tiny):
    """A few updates lower the loss on a batch of the base's own answers; what it then drafts is verified."""
    method, prompts = METHODS["linear_heads"](), make_prompts(4)
    plain = generate(autoregressive(tiny), prompts, 40)
    texts = [prompt + answer.tokens for prompt, answer in zip(prompts, plain, strict=True)]
    lengths = jnp.array([len(text) for text in texts])
    tokens, _ = pad_tokens(texts, int(lengths.max()))
    points = jnp.broadcast_to(jnp.arange(12, 28), (4, 16))
    batch = Batch(jnp.asarray(tokens), lengths, jnp.array([len(prompt) for prompt in prompts]), points)
    trainable, losses = method.init(jax.random.key(0), tiny.base), []
    update = jax.jit(jax.value_and_grad(lambda trainable: method.loss(trainable, tiny.base, batch)[0]))
    for _ in range(8):
        loss, gradient = update(trainable)
        losses.append(float(loss))
        trainable = jax.tree.map(lambda x, g: x - 0.1 * g, trainable, gradient)
    assert losses[-1] < losses[0] and all(jnp.any(g != 0) for g in gradient.values())
    drafter = make_drafter(Adapter(method, trainable, tiny.fingerprint, {}), tiny, "chain:3")
    ours = generate(drafter, prompts, 40, batch_size=2)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    assert sum(sum(a.accepted) for a in ours) > 0
