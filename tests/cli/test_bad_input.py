"""Bad input at the entry points: one clear line, exit code 2, nothing on stdout."""

import shutil
import sys
from pathlib import Path

import jax
import pytest

from jaxspec.cli import decode, train, tune
from jaxspec.cli.program import run_main
from jaxspec.training.run_config import load_papers
from jaxspec.weights.hf import save_directory
from tests.helpers.cli import arguments, named
from tests.helpers.tiny import make_text_model


@pytest.fixture
def refuses(capsys, monkeypatch):
    """Runs a program that must end with such an error; the error."""

    def run(main, args, message, lines=1):
        monkeypatch.setattr(sys, "argv", ["program", *args])
        with pytest.raises(SystemExit) as exit:
            run_main(main)
        out, err = capsys.readouterr()
        assert exit.value.code == 2 and out == ""
        assert message in err and err.startswith("error: ") and err.count("\n") == lines
        return err

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--method", "pdd"], "unknown method 'pdd' (did you mean 'ppd'?)"),
        (["--prompt", "x", "--max-new-token", "3"], "'--max-new-token' (did you mean '--max-new-tokens'?)"),
        (["--prompt", ""], "give a prompt"),
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt", "x", "--prompts", "y"], "not both"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max-new-tokens must be at least 1"),
        (["--prompt", "x", "--max-new-tokens", "-3"], "max-new-tokens must be at least 1"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--temperature", "1e-40"], "temperature must be 0 (greedy) or a number from 1e-06 on"),
        (["--prompt", "so \ud83d"], "'so \\ud83d': not valid Unicode"),
        (["--prompt", "x", "--tree", "efficient:40000"], "more than 4096"),
        (["--prompt", "x", "--temperature", "warm"], "--temperature: could not convert string to float: 'warm'"),
        (["--prompt", "x", "--accept", "all"], "invalid choice 'all' for argument '--accept'"),
        (["--prompt", "x", "--top-p", "0"], "top-p"),
        (["--prompt", "x" * 300], "exceeds the base's context of 256; shorten it"),
        (["--prompt", "x", "--max-length", "22"], "exceeds max-length, 22; "),
        (["--prompt", "x", "--dtype", "int4"], "dtype 'int4' is unknown"),
        (["--prompt", "x", "--weights", "q4"], "weights 'q4' are unknown; use one of int8, int4, int4-64"),
        (["--prompt", "x", "--model", "/no/such/model"], "no such file or directory"),
        (["--prompt", "x", "--adapter", "/no/such/adapter"], "no adapter there"),
        (["--prompt", "x", "--batch-size", "0"], "batch-size"),
        (["--prompt", "x", "--tree", "sparce:4"], "did you mean 'sparse'?"),
        (["--prompt", "x", "--tree", "bets"], "in decoding also auto, own and best:ROWS"),
        (["--prompt", "x", "--tree", "chain:4"], "chain:4' is too deep"),
        (["--prompt", "x", "--stream", "--json"], "--stream"),
        (["--prompt", "x", "--accept", "typical", "--epsilon", "-1"], "must be positive"),
        (["--prompt", "x", "--model", "smollm2-135"], "did you mean 'smollm2-135m'?"),
        (["--prompt", "x", "--tree", "auto", "--draft-vocabulary", "9"], "leave vocabulary=9 (--draft-vocabulary) out"),
        (["--prompt", "x", "--method", "ppd tree=a", "--tree", "b"], "tree is given twice, as 'a' and as 'b'"),
        (["--prompt", "x", "--method", "ppd adapter=y", "--adapter", "z"], "adapter is given twice, as 'y' and as 'z'"),
        (["--prompt", "x", "--draft-model", "y"], "a draft model is for the method draft_model"),
        (["--prompt", "x", "--draft-adapter", "y"], "a draft adapter is for the method draft_model"),
        (["--prompt", "x", "--config", "bita_7b"], "--config and --topology go with --dry-run"),
        (["--dry-run", "--prompt", "x"], "--dry-run decodes nothing: it does not go with --"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(files, refuses, options, message):
    refuses(decode.main, arguments(files, *options), message)


def test_a_dry_run_reads_no_adapter(refuses):
    refuses(decode.main, ["--dry-run", "--method", "eagle adapter=x"], "a dry run reads no adapter or draft model")


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def write_another_base(folder):
    other = make_text_model(1, num_layers=1)
    save_directory(folder / "model", other.config, other.params)


def of_no_method(folder):
    file = folder / "adapter" / "adapter.json"
    file.write_text(file.read_text().replace('"ppd"', '"pdp"'))


BROKEN = {  # what is done to a copy of the files, what is asked then, what the error says
    "prompts": (
        lambda at: (at / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n'), ["--prompts", "prompts.jsonl"],
        "prompts.jsonl:2: ",
    ),
    "another method": (lambda at: None, ["--prompt", "x", "--method", "bita"], "belongs to method 'ppd', not 'bita'"),
    "no method": (of_no_method, ["--prompt", "x"], "adapter/adapter.json: unknown method 'pdp'"),
    "another base": (write_another_base, ["--prompt", "x"], "trained for another base"),
    "adapter": (lambda at: cut(at / "adapter" / "adapter.safetensors"), ["--prompt", "x"], "not a complete"),
    "settings": (lambda at: cut(at / "adapter" / "adapter.json"), ["--prompt", "x"], "adapter.json: "),
    "weights": (lambda at: cut(at / "model" / "model.safetensors"), ["--prompt", "x"], "model.safetensors: "),
    "gguf": (
        lambda at: (at / "m.gguf").write_bytes(b"GGUF" + bytes(60)), ["--prompt", "x", "--model", "m.gguf"],
        "m.gguf: not a complete GGUF file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_files_are_one_line_and_exit_code_2(files, tmp_path, refuses, monkeypatch, broken):
    break_it, options, message = BROKEN[broken]
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "files"))
    break_it(Path())
    refuses(decode.main, arguments(Path(), *options), message)


@pytest.mark.parametrize(
    ("path", "message"), [("/dev/full", "No space left on device"), (f"/tmp/{'x' * 300}", "xxx: File name too long")]
)
def test_files_that_cannot_be_used_are_one_line(refuses, path, message):
    refuses(lambda args: Path(path).write_text("anything"), [], message)


def test_too_little_memory_is_one_line(refuses):
    def too_much(args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nA long table")

    remedies = "error: out of memory; smaller batches (--train.microbatch 1 in training), --weights int8,"
    assert "allocating 99 bytes.)" in refuses(too_much, [], remedies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-rows", "2"], "max-rows must be at least 3"),
        (
            ["--quick", "--temperature", "0.5"],
            "--quick replays and races nothing: it does not go with --temperature",
        ),
        (["--quick", "--method", "ppd tree=best:4"], "the tree is chosen here, leave it out"),
        (["--quick", "--cache-length", "8"], "cache-length must be at least 64"),
        (["--method", "ppd vocabulary=20"], "the vocabulary is chosen here, leave it out"),
        (["--max-new-tokens", "1"], "max-new-tokens must be at least 2"),
        (["--num-prompts", "9000", "--batch-size", "999"], "need at least 1000 prompts"),
        (["--cache-length", "100000"], "at most the base's"),
        (["--also", "cartesian:4000"], "outside the vocabulary"),
        (["--also", "sparse:3", "--output", "README.md"], "README.md: cannot be written"),
        (["--batch-size", "0"], "batch-size must be at least 1"),
        (["--cache-length", "8"], "cache-length"),
        (["--temperature", "-1"], "temperature"),
        (["--prompts", "/no/such/file"], "/no/such/file: no such file"),
        (["--method", "pdp"], "did you mean 'ppd'?"),
        (["--method", "autoregressive"], "takes no adapter"),
        (["--method", "self_speculative"], "this adapter belongs to method 'ppd'"),
        (["--method", "self_speculative", "--adapter", ""], "give a new directory with --output, got ''"),
        (
            ["--method", "self_speculative", "--adapter", "", "--output", "x", "--trials", "0"],
            "trials must be at least",
        ),
        (["--also", "spars:3"], "did you mean 'sparse'?"),
    ],
)
def test_tune_refuses_bad_input_on_one_line(files, refuses, options, message):
    small = ["--prompts", str(files / "prompts.jsonl"), "--num-prompts", "2", "--max-new-tokens", "8"]
    small = [] if "--quick" in options else [*small, "--cache-length", "64", "--accuracy-prompts", "1"]
    refuses(tune.main, [*named(files), *small, *options], message)


def test_a_file_of_costs_that_cannot_be_written_is_told_before_anything_is_loaded(files, refuses, monkeypatch):
    monkeypatch.setattr("jaxspec.drafters.costs.FILE", Path("/dev/null/costs.json"))
    monkeypatch.setattr(tune.TuneOptions, "load_model", None)
    refuses(tune.main, [*named(files), "--quick"], "/dev/null: cannot be written (/dev/null is a file)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "ppd_smollm2", "--train.step", "7"], "did you mean '--train.steps'?"),
        (["--config", "ppd_smollm2", "--method.ensemble", "0"], "ensemble"),
        (["--config", "ppd_smollm2", "--topology", "v5e:2x2x1"], "--topology and --json go with --dry-run"),
        (["--config", "bita_7b", "--data.mixture.0.weight", "-1"], "weights must not be negative, nor all 0, got -1.0"),
        (["--config", "bita_7b", "--data.templates", "lama2"], "unknown template 'lama2' (did you mean 'llama2'?)"),
        (["--config", "ppd_smollm2", "--output", "gs://bucket/run"], "gs://bucket/run: not a folder; mount the bucket"),
        (["--config", "ppd_smollm2", "--model", "/no/such/model"], "no such file or directory"),
        (["--config", "ppd_smollm2", "--weights", "int2"], "weights 'int2' are unknown"),
        (
            ["--config", "ppd_smollm2", "--dtype", "exact"],
            "'exact' is for decoding; use one of float32, bfloat16, float16",
        ),
    ],
)
def test_train_refuses_bad_input_on_one_line(refuses, options, message):
    refuses(train.main, options, message)


@pytest.mark.parametrize(
    ("options", "message"), [(["--config", "ppd_smolm2"], "did you mean 'ppd_smollm2'?"), ([], "--config NAME")]
)
def test_train_names_the_configs_below_a_line_per_paper(refuses, options, message):
    error = refuses(train.main, options, message, lines=1 + len(load_papers()))
    assert "\n  ppd: ppd_vicuna_7b, " in error
