"""Published EAGLE-3 drafters: read, they compute what is published; written, they are what was read."""

import dataclasses
import json
import pickle
import time

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxspec.drafters import load_drafter
from jaxspec.drafters.adapter import Adapter, load_adapter, save_adapter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.drafters.published import only_interpretation, read_published, write_published
from jaxspec.drafters.published.eagle_parts import layers_read
from jaxspec.drafters.source import learning
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import Eagle
from jaxspec.model.rows import read_layers
from jaxspec.weights.shards import map_safetensors
from tests.helpers.methods import batch_of, predict, sequence
from tests.helpers.published import DRAFTED, TOKENS, eagle3, make_tensors, reference, save, speculators
from tests.helpers.tiny import TINY, make_prompts, make_tiny

READS = (0, 2, 3)
KEY = "eagle_aux_hidden_state_layer_ids"
IDS = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}  # of inputs
QWEN = {"model_type": "qwen3", "attention_bias": True}
slow = pytest.mark.slow


def published(folder, config, **more):
    """The folder of a random drafter."""
    return save(folder, config, make_tensors(config, **more))


def reading_of(folder, model, *, reads=READS, **settings):
    """The one reading that has these settings."""
    [found] = [
        each.adapter
        for each in read_published(folder, model)
        if each.adapter.method.reads == reads and all(getattr(each.adapter.method, k) == v for k, v in settings.items())
    ]
    return found


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(speculators(norm_before_residual=True, fc_norm=True, norm_output=True), id="speculators"),
        pytest.param(eagle3(eagle_config=IDS), id="authors", marks=slow),
        pytest.param(eagle3(eagle_config=IDS, fc_norm=True, norm_output=True), id="specforge", marks=slow),
        pytest.param(speculators(QWEN, norm_before_fc=True, draft_vocab_size=TOKENS), id="qwen", marks=slow),
    ],
)
def test_it_computes_what_is_published(tiny, tmp_path, config):
    """Three unrolls against numpy, in double precision: shapes, base of rotations and epsilon are the drafter's own."""
    tensors, tokens = make_tensors(config), sequence(tiny, 24)
    adapter = reading_of(save(tmp_path, config, tensors), tiny, norm_output=config.get("norm_output", False))
    _, _, states = jax.jit(read_layers, static_argnums=2)(tiny.base, tokens, READS)
    states = [np.asarray(states[layer], np.float64)[0] for layer in READS]
    embedding = np.asarray(tiny.params["embedding"], np.float64)
    expected = reference(config, tensors, states, embedding, np.asarray(tokens)[0], 3)
    points, method = list(range(1, 20)), dataclasses.replace(adapter.method, depth=3)
    base = learning(tiny.base, method, adapter.frequent_tokens)
    ours = predict(method, adapter.trainable, base, batch_of(tokens, [points]))[0]
    ids = DRAFTED if adapter.method.vocabulary else np.arange(TOKENS)
    for unroll in range(3):
        np.testing.assert_allclose(ours[:, unroll][:, ids], expected[unroll][points], atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("eagle3", eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, fc_norm=True)),
        ("speculators", speculators(QWEN, norm_before_residual=True, norm_before_fc=True)),
    ],
)
def test_a_round_trip_is_bit_for_bit(tiny, tmp_path, form, config, dtype):
    """Through an adapter on disk; embeddings of its own stay, those of the base are not kept, and written again."""
    rng = np.random.default_rng(1)
    tensors = make_tensors(config, dtype) | {"embed_tokens.weight": rng.normal(size=(TOKENS, 32)).astype(dtype)}
    reads = (1, 2, 3) if form == "eagle3" else READS
    adapter = reading_of(save(tmp_path / "in", config, tensors), tiny, reads=reads, norm_output=False)
    assert adapter.method.own_embedding
    save_adapter(tmp_path / "adapter", adapter, adapter.info["published"]["dtype"])
    written = write_published(tmp_path / "out", load_adapter(tmp_path / "adapter", tiny.config), tiny, form)
    assert written == np.dtype(dtype).name
    found = map_safetensors(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].tobytes() == tensor.tobytes(), name
    again = reading_of(tmp_path / "out", tiny, reads=reads, norm_output=False)
    if form == "speculators":
        assert again.method == adapter.method
    np.testing.assert_array_equal(again.frequent_tokens, adapter.frequent_tokens)


def test_the_bases_own_embeddings_are_not_kept(tiny, tmp_path):
    config = speculators()
    tensors = make_tensors(config) | {"embed_tokens.weight": np.asarray(tiny.params["embedding"]).astype(np.float16)}
    adapter = only_interpretation(save(tmp_path / "in", config, tensors), tiny)
    assert not adapter.method.own_embedding
    write_published(tmp_path / "out", adapter, tiny, "speculators")
    found = map_safetensors(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found["embed_tokens.weight"], tensors["embed_tokens.weight"])


def test_conventions_of_layers():
    """The defaults of training tell them apart; other ids are of inputs in one form, and ambiguous in the other."""

    def reads(ids, layers, usual):
        return list(layers_read(None, ids, layers, usual).values())

    assert reads(None, 30, "") == reads([2, 15, 27], 30, "") == reads([1, 14, 26], 30, "") == [(2, 15, 27)]
    assert reads([3, 9, 28], 30, "input") == [(3, 9, 28)]
    assert reads([3, 9, 28], 30, "") == [(3, 9, 28), (4, 10, 29)]
    assert reads([3, 9, 30], 30, "") == [(3, 9, 30)]  # there is no output 30
    assert reads([1, 14, 26], 30, "input") == [(1, 14, 26), (2, 15, 27)]  # perhaps copied from the other form


def test_norm_output_has_two_meanings_in_one_form(tiny, tmp_path):
    for config, count in [(eagle3(norm_output=True), 2), (eagle3(), 1), (speculators(norm_output=True), 1)]:
        readings = read_published(published(tmp_path / str(count) / config["architectures"][0], config), tiny)
        assert len(readings) == count
    folder = published(tmp_path / "unclear", eagle3(norm_output=True))
    with pytest.raises(UserError, match=r"can mean 2 things \(norm_output feeds .*`jaxspec import` tries them"):
        load_drafter("eagle", tiny, folder)


def test_without_a_key_rotations_have_base_10000(tiny, tmp_path):
    """Without a key the base of rotations is 10,000, as in the authors' files, whatever the base's."""
    config = eagle3()
    del config["rope_theta"]
    adapter = only_interpretation(published(tmp_path, config), dataclasses.replace(tiny))
    assert adapter.method.shapes.rope_theta == 10000


def test_what_says_nothing_may_be_there(tiny, tmp_path):
    """A switch that is off, a null in one of two places."""
    published(tmp_path / "a", speculators(has_no_defaults_at_init=False))
    published(tmp_path / "b", eagle3(**{KEY: [0, 2, 3]}, eagle_config={KEY: None, "use_aux_hidden_state": True}))
    for folder in ("a", "b"):
        assert all(one.adapter.method.reads for one in read_published(tmp_path / folder, tiny))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "tensor 'midlayer.hidden_norm.weight' is missing"),
        (lambda t: t.pop("norm.weight"), "tensor 'norm.weight' is missing"),
        (lambda t: t.pop("d2t"), "tensor 't2d' is there without 'd2t'"),
        (lambda t: t.pop("t2d"), "tensor 'd2t' is there without 't2d'"),
        (lambda t: t.update(d2t=np.float32(t["d2t"])), "'d2t' is of float32, and must be of whole numbers"),
        (
            lambda t: t.update({"norm.weight": np.int8(t["norm.weight"])}),
            "'norm.weight' is of int8, and must be of floats",
        ),
        (lambda t: t.update(d2t=DRAFTED), "'d2t' must lead to different tokens below 16"),
        (lambda t: t.update(t2d=np.arange(16) < 12), "tensors 'd2t' and 't2d' name different tokens"),
        (
            lambda t: t.update({"fc_norm.0.weight": t["norm.weight"]}),
            "tensor 'fc_norm.0.weight' is not one of this form",
        ),
        (
            lambda t: t.update({"midlayer.mlp.up_proj.weight": t["midlayer.mlp.up_proj.weight"].T.copy()}),
            r"'midlayer.mlp.up_proj.weight' has shape \[32, 40\], its config.json says \[40, 32\]",
        ),
    ],
)
def test_wrong_tensors_are_named(tiny, tmp_path, change, message):
    tensors = make_tensors(eagle3())
    change(tensors)
    with pytest.raises(UserError, match=message):
        read_published(save(tmp_path, eagle3(), tensors), tiny)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (eagle3(hidden_size=64), "for a base of width 64 with 16 tokens; 'tiny' has width 32 and 16 tokens"),
        (eagle3(vocab_size=32000), "for a base of width 32 with 32000 tokens"),
        (eagle3(num_hidden_layers=2), "num_hidden_layers 2 is not supported, only 1"),
        (eagle3(model_type="qwen3"), "model_type 'qwen3' is no layer of this form, only llama"),
        (eagle3(sliding_window=64), "sliding_window 64 is not supported in a drafter"),
        (eagle3(residual_scale=2), "'residual_scale' 2 is not known in this form"),
        (speculators(enable_sp_ulysses=True), "'enable_sp_ulysses' True is not known in this form"),
        (eagle3(eagle_config={"use_aux_hidden_state": 0}), "use_aux_hidden_state false is EAGLE 1 or 2"),
        (
            eagle3(**{KEY: [0, 1, 2]}, eagle_config={KEY: [1, 2, 3]}),
            rf"{KEY} is \[0, 1, 2\], and \[1, 2, 3\] in eagle_config",
        ),
        (eagle3(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm exclude each other"),
        (eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [5, 6, 9]}), r"reads layers \[5, 6, 9\].* has 3"),
        (
            speculators(speculators_model_type="fancy"),
            r"no form of drafters .* 'fancy'; known: eagle3 \(EAGLE-3 of its",
        ),
        ({"model_type": "llama"}, "found model_type 'llama'; known: eagle3"),
    ],
)
def test_wrong_configs_are_named(tiny, tmp_path, config, message):
    with pytest.raises(UserError, match=message):
        read_published(save(tmp_path, config, make_tensors(eagle3())), tiny)


@pytest.mark.slow
def test_malicious_folders_are_refused_at_once(tiny, tmp_path):
    """A pickle that would run code, a link out of the folder, a header of a gigabyte."""
    pytest.importorskip("torch")
    pickled, linked, huge = tmp_path / "pickled", tmp_path / "linked", tmp_path / "huge"
    looped = tmp_path / "looped"
    for folder in (pickled, linked, huge, looped):
        published(folder, eagle3())
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Evil()}))
    (linked / "model.safetensors").rename(tmp_path / "elsewhere")
    (linked / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    (huge / "model.safetensors").write_bytes((2**30).to_bytes(8, "little") + b"{}")
    (looped / "config.json").unlink()
    (looped / "config.json").symlink_to("config.json")
    import torch  # its start does not count

    zipped = published(tmp_path / "zipped", eagle3())
    (zipped / "model.safetensors").unlink()
    torch.save({"fc.weight": _Evil()}, zipped / "pytorch_model.bin")
    for folder, message in [
        (pickled, "not a complete file of PyTorch weights"),
        (zipped, "it holds more than tensors, and no code of a file is run"),
        (linked, "leads out of the folder"),
        (looped, "cannot be followed|no such file|No such file|Too many levels"),
        (huge, "its header would have 1073741824 bytes"),
    ]:
        began = time.monotonic()
        with pytest.raises(UserError, match=message):
            read_published(folder, tiny)
        assert time.monotonic() - began < 1


class _Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


def test_a_name_that_is_nowhere(tiny, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="owner/drafter: no such folder, and it could not be fetched from the hub"):
        load_drafter("eagle", tiny, "owner/drafter")


@slow
def test_a_folder_decodes_as_an_adapter(tiny, tmp_path):
    folder, prompts = published(tmp_path, speculators(norm_output=True, fc_norm=True)), make_prompts(4)
    drafter = load_drafter("eagle", tiny, folder, tree="own")
    ours = generate(drafter, prompts, 20, batch_size=4)
    assert [a.tokens for a in ours] == [a.tokens for a in generate(autoregressive(tiny), prompts, 20)]
    with pytest.raises(UserError, match="draft-vocabulary 4: this drafter, which was published, drafts 12 tokens"):
        load_drafter("eagle", tiny, folder, tree="own", draft_vocabulary=4)
    with pytest.raises(UserError, match="belongs to method 'eagle', not 'medusa'"):
        load_drafter("medusa", tiny, folder)


@pytest.mark.parametrize(
    ("settings", "form", "message"),
    [
        ({"direct": True}, "speculators", "eagle: direct is an option of jaxspec alone"),
        ({"even": True}, "eagle3", "eagle: even is an option of jaxspec alone"),
        ({"norm_before_residual": True}, "eagle3", "the form eagle3 has no norm_before_residual"),
        ({"reads": (1, 2)}, "eagle3", r"reads the outputs of 3 layers, and reads is \[1, 2\]"),
        ({}, "gguf", "unknown form 'gguf'; forms to write: eagle3, dflash, speculators"),
    ],
)
def test_what_a_form_lacks_is_named(tiny, tmp_path, settings, form, message):
    method = Eagle(**{"reads": (1, 2, 3)} | settings)
    adapter = Adapter(method, method.init(jax.random.key(0), tiny.base), tiny.fingerprint, {})
    with pytest.raises(UserError, match=message):
        write_published(tmp_path / "out", adapter, tiny, form)
    assert not (tmp_path / "out").exists()


def test_layers_that_would_be_read_as_others_are_not_written(tmp_path):
    """Outputs 2, 4 and 5 of 8 layers have the ids that training defaults to for inputs."""
    base = make_tiny(dataclasses.replace(TINY, num_layers=8))
    method = Eagle(reads=(3, 5, 6))
    adapter = Adapter(method, method.init(jax.random.key(0), base.base), base.fingerprint, {})
    with pytest.raises(UserError, match=r"means other layers by the ids \[2, 4, 5\] of its reads \[3, 5, 6\]"):
        write_published(tmp_path / "out", adapter, base, "eagle3")
    write_published(tmp_path / "out", adapter, base, "speculators")


def test_a_trained_adapter_is_written_with_the_bases_projection(tiny, tmp_path):
    """Where it has none of its own, for the tokens that it may draft, in the order of their ids."""
    frequent = np.array([7, 0, 3, 12, 5], np.int32)
    method = Eagle(reads=(1, 2, 3))
    adapter = Adapter(
        method, method.init(jax.random.key(0), tiny.base), tiny.fingerprint, {"draft_vocabulary": 3}, frequent
    )
    write_published(tmp_path / "out", adapter, tiny, "eagle3", "float32")
    again = reading_of(tmp_path / "out", tiny, reads=(1, 2, 3))
    np.testing.assert_array_equal(again.frequent_tokens, [0, 3, 7])
    np.testing.assert_array_equal(again.trainable["lm_head"], np.asarray(tiny.params["lm_head"])[:, [0, 3, 7]])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "use_aux_hidden_state": True,
    }
