"""Gate and up side by side, as GPUs hold them: the same base, whatever holds it and wherever it goes."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.methods.space import SPACE
from jaxspec.model.base import Base
from jaxspec.weights import parts
from jaxspec.weights.checkpoint import load_checkpoint, save_checkpoint
from jaxspec.weights.hf import load_directory, save_directory
from jaxspec.weights.params import params_fingerprint
from jaxspec.weights.parts import with_joined_gates, with_split_gates
from tests.helpers.model import assert_same_params, plain, random_tokens


@pytest.fixture
def paired(tiny):
    """The parameters of the tiny model as GPUs hold them."""
    return with_joined_gates(tiny.params)


def test_pairs_are_two_kernels_side_by_side(tiny, paired):
    mlp = paired["layers_0"]["mlp"]
    assert set(mlp) == {"gate_up", "down"} and mlp["gate_up"]["kernel"].shape == (2, 32, 48)
    assert_same_params(with_split_gates(paired), tiny.params)


def test_a_paired_base_is_the_same_base(tiny, paired):
    assert params_fingerprint(tiny.config, paired) == tiny.fingerprint
    tokens = random_tokens((2, 7), vocab_size=tiny.config.vocab_size)
    own = plain(Base(paired, tiny.decoder), tokens)
    np.testing.assert_allclose(own, plain(Base(tiny.params, tiny.decoder), tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save, load", [(save_directory, load_directory), (save_checkpoint, load_checkpoint)])
def test_files_hold_parts_and_devices_choose(tiny, paired, tmp_path, monkeypatch, save, load):
    save(tmp_path / "base", tiny.config, paired)
    _, params, fingerprint = load(tmp_path / "base", tiny.dtype)
    assert fingerprint == tiny.fingerprint
    assert_same_params(params, tiny.params)
    monkeypatch.setattr(parts, "holds_pairs", lambda platform: True)
    _, params, fingerprint = load(tmp_path / "base", tiny.dtype)
    assert fingerprint == tiny.fingerprint
    assert_same_params(params, paired)


@pytest.mark.parametrize("targets", [("qkv", "o", "gate", "up", "down"), ("up", "down")], ids=["all", "up"])
def test_corrections_of_low_rank_keep_their_names(tiny, paired, targets):
    method = dataclasses.replace(SPACE(rank=4), targets=targets)
    bases = [Base(params, tiny.decoder) for params in (tiny.params, paired)]
    trainables = [method.init(jax.random.key(0), base) for base in bases]
    assert_same_params(*trainables)
    trained = jax.tree.map(lambda x: x + 0.05, trainables[0])
    tokens = random_tokens((1, 9), vocab_size=tiny.config.vocab_size)
    one, two = (plain(method.tuned_base(trained, base), tokens) for base in bases)
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
    kept = [method.finalize(trained, base).base.params for base in bases]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), kept[0], with_split_gates(kept[1]))
