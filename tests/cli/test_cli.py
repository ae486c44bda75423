"""The entry points as a user meets them: text, JSON, reports, and how errors end a program."""

import dataclasses
import json
import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import decode
import export
import train
import tune
from jaxspec.cli.options import _show_unraised, run_main
from jaxspec.config import DataConfig, RopeScaling
from jaxspec.drafting.adapter import Adapter, load_method, save_adapter
from jaxspec.errors import UserError
from jaxspec.methods import PPD, SPACE
from jaxspec.training.examples import select_prompts
from jaxspec.weights.load import load_model, save_model
from jaxspec.weights.params import params_fingerprint
from tests.helpers.cli import arguments, save_with_adapter
from tests.helpers.tiny import make_text_model

KEYS = {
    "method",
    "model",
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
}


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "7"]], ids=["greedy", "sampling"])
def test_json_is_one_object_per_prompt(files, capsys, sampling):
    decode.main(arguments(files, "--prompts", str(files / "prompts.jsonl"), "--compare", "--json", *sampling))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "two, longer", "three"]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["identical_to_autoregressive"] and row["lossless"] and row["new_tokens"] == len(row["tokens"])


def test_text_on_stdout_and_the_report_on_stderr(files, capsys):
    decode.main(arguments(files, "--prompt", "hello", "--json"))
    row = json.loads(capsys.readouterr().out)
    for stream in ([], ["--stream"]):
        decode.main(arguments(files, "--prompt", "hello", *stream))
        out, err = capsys.readouterr()
        assert out == row["text"] + "\n" and "tokens per step" in err
        decode.main(arguments(files, "--prompt", "hello", "--compare", *stream))
        out, err = capsys.readouterr()
        assert out == f"[ppd]\n{row['text']}\n[autoregressive]\n{row['text']}\n"
        assert "identical: yes" in err and "autoregressive:" in err


def test_compile_time_is_reported_with_the_first_answer(files, capsys):
    command = arguments(files, "--prompts", str(files / "prompts.jsonl"), "--compare", "--json")
    command[command.index("20")] = "65"  # a shape that no other test uses
    decode.main(command)
    first, second, third = [json.loads(line)["compile_seconds"] for line in capsys.readouterr().out.splitlines()]
    assert first > 0.1 and second == third == 0
    command[command.index("65")] = "130"
    command.remove("--json")
    decode.main(command)
    shown = re.findall(r"^(\w+): .*compile ([\d.]+) s$", capsys.readouterr().err, re.MULTILINE)
    compiled = {name: [float(seconds) for way, seconds in shown if way == name] for name in ("ppd", "autoregressive")}
    assert all(seconds[0] > 0 and not any(seconds[1:]) and len(seconds) == 3 for seconds in compiled.values())


def test_every_line_of_a_prompt_file_gets_its_answer(files, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "same"}\n{"prompt": "same"}\n')
    decode.main(arguments(files, "--prompts", str(file), "--json"))
    assert len(capsys.readouterr().out.splitlines()) == 2
    file.write_text('{"prompt": "fine"}\n{"prompt": " "}\n')
    with pytest.raises(UserError, match="prompt 2 is empty"):
        decode.main(arguments(files, "--prompts", str(file), "--json"))
    assert capsys.readouterr().out == ""


def test_batches_give_the_same_answers(files, capsys):
    command = arguments(files, "--prompts", str(files / "prompts.jsonl"), "--json")
    decode.main(command)
    alone = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    decode.main([*command, "--batch-size", "2"])
    assert [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()] == alone


def test_chat_template_is_the_default_and_can_be_left_out(files, capsys):
    texts = []
    for option in ("--chat", "--no-chat"):
        decode.main(arguments(files, "--prompt", "hello", "--json", option))
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] != texts[1]


def test_rejection_says_that_the_text_is_another(files, capsys):
    command = arguments(files, "--prompt", "hello", "--accept", "rejection", "--temperature", "0.9")
    decode.main(command)
    assert "another text than the seed's own, of the same distribution" in capsys.readouterr().err
    decode.main([*command, "--json", "--compare"])
    row = json.loads(capsys.readouterr().out)
    assert row["lossless"] is True and row["accept"] == "rejection" and row["first_divergence"] is None


def test_dynamic_rope_decodes_past_the_context_of_pretraining(tmp_path, capsys):
    """Of 16 tokens: the directory says those, and the base takes 4 times as many."""
    tiny = make_text_model()
    config = dataclasses.replace(tiny.config, max_positions=64, rope_scaling=RopeScaling("dynamic", 4.0, 16))
    save_with_adapter(tmp_path, dataclasses.replace(tiny, config=config, eos=()))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["max_position_embeddings"] == 16
    decode.main(arguments(tmp_path, "--prompt", "x", "--max-new-tokens", "40", "--compare", "--json", "--no-chat"))
    row = json.loads(capsys.readouterr().out)
    assert row["new_tokens"] == 40 and row["identical_to_autoregressive"]


@pytest.mark.parametrize("batch", ["1", "2"])
def test_drafted_tokens_are_coloured_on_a_terminal(files, capsys, monkeypatch, batch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    prompts = ["--prompts", str(files / "prompts.jsonl"), "--batch-size", batch]
    decode.main(arguments(files, *prompts))
    out = capsys.readouterr().out
    decode.main(arguments(files, *prompts, "--json"))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "\033[32m" in out and re.sub(r"\033\[\d+m", "", out) == "".join(row["text"] + "\n" for row in rows)


def test_typical_acceptance_says_that_it_is_lossy(files, capsys):
    decode.main(arguments(files, "--prompt", "hello", "--accept", "typical"))
    assert "may differ from the base's own" in capsys.readouterr().err
    decode.main(arguments(files, "--prompt", "hello", "--accept", "typical", "--json"))
    assert json.loads(capsys.readouterr().out)["lossless"] is False


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("too small"), 2, "error: too small\n"),
        (ValueError("UNKNOWN: Gloo AllGather failed: closed\nmore"), 2, "error: the processes lost each other; see"),
        (ValueError("shapes (2,) and (3,)"), 1, "Traceback"),
    ],
)
def test_one_of_several_processes_ends_at_once(capsys, monkeypatch, error, code, said):
    """Or the others, who wait for it, and it for them, would only end minutes later."""

    def ends(args):
        raise error

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as exit:
        run_main(ends)
    err = capsys.readouterr().err
    assert exit.value.code == code and err.startswith(said) and str(error).split("\n")[0] in err


def test_what_should_not_happen_is_raised():
    def fails(args):
        raise ValueError("UNKNOWN: Gloo AllGather failed: closed")

    with pytest.raises(ValueError, match="Gloo"):
        run_main(fails)


def test_errors_that_are_raised_too_are_not_logged(caplog, monkeypatch):
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    run_main(lambda args: None)
    for text in ("Task exception was never retrieved", "anything else"):
        logging.getLogger("asyncio").error(text)
    assert caplog.messages == ["anything else"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Event loop is closed", False), ("no space [os_error_code='28']", False), ("anything else", True)],
)
def test_errors_that_follow_from_another_are_not_shown(monkeypatch, text, shown):
    """Of Orbax's writer on a full disk, which has raised the first one."""
    found = []
    monkeypatch.setattr(sys, "__unraisablehook__", found.append)
    _show_unraised(SimpleNamespace(exc_value=RuntimeError(text)))
    assert bool(found) == shown


def test_train_shows_a_config(capsys):
    train.main(["--config", "ppd_smollm2", "--show", "--method.ensemble", "4", "--train.steps", "7"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["method"]["ensemble"] == 4 and shown["train"]["steps"] == 7 and shown["method"]["name"] == "ppd"


def test_trains_help_lists_the_configs_by_paper(capsys):
    train.main(["--help"])
    assert "\n  bita: bita_7b, bita_13b, bita_70b, " in capsys.readouterr().out


def test_tune_measures_tries_and_decode_takes_its_choice(files, capsys):
    base = ["--model", str(files / "model"), "--adapter", str(files / "adapter")]
    small = ["--cache-length", "64", "--max-rows", "6", "--num-prompts", "2", "--finalists", "2", "--also", "sparse:3"]
    prompts = ["--prompts", str(files / "prompts.jsonl"), "--max-new-tokens", "8"]
    tune.main([*base, *small, *prompts, "--output", str(files / "tuned"), "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    names = [trial["name"] for trial in result["trials"]]
    assert names[0] == "autoregressive" and names[-1] == "sparse:3" and len(names) >= 3
    assert all(trial["identical"] == 2 for trial in result["trials"])
    assert result["rows"][0] == 1 and "measuring: " in err
    assert (files / "tuned" / "tuning.png").stat().st_size > 5000

    if result["tree"]:
        tree = str(files / "tuned" / "tree.json")
        decode.main(arguments(files, "--prompt", "some words", "--json", "--tree", tree, "--compare"))
        assert json.loads(capsys.readouterr().out)["identical_to_autoregressive"]
    (files / "tuned" / "tuned.json").rename(files / "adapter" / "tuned.json")
    decode.main(arguments(files, "--prompt", "some words", "--json", "--tree", "auto"))
    out, err = capsys.readouterr()
    chosen = "autoregressive" if result["choice"] == "autoregressive" else "ppd"
    assert json.loads(out)["method"] == chosen and ("tuned" in err) == (chosen == "ppd")
    (files / "adapter" / "tuned.json").write_text("{")  # damage is told and stops nothing
    decode.main(arguments(files, "--prompt", "some words", "--json"))
    assert "warning: " in capsys.readouterr().err
    (files / "adapter" / "tuned.json").unlink()


def test_prompts_that_the_adapter_was_trained_on_are_left_out(files, tmp_path):
    model = load_model(str(files / "model"))
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(30)))
    data = {"held_out": 5, "held_out_seed": 3, "max_prompt_tokens": 100, "chat": True}
    held_out = [prompt.text for prompt in select_prompts(model, DataConfig(str(file), answers=9, **data))[:5]]
    options = tune.Options(prompts=str(file))
    for name, expected in (("mine.jsonl", held_out), ("other.jsonl", [f"question {i}" for i in range(30)])):
        adapter = Adapter(PPD(), {}, "", {"data": data | {"prompts": name}})
        assert tune.unseen_prompts(options, model, adapter) == expected
    rows = [
        {"say": f"question {i % 9}", "about": f"{i % 2}", "answer": f"{i}" * (i > 2)} for i in range(30)
    ]  # repeated, and some empty
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data |= {"column": "say", "answer_column": "answer", "context_column": "about"}
    held_out = [prompt.text for prompt in select_prompts(model, DataConfig(str(file), answers=9, **data))[:5]]
    adapter = Adapter(PPD(), {}, "", {"data": data | {"prompts": "mine.jsonl"}})
    assert tune.unseen_prompts(options, model, adapter) == held_out


def test_the_programs_start(files):
    """As real processes, where an import that only works under pytest would show."""
    result = subprocess.run([sys.executable, "decode.py", "--help"], capture_output=True, text=True, check=True)
    assert "--max-new-tokens" in result.stdout


def test_export_writes_the_base_that_a_method_has_tuned(files, tmp_path, capsys):
    model = load_model(str(files / "model"))
    method = SPACE(rank=2)
    trainable = jax.tree.map(lambda x: x + 0.1, method.init(jax.random.key(0), model.base))
    save_adapter(tmp_path / "space", Adapter(method, trainable, model.fingerprint, {"tree": [[0]]}))
    place = ["--model", str(files / "model"), "--output", str(tmp_path / "out")]
    space = ["--adapter", str(tmp_path / "space")]
    for words, message in (
        (["--method", "ppd", "--adapter", str(files / "adapter")], "ppd leaves the base as it is"),
        (space, "--adapter needs --method"),
        (["--output", str(tmp_path)], "give a new directory"),
    ):
        with pytest.raises(UserError, match=message):
            export.main([*place, *words])
    export.main([*place, "--method", "space", *space])
    assert load_method("space", model, tmp_path / "space").own.fingerprint in capsys.readouterr().out
    exported = load_model(str(tmp_path / "out"))
    decode.main(["--model", str(tmp_path / "out"), "--method", "space", "--adapter", str(tmp_path / "out" / "adapter"),
                 "--prompt", "one", "--max-new-tokens", "8", "--compare", "--json"])  # fmt: skip
    assert json.loads(capsys.readouterr().out)["identical_to_autoregressive"]
    assert exported.fingerprint == load_method("space", model, tmp_path / "space").own.fingerprint


def test_export_says_where_a_dtype_makes_another_base(tmp_path, capsys):
    model = make_text_model()
    params = jax.tree.map(lambda x: x * 1e-6, model.params)  # float16 loses digits
    model = dataclasses.replace(model, params=params, fingerprint=params_fingerprint(model.config, params))
    save_model(model, tmp_path / "base", "orbax")
    for dtype, same in (("float32", True), ("float16", False)):
        export.main(["--model", str(tmp_path / "base"), "--dtype", dtype, "--output", str(tmp_path / dtype)])
        said, written = capsys.readouterr().out, load_model(str(tmp_path / dtype)).fingerprint
        assert f"fingerprint {written}" in said
        assert (written == model.fingerprint) == same == ("do not fit this one" not in said)
