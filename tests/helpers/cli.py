"""A model on disk, an adapter for it, and how a user names them."""

import jax

from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.methods import PPD
from jaxspec.weights.hf import save_directory
from jaxspec.weights.load import load_model
from tests.helpers.files import write_jsonl


def save_with_adapter(folder, tiny):
    """A model directory, and an adapter for it."""
    save_directory(folder / "model", tiny.config, tiny.params, tiny.eos)
    tiny.tokenizer.save_pretrained(folder / "model")
    model = load_model(str(folder / "model"))
    method = PPD()
    info = {"accuracy": [[0.3, 0.2, 0.1]] * 3, "tree": [[0], [1], [0, 0]]}
    save_adapter(
        folder / "adapter", Adapter(method, method.init(jax.random.key(0), model.base), model.fingerprint, info)
    )


def named(files):
    """The options that name both."""
    return ["--model", str(files / "model"), "--adapter", str(files / "adapter")]


def arguments(files, *more):
    """A command line of `jaxspec decode`."""
    return [*named(files), "--max-new-tokens", "20", *more]


def write_prompts(file, *prompts):
    """A prompt per line; the option that names the file."""
    return ["--prompts", write_jsonl(file, [{"prompt": prompt} for prompt in prompts])]
