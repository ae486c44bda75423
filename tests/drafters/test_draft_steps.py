"""Probes inside a draft model: the drafts that it makes without them, in fewer passes."""

import dataclasses

import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match, Rejection
from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.draft_steps import with_steps
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, BiTA, HiddenTransfer, Medusa
from tests.helpers.methods import trained
from tests.helpers.tiny import TINY, make_prompts, make_text_model, make_tiny, with_fewer_tokens

GREEDY, SAMPLING = SamplingConfig(), SamplingConfig(1.0, top_k=9)


@pytest.fixture(scope="module")
def draft():
    """The first layers of the tiny base, which are sometimes right."""
    base = make_tiny(seed=1)
    config = dataclasses.replace(TINY, num_layers=2)
    params = {name: part for name, part in base.params.items() if name != "layers_2"}
    return dataclasses.replace(base, config=config, params=params, name="draft", fingerprint="draft")


def adapter_of(method, model):
    return Adapter(method, trained(method, model.base, seed=1, scale=0.3, noise=2), model.fingerprint, {})


def stepped(drafter, adapter):
    return dataclasses.replace(drafter, sources=(with_steps(drafter.source, adapter),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "method", "sampling", "acceptance"),
    [
        ("chain:4", PPD(ensemble=2), SAMPLING, Rejection()),
        ("best:7", PPD(), SAMPLING, Match()),
        pytest.param("chain:3", PPD(prefix_tokens=2, multi_exit=2), GREEDY, Match(), marks=pytest.mark.exhaustive),
        pytest.param("chain:3", PPD(entry=1, distances=2), SAMPLING, Match(), marks=pytest.mark.exhaustive),
        ("chain:3", BiTA(prompts=3), SAMPLING, Match()),
        ("best:6", HiddenTransfer(layers=(0, 1, 1)), GREEDY, Match()),
    ],
)
def test_the_same_drafts_in_fewer_passes(tiny, draft, tree, method, sampling, acceptance):
    """Also where candidates are drawn: a draw is decided by the position, not by the pass that makes it."""
    plain = load_drafter("draft_model", tiny, draft_model=draft, tree=tree)
    ours, settings = stepped(plain, adapter_of(method, draft)), {"sampling": sampling, "acceptance": acceptance}
    one, other = (generate(d, make_prompts(12), 24, seed=3, batch_size=4, **settings) for d in (plain, ours))
    assert [(a.tokens, a.accepted, a.offered) for a in other] == [(a.tokens, a.accepted, a.offered) for a in one]
    passes = [sum(a.draft_passes for a in answers) for answers in (one, other)]
    assert passes[1] <= passes[0] and (not sampling.temperature or passes[1] < passes[0])
    assert 0 < np.sum([a.accepted for a in other]) < np.sum([a.offered for a in other])


@pytest.mark.slow
def test_tokens_that_the_draft_model_lacks():
    """The base writes some, and neither the draft model nor its probes draft any."""
    base = dataclasses.replace(make_text_model(vocab_size=280, tie_embeddings=True), eos=())
    draft, prompts = with_fewer_tokens(base, 257), ["hello", "another text", "x"]
    plain = load_drafter("draft_model", base, draft_model=draft, tree="chain:3")
    ours, settings = stepped(plain, adapter_of(PPD(), draft)), {"sampling": SamplingConfig(2.0), "batch_size": 3}
    one, other = (generate(d, prompts, 40, **settings) for d in (plain, ours))
    assert [(a.tokens, a.accepted) for a in other] == [(a.tokens, a.accepted) for a in one]
    assert max(token for a in other for token in a.tokens) >= 257


def test_adapters_that_do_not_fit(tiny, draft, tmp_path):
    def load(adapter):
        save_adapter(tmp_path, adapter)
        return load_drafter("draft_model", tiny, draft_model=draft, draft_adapter=tmp_path)

    with pytest.raises(UserError, match="belongs to the draft model, and this one to the base"):
        load(adapter_of(PPD(), tiny))
    with pytest.raises(UserError, match="belongs to the draft model, and this one to another base"):
        load(dataclasses.replace(adapter_of(PPD(), draft), fingerprint="0123"))
    with pytest.raises(UserError, match="a draft adapter is for the method draft_model"):
        load_drafter("prompt_lookup", tiny, draft_adapter=tmp_path)
    source = load_drafter("draft_model", tiny, draft_model=draft).source
    with pytest.raises(UserError, match="medusa has no probes"):
        with_steps(source, adapter_of(Medusa(heads=2), draft))


def test_it_drafts_a_chain(tiny, draft):
    drafter = stepped(load_drafter("draft_model", tiny, draft_model=draft), adapter_of(PPD(), draft))
    assert drafter.with_tree([(0,), (1,), (0, 0)]).num_rows == 4  # what nothing follows may stand beside it
    with pytest.raises(UserError, match="draft_model: it drafts a chain here: give the tree chain:N or best:N"):
        drafter.with_tree([(0,), (1,), (0, 0), (1, 0)])


def test_an_adapter_of_the_draft_model_is_found_by_its_fingerprint(tiny, tmp_path, monkeypatch):
    draft = make_tiny(dataclasses.replace(TINY, num_layers=2), seed=1)
    save_adapter(tmp_path, adapter_of(PPD(), draft))
    drafter = load_drafter("draft_model", tiny, draft_model=draft, draft_adapter=tmp_path)
    assert drafter.source.method.inner == PPD() and "inner" in drafter.on_device.sources[0].trainable
    with pytest.raises(UserError, match="no adapter of ppd ships for this draft model"):
        load_drafter("draft_model", tiny, draft_model=draft, draft_adapter="ppd")
    monkeypatch.setattr("jaxspec.drafters.loading.find_shipped", lambda name, fingerprint: tmp_path)
    assert load_drafter("draft_model", tiny, draft_model=draft, draft_adapter="ppd").source.method.inner == PPD()
