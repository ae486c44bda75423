"""Drafters that take turns of a few steps."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import turns
from experiments.turns import Options, in_turns, load_drafters, measure, report
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import Generation, generate
from jaxspec.methods import Suffix
from tests.helpers.files import write_jsonl
from tests.helpers.methods import union
from tests.helpers.tiny import make_text_model

NOTHING = Generation("", "", [], [], 0, [], [], 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(make_text_model(num_layers=1), eos=())


def test_all_answer_as_if_alone(model):
    drafters = {turns.REFERENCE: autoregressive(model), "suffix": union([Suffix()], model, 4)}
    options = Options("", tokens=12, steps=2)
    answers = in_turns(drafters, [1, 2, 3], options, np.random.default_rng(0))
    [alone] = generate(drafters["suffix"], [[1, 2, 3]], 12)
    assert answers["suffix"].tokens == alone.tokens == answers[turns.REFERENCE].tokens
    assert answers["suffix"].steps == alone.steps


def test_in_every_round_each_that_is_not_done_decodes(monkeypatch):
    order = []

    def pieces(name, *args, **settings):
        for number in range(3 if name == "slow" else 2):
            order.append(name)
            yield dataclasses.replace(NOTHING, steps=number)

    monkeypatch.setattr(turns, "stream", pieces)
    answers = in_turns({"slow": "slow", "fast": "fast"}, [1], Options(""), np.random.default_rng(0))
    assert sorted(order[:2]) == sorted(order[2:4]) == ["fast", "slow"] and order[4:] == ["slow"]
    assert answers["slow"].steps == 2 and answers["fast"].steps == 1


def test_what_compiled_and_answers_without_steps_do_not_count(monkeypatch):
    """Where something compiled the prompt is answered again."""
    rounds = [{"steps": 7, "compile_seconds": 1.0}, {"steps": 3}, {"steps": 0}]
    said = iter([{turns.REFERENCE: dataclasses.replace(NOTHING, **fields)} for fields in rounds])
    monkeypatch.setattr(turns, "in_turns", lambda *args: next(said))
    answers = measure({turns.REFERENCE: None}, [[1], [2]], Options(""))
    assert [answer.steps for answer in answers[turns.REFERENCE]] == [3]
    said = iter([{turns.REFERENCE: NOTHING}] * 2)
    with pytest.raises(UserError, match="no prompt has an answer of more than one token"):
        measure({turns.REFERENCE: None}, [[1]], Options(""))


@pytest.mark.parametrize("run", [("suffix", "suffix"), ("autoregressive",)])
def test_a_drafter_that_is_there_twice_is_refused(model, run):
    with pytest.raises(UserError, match="is there twice"):
        load_drafters(Options("", run=run), model)


def test_a_drafter_on_a_base_of_its_own_is_refused(model, monkeypatch):
    monkeypatch.setattr(turns, "load_drafter", lambda name, base, **use: autoregressive(make_text_model(num_layers=1)))
    with pytest.raises(UserError, match="'space': it decodes on a base that it has tuned"):
        load_drafters(Options("", run=("space",)), model)


def test_speeds_are_those_of_all_tokens_and_of_each_question():
    plain = [dataclasses.replace(NOTHING, tokens=[1] * 11, steps=10, decode_seconds=1.0)] * 2
    ours = [dataclasses.replace(plain[0], steps=5, decode_seconds=seconds) for seconds in (0.5, 2.0)]
    line = report({turns.REFERENCE: plain, "suffix": ours})[-1].split(" | ")
    assert line[:4] == ["| suffix", "2.00", "250.0", "0.80"] and line[5:] == ["0.50", "2 of 2 |"]


def test_it_prints_a_table_and_writes_all_answers(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(turns, "load_model", lambda name: model)
    data = write_jsonl(tmp_path / "question.jsonl", [{"question_id": 1, "category": "qa", "turns": ["hello"]}])
    options = ["--data", data, "--run", "suffix", "--tokens", "8", "--output", str(tmp_path / "out")]
    turns.main(options)
    assert "| suffix | " in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "turns.json").read_text())
    assert list(written["answers"]) == ["autoregressive", "autoregressive again", "suffix"]
    with pytest.raises(UserError, match="no prompt has at most 1 tokens"):
        turns.main([*options, "--longest", "1"])
