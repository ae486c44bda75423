"""DFlash, DFlash 2 and DSpark drafters of others: what they compute and round trips."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter, load_adapter, save_adapter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.drafters.published import method_to_write, only_interpretation, write_published
from jaxspec.drafters.source import learning
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.model.rows import read_layers
from jaxspec.weights.shards import map_safetensors
from tests.helpers.methods import batch_of, predict, sequence, trained
from tests.helpers.published import DRAFTED, TOKENS, save
from tests.helpers.published_dflash import (
    EXPORTABLE,
    MASK,
    authors,
    authors2,
    dspark,
    fused,
    head_of,
    make_dflash,
    packaged,
    packaged2,
    published,
    reference,
    taps_of,
)
from tests.helpers.tiny import TINY, make_prompts

slow = pytest.mark.slow
ANCHORS = [1, 2, 7, 15]


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        pytest.param(authors(), lambda x: x, id="authors"),
        pytest.param(packaged({"attention_bias": True}), fused, id="speculators"),
        pytest.param(packaged2(), lambda x: x, id="dflash2"),
        pytest.param(authors2(conv_kernel_size=3), lambda x: x, id="dflash2_authors", marks=slow),
        pytest.param(packaged2(sample_from_anchor=True), lambda x: x, id="dflash2_anchor", marks=slow),
        pytest.param(dspark(), lambda x: x, id="dspark"),
        pytest.param(dspark(confidence_head_with_markov=False), lambda x: x, id="dspark_state", marks=slow),
        pytest.param(dspark(sample_from_anchor=False), lambda x: x, id="dspark_behind_anchor", marks=slow),
        pytest.param(packaged(sample_from_anchor=True), lambda x: x, id="anchor", marks=slow),
        pytest.param(packaged({"model_type": "llama"}, draft_vocab_size=TOKENS), lambda x: x, id="llama", marks=slow),
    ],
)
def test_it_computes_what_is_published(tiny, tmp_path, config, tensors):
    """Blocks against numpy, in double precision: shapes, base of rotations and epsilon are the drafter's own."""
    weights, tokens = make_dflash(config, head_of(tiny)), sequence(tiny, 24)
    adapter = only_interpretation(save(tmp_path, config, tensors(weights)), tiny)
    _, _, states = jax.jit(read_layers, static_argnums=2)(tiny.base, tokens, tuple(sorted(taps_of(config))))
    states = [np.asarray(states[layer], np.float64)[0] for layer in taps_of(config)]
    embedding = np.asarray(tiny.params["embedding"], np.float64)
    ids = DRAFTED if adapter.method.vocabulary else np.arange(TOKENS)
    expected, odds = reference(config, weights, states, embedding, head_of(tiny)[ids], np.asarray(tokens)[0], ANCHORS)
    base = learning(tiny.base, adapter.method, adapter.frequent_tokens)
    points = [anchor - 1 for anchor in ANCHORS]  # a block's owner is the token before its anchor
    method, batch = adapter.method, batch_of(tokens, [points])
    ours = predict(method, adapter.trainable, base, batch)[0]
    predicting = expected if method.sample_from_anchor else expected[:, 1:]
    np.testing.assert_allclose(ours[..., ids], predicting, atol=1e-4)
    if method.confidence_head != "none":
        blocks = jax.jit(method.text_blocks)(adapter.trainable, base, batch)
        found = method.log_odds(adapter.trainable, base, *blocks[:2])[0]
        np.testing.assert_allclose(found, odds if method.sample_from_anchor else odds[:, 1:], atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("dflash", authors()),
        ("speculators", packaged({"attention_bias": True}, aux_hidden_state_layer_ids=[0, 2])),
        ("speculators", dspark(aux_hidden_state_layer_ids=[0, 2])),
        ("speculators", dspark(aux_hidden_state_layer_ids=[0, 2], enable_confidence_head=False)),
        ("speculators", dspark(aux_hidden_state_layer_ids=[0, 2], markov_rank=0, confidence_head_with_markov=False)),
        ("dflash", authors2()),
        ("speculators", packaged2(aux_hidden_state_layer_ids=[0, 2])),
    ],
)
def test_a_round_trip_is_bit_for_bit(tiny, tmp_path, form, config, dtype):
    """Through an adapter on disk."""
    tensors = make_dflash(config, head_of(tiny), dtype)
    adapter = only_interpretation(save(tmp_path / "in", config, tensors), tiny)
    save_adapter(tmp_path / "adapter", adapter, adapter.info["published"]["dtype"])
    written = write_published(tmp_path / "out", load_adapter(tmp_path / "adapter", tiny.config), tiny, form)
    assert written == np.dtype(dtype).name
    found = map_safetensors(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].tobytes() == tensor.tobytes(), name
    assert only_interpretation(tmp_path / "out", tiny).method == adapter.method


@pytest.mark.parametrize(
    ("changes", "form", "keys"),
    [
        ({}, "dflash", {"mask_token_id": MASK, "target_layer_ids": [0, 1]}),
        (
            {"convolution": 3, "convolution_group": 8, "selector_rank": 4, "selector_width": 5},
            "dflash",
            {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
        ),
        (
            {"markov_rank": 4, "markov_tables": True, "confidence_head": "markov", "sample_from_anchor": True},
            "speculators",
            {"markov_rank": 4, "enable_confidence_head": True, "confidence_head_with_markov": True},
        ),
    ],
    ids=["dflash", "dflash2", "dspark"],
)
def test_a_trained_adapter_is_written_and_read_again(tiny, tmp_path, changes, form, keys):
    """Its layers' shapes are its own then."""
    method = dataclasses.replace(EXPORTABLE, **changes)
    adapter = Adapter(method, trained(method, tiny.base), tiny.fingerprint, {})
    write_published(tmp_path / "out", adapter, tiny, form, "float32")
    again = only_interpretation(tmp_path / "out", tiny)
    jax.tree.map(np.testing.assert_array_equal, again.trainable, adapter.trainable)
    shapes = dataclasses.replace(TINY, head_norms=True, num_layers=2)
    assert again.method == dataclasses.replace(method, shapes=again.method.shapes, head_norms=again.method.head_norms)
    assert again.method.layer_shapes(tiny.config) == shapes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config = config.get("dflash_config", config)
    assert {key: config[key] for key in keys} == keys


@slow
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.5, top_k=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "config",
    [packaged(), pytest.param(packaged2(), marks=pytest.mark.exhaustive), dspark()],
    ids=["dflash", "dflash2", "dspark"],
)
def test_a_folder_decodes_as_an_adapter(tiny, tmp_path, config, sampling):
    folder, prompts = published(tmp_path, tiny, config), make_prompts(4)
    drafter = load_drafter("dflash", tiny, folder, tree="own")
    ours = generate(drafter, prompts, 20, sampling=sampling, batch_size=4)
    assert sum(sum(answer.accepted) for answer in ours)
    assert [a.tokens for a in ours] == [
        a.tokens for a in generate(autoregressive(tiny), prompts, 20, sampling=sampling)
    ]
    if "d2t" in map_safetensors(folder / "model.safetensors"):
        with pytest.raises(UserError, match="draft-vocabulary 4: this drafter, which was published, drafts 12 tokens"):
            load_drafter("dflash", tiny, folder, tree="own", draft_vocabulary=4)


def test_copies_of_the_bases_weights_are_not_kept(tiny, tmp_path):
    """Embeddings and the projection are the base's in this form; those of another base are refused."""
    config = packaged(draft_vocab_size=TOKENS)
    tensors = make_dflash(config, head_of(tiny))
    own = {"embed_tokens.weight": np.asarray(tiny.params["embedding"]), "lm_head.weight": head_of(tiny)}
    tensors |= {name: x.astype(np.float16) for name, x in own.items()}
    adapter = only_interpretation(save(tmp_path / "in", config, tensors), tiny)
    assert adapter.trainable.keys() == {"fuse", "fuse_norm", "layer1", "layer2", "norm"}
    for name in own:
        with pytest.raises(
            UserError, match=f"tensor '{name}' is not that of 'tiny': made for another base, or trained"
        ):
            only_interpretation(save(tmp_path / "other", config, tensors | {name: tensors[name][::-1].copy()}), tiny)


def test_dflash2_of_the_package_drafts_all_tokens(tiny, tmp_path):
    """Whatever an adapter drafts by default, unless it has learned few tokens alone."""
    method = dataclasses.replace(EXPORTABLE, convolution=2, selector_rank=4)
    adapter = Adapter(method, trained(method, tiny.base), tiny.fingerprint, {"draft_vocabulary": 4}, np.arange(4))
    write_published(tmp_path / "out", adapter, tiny, "speculators", "float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == TOKENS
    again = only_interpretation(tmp_path / "out", tiny)
    assert again.frequent_tokens is None
    jax.tree.map(np.testing.assert_array_equal, again.trainable, adapter.trainable)
    few = dataclasses.replace(adapter, method=dataclasses.replace(method, vocabulary=4))
    with pytest.raises(UserError, match="DFlash 2 in the form speculators has no vocabulary"):
        write_published(tmp_path / "few", few, tiny, "speculators")


def test_the_method_of_a_form_that_several_have(tiny, tmp_path):
    """An adapter tells it; without one it must be said."""
    save_adapter(tmp_path, Adapter(EXPORTABLE, {}, tiny.fingerprint, {}))
    assert method_to_write("speculators", str(tmp_path)) == method_to_write("dflash", "") == "dflash"
    for wrong, message in {
        ("speculators", ""): "the form speculators is for method eagle or dflash: say which with --method",
        ("speculators", "", "medusa"): "the form speculators is for method eagle or dflash, not medusa",
    }.items():
        with pytest.raises(UserError, match=message):
            method_to_write(*wrong)
