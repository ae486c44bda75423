"""Whole bases on disk: what is written is what is loaded, in either form, and damage is named."""

import dataclasses
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxspec.config import MeshConfig
from jaxspec.errors import UserError
from jaxspec.weights.load import load_model, save_model
from jaxspec.weights.params import params_fingerprint
from tests.helpers.model import assert_same_params
from tests.helpers.tiny import make_text_model, make_tiny, on_mesh

FAMILIES = {"llama": {}, "tied": {"tie_embeddings": True}, "qwen2": {"qkv_bias": True}}


@pytest.mark.parametrize("form", ["orbax", "huggingface"])
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_a_saved_model_loads_as_it_was_in_either_form(tmp_path, changes, form):
    model = make_text_model()
    config = dataclasses.replace(model.config, **changes)
    model = dataclasses.replace(make_tiny(config, model.eos), tokenizer=model.tokenizer)
    save_model(model, tmp_path / "base", form)
    loaded = load_model(str(tmp_path / "base"))
    assert_same_params(loaded.params, model.params)
    assert (loaded.config, loaded.fingerprint, loaded.eos) == (model.config, model.fingerprint, model.eos)
    assert loaded.encode("some text") == model.encode("some text")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_checkpoint_loads_in_16_bits(tmp_path, dtype):
    model = make_text_model()
    model = dataclasses.replace(model, params=jax.tree.map(lambda x: x * 1e-6, model.params))  # float16 loses digits
    model = dataclasses.replace(model, fingerprint=params_fingerprint(model.config, model.params))
    save_model(model, tmp_path / "base", "orbax")
    loaded = load_model(str(tmp_path / "base"), dtype)
    types = {str(path[-1].key): leaf.dtype for path, leaf in jax.tree.leaves_with_path(loaded.params)}
    assert types["kernel"] == types["lm_head"] == dtype and types["scale"] == "float32"
    assert loaded.fingerprint == model.fingerprint


@pytest.mark.slow
def test_what_devices_have_written_loads_where_there_are_fewer(tmp_path):
    model = make_text_model()
    save_model(on_mesh(model, MeshConfig(fsdp=2, tensor=4)), tmp_path / "base", "orbax")
    loaded = load_model(str(tmp_path / "base"))
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded.params))
    assert_same_params(loaded.params, model.params)
    code = "import jax, sys, jaxspec; print(jax.device_count(), jaxspec.load_model(sys.argv[1]).fingerprint)"
    command = [sys.executable, "-c", code, str(tmp_path / "base")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"1 {model.fingerprint}\n"


def test_a_new_base_takes_an_older_ones_place(tmp_path):
    first = make_text_model()
    second = make_text_model(seed=1)
    for model in (first, second):
        save_model(model, tmp_path / "base", "orbax")
    assert load_model(str(tmp_path / "base")).fingerprint == second.fingerprint != first.fingerprint


def test_damage_is_named(tmp_path):
    model = make_text_model()
    save_model(model, tmp_path / "base", "orbax")
    other = dataclasses.replace(model.config, hidden_size=64)
    params = jax.tree.map(np.asarray, make_tiny(other).params)
    other_model = dataclasses.replace(model, config=other, params=params, fingerprint=params_fingerprint(other, params))
    save_model(other_model, tmp_path / "other", "orbax")
    shutil.copy(tmp_path / "other" / "config.json", tmp_path / "base" / "config.json")
    with pytest.raises(UserError, match=r"base/params: not a checkpoint of these shapes"):
        load_model(str(tmp_path / "base"))
    for file in [file for file in (tmp_path / "other" / "params").rglob("*") if file.is_file()]:
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"other/params: not a checkpoint"):
        load_model(str(tmp_path / "other"))
    (tmp_path / "other" / "config.json").unlink()
    with pytest.raises(UserError, match=r"other/config\.json"):
        load_model(str(tmp_path / "other"))


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        save_model(make_text_model(), tmp_path / "file" / "base")
