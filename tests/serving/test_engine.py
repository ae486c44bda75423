"""Whoever shares the slots, each request's answer is the one it has alone."""

import asyncio
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.prompt import read
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.serving import reader
from jaxspec.serving.engine import Engine
from jaxspec.serving.request import Busy, Closed
from jaxspec.serving.slots import Slots
from tests.helpers.model import log_probabilities
from tests.helpers.serving import LIMITS, answer, idle, letters

SAMPLINGS = [SamplingConfig(), SamplingConfig(1.1), SamplingConfig(1.4, top_k=60, top_p=0.9, min_p=0.01)]


def random_requests(rng, count):
    """Prompts with settings, for `Engine.submit`."""
    for _ in range(count):
        yield (
            letters(rng, rng.integers(1, 60)),
            {
                "max_new_tokens": int(rng.integers(1, 50)),
                "sampling": SAMPLINGS[rng.integers(3)],
                "seed": int(rng.integers(2**32)),
                "stop": [*letters(rng, 5)] if rng.random() < 0.3 else [],
                "drafting": bool(rng.random() < 0.7),
                "logprobs": bool(rng.random() < 0.3),
            },
        )


@functools.cache
def decoded(model, prompt, max_new_tokens, sampling, seed):
    """What `jaxspec decode` answers."""
    return generate(autoregressive(model), [prompt], max_new_tokens, sampling=sampling, seed=seed, chat=False)[0]


def alone(model, prompt, max_new_tokens, sampling, seed, stop=(), **others):
    """That, up to the first token that completes a stop text."""
    whole = decoded(model, prompt, max_new_tokens, sampling, seed)
    for count in range(1, whole.new_tokens + 1):
        text = model.decode(whole.tokens[:count])
        if found := [text.index(end) for end in stop if end in text]:
            return whole.tokens[:count], text[: min(found)]
    return whole.tokens, whole.text


async def check_round(engine, requests, rng):
    """Has requests answered, in random order and some of them cancelled, and checks all others; the answers."""
    requests = [requests[i] for i in rng.permutation(len(requests))]
    cancelled = rng.random(len(requests)) < 0.2
    cancel_after = [int(rng.integers(0, 3)) if gone else None for gone in cancelled]
    answering = (
        answer(engine, prompt, cancel_after=after, **settings)
        for (prompt, settings), after in zip(requests, cancel_after, strict=True)
    )
    answers = await asyncio.gather(*answering)
    await idle(engine)
    finished = 0
    for (prompt, settings), found in zip(requests, answers, strict=True):
        if found.finish == "cancelled":
            continue
        finished += 1
        tokens, text = alone(engine.model, prompt, **settings)
        assert (found.tokens, found.text) == (tokens, text), settings
        assert len(found.scores) == (len(tokens) if settings["logprobs"] else 0)
        assert settings["drafting"] or not any(found.drafted_by)
    assert finished >= len(requests) / 2
    return answers


def test_answers_do_not_depend_on_who_shares_the_slots(engine):
    rng = np.random.default_rng(0)
    answers = asyncio.run(check_round(engine, list(random_requests(rng, 24)), rng))
    assert {found.finish for found in answers} == {"stop", "length", "cancelled"}
    assert any(any(found.drafted_by) for found in answers)


def test_logprobs_are_those_of_the_plain_forward_pass(engine):
    prompt = "a prompt of two chunks, or three"
    settings = {"sampling": SamplingConfig(1.2), "seed": 4, "logprobs": True, "prompt_logprobs": True}
    found = asyncio.run(answer(engine, prompt, max_new_tokens=20, **settings))
    ids = found.answer.request.ids
    text = [*ids, *found.tokens]
    expected = log_probabilities(engine.model, text)
    scores = [*found.answer.prompt_scores, *found.scores]
    assert len(scores) == len(expected)
    np.testing.assert_allclose([s.logprob for s in scores], expected[np.arange(len(expected)), text[1:]], atol=1e-4)
    best = np.sort(expected, axis=-1)[:, ::-1][:, :5]
    np.testing.assert_allclose([[p for _, p in s.best] for s in scores], best, atol=1e-4)
    assert all(expected[i, token] == pytest.approx(p, abs=1e-4) for i, s in enumerate(scores) for token, p in s.best)


def test_an_answer_whose_logits_overflow_fails_alone(drafter):
    model = drafter.model
    params = jax.tree.map(lambda x: x.astype("float16"), model.params)
    overflowing = params | {"embedding": params["embedding"].at[model.encode("~", chat=False)[0]].set(np.inf)}
    narrow = dataclasses.replace(model, params=overflowing)

    async def ask(engine):
        return await asyncio.gather(*(answer(engine, text, max_new_tokens=8) for text in "a~"), return_exceptions=True)

    with Engine(narrow, autoregressive(narrow), LIMITS) as engine:
        whole, failed = asyncio.run(ask(engine))
    assert whole.finish in ("stop", "length") and whole.tokens
    assert isinstance(failed, UserError) and "float16 is too narrow" in str(failed)


def test_a_prompt_whose_scores_overflow_fails(drafter):
    """Nothing is decoded behind it."""
    model = drafter.model
    params = jax.tree.map(lambda x: x.astype("float16"), model.params)
    overflowing = params | {"embedding": params["embedding"].at[model.encode("~", chat=False)[0]].set(np.inf)}
    narrow = dataclasses.replace(model, params=overflowing)
    with Engine(narrow, autoregressive(narrow), LIMITS) as engine, pytest.raises(UserError, match="too narrow"):
        asyncio.run(answer(engine, "a~b", max_new_tokens=0, logprobs=True, prompt_logprobs=True))


def test_a_stop_text_may_come_in_parts_and_ends_the_same_whether_drafted_or_not(engine):
    settings = {"max_new_tokens": 40, "sampling": SAMPLINGS[1]}
    texts = ((seed, alone(engine.model, "abc", 40, SAMPLINGS[1], seed)[1]) for seed in range(100))
    seed, whole = next((seed, text) for seed, text in texts if len(text) > 20)
    stop = whole[12:15]
    for drafting in (True, False):
        asked = settings | {"seed": seed, "drafting": drafting, "stop": [whole[13:15] + "?", stop]}
        found = asyncio.run(answer(engine, "abc", **asked))
        assert (found.text, found.finish, found.stop) == (whole[: whole.index(stop)], "stop", stop)
        assert stop in engine.model.decode(found.tokens) and stop not in engine.model.decode(found.tokens[:-1])


@pytest.fixture
def read_lengths(monkeypatch):
    """Numbers of tokens read of prompts, one for each chunk, as they come."""
    lengths = []

    def counted(base, decoding, reading, tokens, count, *others, **sizes):
        lengths.append(int(count[0]))
        return read(base, decoding, reading, tokens, count, *others, **sizes)

    monkeypatch.setattr(reader, "read", counted)
    return lengths


def test_a_turn_of_a_chat_reads_what_is_new_and_changes_nothing(engine, read_lengths):
    """At most its new tokens, the last answer and a chunk; in chunks, so that it rounds like a whole prompt."""
    W, history, last = LIMITS.prompt_chunk, "a first message of more than two chunks", 0
    for turn in range(4):
        read_lengths.clear()
        settings = {"max_new_tokens": 8, "sampling": SAMPLINGS[1], "seed": 3 + turn}
        found = asyncio.run(answer(engine, history, **settings))
        assert found.tokens == alone(engine.model, history, **settings)[0]
        assert found.answer.cached == last // W * W
        assert sum(read_lengths) == len(found.answer.request.ids) - found.answer.cached
        last = len(found.answer.request.ids)
        history += "".join(filter(str.isascii, found.text)) + f" and turn {turn}?"


def test_another_prompt_with_the_same_beginning_reads_the_rest(engine, read_lengths):
    beginning = "a system prompt of more than three chunks, which all share: "
    for prompt, cached in (("why?", 0), ("how?", 48), ("and when?", 48)):
        read_lengths.clear()
        settings = {"max_new_tokens": 20, "sampling": SAMPLINGS[1], "seed": 3}
        found = asyncio.run(answer(engine, beginning + prompt, **settings))
        assert found.tokens == alone(engine.model, beginning + prompt, **settings)[0]
        assert found.answer.cached == cached
        assert sum(read_lengths) == len(beginning + prompt) - cached


def test_log_probabilities_of_a_prompt_are_of_all_of_it(engine):
    """What was kept of it has none, so it is read again."""
    prompt = "a prompt of more than one chunk"
    settings = {"max_new_tokens": 2, "logprobs": True, "prompt_logprobs": True}
    first, second = (asyncio.run(answer(engine, prompt, **settings)) for _ in range(2))
    assert second.answer.cached == 0
    assert first.answer.prompt_scores == second.answer.prompt_scores
    assert len(second.answer.prompt_scores) == len(prompt) - 1


def test_penalties_are_those_of_each_request(drafter):
    rng, model = np.random.default_rng(0), drafter.model
    penalties = SamplingConfig(repetition_penalty=2.0, presence_penalty=1.5, frequency_penalty=2.0)
    samplings = [SamplingConfig(), penalties, SAMPLINGS[1], dataclasses.replace(penalties, temperature=1.1)]
    asked = [(letters(rng, 20), 30, sampling, 5) for _ in range(2) for sampling in samplings]

    async def ask(engine):
        each = (answer(engine, text, max_new_tokens=n, sampling=s, seed=seed) for text, n, s, seed in asked)
        return await asyncio.gather(*each)

    with Engine(model, drafter, dataclasses.replace(LIMITS, slots=2), penalties=True) as engine:
        found = asyncio.run(ask(engine))
    assert [one.tokens for one in found] == [alone(model, *one)[0] for one in asked]
    unpenalised = [alone(model, text, n, SamplingConfig(s.temperature), seed)[0] for text, n, s, seed in asked]
    changed = [one.tokens != without for one, without in zip(found, unpenalised, strict=True)]
    assert any(changed[1::4]) and any(changed[3::4]) and not any(changed[0::2])


def test_an_engine_without_penalties_refuses_them(engine):
    async def ask():
        engine.submit("abc", 3, sampling=SamplingConfig(presence_penalty=1.0))

    with pytest.raises(UserError, match="start it with penalties"):
        asyncio.run(ask())
    assert engine._slots._state.seen is None


def test_nothing_to_emit_is_an_answer(engine):
    found = asyncio.run(answer(engine, "abc", max_new_tokens=0))
    assert (found.text, found.tokens, found.finish) == ("", [], "length")


def test_a_full_queue_refuses_and_goes_on(engine):
    async def ask_too_much():
        accepted, refused = [], 0
        for _ in range(200):
            try:
                accepted.append(engine.submit("abc", 3))
            except Busy:
                refused += 1
        texts = {"".join([piece.text async for piece in one]) for one in accepted}
        await idle(engine)
        return len(accepted), refused, texts

    accepted, refused, texts = asyncio.run(ask_too_much())
    assert accepted + refused == 200 and refused > 100 and accepted >= 32
    assert len(texts) == 1


def test_what_fails_in_one_request_fails_that_one_alone(engine, monkeypatch):
    async def with_a_failure():
        good, bad = (engine.submit(prompt, 20, chat=False) for prompt in ("abc", "abd"))
        monkeypatch.setattr(bad, "extend", None)
        with pytest.raises(TypeError):
            async for _ in bad:
                pass
        text = "".join([piece.text async for piece in good])
        await idle(engine)
        return text

    assert asyncio.run(with_a_failure()) == alone(engine.model, "abc", 20, SamplingConfig(), 0)[1]


@pytest.mark.parametrize(("name", "failing"), [("reader", 1), ("advance", 4)])
def test_what_fails_once_on_the_device_fails_those_it_was_for(engine, monkeypatch, name, failing):
    """Making a reader is for one request; a step is for all that run, not for those that wait."""
    whole, calls = getattr(Slots, name), []

    def fails_once(*arguments):
        calls.append(arguments)
        if len(calls) == failing:
            raise RuntimeError("once")
        return whole(*arguments)

    async def ask():
        answering = (answer(engine, "abc", max_new_tokens=40, seed=seed, sampling=SAMPLINGS[1]) for seed in range(8))
        found = await asyncio.gather(*answering, return_exceptions=True)
        await idle(engine)
        return found

    monkeypatch.setattr(Slots, name, fails_once)
    found = asyncio.run(ask())
    failed = [one for one in found if isinstance(one, RuntimeError)]
    assert len(failed) == 1 if name == "reader" else 1 <= len(failed) <= 4
    for seed, one in enumerate(found):
        if one not in failed:
            assert one.tokens == alone(engine.model, "abc", 40, SAMPLINGS[1], seed)[0]
    assert engine.alive


def test_an_engine_that_ends_leaves_nobody_waiting(drafter, monkeypatch):
    asked = threading.Event()

    def fails(*arguments):
        asked.wait(10)
        raise RuntimeError("lost")

    async def ask(engine):
        answers = [engine.submit("abc", 20) for _ in range(6)]  # in four slots
        asked.set()
        return await asyncio.gather(*(anext(one) for one in answers), return_exceptions=True)

    with Engine(drafter.model, drafter, LIMITS) as engine:
        monkeypatch.setattr(Slots, "release", fails)
        monkeypatch.setattr(Slots, "clear", fails)
        assert {str(one) for one in asyncio.run(ask(engine))} == {"lost"}
        with pytest.raises(Closed):
            asyncio.run(ask(engine))
    assert not engine.alive


def test_an_exception_inside_the_context_ends_what_runs(drafter):
    async def fail(answers):
        with Engine(drafter.model, drafter, LIMITS) as engine:
            answers += [engine.submit("abc", 50) for _ in range(6)]
            raise RuntimeError("inside")

    async def ends():
        answers = []
        with pytest.raises(RuntimeError, match="inside"):
            await fail(answers)
        return [[piece async for piece in one][-1].finish for one in answers]

    assert asyncio.run(ends())[-1] == "cancelled"


def test_a_request_that_takes_too_long_ends(engine, monkeypatch):
    monkeypatch.setattr(engine, "limits", dataclasses.replace(engine.limits, seconds=1e-6))
    assert asyncio.run(answer(engine, "abc", max_new_tokens=20)).finish == "timeout"
    asyncio.run(idle(engine))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": [1, 300]}, "outside the vocabulary"),
        ({"max_new_tokens": 119}, "exceeds max-length, 120"),
        ({"max_new_tokens": -1}, "max-new-tokens must be at least 0"),
        ({"sampling": SamplingConfig(1.0, top_p=0.0)}, "top-p"),
        ({"stop": [""]}, "must not be empty"),
        ({"min_new_tokens": 4}, "min-new-tokens must be between 0 and max-new-tokens, 3, got 4"),
    ],
)
def test_bad_requests_are_refused(engine, settings, message):
    async def ask():
        engine.submit(**{"prompt": "abc", "max_new_tokens": 3} | settings)

    with pytest.raises(UserError, match=message):
        asyncio.run(ask())


def test_slots_that_no_memory_holds_are_refused_before_anything_is_compiled(drafter, monkeypatch):
    monkeypatch.setattr(Slots, "clear", None)
    said = r"10000000 slots of 120 tokens take [\d,]+\.\d GB, and [\d,]+\.\d GB are free; lower limits.slots or"
    with pytest.raises(UserError, match=said):
        Engine(drafter.model, drafter, dataclasses.replace(LIMITS, slots=10**7))


def test_memory_of_a_row_is_known_before_there_is_one(engine):
    state, rows = engine._slots._state, len(engine._slots._requests)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == rows * engine._slots._row_bytes


def test_memory_is_known_at_the_start(drafter):
    """Of kept prefixes as many whole chunks as fit; of the prompt being read the hidden states of its last chunk."""
    model, limits = drafter.model, dataclasses.replace(LIMITS, max_length=64, prefix_bytes=0)

    def memory(**others):
        return Slots(drafter, Match(), dataclasses.replace(limits, **others)).memory

    halves, whole = (memory(prompt_chunk=chunk) for chunk in (32, 64))
    layers = 1 + len(drafter.on_device.taps(model.base))
    assert whole - halves == 32 * layers * model.config.hidden_size * 4
    kept = memory(prompt_chunk=32, prefix_bytes=10**6) - halves
    assert 0.9e6 < kept <= 1e6


def test_prefixes_that_no_memory_is_given_to_are_told_of(drafter, caplog):
    Slots(drafter, Match(), dataclasses.replace(LIMITS, prefix_bytes=100))
    assert "are read again every time: limits.prefix-bytes is 100, and 16 tokens take" in caplog.text
