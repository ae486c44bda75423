"""Decoding as a user meets it: texts and figures, JSON, comparisons."""

import dataclasses
import json
import re
import sys

import pytest

from jaxspec.cli import decode
from jaxspec.cli.options import parse
from jaxspec.config import RopeScaling
from jaxspec.errors import UserError
from jaxspec.generation import generate
from tests.helpers.cli import arguments, save_with_adapter, write_prompts
from tests.helpers.tiny import make_text_model

KEYS = {
    "method",
    "model",
    "base",
    "accept",
    "lossless",
    "prompt",
    "text",
    "tokens",
    "new_tokens",
    "steps",
    "tokens_per_step",
    "prefill_seconds",
    "decode_seconds",
    "tokens_per_second",
    "compile_seconds",
    "identical_to_autoregressive",
    "autoregressive_tokens_per_second",
    "speedup",
    "first_divergence",
}


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param([], id="greedy"),
        pytest.param(["--temperature", "0.8", "--seed", "7"], id="sampling", marks=pytest.mark.slow),
    ],
)
def test_json_is_one_object_per_prompt(decode_rows, all_prompts, sampling):
    rows = decode_rows(*all_prompts, "--compare", *sampling)
    assert [row["prompt"] for row in rows] == ["one", "two, longer", "three"]
    for row in rows:
        assert row.keys() >= KEYS and row["method"] == "ppd"
        assert row["identical_to_autoregressive"] and row["lossless"] and row["new_tokens"] == len(row["tokens"])
    assert not any(row["compile_seconds"] for row in rows[1:])


@pytest.mark.parametrize(
    ("options", "tree"),
    [([], "best:1@"), (["--accept", "rejection"], None), (["--accept", "rejection", "--tree", "best:8"], "best:8")],
)
def test_rejection_judges_the_adapters_own_tree_unless_another_is_given(files, options, tree):
    """Of drafts that are chosen in every step it would be `match`."""
    given = parse(decode.DecodeOptions, arguments(files, "--prompt", "x", "--temperature", "0.8", *options))
    [drafter] = decode.choose_drafters(given, given.load_model())
    assert drafter.shape.spec.startswith(tree) if tree else drafter.plan == drafter.source.tree


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "stream"])
def test_text_goes_to_stdout_and_figures_to_stderr(decode_rows, decode_text, stream):
    [row] = decode_rows("--prompt", "hello")
    out, err = decode_text("--prompt", "hello", *stream)
    assert out == row["text"] + "\n" and "tokens per step" in err
    out, err = decode_text("--prompt", "hello", "--compare", *stream)
    assert out == f"[ppd]\n{row['text']}\n[autoregressive]\n{row['text']}\n"
    assert "identical: yes" in err and "autoregressive:" in err


@pytest.mark.slow
def test_drafters_are_compared(decode_rows, decode_text):
    ways = ["suffix tree=best:3", "prompt_lookup tree=best:4"]
    options = ["--prompt", "hello", *(word for way in ways for word in ("--compare-with", way))]
    [row] = decode_rows(*options)
    assert list(row["compared_with"]) == ways and row["identical_to_autoregressive"]
    assert all(other["identical_to_autoregressive"] for other in row["compared_with"].values())
    assert list(row["compared_with"][ways[1]]["sources"]) == ["prompt_lookup"]
    out, err = decode_text(*options)
    assert out == "".join(f"[{name}]\n{row['text']}\n" for name in ("ppd", *ways, "autoregressive"))
    assert [f"({name})" in err for name in ("ppd", *ways)] == [True] * 3 and err.count("identical: yes") == 3


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (["sufix"], "drafter 'sufix': unknown method 'sufix' (did you mean 'suffix'?)"),
        (["suffix", "suffix"], "--compare-with 'suffix': that drafter is there twice"),
        (["suffix tree=chain:99"], "is too deep: suffix has candidates for 16 distances"),
        (["autoregressive tree=chain:2"], "autoregressive drafts nothing and has no tree, got 'chain:2'"),
    ],
)
def test_a_way_that_makes_no_sense_is_refused(decode_rows, ways, message):
    with pytest.raises(UserError) as error:
        decode_rows("--prompt", "hello", *(word for way in ways for word in ("--compare-with", way)))
    assert message in str(error.value)


def test_what_warming_up_compiles_is_reported_with_the_first_answer(decode_rows, decode_text, all_prompts, monkeypatch):
    def iterate(*args, **settings):
        """Compiles while it warms up, with a few steps, and then no more."""
        seconds = 1.5 if "max_steps" in settings else 0.0
        for answer in generate.iterate(*args, **settings):
            yield dataclasses.replace(answer, compile_seconds=seconds)

    monkeypatch.setattr(decode, "iterate", iterate)
    assert [row["compile_seconds"] for row in decode_rows(*all_prompts, "--compare")] == [1.5, 0, 0]
    _, err = decode_text(*all_prompts, "--compare")
    assert re.findall(r"^ppd: .*compile ([\d.]+) s$", err, re.MULTILINE) == ["1.5", "0.0", "0.0"]
    assert re.findall(r"^autoregressive: .*compile ([\d.]+) s$", err, re.MULTILINE) == ["1.5", "0.0", "0.0"]


def test_every_line_of_a_prompt_file_gets_its_answer(decode_rows, tmp_path, capsys):
    assert len(decode_rows(*write_prompts(tmp_path / "prompts.jsonl", "same", "same"))) == 2
    with pytest.raises(UserError, match=r"prompts.jsonl:2: the prompt in column 'prompt' is empty"):
        decode_rows(*write_prompts(tmp_path / "prompts.jsonl", "fine", " "))
    assert capsys.readouterr().out == ""


def test_batches_give_the_same_answers(decode_rows, all_prompts):
    alone, together = (decode_rows(*all_prompts, "--batch-size", size) for size in ("1", "2"))
    assert [row["tokens"] for row in together] == [row["tokens"] for row in alone]


def test_the_chat_template_is_the_default_and_can_be_left_out(decode_rows):
    [[chat], [plain]] = (decode_rows("--prompt", "hello", option) for option in ("--chat", "--no-chat"))
    assert chat["tokens"] != plain["tokens"]


@pytest.mark.parametrize("batch", ["1", "2"])
def test_drafted_tokens_are_green_on_a_terminal(decode_rows, decode_text, all_prompts, monkeypatch, batch):
    options = [*all_prompts, "--batch-size", batch, "--tree", "own"]
    rows = decode_rows(*options)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out, _ = decode_text(*options)
    assert "\033[32m" in out and re.sub(r"\033\[\d+m", "", out) == "".join(row["text"] + "\n" for row in rows)


def test_rejection_says_that_the_text_is_another(decode_rows, decode_text):
    options = ["--prompt", "hello", "--accept", "rejection", "--temperature", "0.9"]
    _, err = decode_text(*options)
    assert "the same distribution, but with a fixed tree another text than the seed's own" in err
    [row] = decode_rows(*options, "--compare")
    assert row["lossless"] is True and row["accept"] == "rejection" and row["first_divergence"] is None


@pytest.mark.slow
def test_typical_acceptance_says_where_it_is_lossy(decode_rows, decode_text):
    options, remark = ["--prompt", "hello", "--accept", "typical"], "may differ from the base's own"
    _, err = decode_text(*options, "--temperature", "0.9")
    assert remark in err and remark not in decode_text(*options)[1]
    [row] = decode_rows(*options, "--temperature", "0.9")
    assert row["lossless"] is False
    [row] = decode_rows(*options, "--compare")
    assert row["lossless"] is True and row["identical_to_autoregressive"]


@pytest.mark.slow
def test_dynamic_rope_decodes_past_the_context_of_pretraining(tmp_path, capsys):
    """Of 16 tokens: the directory says those, and the base takes 4 times as many."""
    tiny = make_text_model(num_layers=1, max_positions=64, rope_scaling=RopeScaling("dynamic", 4.0, 16))
    save_with_adapter(tmp_path, dataclasses.replace(tiny, eos=()))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["max_position_embeddings"] == 16
    decode.main(arguments(tmp_path, "--prompt", "x", "--max-new-tokens", "40", "--compare", "--json", "--no-chat"))
    row = json.loads(capsys.readouterr().out)
    assert row["new_tokens"] > 16 and row["identical_to_autoregressive"]
