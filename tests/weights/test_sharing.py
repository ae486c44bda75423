"""Bases that share weights with another one, loaded in few bits."""

import dataclasses

import gguf
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from jaxspec.weights import load
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.load import load_model
from jaxspec.weights.params import parameter_count
from jaxspec.weights.sharing import Shared, write_sharing
from tests.helpers.model import TOKENS, assert_same_params, random_params, tiny_config, write_gguf

CONFIG = tiny_config(vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96)
KINDS = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A draft model of one layer with the embeddings of a GGUF file in blocks of 4 bits."""
    folder = tmp_path_factory.mktemp("shares")
    write_gguf(folder / "base.gguf", CONFIG, random_params(CONFIG), quantization=KINDS.Q4_1)
    other = load_model(str(folder / "base.gguf"))
    own = flatten_dict({name: other.params[name] for name in ("layers_0", "norm")}, sep="/")
    safetensors.numpy.save_file({path: np.asarray(x) for path, x in own.items()}, folder / "own.safetensors")
    names = sorted(other.params.keys() - {"layers_0", "layers_1", "norm"})
    shared = Shared(str(folder / "base.gguf"), other.fingerprint, names, "own.safetensors", "0" * 16)
    write_sharing(folder, dataclasses.replace(CONFIG, num_layers=1), shared)
    return folder


def test_shared_weights_keep_the_groups_of_their_file(folder):
    """They are the other base's in that form, bit for bit; its own weights are quantized from floats."""
    model = load_model(str(folder), weights="int4")
    _, theirs, _ = GGUFFile(folder / "base.gguf").load("float32", form="int4")
    assert_same_params(model.params["lm_head"], theirs["lm_head"])
    assert model.params["lm_head"].minima is not None and model.weights == "int4"
    assert model.fingerprint == "0" * 16
    floats = load_model(str(folder))
    assert parameter_count(model.params) == parameter_count(floats.params) and floats.weights == ""


def test_the_other_base_is_never_read_as_floats(folder, monkeypatch):
    forms = []
    read = GGUFFile.load

    def watched(self, dtype, mesh=None, form=""):
        forms.append(form)
        return read(self, dtype, mesh, form)

    monkeypatch.setattr(load.GGUFFile, "load", watched)
    load_model(str(folder), weights="int8")
    assert forms == ["int8"]
