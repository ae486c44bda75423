"""Drafters of other software: imported, measured, decoded with and written again."""

import json
import shutil

import pytest
import safetensors.numpy

from jaxspec.cli import decode, evaluate, export, import_drafter
from jaxspec.cli.main import run_command
from jaxspec.drafters.adapter import find_shipped, read_head
from jaxspec.errors import UserError
from jaxspec.weights.hf import save_directory
from tests.helpers.published import eagle3, make_tensors, save, speculators
from tests.helpers.tiny import make_text_model

UNCLEAR = eagle3(vocab_size=257, norm_output=True, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a base with four layers."""
    folder, model = tmp_path_factory.mktemp("published") / "base", make_text_model(num_layers=4)
    save_directory(folder, model.config, model.params, model.eos)
    model.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_drafter_is_imported_measured_and_written_again(base, tmp_path, capsys):
    """A config.json that can mean four things: each is tried, the best one kept, and that is said."""
    tensors, output = make_tensors(UNCLEAR), tmp_path / "adapter"
    drafter = str(save(tmp_path / "drafter", UNCLEAR, tensors))
    few = ["--answers", "2", "--max-new-tokens", "12"]
    import_drafter.main([drafter, "--model", base, "--output", str(output), "--depth", "2", *few])
    said, head = capsys.readouterr().out, read_head(output)
    assert said.count(" tokens per step\n") == 4 and f"kept: {head['published']['meaning']}" in said
    assert "distance 2: top-1" in said and "distance 3" not in said and head["draft_vocabulary"] == 12

    named = ["--method", "eagle", "--model", base, "--adapter", str(output)]
    evaluate.main([*named, *few, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == head["accuracy"] and found["tokens_per_step"] == head["tokens_per_step"]
    evaluate.main([*named, *few, "--tree", "chain:1"])
    assert "tokens per step: " in capsys.readouterr().out

    decode.main([*named, "--prompt", "one", "--max-new-tokens", "12", "--compare", "--json"])
    assert json.loads(capsys.readouterr().out)["identical_to_autoregressive"]

    export.main(["--model", base, "--adapter", str(output), "--form", "eagle3", "--output", str(tmp_path / "out")])
    assert "the adapter of eagle as eagle3, float16" in capsys.readouterr().out
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: x.tobytes() for name, x in written.items()} == {name: x.tobytes() for name, x in tensors.items()}


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.exhaustive
def test_layers_off_by_one_show_in_the_figures(tmp_path, capsys):
    """The shipped adapter, and the same told to read the layers before its own."""
    from jaxspec.weights.load import load_model

    shipped, wrong = find_shipped("eagle", load_model().fingerprint), tmp_path / "wrong"
    shutil.copytree(shipped, wrong)
    head = read_head(wrong)
    head["settings"]["reads"] = [layer - 1 for layer in head["settings"]["reads"]]
    (wrong / "adapter.json").write_text(json.dumps(head))
    found = []
    for adapter in (shipped, wrong):
        options = ["--adapter", str(adapter), "--answers", "4", "--max-new-tokens", "64", "--json"]
        evaluate.main(options)
        found.append(json.loads(capsys.readouterr().out)["tokens_per_step"])
    assert found[0] > 2 and found[1] < found[0] - 0.1


def test_import_is_a_command(base, tmp_path):
    """Though no module can have its name."""
    folder = str(save(tmp_path / "other", speculators({"hidden_size": 64}), {}))
    with pytest.raises(
        UserError, match=r"a drafter for a base of width 64 with 16 tokens; .* has width 32 and 257 tokens"
    ):
        run_command(["import", folder, "--model", base, "--output", str(tmp_path / "adapter")])


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (import_drafter.main, ["nowhere", "--output", "."], "give a new directory with --output"),
        (import_drafter.main, ["x", "--output", "new", "--answers", "0"], "answers must be at least 1, got 0"),
        (evaluate.main, ["--method", "eagle+suffix"], "evaluate measures the adapter of one method"),
        (evaluate.main, ["--max-new-tokens", "2"], "max-new-tokens must be at least 3, got 2"),
        (export.main, ["--form", "eagle4", "--output", "new"], r"unknown form 'eagle4' \(did you mean 'eagle3'\?\)"),
    ],
)
def test_bad_options(main, options, message):
    with pytest.raises(UserError, match=message):
        main(options)
