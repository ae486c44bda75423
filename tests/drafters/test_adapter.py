"""Adapters on disk: round trip, and every way a file can be wrong."""

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.drafters import load_adapter, load_drafter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.choices import TunedChoice, save_choice
from jaxspec.drafters.drafter import autoregressive, make_drafter
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate, generate_many, stream
from jaxspec.machine import this_machine
from jaxspec.methods import PPD, SPACE, Medusa
from jaxspec.model.base import Base
from tests.helpers.files import change_json
from tests.helpers.tiny import make_prompts, make_tiny
from tests.helpers.trees import tree_paths

ACCURACY = [[0.5, 0.2, 0.1], [0.3, 0.1, 0.1], [0.2, 0.1, 0.0]]


@pytest.fixture
def folder(tiny, tmp_path):
    method = PPD(ensemble=2)
    trainable = method.init(jax.random.key(0), Base(tiny.params, tiny.decoder))
    save_adapter(tmp_path / "a", Adapter(method, trainable, tiny.fingerprint, {"accuracy": ACCURACY, "base": "tiny"}))
    return tmp_path / "a"


def edit(folder, **changes):
    change_json(folder / "adapter.json", **changes)


def test_a_saved_adapter_loads_as_it_was(tiny, folder):
    adapter = load_adapter(folder, tiny.config)
    assert adapter.method == PPD(ensemble=2) and adapter.info["accuracy"] == ACCURACY
    expected = PPD(ensemble=2).init(jax.random.key(0), Base(tiny.params, tiny.decoder))
    np.testing.assert_array_equal(adapter.trainable["embeddings"], expected["embeddings"])
    assert not list(folder.glob(".*"))  # no temporary files stay behind


def paths_of(drafter):
    return tree_paths(jax.tree.map(lambda x: x[0], drafter.on_device.shape.stack))


def test_the_tree_is_the_adapters_own_or_the_one_asked_for(tiny, folder):
    assert paths_of(load_drafter("ppd", tiny, folder, tree="sparse:4")) == [(0,), (1,), (0, 0)]
    assert paths_of(load_drafter("ppd", tiny, folder, tree="efficient:2,1")) == [(0,), (1,), (0, 0)]
    assert paths_of(load_drafter("ppd", tiny, folder, tree=[(0,), (2,)])) == [(0,), (2,)]
    dynamic = load_drafter("ppd", tiny, folder, tree="dynamic:12").on_device.shape.stack
    assert dynamic.parent.shape[0] == 2 and dynamic.next_state.max() == 1  # the third state has the tree of the second
    edit(folder, tree=[[1], [1, 0]])
    drafter = load_drafter("ppd", tiny, folder, tree="own")
    assert paths_of(drafter) == [(1,), (1, 0)]
    assert drafter.on_device.shape.stack.probe_of[0].tolist() == [[0, 3, -1], [1, 4, -1], [2, 5, -1]]


def test_an_ensemble_of_two_counts_two_rows_per_probe(tiny, folder):
    """Budget 6: one candidate with a probe is 3 rows, so two of them fit."""
    plan = make_drafter(load_adapter(folder, tiny.config), tiny, "dynamic:6").plan
    assert all(len(state.paths) + 2 * sum(state.probes[1:]) <= 6 for state in plan.states)
    assert plan.num_nodes == 3


def test_wrong_adapters_are_refused(tiny, folder):
    def message(name="ppd", model=tiny, adapter=folder):
        with pytest.raises(UserError) as error:
            load_drafter(name, model, adapter)
        return str(error.value)

    assert "did you mean 'ppd'?" in message("pdd")
    assert "takes no adapter" in message("autoregressive")
    assert "holds no tree" in message()
    edit(folder, tree=[])
    assert "1 to 3 candidates deep, not 0" in message()
    edit(folder, tree=[[0]], accuracy=[[0.5], [0.1, 0.2]])
    with pytest.raises(UserError, match=r"\[M, K\] table"):
        load_drafter("ppd", tiny, folder, tree="sparse:3")
    with pytest.raises(UserError, match="neither a file nor a builder"):
        load_drafter("ppd", tiny, folder, tree="efficient.json")
    with pytest.raises(UserError, match="has no tree"):
        load_drafter("autoregressive", tiny, tree="sparse:4")
    assert "adapter.json is missing" in message(adapter=folder / "nothing")
    assert "no adapter of ppd ships for 'tiny'" in message(adapter=None)
    assert "trained for another base ('tiny'" in message(model=make_tiny(seed=2))

    (folder.parent / "unfinished").mkdir()
    (folder.parent / "unfinished" / "run.json").touch()
    assert "its training is not finished: continue it with --resume" in message(adapter=folder.parent / "unfinished")

    edit(folder, method="autoregressive")
    assert "belongs to method 'autoregressive', not 'ppd'" in message()
    edit(folder, method="ppd", settings={"ensemble": 2, "colour": 1})
    assert "settings do not fit ppd" in message()
    edit(folder, settings={"ensemble": 2.0})
    assert "settings do not fit ppd" in message()
    edit(folder, settings={"ensemble": 3})
    assert "'embeddings' has shape [3, 2, 32], ppd on this base needs [3, 3, 32]" in message()
    edit(folder, settings={"ensemble": 2, "aggregation": "learned"})
    assert "tensor 'weights' is missing" in message()
    edit(folder, settings={"mask": "sideways"})
    assert "mask must be one of ensemble, decoder, encoder, causal, alone, got 'sideways'" in message()
    edit(folder, settings={"ensemble": 2}, format=99)
    assert "format 99" in message()
    edit(folder, format=1)
    weights = folder / "adapter.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "not a complete safetensors file" in message()
    weights.write_bytes(safetensors.numpy.save({**safetensors.numpy.load(whole), "extra": np.zeros(2)}))
    assert "unknown tensor 'extra'" in message()
    (folder / "adapter.json").write_text("{")
    assert "adapter.json" in message()


ORDER = np.array([3, 0, 9, 7, 1], np.int32)


@pytest.fixture
def counted(tiny, tmp_path):
    """An adapter that knows which tokens are frequent, in 16 bits."""
    method = Medusa(heads=3, lm_head="low_rank")
    trainable = method.init(jax.random.key(0), Base(tiny.params, tiny.decoder))
    info = {"accuracy": ACCURACY, "tree": [[0], [1]], "draft_vocabulary": 4}
    save_adapter(tmp_path / "b", Adapter(method, trainable, tiny.fingerprint, info, ORDER), "float16")
    return tmp_path / "b"


def test_a_draft_vocabulary_goes_with_the_adapter(tiny, counted):
    adapter = load_adapter(counted, tiny.config)
    np.testing.assert_array_equal(adapter.frequent_tokens, ORDER)

    def source(**settings):
        return load_drafter("medusa", tiny, counted, **settings).on_device.sources[0]

    assert source().draft_vocabulary.ids.tolist() == [3, 0, 9, 7]
    assert source(draft_vocabulary=2).draft_vocabulary.ids.tolist() == [3, 0]
    assert source(draft_vocabulary=0).draft_vocabulary is None
    smaller = source(draft_vocabulary=3)
    assert smaller.draft_vocabulary.columns.shape == (32, 3) and smaller.trainable["up"].shape == (3, 16, 3)
    np.testing.assert_array_equal(smaller.draft_vocabulary.columns, tiny.params["lm_head"][:, ORDER[:3]])


def test_weights_in_16_bits_are_read_as_float32(tiny, counted):
    stored = safetensors.numpy.load_file(counted / "adapter.safetensors")
    assert {value.dtype.name for name, value in stored.items() if name != "frequent_tokens"} == {"float16"}
    adapter = load_adapter(counted, tiny.config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adapter.trainable)} == {"float32"}


def test_draft_vocabularies_that_cannot_be(tiny, folder, counted):
    def message(name, folder, **settings):
        with pytest.raises(UserError) as error:
            load_drafter(name, tiny, folder, **settings)
        return str(error.value)

    edit(folder, tree=[[0]])
    assert "does not say which tokens are frequent" in message("ppd", folder, draft_vocabulary=4)
    assert "0 (all tokens) or at most 5, got 6" in message("medusa", counted, draft_vocabulary=6)
    assert "0 (all tokens) or at most 5, got -1" in message("medusa", counted, draft_vocabulary=-1)
    assert "rank 2 is outside the vocabulary of 2" in message("medusa", counted, tree=[(2,)], draft_vocabulary=2)
    with pytest.raises(UserError, match="has no draft vocabulary, got 3"):
        load_drafter("autoregressive", tiny, draft_vocabulary=3)
    assert "medusa has none; try sparse:NODES" in message("medusa", counted, tree="dynamic:12")
    for count in ("8k", None, 2.5, True):
        edit(counted, draft_vocabulary=count)
        assert f"must be a whole number, got {count!r}" in message("medusa", counted)
    edit(counted, draft_vocabulary=0)
    states = [{"needs": n, "paths": [[0]][:n], "probes": [1] * (n + 1)} for n in (0, 1)]
    edit(counted, tree=states)
    assert "takes one tree, not 2" in message("medusa", counted)
    file = counted / "adapter.safetensors"
    for wrong in (np.array([0, 16], np.int32), np.array([0, 0], np.int32), np.zeros(2), np.zeros((1, 1), np.int32)):
        tensors = safetensors.numpy.load_file(file)
        file.write_bytes(safetensors.numpy.save(tensors | {"frequent_tokens": wrong}))
        assert "frequent_tokens must hold different token ids of the vocabulary of 16" in message("medusa", counted)


@pytest.mark.slow
def test_a_method_decodes_on_the_base_that_it_has_tuned(tiny, tmp_path):
    """However it is asked: one prompt or many, streamed, or tuned to draft nothing."""
    method = SPACE(distances=2, rank=2)
    trainable = jax.tree.map(lambda x: x + 0.1, method.init(jax.random.key(0), tiny.base))
    adapter = Adapter(method, trainable, tiny.fingerprint, {"accuracy": ACCURACY[:2], "tree": [[0], [0, 0]]})
    save_adapter(tmp_path, adapter)
    drafter, prompts = load_drafter("space", tiny, tmp_path), make_prompts(3)
    expected = [a.tokens for a in generate(autoregressive(drafter.model), prompts, 12)]
    assert expected != [a.tokens for a in generate(autoregressive(tiny), prompts, 12)]
    assert [a.tokens for a in generate(drafter, prompts, 12)] == expected
    assert dict(generate_many(drafter, prompts, 12)) == dict(enumerate(expected))
    *_, last = stream(drafter, prompts[0], 12)
    assert last.tokens == expected[0]
    none = TunedChoice(
        this_machine(), "float32", load_adapter(tmp_path, tiny.config).digest, 1, 512, 0.0, None, "none", {}
    )
    save_choice(tmp_path, "space", none)
    tuned = load_drafter("space", tiny, tmp_path, tree="auto", temperature=0.0)
    assert "autoregressive" in tuned.note and [a.tokens for a in generate(tuned, prompts, 12)] == expected
