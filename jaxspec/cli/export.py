"""Write a base, or an adapter, where other software can read it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxspec.cli.options import parse
from jaxspec.drafters import adapter_method, load_drafter, open_adapter
from jaxspec.drafters.adapter import Adapter, save_adapter
from jaxspec.drafters.published import method_to_write, write_published
from jaxspec.errors import UserError
from jaxspec.files import new_folder
from jaxspec.weights.load import DEFAULT_MODEL, WEIGHT_DTYPES, check_dtype, load_model, save_model
from jaxspec.weights.model import Model
from jaxspec.weights.params import params_fingerprint


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write a base as a Hugging Face directory: config.json, weights in safetensors, tokenizer files.

    With a form, write an adapter instead, for other software: eagle3 and dflash for SGLang, speculators for vLLM,
    medusa. With a method, write the base as the method's adapter tunes it, and the adapter for that base in adapter/.
    Use JAX_PLATFORMS=cpu and --dtype bfloat16 to export a base that no device can hold from the host's memory.

    Attributes:
      model: smollm2-135m (the default), a Hugging Face directory or hub name, a checkpoint that `jaxspec train` wrote,
        or a GGUF file.
      method: a method that tunes its base, such as space: export the tuned base; default that of the adapter. With a
        form: the adapter's method, which is the form's where left out.
      adapter: folder of that adapter; default the one that ships for this method and model.
      form: form of published drafters to write the adapter in: eagle3, dflash, speculators for either, or medusa.
      dtype: dtype of the weights; default float32 on CPU, float16 on GPUs without bfloat16, bfloat16 elsewhere. Of an
        adapter: that which it was imported in, else float16.
      output: the directory; it must not exist.
    """

    model: str = DEFAULT_MODEL
    method: str = ""
    adapter: str = ""
    form: str = ""
    dtype: str = ""
    output: str = ""


def main(args: list[str]) -> None:
    """Parse, load, tune, write."""
    options = parse(ExportOptions, args)
    output = new_folder(options.output)
    if options.dtype:
        check_dtype(options.dtype, WEIGHT_DTYPES)
    if options.form:
        export_adapter(options, output)
        return
    method = options.method or (adapter_method(options.adapter) if options.adapter else "")
    model = load_model(options.model, options.dtype or None)
    if not method:
        export(model, output)
        return
    drafter = load_drafter(method, model, options.adapter or None)
    source = drafter.source  # refuses a union
    if drafter.model is model:
        raise UserError(
            f"{method} leaves the base as it is: there is nothing to tune it with; to write the adapter for other "
            "software give --form"
        )
    export(drafter.model, output)
    info = source.adapter.info | {"base": f"{output.name}, made from {options.model}"}
    fingerprint, frequent = drafter.model.fingerprint, source.adapter.frequent_tokens
    save_adapter(output / "adapter", Adapter(source.method, source.trainable, fingerprint, info, frequent))
    print(f"{output / 'adapter'}: the adapter of {method} for that base")


def export_adapter(options: ExportOptions, output: Path) -> None:
    """Write an adapter in a published form."""
    method = method_to_write(options.form, options.adapter, options.method)
    model = load_model(options.model)
    adapter = open_adapter(method, model, options.adapter or None)
    dtype = write_published(output, adapter, model, options.form, options.dtype)
    print(f"{output}: the adapter of {method} as {options.form}, {dtype}")


def export(model: Model, output: Path) -> None:
    """Write the base, and print its fingerprint as it will be loaded."""
    save_model(model, new_folder(str(output)))  # another export may have ended there meanwhile
    written = params_fingerprint(model.config, model.params)
    print(f"{output}: {model.name} as a Hugging Face directory, {model.dtype}, fingerprint {written}")
    if written != model.fingerprint:
        print(f"{model.dtype} rounds it to another base than {model.fingerprint}, whose adapters do not fit this one")
