"""Whose a folder is: a new one, or one that holds the very run that wants to resume there."""

import contextlib
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError
from jaxspec.files import exclusive
from jaxspec.methods import Amphista
from jaxspec.training.folder import claim, identify
from jaxspec.training.run_config import check_same_run, describe
from jaxspec.training.settings import TextSource
from tests.helpers.training import with_train


@pytest.fixture
def begun(config, model, tmp_path):
    """A folder with no more than the beginning of a run."""
    with claim(tmp_path / "run", identify(config, model), resume=False):
        pass
    return tmp_path / "run"


def refused(folder, identity, message, resume=True):
    with pytest.raises(UserError, match=message), claim(folder, identity, resume):
        pass


def test_a_folder_has_one_run_and_one_process_at_a_time(config, model, begun):
    identity = identify(config, model)
    refused(begun, identity, "already holds a run; continue it with --resume", resume=False)
    with exclusive(begun):
        refused(begun, identity, "another process is writing there")
    with pytest.raises(KeyboardInterrupt), claim(begun, identity, resume=True):
        raise KeyboardInterrupt
    with claim(begun, identity, resume=True):
        refused(begun, identity, "another process is writing there")


@pytest.mark.parametrize("left", ["adapter.json", "checkpoints", "log.jsonl"])
def test_a_folder_with_parts_of_another_run_is_refused(tmp_path, left):
    (tmp_path / "run" / left).mkdir(parents=True)
    refused(tmp_path / "run", {}, r"holds parts of a run without its run\.json")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    refused(tmp_path / "file" / "run", {}, "cannot be written", resume=False)


def test_a_process_that_is_late_does_not_take_the_first_ones_file_for_another_run(tmp_path, monkeypatch):
    """The first process writes run.json as soon as all have said that there is none."""

    def late(content, what):
        (tmp_path / "run.json").write_text("{}")

    monkeypatch.setattr("jaxspec.training.folder.check_alike", late)
    with claim(tmp_path, {}, resume=False):
        pass


def test_what_the_weights_depend_on_must_match(config, model, begun):
    other = identify(with_train(config, learning_rate=1e-3), model)
    refused(begun, other, r"other settings.*train\.learning-rate 0.03, not 0\.001")
    refused(begun, identify(dataclasses.replace(config, method=Amphista()), model), "other settings.*method.name")
    many = with_train(config, learning_rate=1e-3, warmup=1, clip=2.0, seed=7, batch_size=2, ema=0.5)
    refused(begun, identify(many, model), r"(; train[^;]*){3}; and 1 more\); resume it with those")
    half = dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    refused(begun, identify(config, half), "a base in float32, not bfloat16; resume it with --dtype float32")


def test_the_content_of_the_prompts_must_match(config, model, begun, tmp_path):
    """Not the name of their folder, which no run.json has."""
    for content, same in (("", True), ('{"prompt": "one more"}\n', False)):
        moved = tmp_path / "elsewhere" / "prompts.jsonl"
        moved.parent.mkdir(exist_ok=True)
        moved.write_text(Path(config.data.prompts).read_text() + content)
        data = dataclasses.replace(config.data, prompts=str(moved), cache="elsewhere")
        assert (identify(dataclasses.replace(config, data=data), model) == identify(config, model)) == same
    assert str(tmp_path.parent) not in (begun / "run.json").read_text()


def test_the_sources_of_a_mixture_must_match(config, model, tmp_path):
    """And a mixture that gave way to one source is not written down."""
    mixture = (TextSource(config.data.prompts, weight=2.0), TextSource(""))
    given = dataclasses.replace(config, data=dataclasses.replace(config.data, mixture=mixture))
    assert identify(given, model) == identify(config, model)
    mixed = dataclasses.replace(config, data=dataclasses.replace(given.data, prompts=""))
    identity = identify(mixed, model)
    assert [source["prompts"] for source in identity["data"]["mixture"]] == ["prompts.jsonl", ""]
    with claim(tmp_path / "run", identity, resume=False):
        pass
    with claim(tmp_path / "run", identity, resume=True):
        pass
    other = dataclasses.replace(mixed, data=dataclasses.replace(mixed.data, mixture=mixture[::-1]))
    refused(tmp_path / "run", identify(other, model), r"other settings.*data\.mixture")


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("train", {"eval_every": 2, "save_every": 3, "remat": True, "keep": 5, "together": 4, "lengths": 1}),
        ("data", {"batch_size": 2}),
    ],
)
def test_settings_that_change_no_weights_do_not_stand_in_the_way(config, model, begun, part, changes):
    config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **changes)})
    config = dataclasses.replace(config, tree="chain:1", draft_vocabulary=50)
    with claim(begun, identify(config, model), resume=True):
        assert json.loads((begun / "run.json").read_text())["tree"] == "chain:1"


@pytest.mark.parametrize(
    ("microbatch", "mesh", "same"),
    [(1, MeshConfig(fsdp=4), True), (2, MeshConfig(data=2, tensor=2), True), (2, MeshConfig(fsdp=4), False),
     (4, MeshConfig(fsdp=2), False), (0, MeshConfig(fsdp=2), False)],
)  # fmt: skip
def test_on_another_mesh_a_run_resumes_in_passes_of_the_same_size(config, tmp_path, microbatch, mesh, same):
    """Of four sequences, where gradients are means of a pass's targets."""

    def over(mesh, microbatch):
        changed = with_train(config, batch_size=8, microbatch=microbatch)
        return describe(dataclasses.replace(changed, mesh=mesh)) | {"dtype": "float32"}

    with contextlib.nullcontext() if same else pytest.raises(UserError, match=r"other settings.*sequences of a pass"):
        check_same_run(over(MeshConfig(fsdp=2), 2), over(mesh, microbatch), tmp_path)
