"""DFlash, DFlash 2 and DSpark drafters of others: what they compute, round trips, and files that are wrong."""

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
from jaxspec.methods import DFlash
from jaxspec.model.rows import read_layers
from jaxspec.weights.shards import map_safetensors
from tests.helpers.methods import batch_of, predict, sequence, trained
from tests.helpers.published import DRAFTED, TOKENS, save
from tests.helpers.published_dflash import (
    MASK,
    authors,
    authors2,
    dspark,
    fused,
    make_dflash,
    packaged,
    packaged2,
    reference,
    taps_of,
)
from tests.helpers.tiny import TINY, make_prompts, make_tiny

slow = pytest.mark.slow
ANCHORS = [1, 2, 7, 15]
# as in the config that DFlash 2's authors have published
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}
# What is ours is off: only the layers' shapes and start are not said.
EXPORTABLE = DFlash(
    block=4,
    layers=2,
    tapped=(1, 2),
    sample_from_anchor=False,
    from_newest=False,
    even=False,
    mask_token=MASK,
    head_norms=True,
    start="random",
)


def head_of(model):
    """The base's projection [V, D]."""
    return np.ascontiguousarray(np.asarray(model.params["lm_head"], np.float32).T)


def published(folder, model, config, dtype=np.float16):
    """The folder of a random drafter."""
    return save(folder, config, make_dflash(config, head_of(model), dtype))


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
@pytest.mark.parametrize("config", [packaged(), packaged2(), dspark()], ids=["dflash", "dflash2", "dspark"])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("hidden_norm.weight"), "tensor 'hidden_norm.weight' is missing"),
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "tensor 'layers.1.self_attn.k_norm.weight' is missing"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].T.copy()}), r"'fc.weight' has shape \[64, 32\]"),
        (
            lambda t: t.update({"layers.2.mlp.up_proj.weight": t["fc.weight"]}),
            "'layers.2.mlp.up_proj.weight' is not one",
        ),
        (lambda t: t.update({"lm_head.weight": t["fc.weight"]}), r"'lm_head.weight' has shape \[32, 64\]"),
        (
            lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": np.zeros((48, 32), np.float16)}),
            "'layers.0.self_attn.[qkv]_proj.weight' is not one of this form",
        ),
    ],
)
def test_wrong_tensors_are_named(tiny, tmp_path, change, message):
    tensors = make_dflash(authors(), head_of(tiny))
    change(tensors)
    with pytest.raises(UserError, match=message):
        only_interpretation(save(tmp_path, authors(), tensors), tiny)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (authors(hidden_size=64), "for a base of width 64 with 16 tokens; 'tiny' has width 32 and 16 tokens"),
        (authors(num_target_layers=36), "a drafter for a base of 36 layers; 'tiny' has 3"),
        (authors({"mask_token_id": 16}), "mask_token_id 16 is no token of 'tiny', which has 16"),
        (authors({"mask_token_id": None}), "mask_token_id must be a whole number"),
        (authors({"target_layer_ids": [0, 3]}), r"target_layer_ids \[0, 3\] is not for a base of 3 layers"),
        (authors({"target_layer_ids": [0, 2]}), r"\[0, 2\] reads states after the base's last layer"),
        (authors({"target_layer_ids": [1, 1]}), r"target_layer_ids \[1, 1\] is not for"),
        (authors({"target_layer_ids": "all"}), "target_layer_ids must be a list of layers, got 'all'"),
        (authors({"causal_head": True}), "dflash_config.'causal_head' True is not known in this form"),
        (authors({"block_size": 8}), "block_size is 4, and 8 in dflash_config"),
        (authors(block_size=None), "block_size must be a whole number"),
        (authors(block_size=32), "block must be 2 to 16, got 32"),
        (authors(sliding_window=64), "sliding_window 64 is not supported in a drafter"),
        (authors(is_causal=True), "'is_causal' True is not known in this form"),
        (authors({"selector_rank": 6}), "dflash_config.'selector_rank' 6 is not known in this form"),
        (authors(architectures=["DFlash2DraftModel"]), "key 'conv_kernel_size' is missing"),
        (authors2(), "tensor 'layers.0.attention_conv.base_kernel' is missing"),
        (authors2(output_multiplier=0.5), "dflash_config.'output_multiplier' 0.5 is not known in this form"),
        (authors2(final_logit_softcapping=30.0), "dflash_config.'final_logit_softcapping' 30.0 is not known"),
        (authors2(input_embedding_scale=2.0), "dflash_config.'input_embedding_scale' 2.0 is not known"),
        (
            authors2(output_multiplier=0.5, final_logit_softcapping=30.0) | WINDOWS,
            "'output_multiplier' 0.5 is not known",
        ),
        (authors2() | WINDOWS, "sliding_window 64 is not supported in a drafter"),
        (authors2(conv_kernel_size=5), "dflash_config: conv_kernel_size must be a whole number from 1 to 4, got 5"),
        (authors2(conv_group_size=5), "conv_group_size 5 does not divide the width 32"),
        (packaged2(selector_top_k=0), "selector_top_k must be a whole number from 1 to 16"),
        (packaged2(selector_top_k=17), "selector_top_k must be a whole number from 1 to 16, got 17"),
        (packaged2(draft_vocab_size=4), "draft_vocab_size must be 16: DFlash 2 drafts all tokens, got 4"),
        (packaged2(markov_rank=4), "'markov_rank' 4 is not known in this form"),
        (dspark(markov_head_type="gated"), "markov_head_type must be vanilla: gated .* not supported, got 'gated'"),
        (dspark(), "tensor 'markov_head.markov_w1.weight' is missing"),
        (packaged(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids must be a list of layers, got None"),
        (packaged(aux_hidden_state_layer_ids=[0, 3]), r"\[0, 3\] reads states after the base's last layer"),
        (packaged(markov_rank=256), "'markov_rank' 256 is not known in this form"),
        (packaged(speculators_config={"algorithm": "dflash2"}), "algorithm 'dflash2' is not dflash"),
        (
            dspark(markov_rank=0, confidence_head_with_markov=True),
            "confidence_head_with_markov must be false where markov_rank is 0",
        ),
    ],
)
def test_wrong_configs_are_named(tiny, tmp_path, config, message):
    tensors = make_dflash(packaged() if "transformer_layer_config" in config else authors(), head_of(tiny))
    with pytest.raises(UserError, match=message):
        only_interpretation(save(tmp_path, config, tensors), tiny)


def test_keys_that_change_nothing_may_be_there(tiny, tmp_path):
    neutral = {"output_multiplier": 1.0, "input_embedding_scale": 1.0, "final_logit_softcapping": None}
    plain, more = (published(tmp_path / str(i), tiny, authors2(**x)) for i, x in enumerate(({}, neutral)))
    assert only_interpretation(more, tiny).method == only_interpretation(plain, tiny).method


def test_a_confidence_head_that_is_off_has_no_tensors(tiny, tmp_path):
    tensors = make_dflash(dspark(), head_of(tiny))
    assert only_interpretation(save(tmp_path, dspark(), tensors), tiny).method.confidence_head == "markov"
    with pytest.raises(UserError, match=r"tensor 'confidence_head.proj.(weight|bias)' is not one of this form"):
        only_interpretation(save(tmp_path, dspark(enable_confidence_head=False), tensors), tiny)


def test_a_base_that_scales_embeddings_is_refused(tmp_path):
    """Whether a drafter reads them scaled no form says."""
    base = make_tiny(dataclasses.replace(TINY, embedding_scale=2.0))
    with pytest.raises(UserError, match="dflash: 'tiny' scales its embeddings, which no published form of dflash says"):
        only_interpretation(published(tmp_path, base, authors()), base)


@pytest.mark.parametrize(
    ("config", "form", "terms", "changes"),
    [
        (authors2(), "dflash", {"convolution": 2, "selector_rank": 4}, {"logit_scale": 0.5}),
        (dspark(), "speculators", {"markov_rank": 4, "markov_tables": True}, {"logit_cap": 30.0}),
    ],
    ids=["dflash2", "dspark"],
)
def test_terms_are_refused_over_a_base_that_changes_logits(tmp_path, config, form, terms, changes):
    """Published code adds them to logits that are neither scaled nor capped. Without them only ranks count."""
    base = make_tiny(dataclasses.replace(TINY, **changes))
    folder, [(name, value)] = published(tmp_path / "in", base, config), changes.items()
    adapter = Adapter(dataclasses.replace(EXPORTABLE, **terms), {}, base.fingerprint, {})
    with pytest.raises(UserError, match=f"the form {form} is not for bases with {name} {value}"):
        only_interpretation(folder, base)
    with pytest.raises(UserError, match=f"the form {form} is not for bases with {name} {value}"):
        write_published(tmp_path / "out", adapter, base, form)
    assert only_interpretation(published(tmp_path / "plain", base, authors()), base).method.name == "dflash"


@pytest.mark.parametrize(
    ("settings", "form", "message"),
    [
        ({"from_newest": True}, "dflash", "dflash: from_newest is an option of jaxspec alone"),
        ({"even": True}, "speculators", "dflash: even is an option of jaxspec alone"),
        ({"markov_rank": 4}, "speculators", "markov_rank 4 without markov_tables is an option of jaxspec alone"),
        ({"markov_rank": 4, "markov_tables": True}, "dflash", "the form dflash has no markov_rank"),
        ({"confidence_head": "state"}, "dflash", "the form dflash has no confidence_head"),
        ({"convolution": 2}, "dflash", "DFlash 2 have convolution and selector_rank, and selector_rank is 0"),
        ({"selector_rank": 4}, "speculators", "DFlash 2 have convolution and selector_rank, and convolution is 0"),
        (
            {"convolution": 2, "selector_rank": 4, "confidence_head": "state"},
            "speculators",
            "no published form has confidence_head beside convolution and selector_rank",
        ),
        ({"mask_token": -1}, "dflash", "dflash: mask_token -1 is a vector of its own"),
        ({"head_norms": False}, "dflash", "dflash: head_norms must be on"),
        ({"tapped": (1, 3)}, "speculators", r"dflash: tapped \[1, 3\] reads states after the base's last layer"),
        ({"tapped": (0, 1)}, "dflash", "the form dflash reads outputs of layers, and tapped has 0"),
        ({"sample_from_anchor": True}, "dflash", "the form dflash has no sample_from_anchor"),
        ({"vocabulary": 4}, "dflash", "the form dflash has no vocabulary"),
        ({}, "eagle3", "the form eagle3 is for method eagle, not dflash"),
    ],
)
def test_what_a_form_lacks_is_named(tiny, tmp_path, settings, form, message):
    adapter = Adapter(dataclasses.replace(EXPORTABLE, **settings), {}, tiny.fingerprint, {})
    with pytest.raises(UserError, match=message):
        write_published(tmp_path / "out", adapter, tiny, form)
    assert not (tmp_path / "out").exists()


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
