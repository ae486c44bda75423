"""Datastores built by the command, and what it and decoding refuse."""

import json
import shutil

import pytest

from jaxspec.cli import datastore, decode
from jaxspec.drafters import load_adapter, load_drafter
from jaxspec.errors import UserError
from jaxspec.methods.rest import SEPARATOR
from jaxspec.weights.hf import save_directory
from jaxspec.weights.load import load_model
from tests.helpers.tiny import make_text_model


@pytest.fixture
def written(tmp_path):
    """Writes a file; its name."""

    def write(name, content):
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def build(files, tmp_path):
    """Runs the command with these options; the folder it writes."""

    def run(*options):
        datastore.main(["--model", str(files / "model"), "--output", str(tmp_path / "out"), *options])
        return tmp_path / "out"

    return run


def texts_in(folder, model):
    """The texts of a datastore."""
    tokens = load_adapter(folder, model.config).trainable["tokens"].tolist()
    assert tokens[0] == tokens[-1] == SEPARATOR
    texts = [[]]
    for token in tokens[1:-1]:
        texts = [*texts, []] if token == SEPARATOR else [*texts[:-1], [*texts[-1], token]]
    return [model.tokenizer.decode(text) for text in texts]


@pytest.mark.parametrize(
    ("rows", "options", "texts"),
    [
        ([{"prompt_tokens": [1, 0], "answer_tokens": [2, 9], "answer": "?"}], [], ['"!#*']),
        ([{"answer": "one two"}, {"answer": ""}, {"answer": "three\n"}], [], ["one two", "three\n"]),
        ([{"text": "one", "tokens": [3]}], ["--column", "text"], ["one"]),
        ([{"choices": [{"turns": ["first", "second"]}]}], [], ["first", "second"]),
    ],
    ids=["tokens", "texts", "decoded", "benchmark"],
)
def test_answers_are_read_in_the_forms_that_the_project_writes(files, written, build, capsys, rows, options, texts):
    folder = build("--answers", written("answers.jsonl", rows), *options)
    assert texts_in(folder, load_model(str(files / "model"))) == texts
    assert f"of {len(texts)} text(s)" in capsys.readouterr().out
    info = json.loads((folder / "adapter.json").read_text())
    assert info["data"] == {"files": ["answers.jsonl"], "texts": len(texts)} and info["base"] == "model"


def test_a_plain_text_is_one_text(files, written, build):
    answers, text = written("answers.jsonl", [{"answer": "one"}]), written("text.txt", "two\n\nthree ½" + 300 * " four")
    folder = build("--answers", answers, "--text", text)
    assert texts_in(folder, load_model(str(files / "model"))) == ["one", "two\n\nthree ½" + 300 * " four"]


@pytest.mark.slow
def test_what_it_builds_drafts(files, written, build, capsys):
    """A base that has answered before drafts its answer from there, alone and beside what looks at the text at hand."""
    ask = ["--model", str(files / "model"), "--prompt", "one", "--max-new-tokens", "20", "--json"]
    decode.main([*ask, "--method", "autoregressive"])
    [row] = map(json.loads, capsys.readouterr().out.splitlines())
    prompt = load_model(str(files / "model")).encode("one")
    folder = build("--answers", written("a.jsonl", [{"prompt_tokens": prompt, "answer_tokens": row["tokens"]}]))
    for method, tree in (("rest", "chain:8"), ("suffix+rest", "best:8")):
        capsys.readouterr()
        decode.main([*ask, "--method", method, "--adapter", str(folder), "--tree", tree, "--compare"])
        [found] = map(json.loads, capsys.readouterr().out.splitlines())
        assert found["identical_to_autoregressive"] and found["tokens_per_step"] > 4
        assert "rest" in found["drafted_by"][1]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "answers.jsonl: cannot be read (No such file"),
        ("", [], "answers.jsonl: holds no text"),
        ("{", [], "answers.jsonl:1: not JSON"),
        ([{"text": "one"}], [], "answers.jsonl:1: no column 'answer', name one of those there are: text"),
        ([{"answer": "one"}, {"answer": 3}], [], "answers.jsonl:2: column 'answer' must hold a text, got 3"),
        ([{"answer_tokens": [1, 257]}], [], "answer_tokens must be token ids below 257"),
        ([{"choices": [{"turns": [3]}]}], [], "answers.jsonl:1: choices without turns of text"),
        ([{"answer": "\ud800"}], [], "'\\ud800': not valid Unicode"),
        ([{"answer_tokens": ["1"]}], [], "answer_tokens must be token ids below 257"),
        ([{"answer": "one"}], ["--output", "."], "give a new directory with --output, got '.'"),
        ([{"answer": "one"}], ["--longest", "0"], "longest must be at least 1, got 0"),
        ([{"answer": "one"}], ["--text", "nowhere.txt"], "nowhere.txt: cannot be read (No such file"),
    ],
)
def test_what_cannot_be_built_is_refused(written, build, tmp_path, content, options, message):
    file = str(tmp_path / "answers.jsonl") if content is None else written("answers.jsonl", content)
    with pytest.raises(UserError) as refused:
        build("--answers", file, *options)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_texts_must_be_given(build):
    with pytest.raises(UserError, match=r"give texts with --answers FILE\.jsonl, with --text FILE, or both"):
        build()


def test_a_datastore_that_does_not_fit_is_refused(files, written, build, tmp_path):
    folder, model = build("--answers", written("a.jsonl", [{"answer": "one"}])), load_model(str(files / "model"))

    def message(model, folder):
        with pytest.raises(UserError) as refused:
            load_drafter("rest", model, folder)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    other = make_text_model(seed=1, num_layers=1)
    save_directory(tmp_path / "other", other.config, other.params, other.eos)
    other.tokenizer.save_pretrained(tmp_path / "other")
    assert "another base ('model'" in message(load_model(str(tmp_path / "other")), folder)
    weights = folder / "adapter.safetensors"
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / weights.name).write_bytes(weights.read_bytes()[:-4])
    assert "not a complete safetensors file" in message(model, damaged)
    (damaged / weights.name).unlink()
    assert "not a complete safetensors file" in message(model, damaged)
    head = json.loads((folder / "adapter.json").read_text())
    (folder / "adapter.json").write_text(json.dumps(head | {"settings": head["settings"] | {"size": 9}}))
    assert "tensor 'order' has shape [5], rest on this base needs [9]" in message(model, folder)
