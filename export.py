"""Write a base where other software can read it: python export.py --model M [--method space] --output DIR."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxspec.cli.options import parse, run_main
from jaxspec.drafting.adapter import open_adapter, save_adapter, settle
from jaxspec.errors import UserError
from jaxspec.weights.load import DEFAULT_MODEL, load_model, save_model
from jaxspec.weights.params import params_fingerprint


@dataclasses.dataclass(frozen=True)
class Options:
    """Write a base as a Hugging Face directory: config.json, weights in safetensors, tokenizer files.

    With a method: the base as the method's adapter tunes it, and in adapter/ what then drafts on it. JAX_PLATFORMS=cpu
    and --dtype bfloat16 export a base that no device holds from the host's memory.

    Attributes:
      model: smollm2-135m (embedded), a Hugging Face directory or hub name, a checkpoint that train.py made, or a GGUF
        file.
      method: first tune the base with the adapter of this method, where that has a base of its own.
      adapter: folder of that adapter; default the one that ships for this method and model.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      output: the directory; it must not exist.
    """

    model: str = DEFAULT_MODEL
    method: str = ""
    adapter: str = ""
    dtype: str = ""
    output: str = ""


def main(args: list[str]) -> None:
    """Parse, load, write."""
    options = parse(Options, args, prog="export.py")
    output = Path(options.output)
    if not options.output or output.exists():
        raise UserError(f"give a new directory with --output, got {options.output!r}")
    if options.adapter and not options.method:
        raise UserError("--adapter needs --method, the method it belongs to")
    model = load_model(options.model, options.dtype or None)
    if options.method:
        _, adapter = open_adapter(options.method, model, options.adapter or None)
        adapter, tuned = settle(adapter, model)
        if tuned is model:
            raise UserError(f"{options.method} leaves the base as it is: there is nothing to tune it with")
        model = tuned
    save_model(model, output)
    written = params_fingerprint(model.config, model.params)  # what those who load it will find
    print(f"{output}: {model.name} as a Hugging Face directory, {model.dtype}, fingerprint {written}")
    if written != model.fingerprint:
        print(f"{model.dtype} rounds it to another base than {model.fingerprint}, whose adapters do not fit this one")
    if options.method:
        info = adapter.info | {"base": f"{output.name}, made from {options.model}"}
        save_adapter(output / "adapter", dataclasses.replace(adapter, info=info))
        print(f"{output / 'adapter'}: what {options.method} drafts with on that base")


if __name__ == "__main__":
    run_main(main)
