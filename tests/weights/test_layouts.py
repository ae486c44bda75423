"""Kernels come in the layouts that are remembered, and nothing but speed depends on them."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec.drafters import load_drafter
from jaxspec.generation.generate import generate
from jaxspec.weights import layouts
from jaxspec.weights.layouts import in_blocks, read_layouts, write_layouts
from tests.helpers.tiny import make_prompts, make_tiny

QKV, OUT, WIDE, DOWN = (32, 64), (32, 32), (32, 48), (48, 32)  # of a tiny model, with a vocabulary of 16


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "FILE", tmp_path / "cache" / "layouts.json")
    monkeypatch.setattr(layouts, "BLOCK", 8)
    return layouts.FILE


def test_without_any_there_are_blocks_for_few_rows():
    model = make_tiny()
    assert [model.block_for(rows, QKV) for rows in (1, 48, 49)] == [8, 8, 0]
    assert model.block_for(1, (32, 60)) == 0  # no blocks divide it
    assert [model.block_for(rows, (32, 49152)) for rows in (1, 16, 17)] == [8, 8, 0]
    assert model.base_for(49) is model.base and model.base_for(2) is model.base_for(48) is not model.base


def test_what_is_remembered_is_used_by_kernel_and_rows():
    write_layouts("float32", {QKV: {1: 16, 4: 0}, DOWN: {4: 4}})
    write_layouts("float32", {OUT: {1: 0}})
    model = make_tiny()
    assert [model.block_for(rows, QKV) for rows in (1, 2, 4, 5)] == [16, 0, 0, 8]
    assert [model.block_for(rows, DOWN) for rows in (1, 4, 5)] == [4, 4, 8]
    assert [model.block_for(rows, OUT) for rows in (1, 2)] == [0, 8] and model.block_for(1, WIDE) == 8
    one, three, plain = (base.params["layers_1"] for base in (model.base_for(1), model.base_for(3), model.base))
    assert one["attention"]["qkv"]["kernel"].shape == (4, 32, 16)
    assert three["attention"]["qkv"]["kernel"] is plain["attention"]["qkv"]["kernel"]
    assert one["attention"]["o"]["kernel"] is plain["attention"]["o"]["kernel"]
    assert one["mlp"]["down"]["kernel"] is three["mlp"]["down"]["kernel"]  # held once
    assert one["mlp"]["down"]["kernel"].shape == (8, 48, 4) and one["mlp"]["up"]["kernel"].shape == (6, 32, 8)


def test_what_another_machine_jax_or_precision_was_measured_with_does_not_count(monkeypatch):
    here, found = layouts.this_machine(), {QKV: {1: 16}}
    write_layouts("float32", found)
    assert read_layouts("float32") == found and read_layouts("bfloat16") == {}
    monkeypatch.setattr(layouts, "this_machine", lambda: here | {"cores": 1000})
    assert read_layouts("float32") == {}
    write_layouts("float32", {OUT: {1: 0}})
    monkeypatch.setattr(layouts, "this_machine", lambda: here)
    assert read_layouts("float32") == found  # the other's came beside it
    monkeypatch.setattr(jax, "__version__", "0.0")
    assert read_layouts("float32") == {}


@pytest.mark.slow
def test_tokens_do_not_depend_on_layouts():
    def texts():
        drafter = load_drafter("suffix", make_tiny(), tree="chain:3")
        return [answer.tokens for answer in generate(drafter, make_prompts(2), 16)]

    before = texts()
    write_layouts("float32", {QKV: {1: 16, 4: 0, 16: 32}, WIDE: {8: 0}, DOWN: {4: 0, 16: 16}, (32, 16): {64: 4}})
    assert texts() == before


@pytest.mark.parametrize(
    "damage", ["{", "[]", '"32x64"', '{"32x64": 3}', '{"32x64": {"1": "x"}}', '{"32x64": {"1": 7}}', '{"a": {"1": 8}}']
)
def test_a_damaged_file_is_passed_over_and_written_anew(file, damage):
    write_layouts("float32", {QKV: {1: 16}})
    (here,) = layouts.read_json(file)
    file.write_text(damage if damage in "{[]" else f'{{"{here}": {damage}}}')
    assert make_tiny().block_for(1, QKV) == 8
    write_layouts("float32", {OUT: {1: 0}})
    assert read_layouts("float32") == {OUT: {1: 0}} and not list(file.parent.glob(".*"))


def test_only_kernels_are_put_in_blocks_and_each_layout_is_made_once():
    tree = {
        "a": {"kernel": jnp.ones((4, 12)), "bias": jnp.zeros(12)},
        "lm_head": jnp.ones((4, 10)),
        "embedding": jnp.ones((4, 12)),
    }
    made = {}
    found = in_blocks(tree, {(4, 12): 4, (4, 10): 0}.get, made=made)
    assert found["a"]["kernel"].shape == (3, 4, 4) and found["a"]["bias"] is tree["a"]["bias"]
    assert found["lm_head"] is tree["lm_head"] and found["embedding"] is tree["embedding"]
    again = in_blocks(tree, {(4, 12): 4, (4, 10): 5}.get, made=made)
    assert again["a"]["kernel"] is found["a"]["kernel"] and again["lm_head"].shape == (2, 4, 5) and len(made) == 2
    assert in_blocks(tree, lambda _: 0) is tree
