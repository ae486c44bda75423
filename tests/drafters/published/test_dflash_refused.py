"""DFlash, DFlash 2 and DSpark drafters that are refused: files that are wrong, and what a form lacks."""

import dataclasses

import numpy as np
import pytest

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published import only_interpretation, write_published
from jaxspec.errors import UserError
from tests.helpers.published import save
from tests.helpers.published_dflash import (
    EXPORTABLE,
    authors,
    authors2,
    dspark,
    head_of,
    make_dflash,
    packaged,
    packaged2,
    published,
)
from tests.helpers.tiny import TINY, make_tiny

# as in the config that DFlash 2's authors have published
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}


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
