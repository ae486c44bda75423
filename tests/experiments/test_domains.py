"""Code and mathematics against conversation: who is asked what, answers turn by turn, and recordings that go on."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from experiments import domains
from experiments.domains import answers, chosen, drafter_of, main, record_ranks
from jaxspec.bench.questions import Question
from jaxspec.errors import UserError
from jaxspec.methods import PPD


def question(number, category, *turns):
    return Question("f", number, category, turns, "spec_bench", {})


def test_questions_of_groups_are_chosen():
    asked = [
        question(1, "writing", "a"),
        question(2, "qa", "b"),
        question(3, "stem", "c"),
        question(4, "humaneval", "d"),
    ]
    assert [each.id for each in chosen(asked, 1)] == [1, 4]


def test_a_turn_follows_the_answer_to_the_one_before(model, tmp_path):
    asked = [question(1, "writing", "ab", "cd"), question(2, "humaneval", "abc")]
    found = answers(model, asked, 4, tmp_path / "answers.json", {})
    (first, answer), (second, _), (other, _) = found
    assert first == model.encode("ab") and other == model.encode("abc") and len(answer) <= 4
    assert second == model.encode(["ab", model.decode(answer), "cd"])
    kept = answers(model, [], 4, tmp_path / "answers.json", {})  # nothing is asked again
    assert kept == [[*text] for text in found]


def test_a_recording_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    source = SimpleNamespace(method=PPD(), accuracy=[[0.5]], facts=SimpleNamespace(probe_rows=1, distances=1))
    drafter = SimpleNamespace(sources=[source], digest="d")
    made: list[int] = []

    def words(drafter, texts):
        if len(made) == 1:
            made.append(0)
            raise KeyboardInterrupt
        made.append(len(texts))
        return [[["0"]] for _ in texts]

    monkeypatch.setattr(domains, "_words", words)
    texts = [([1], [2, 3])] * (domains._KEPT + 2)
    with pytest.raises(KeyboardInterrupt):
        record_ranks("ppd", drafter, texts, tmp_path / "ppd.json", {})
    found = record_ranks("ppd", drafter, texts, tmp_path / "ppd.json", {})
    assert made == [domains._KEPT, 0, 2] and len(found["ppd"]["ranks"]) == len(texts)
    assert found["ppd"]["ranks"][0] == ["0"] and found["ppd"]["probe_rows"] == 1


def test_a_drafter_of_another_base_is_refused(model, monkeypatch):
    """SPACE tunes its base: the answers are those of the one that was not tuned."""
    for fingerprint, refused in ((model.fingerprint, False), ("tuned", True)):
        drafter = SimpleNamespace(model=SimpleNamespace(fingerprint=fingerprint))
        drafter.with_tree = lambda tree, vocabulary, drafter=drafter: drafter
        monkeypatch.setattr(domains, "load_drafter", lambda *names, drafter=drafter, **settings: drafter)
        with pytest.raises(UserError, match="space drafts for a base that it has tuned") if refused else nullcontext():
            assert drafter_of("space", model) is drafter


def test_results_belong_to_the_questions_that_were_asked(model, tmp_path, monkeypatch):
    """Not to names of files alone: another file of the same name is refused."""
    file = tmp_path / "q.jsonl"
    monkeypatch.setattr(domains, "load_model", lambda *names: model)
    monkeypatch.setattr(domains, "drafter_of", lambda names, model: None)
    monkeypatch.setattr(domains, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(domains, "record_ranks", lambda names, *others: {names: {}})
    given = ["--data", str(file), "--output", str(tmp_path), "--work", str(tmp_path), "--tokens", "2"]
    for turn in ("a", "b"):
        file.write_text(json.dumps({"question_id": 1, "category": "writing", "turns": [turn]}) + "\n")
        with pytest.raises(UserError, match="holds other results") if turn == "b" else nullcontext():
            main([*given, "--drafters", "ppd"])


def test_files_without_such_questions_are_refused(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": ["a"]}\n')
    with pytest.raises(UserError, match="no question is of a group; categories are writing"):
        main(["--data", str(file), "--output", str(tmp_path), "--work", str(tmp_path)])
