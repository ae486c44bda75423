"""The next-token module in a base's own files, against the layer of transformers that it is."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.drafters.loading import open_adapter
from jaxspec.drafters.published import read_published
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate
from jaxspec.methods import Mtp
from jaxspec.weights.hf import load_directory
from jaxspec.weights.model import Model
from tests.helpers.methods import batch_of, predict
from tests.helpers.tiny import make_prompts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

WIDTH, TOKENS, LENGTH = 32, 16, 14
SHAPES = dict(hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
SHAPES |= dict(vocab_size=TOKENS, tie_word_embeddings=False, attn_implementation="eager", max_position_embeddings=256)
MODULE = "model.mtp_layers.0."


def random(model):
    """The model in double precision, with no parameter that is zero or one."""
    generator = torch.Generator().manual_seed(len(list(model.parameters())))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval().double()


class Reference:
    """A tiny MiMo: the base, and the module as a Qwen 2 of one layer behind what joins state and embedding."""

    def __init__(self):
        from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

        self.base = random(Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, **SHAPES)))
        self.layer = random(Qwen2Model(Qwen2Config(num_hidden_layers=1, **SHAPES)))
        rng = np.random.default_rng(3)
        self.norms = {name: 1 + 0.3 * rng.normal(size=WIDTH) for name in ("token_layernorm", "hidden_layernorm")}
        self.input_proj = 0.3 * rng.normal(size=(WIDTH, 2 * WIDTH))

    def write(self, folder, **changes):
        """The folder that MiMo is published as."""
        self.base.float().save_pretrained(folder)
        self.base.double()
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1} | changes
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.detach().numpy() for name, tensor in self.layer.layers[0].named_parameters()}
        tensors |= {f"{name}.weight": scale for name, scale in self.norms.items()}
        tensors |= {"final_layernorm.weight": self.layer.norm.weight.detach().numpy()}
        tensors |= {"input_proj.weight": self.input_proj}
        named = {MODULE + name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
        file = folder / "model.safetensors"
        safetensors.numpy.save_file(safetensors.numpy.load_file(file) | named, file)
        return folder

    def joined(self, state, token):
        """State [D] and the token after it as a row [D]."""
        embedding = self.base.model.embed_tokens.weight[token]
        parts = [("hidden_layernorm", state), ("token_layernorm", embedding)]
        epsilon = self.base.config.rms_norm_eps
        normed = [x * (x.square().mean() + epsilon).rsqrt() * torch.tensor(self.norms[name]) for name, x in parts]
        return torch.tensor(self.input_proj) @ torch.cat(normed)

    @torch.no_grad()
    def logits(self, tokens, point, depth, after_norm):
        """[depth, V], of the tokens behind the one after `point`."""
        read = []
        hook = self.base.model.norm.register_forward_hook(lambda norm, before, after: read.extend([*before, after]))
        self.base.model(torch.tensor(tokens)[None])
        hook.remove()
        states = read[after_norm][0]
        rows = [self.joined(states[t], tokens[t + 1]) for t in range(point + 1)]
        logits = []
        for further in range(depth):
            output = self.layer(inputs_embeds=torch.stack(rows)[None]).last_hidden_state[0, -1]
            logits.append(self.base.lm_head(output).numpy())
            if further < depth - 1:
                rows.append(self.joined(output, tokens[point + 2 + further]))
        return np.array(logits)


@pytest.fixture(scope="module")
def reference():
    return Reference()


@pytest.fixture(scope="module")
def mimo(reference, tmp_path_factory):
    return model_of(reference.write(tmp_path_factory.mktemp("mimo")))


def model_of(folder):
    config, params, fingerprint = load_directory(folder, jnp.float32)
    return Model(str(folder), config, params, fingerprint)


@pytest.mark.parametrize("after_norm", [False, True])
def test_the_module_computes_what_is_published(mimo, reference, after_norm):
    """At two places of a text, three tokens ahead: once on the base's state, then on its own outputs.

    The files do not say whether that state is before the base's final norm, so both readings are there.
    """
    tokens = np.random.default_rng(0).integers(0, TOKENS, LENGTH)
    adapter = read_published(mimo.name, mimo)[after_norm].adapter
    assert open_adapter("mtp", mimo).method == Mtp()
    ours = predict(adapter.method, adapter.trainable, mimo.base, batch_of(jnp.array(tokens)[None], [[3, 8]]))[0]
    expected = np.stack([reference.logits(tokens, point, 3, after_norm) for point in (3, 8)])
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())
    assert len({*expected.argmax(-1).ravel().tolist()}) > 1


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.2)], ids=["greedy", "sampling"])
def test_the_text_is_that_of_autoregressive_decoding(mimo, sampling):
    drafter, prompts = load_drafter("mtp", mimo, tree="own"), make_prompts(3)
    settings = {"sampling": sampling, "seed": 3, "batch_size": 3}
    ours, plain = (generate(d, prompts, 30, **settings) for d in (drafter, autoregressive(mimo)))
    assert [a.tokens for a in ours] == [a.tokens for a in plain] and sum(sum(a.accepted) for a in ours) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported, only 1"),
        ({"num_nextn_predict_layers": 0}, "mtp is a part of the base's own files, and"),
    ],
)
def test_other_modules_are_refused(reference, tmp_path, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        open_adapter("mtp", model_of(reference.write(tmp_path, **changes)))


def test_a_tensor_that_is_missing_is_named(reference, tmp_path):
    file = reference.write(tmp_path) / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    del tensors[f"{MODULE}input_proj.weight"]
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(UserError, match=r"tensor 'model.mtp_layers.0.input_proj.weight' is missing"):
        open_adapter("mtp", model_of(tmp_path))
