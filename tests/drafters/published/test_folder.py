"""Folders and hub names of published drafters: which files are read, and what is refused before they are."""

import json

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.drafters import load_drafter
from jaxspec.drafters.published import is_published, only_interpretation, read_published
from jaxspec.errors import UserError
from jaxspec.model.rows import read_layers
from tests.helpers.methods import batch_of, predict, sequence
from tests.helpers.published import DRAFTED, TOKENS, eagle3, make_tensors, reference, save, speculators

KEY = "eagle_aux_hidden_state_layer_ids"


def same(one, other):
    """Whether two adapters compute the same."""
    assert one.method == other.method
    jax.tree.map(np.testing.assert_array_equal, one.trainable, other.trainable)


@pytest.mark.slow
def test_weights_of_pytorch_are_read(tiny, tmp_path):
    torch = pytest.importorskip("torch")
    config, tensors = speculators(), make_tensors(speculators())
    expected = only_interpretation(save(tmp_path / "a", config, tensors), tiny)
    folder = save(tmp_path / "b", config, {})
    (folder / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(x) for name, x in tensors.items()}, folder / "pytorch_model.bin")
    same(only_interpretation(folder, tiny), expected)


def test_a_tensor_in_two_files_is_named(tiny, tmp_path):
    config, tensors = speculators(), make_tensors(speculators())
    folder = save(tmp_path, config, {})
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": tensors, "b.safetensors": {"norm.weight": tensors["norm.weight"]}}
    for name, shard in shards.items():
        (folder / name).write_bytes(safetensors.numpy.save(shard))
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"norm.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"tensor 'norm.weight' is in two files"):
        read_published(folder, tiny)


def test_tokens_and_layers_may_come_in_any_order(tiny, tmp_path):
    """Rows of the projection for tokens that are not sorted, and ids of layers from the last to the first."""
    config, order = speculators(), np.random.default_rng(1).permutation(len(DRAFTED))
    tensors = make_tensors(config)
    expected = only_interpretation(save(tmp_path / "a", config, tensors), tiny)
    tensors |= {
        "lm_head.weight": tensors["lm_head.weight"][order],
        "d2t": DRAFTED[order] - np.arange(len(DRAFTED)),
        "fc.weight": tensors["fc.weight"].reshape(32, 3, 32)[:, ::-1].reshape(32, 96),
    }
    turned = only_interpretation(save(tmp_path / "b", config | {KEY: config[KEY][::-1]}, tensors), tiny)
    np.testing.assert_array_equal(turned.frequent_tokens, DRAFTED[order])
    np.testing.assert_array_equal(turned.trainable["fc"]["kernel"], expected.trainable["fc"]["kernel"])
    np.testing.assert_array_equal(turned.trainable["lm_head"], expected.trainable["lm_head"][:, order])


def test_another_name_of_the_architecture(tiny, tmp_path):
    config = eagle3(architectures=["Eagle3LlamaForCausalLM"])
    assert only_interpretation(save(tmp_path, config, make_tensors(config)), tiny).method.reads == (0, 1, 2)


def deepspec(**more):
    """The config.json of DeepSpec's EAGLE-3, whose ids are of outputs; -1 is the embedding."""
    layer = speculators({"model_type": "qwen3", "num_hidden_layers": 1})["transformer_layer_config"]
    own = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [-1, 1, 2], "ttt_length": 5}
    return layer | own | {"step_loss_decay": 0.8, "num_target_layers": 3} | more


def deepspec_tensors():
    """All tokens are drafted, and the base's embeddings are there."""
    return make_tensors(speculators({"model_type": "qwen3"}, draft_vocab_size=TOKENS))


def test_deepspecs_drafter_computes_what_is_published(tiny, tmp_path):
    tensors, tokens = deepspec_tensors(), sequence(tiny, 24)
    embedding = np.asarray(tiny.params["embedding"])
    folder = save(tmp_path, deepspec(), tensors | {"embed_tokens.weight": embedding})
    adapter = only_interpretation(folder, tiny)
    assert adapter.method.depth == 5 and adapter.method.reads == (0, 2, 3)
    assert not adapter.method.own_embedding
    _, _, states = jax.jit(read_layers, static_argnums=2)(tiny.base, tokens, (0, 2, 3))
    states = [np.asarray(states[layer], np.float64)[0] for layer in (0, 2, 3)]
    config = speculators({"model_type": "qwen3"})
    expected = reference(config, tensors, states, embedding.astype(np.float64), np.asarray(tokens)[0], 2)
    ours = predict(adapter.method, adapter.trainable, tiny.base, batch_of(tokens, [[3, 9, 14]]))[0]
    for unroll in range(2):
        np.testing.assert_allclose(ours[:, unroll], expected[unroll][[3, 9, 14]], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (deepspec(num_target_layers=36), "for a base of 36 layers; 'tiny' has 3"),
        (deepspec(target_layer_ids=[0, 1, 3]), r"reads layers \[1, 2, 4\], and the base has 3"),
        (deepspec(target_layer_ids="all"), "target_layer_ids must be a list of layers, got 'all'"),
        (deepspec(model_type="llama"), "model_type 'llama' is no layer of this form, only qwen3"),
    ],
)
def test_wrong_configs_of_deepspec_are_named(tiny, tmp_path, config, message):
    with pytest.raises(UserError, match=message):
        read_published(save(tmp_path, config, deepspec_tensors()), tiny)


def test_a_missing_folder_is_no_hub_name(tiny, tmp_path, monkeypatch):
    """Where its parent is a folder, or one that commands write into: nothing is looked up."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("mine/eagle", "runs/eagle", "adapters/eagle", "./eagle", "~/eagle", "a/b/c"):
        assert not is_published(name)
        with pytest.raises(UserError, match=r"no such folder, and so no adapter there"):
            load_drafter("eagle", tiny, name)
        with pytest.raises(UserError, match=f"{name}: no such folder, and not a hub name"):
            read_published(name, tiny)
    assert is_published("owner/eagle")


def test_weights_of_an_unknown_form_are_not_fetched(tiny, tmp_path, monkeypatch):
    """Of the hub config.json comes first, then what its form has."""
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        return tmp_path / name

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = speculators()
    save(tmp_path / "owner/eagle", config, make_tensors(config))
    save(tmp_path / "owner/base", {"model_type": "llama"}, {})
    with pytest.raises(UserError, match="no form of drafters that is known"):
        read_published("owner/base", tiny)
    assert asked == [["adapter_config.json", "config.json"]]
    assert read_published("owner/eagle", tiny)
    assert {"model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin"} < {*asked[2]}
