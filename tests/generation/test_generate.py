"""Batches, streaming, statistics and bad input of the public functions."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Typical
from jaxspec.decoding.loop import decode
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate, generate_many, stream
from jaxspec.generation.job import bucket
from jaxspec.methods import PPD
from jaxspec.trees import from_paths
from tests.helpers.decoding import begin
from tests.helpers.methods import untrained_drafter
from tests.helpers.tiny import make_prompts


@pytest.fixture(scope="module")
def ppd(tiny):
    trainable = PPD().init(jax.random.key(1), tiny.base)
    return untrained_drafter(PPD(), tiny, from_paths([(0,), (1,), (2,), (0, 0), (0, 1)]), trainable)


@pytest.fixture(scope="module")
def plain(tiny):
    return autoregressive(tiny)


def on(model, drafter):
    """The drafter on a base with other ends of text."""
    return dataclasses.replace(drafter, model=model)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_tokens_are_those_of_the_plain_forward_pass(tiny, plain, temperature):
    """The loop against a decoder without cache or loop: argmax of logits / T + noise of seed and position."""
    prompt = make_prompts(1)[0]
    model, forward = dataclasses.replace(tiny, eos=()), jax.jit(tiny.decoder.apply)
    tokens = list(prompt)
    for _ in range(10):
        padded = np.array([tokens + [0] * (32 - len(tokens))])
        scores = forward({"params": model.params}, padded)[0, len(tokens) - 1]
        if temperature:
            key = jax.random.fold_in(jax.random.key(np.uint32(11)), len(tokens))
            scores = scores / temperature + jax.random.gumbel(key, scores.shape)
        tokens.append(int(scores.argmax()))
    answer = generate(on(model, plain), [prompt], 10, sampling=SamplingConfig(temperature), seed=11)[0]
    assert answer.tokens == tokens[len(prompt) :]


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_logits_that_are_not_finite_are_reported_in_float16(tiny, where):
    params = jax.tree.map(lambda x: x.astype("float16"), tiny.params)
    narrow, prompt = dataclasses.replace(tiny, params=params), [1, 2, 3]
    tokens = generate(autoregressive(narrow), [prompt], 4)[0].tokens
    token = {"prompt": prompt[0], "answer": next(t for t in tokens if t not in prompt)}[where]
    overflowing = params | {"embedding": params["embedding"].at[token].set(np.inf)}
    with pytest.raises(UserError, match="float16 is too narrow for it; use --dtype float32"):
        generate(autoregressive(dataclasses.replace(tiny, params=overflowing)), [prompt], 8)


def test_long_prompts_are_prefilled_in_chunks(tiny, plain, monkeypatch):
    prompts = [(make_prompts(1, seed=s)[0] * 300)[:length] for s, length in enumerate((130, 40, 97))]
    whole = generate(plain, prompts, 12, batch_size=3)
    monkeypatch.setattr("jaxspec.generation.job.prefill_chunk", lambda: 32)
    chunked = generate(plain, prompts, 12, batch_size=3)
    assert [a.tokens for a in whole] == [a.tokens for a in chunked]


def test_autoregressive_is_one_token_per_step(tiny, plain):
    for answer in generate(plain, make_prompts(4), 15):
        assert answer.steps == answer.new_tokens - 1
        assert answer.tokens_per_step in (0.0, 1.0)
        assert not any(answer.drafted)


def test_statistics_add_up(tiny, ppd):
    """Every token is the first, a bonus or an accepted candidate; steps and acceptances count them."""
    model = dataclasses.replace(tiny, eos=())
    for answer in generate(on(model, ppd), make_prompts(6), 30, batch_size=3):
        emitted = 1 + answer.steps + sum(answer.accepted)
        assert emitted - 3 < answer.new_tokens <= emitted  # the limit may cut the last step
        assert sum(answer.drafted) <= sum(answer.accepted)
        assert all(a <= o for a, o in zip(answer.accepted, answer.offered, strict=True))
        assert answer.offered[1] <= answer.offered[0] <= answer.steps
        assert answer.tokens_per_step == (answer.new_tokens - 1) / answer.steps


def test_candidates_are_counted_wherever_they_stand(tiny, ppd):
    """All nodes but the root that a step verified, of rows that were not done."""
    decoding, state = begin(on(tiny, ppd), make_prompts(3), 12)
    expected = np.zeros(3, int)
    for _ in range(8):
        draft, done = state.draft, np.asarray(state.done)
        expected += ~done * np.sum(np.asarray(draft.valid) & (np.asarray(draft.tree.depth) > 0), axis=1)
        state = decode(decoding, state, np.int32(1))
    np.testing.assert_array_equal(state.stats.drafted, expected)
    assert np.all(expected > state.stats.offered[:, 0].sum(axis=1))  # a tree has more nodes than levels


def test_streaming_gives_the_same_answer_in_growing_pieces(tiny, ppd):
    prompt, model = make_prompts(1)[0], dataclasses.replace(tiny, eos=())
    pieces = [a.tokens for a in stream(on(model, ppd), prompt, 20, steps_per_chunk=2)]
    assert pieces[-1] == generate(on(model, ppd), [prompt], 20)[0].tokens
    assert len(pieces) > 2 and len(pieces[0]) == 1
    assert all(b[: len(a)] == a for a, b in itertools.pairwise(pieces))


def test_refilled_rows_answer_as_if_alone(tiny, plain, ppd):
    prompts = make_prompts(23)
    alone = [a.tokens for a in generate(plain, prompts, 17)]
    for method in (plain, ppd):
        many = dict(generate_many(method, prompts, 17, batch_size=3, refill=2, steps_per_chunk=3))
        assert [many[i] for i in range(len(prompts))] == alone


@pytest.mark.parametrize(
    ("drafter", "batch"),
    [
        ("plain", 3),
        ("ppd", 1),
        pytest.param("plain", 1, marks=pytest.mark.slow),
        pytest.param("ppd", 3, marks=pytest.mark.slow),
    ],
)
def test_the_cache_is_written_in_place(tiny, drafter, batch, request):
    """No step copies a layer's keys or values; with one node and many rows that takes longer than the layer."""
    config = tiny.config
    program = (
        decode.lower(*begin(request.getfixturevalue(drafter), [[1, 2, 3]] * batch, 4), np.int32(4)).compile().as_text()
    )
    shape = f"f32[{batch},{config.num_kv_heads},128,{config.head_dim}]"
    assert shape in program
    assert not re.findall(rf"= {re.escape(shape)}\S* copy\(", program)


def test_another_prompt_of_the_same_bucket_does_not_recompile(tiny, ppd):
    first, second = make_prompts(2, seed=5)
    generate(ppd, [first], 16)
    assert generate(ppd, [second], 13)[0].compile_seconds == 0


def test_temperature_is_no_reason_to_recompile(tiny, ppd):
    prompt = make_prompts(1)[0]
    generate(ppd, [prompt], 16, sampling=SamplingConfig(0.5))
    assert generate(ppd, [prompt], 16, sampling=SamplingConfig(0.9))[0].compile_seconds == 0


@pytest.mark.slow
def test_typical_acceptance_takes_more_and_may_change_the_text(tiny, ppd, plain):
    model, prompts, sampling = dataclasses.replace(tiny, eos=()), make_prompts(8), SamplingConfig(1.0)
    strict = generate(on(model, ppd), prompts, 40)
    loose = generate(on(model, ppd), prompts, 40, sampling=sampling, acceptance=Typical(epsilon=1e-3, delta=1e-3))
    assert sum(a.steps for a in loose) < sum(a.steps for a in strict)
    assert [a.tokens for a in loose] != [a.tokens for a in generate(on(model, plain), prompts, 40)]
    never = generate(on(model, ppd), prompts, 40, sampling=sampling, acceptance=Typical(epsilon=2.0, delta=1e9))
    assert not any(any(a.accepted) for a in never)
    assert [a.tokens for a in never] == [a.tokens for a in generate(on(model, plain), prompts, 40)]


@pytest.mark.slow
def test_typical_acceptance_draws_nothing(tiny, ppd):
    """A temperature decides what is plausible; a seed decides nothing."""
    texts = [
        generate(ppd, make_prompts(4), 24, sampling=SamplingConfig(0.9), seed=seed, acceptance=Typical())
        for seed in (1, 2)
    ]
    assert [(a.tokens, a.steps) for a in texts[0]] == [(a.tokens, a.steps) for a in texts[1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens must be at least 1, got 0"),
        ({"max_new_tokens": -3}, "got -3"),
        ({"prompts": [[]]}, "empty"),
        ({"prompts": ["  "]}, "empty"),
        ({"prompts": "one text"}, "must be a list of prompts"),
        ({"prompts": [[16]]}, "outside the vocabulary"),
        (
            {"prompts": [[1] * 250]},
            "250 tokens: with 20 new ones it exceeds the base's context of 256; lower max-new-tokens to 6",
        ),
        (
            {"max_length": 30, "prompts": [[1] * 11]},
            "11 tokens: with 20 new ones it exceeds max-length, 30; raise it to 31 or lower max-new-tokens to 19",
        ),
        ({"max_length": 1000}, "max-length must be between 2 and the base's 256, got 1000"),
        ({"batch_size": 0}, "batch-size"),
        ({"sampling": SamplingConfig(-1.0)}, "temperature"),
        ({"sampling": SamplingConfig(float("nan"))}, "temperature"),
        ({"sampling": SamplingConfig(1.0, top_p=0.0)}, "top-p"),
        ({"sampling": SamplingConfig(1.0, top_p=1.5)}, "top-p"),
        ({"sampling": SamplingConfig(1.0, top_k=-1)}, "top-k"),
        ({"sampling": SamplingConfig(1.0, min_p=2.0)}, "min-p"),
    ],
)
def test_bad_input_is_refused(tiny, plain, arguments, message):
    settings = {"prompts": [[1, 2]], "max_new_tokens": 20} | arguments
    with pytest.raises(UserError, match=message):
        generate(plain, **settings)


def test_buckets_cover_and_waste_little():
    for length in range(1, 3000, 7):
        assert length <= bucket(length) <= max(32, 2 * length)
    assert bucket(600) == 1024 and bucket(1025) == 1536


def test_prompts_of_one_bucket_have_one_program(tiny, plain):
    prompts = [(make_prompts(1, seed=s)[0] * 300)[:length] for s, length in enumerate((130, 180, 220))]
    answers = [generate(plain, [prompt] * 3, 12, batch_size=3)[0] for prompt in prompts]
    assert [answer.compile_seconds for answer in answers[1:]] == [0, 0]
