"""Prompts, the cache of self-generated answers, and batches that depend on the step alone."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.files import locked
from jaxspec.generation.generate import generate
from jaxspec.training.data import (
    AnsweredPrompt,
    TrainingData,
    cache_file,
    frequent_tokens,
    insertion_points,
    prepare_answers,
)
from jaxspec.training.examples import select_prompts
from jaxspec.training.settings import DataConfig, TextSource, TrainConfig
from tests.helpers.files import read_jsonl, write_jsonl
from tests.helpers.training import files_of_at_most


@pytest.fixture
def data(tmp_path):
    rows = ({"prompt": f"question {i} " + "x" * (i % 7)} for i in range(30))
    prompts = write_jsonl(tmp_path / "prompts.jsonl", rows)
    return DataConfig(
        prompts=prompts, answers=12, held_out=4, max_prompt_tokens=24, max_answer_tokens=10, held_out_tokens=16,
        batch_size=5, cache=str(tmp_path / "cache"),
    )  # fmt: skip


def answers_to(model, data):
    return prepare_answers(model, data, select_prompts(model, data))


def test_answers_are_the_greedy_ones_and_held_out_stays_out(model, data):
    held_out, answers = answers_to(model, data)
    assert len(held_out) == 4 and len(answers) == 12
    plain = autoregressive(model)
    for group, limit in ((held_out, 16), (answers, 10)):
        alone = generate(plain, [a.prompt_tokens for a in group], limit)
        assert [a.answer_tokens for a in group] == [a.tokens for a in alone]
    assert not {tuple(a.prompt_tokens) for a in held_out} & {tuple(a.prompt_tokens) for a in answers}


def test_answers_that_were_recorded_are_found_under_the_same_names(model):
    model = dataclasses.replace(model, fingerprint="base")
    given = {"answer_column": "output", "context_column": "input", "split": "test", "template": "vicuna"}
    for settings, name in (({}, "36a6c2a0b86a"), ({"regenerate": True}, "ac021e3ca599"), (given, "a94b3fa40e85")):
        file = cache_file(model, DataConfig(prompts="owner/name", **settings), 128)
        assert str(file) == f"runs/answers/base-{name}.jsonl"


def test_two_runs_do_not_make_the_same_answers_at_once(model, data):
    """The second one would cut off the line that the first one is writing."""
    file = cache_file(model, data, data.held_out_tokens)
    file.parent.mkdir()
    lock = file.with_name(f".{file.name}.lock")
    with locked(lock), pytest.raises(UserError, match="another run is making these answers"):
        answers_to(model, data)
    assert len(answers_to(model, data)[1]) == 12


def test_more_answers_keep_the_held_out_set_and_reuse_the_cache(model, data):
    first, file = answers_to(model, data), cache_file(model, data, data.max_answer_tokens)
    kept = file.read_text()
    more = answers_to(model, dataclasses.replace(data, answers=15))
    assert more[0] == first[0] and more[1][:12] == first[1] and len(more[1]) == 15
    assert file.read_text().startswith(kept) and file.read_text().count("\n") == 15  # three were generated


def test_answers_are_those_to_their_prompts_however_many_are_held_out(model, data):
    """Turns of one conversation stay together, so the numbers of prompts shift by more than those held out."""
    write_jsonl(
        Path(data.prompts), ({"talk": [{"from": "human", "value": f"{i}"}, *said(i), *said(i)]} for i in range(9))
    )
    data = dataclasses.replace(data, column="talk", regenerate=True, max_prompt_tokens=60)
    for held_out in (2, 4):
        changed = dataclasses.replace(data, held_out=held_out)
        prompts = [selected.prompt_tokens for selected in select_prompts(model, changed)]
        first, rest = answers_to(model, changed)
        assert [answer.prompt_tokens for answer in (*first, *rest)] == prompts
        fresh = answers_to(model, dataclasses.replace(changed, cache=f"{data.cache}-{held_out}"))
        assert (first, rest) == fresh


def said(i):
    return [{"from": "gpt", "value": "yes"}, {"from": "human", "value": f"and {i}"}]


def test_answers_to_a_mixture_are_kept_under_a_name_of_its_own(model, data, tmp_path):
    """Which does not depend on where its files are, but on what they hold, on weights and on templates."""
    other = write_jsonl(tmp_path / "other.jsonl", ({"q": f"other {i}"} for i in range(9)))
    mixture = (TextSource(data.prompts, weight=3), TextSource(other, column="q"))
    mixed = dataclasses.replace(data, prompts="", mixture=mixture)
    held_out, answers = answers_to(model, mixed)
    assert len(held_out) == 4 and len(answers) == 12
    assert answers_to(model, mixed) == (held_out, answers)
    file = cache_file(model, mixed, 10)
    assert len(file.read_text().splitlines()) == 12 and file != cache_file(model, data, 10)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(Path(other).read_bytes())
    for changes, same in (
        ({"mixture": (mixture[0], dataclasses.replace(mixture[1], prompts=str(moved)))}, True),
        ({"mixture": (dataclasses.replace(mixture[0], weight=3.0), mixture[1])}, True),
        ({"mixture": (dataclasses.replace(mixture[0], weight=2), mixture[1])}, False),
        ({"mixture": mixture[:1]}, False),
        ({"templates": ("vicuna",)}, False),
    ):
        assert (cache_file(model, dataclasses.replace(mixed, **changes), 10) == file) == same
    moved.write_text('{"q": "another"}\n')
    changed = dataclasses.replace(mixed, mixture=(mixture[0], dataclasses.replace(mixture[1], prompts=str(moved))))
    assert cache_file(model, changed, 10) != file
    assert cache_file(model, dataclasses.replace(mixed, prompts=data.prompts), 10) == cache_file(model, data, 10)


def test_a_cache_cut_short_by_a_kill_is_continued(model, data):
    whole = answers_to(model, data)
    file = cache_file(model, data, data.max_answer_tokens)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert answers_to(model, data) == whole
    rows = read_jsonl(file)
    assert sorted(row["index"] for row in rows) == list(range(4, 16))  # nothing twice, nothing missing
    assert all(row["answer"] == model.decode(row["answer_tokens"]) for row in rows)


def test_a_full_disk_keeps_the_answers_that_are_whole(model, data, tmp_path):
    whole, file = answers_to(model, data), cache_file(model, data, data.max_answer_tokens)
    small = dataclasses.replace(data, cache=str(tmp_path / "small"))
    message = r"small: answers cannot be cached there \(File too large\)"
    with pytest.raises(UserError, match=message), files_of_at_most(file.stat().st_size - 100):
        answers_to(model, small)
    kept = cache_file(model, small, data.max_answer_tokens).read_bytes()
    assert kept.count(b"\n") >= 5 and answers_to(model, small) == whole
    assert cache_file(model, small, data.max_answer_tokens).read_bytes().startswith(kept[: kept.rindex(b"\n")])


def test_given_answers_are_taken_as_they_are_and_cut(model, data, tmp_path, capsys):
    rows = [{"prompt": f"q{i}", "answer": "word " * (i % 4 + 1)} for i in range(16)]
    file = write_jsonl(tmp_path / "given.jsonl", rows)
    held_out, answers = answers_to(model, dataclasses.replace(data, prompts=file, answer_column="answer"))
    assert len(held_out) == 4 and len(answers) == 12
    assert not (tmp_path / "cache").exists()  # nothing was generated
    assert re.search(r"cut at 10 tokens: \d+ of 12 answers\n", capsys.readouterr().err)
    for limit, group in ((16, held_out), (10, answers)):
        for answer in group:
            number = int(model.decode(answer.prompt_tokens)[2:-1])
            whole = [*model.tokenizer.encode(rows[number]["answer"]), *model.eos]
            assert answer.answer_tokens == whole[:limit]


ANSWERS = [AnsweredPrompt([1] * n, list(range(2, 2 + m))) for n, m in ((3, 9), (5, 2), (2, 30), (4, 6), (8, 12))]
TRAIN = TrainConfig(batch_size=2, sequence_length=20, insertions=6, seed=7)


def test_insertion_points_are_answer_tokens_with_a_next_next_token():
    assert insertion_points(AnsweredPrompt([1] * 3, [5, 6, 7, 8]), 100).tolist() == [3, 4]
    assert insertion_points(AnsweredPrompt([1] * 3, [5, 6, 7, 8]), 6).tolist() == [3]
    assert insertion_points(AnsweredPrompt([1] * 3, [5]), 100).tolist() == []


def test_insertion_points_of_the_whole_text_begin_at_the_prompt():
    assert insertion_points(AnsweredPrompt([1] * 3, [5, 6, 7, 8]), 6, "text").tolist() == [0, 1, 2, 3]
    answers = [
        AnsweredPrompt([1] * 9, [2, 3]),
        AnsweredPrompt([1] * 30, [2, 3]),
    ]  # too short, and cut off, were the answer asked for
    batch = TrainingData(answers, dataclasses.replace(TRAIN, positions="text", insertions=20)).batch(0)
    found = sorted(points[points >= 0].tolist() for points in batch.points)
    assert found == [list(range(9)), list(range(18))]


def test_batches_hold_what_they_should():
    data = TrainingData(ANSWERS, TRAIN)
    for step in range(6):
        batch = data.batch(step)
        for row in range(2):
            length, start = batch.lengths[row], batch.starts[row]
            answer = next(a for a in ANSWERS if len(a.prompt_tokens) == start)
            text = (answer.prompt_tokens + answer.answer_tokens)[:20]
            assert batch.tokens[row, :length].tolist() == text and not batch.tokens[row, length:].any()
            points = batch.points[row][batch.points[row] >= 0]
            assert len(set(points)) == len(points) == min(6, len(insertion_points(answer, 20)))
            assert set(points) <= set(insertion_points(answer, 20))


def test_batches_depend_on_seed_and_step_alone():
    data = TrainingData(ANSWERS, TRAIN)
    forward = [data.batch(step) for step in range(5)]
    for step in (3, 0, 4):
        again = TrainingData(ANSWERS, TRAIN).batch(step)
        for a, b in zip(jax.tree.leaves(forward[step]), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
    other = TrainingData(ANSWERS, dataclasses.replace(TRAIN, seed=8)).batch(0)
    for name in ("points", "seeds"):
        assert not np.array_equal(getattr(other, name), getattr(forward[0], name))
    seeds = np.concatenate([batch.seeds for batch in forward])
    assert len(set(seeds.tolist())) == len(seeds)


@pytest.mark.parametrize("count", [160, 161])
def test_batches_hold_answers_of_like_length(count):
    """Every epoch, those after the first included, of which none but the first begins with a batch."""
    rng = np.random.default_rng(0)
    answers = [AnsweredPrompt([1, 2], [3] * length) for length in rng.integers(3, 99, count)]
    train = dataclasses.replace(TRAIN, batch_size=4, sequence_length=100)
    data = TrainingData(answers, train)
    batches = [data.batch(step) for step in range(3 * count // 4)]
    padded = [batch.tokens.shape[1] for batch in batches]
    assert set(padded) == {25, 50, 75, 100}
    for batch, length in zip(batches, padded, strict=True):
        assert length - 25 < batch.lengths.max() <= length
    text = sum(batch.lengths.sum() for batch in batches)
    assert 0.75 < text / (4 * sum(padded)) <= 1  # unsorted it is 0.6
    windows = np.array(padded[:32]).reshape(2, 16)
    assert all(sorted(window) != list(window) for window in windows)  # long ones do not come last


@pytest.mark.parametrize(("lengths", "padded"), [(1, {100}), (3, {34, 68, 100}), (5, {20, 40, 60, 80, 100})])
def test_batches_have_as_many_lengths_as_asked_for(lengths, padded):
    """All within the sequence length, and with the same text."""
    answers = [AnsweredPrompt([1, 2], [3] * length) for length in range(3, 99)]
    train = dataclasses.replace(TRAIN, batch_size=4, sequence_length=100)
    data, usual = TrainingData(answers, dataclasses.replace(train, lengths=lengths)), TrainingData(answers, train)
    batches = [data.batch(step) for step in range(24)]
    assert [batch.tokens.shape[1] for batch in batches] == [data.length(step) for step in range(24)]
    assert {data.length(step) for step in range(24)} == padded
    for step, batch in enumerate(batches):
        for name in ("lengths", "starts", "points", "seeds"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(usual.batch(step), name))


def test_every_epoch_visits_every_usable_answer_once():
    data = TrainingData(ANSWERS, dataclasses.replace(TRAIN, batch_size=4))
    seen = sorted(start for start in data.batch(0).starts)
    assert seen == [2, 3, 4, 8]  # the answer of two tokens has no insertion point
    data = TrainingData(ANSWERS, dataclasses.replace(TRAIN, batch_size=3))
    starts = np.concatenate([data.batch(step).starts for step in range(4)])  # three epochs, no batch begins with one
    assert [sorted(epoch) for epoch in starts.reshape(3, 4)] == [seen] * 3
    with pytest.raises(UserError, match="long enough"):
        TrainingData(ANSWERS[1:2], TRAIN)


def test_tokens_are_counted_in_answers_alone_and_the_rest_follow_by_id():
    answers = [AnsweredPrompt([1, 1, 1, 1], [4, 2, 4]), AnsweredPrompt([1], [2, 4, 6])]
    assert frequent_tokens(answers, 8).tolist() == [4, 2, 6, 0, 1, 3, 5, 7]
