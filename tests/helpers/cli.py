"""A model on disk, an adapter for it, and how a user names them."""

import jax

from jaxspec.drafting.adapter import Adapter, save_adapter
from jaxspec.methods import PPD
from jaxspec.model.base import Base
from jaxspec.weights.hf import save_directory
from jaxspec.weights.load import load_model


def save_with_adapter(folder, tiny):
    """A model directory, and an adapter for it."""
    save_directory(folder / "model", tiny.config, tiny.params, tiny.eos)
    tiny.tokenizer.save_pretrained(folder / "model")
    model = load_model(str(folder / "model"))
    method = PPD()
    trainable = method.init(jax.random.key(0), Base(model.params, model.decoder))
    accuracy = [[0.3, 0.2, 0.1]] * 3
    save_adapter(
        folder / "adapter",
        Adapter(method, trainable, model.fingerprint, {"accuracy": accuracy, "tree": [[0], [1], [0, 0]]}),
    )


def arguments(files, *more):
    return ["--model", str(files / "model"), "--adapter", str(files / "adapter"), "--max-new-tokens", "20", *more]
