"""Write an adapter as a folder that other software reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.folder import CONFIG
from jaxspec.drafters.published.form import Form
from jaxspec.drafters.published.table import FORMS, adapter_method
from jaxspec.errors import UserError, suggest
from jaxspec.files import replacing
from jaxspec.parallel.processes import is_leader
from jaxspec.weights.model import Model

_DTYPE = "float16"  # that trained adapters are stored in


def write_published(folder: Path, adapter: Adapter, model: Model, form: str, dtype: str = "") -> str:
    """Write config.json and the weights, in safetensors.

    Args:
      folder: the new folder.
      adapter: what to write.
      model: its base.
      form: a key of `FORMS`.
      dtype: of the weights; default that of the drafter that was imported, else float16.

    Returns:
      The dtype that it was written in.

    Raises:
      UserError: an unknown form, one of another method, a setting that it lacks, or weights that do not fit the dtype.
    """
    forms = {each.method: each for each in check_form(form)}
    if adapter.method.name not in forms:
        raise UserError(f"the form {form} is for {_either(forms)}, not {adapter.method.name}")
    chosen = forms[adapter.method.name]
    written = chosen.write(adapter, model)
    dtype = dtype or adapter.info.get("published", {}).get("dtype", _DTYPE)
    tensors = {name: _stored(name, array, dtype) for name, array in written.tensors.items()}
    config = {**written.config, "dtype": dtype, "torch_dtype": dtype}
    if is_leader():
        new = folder.with_name(f".{folder.name}.tmp")
        with replacing(folder, new):
            new.mkdir(parents=True)
            (new / CONFIG).write_text(json.dumps(config, indent=2))
            (new / chosen.weights[0]).write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    return dtype


def check_form(form: str) -> list[Form]:
    """The forms of that name that are written. Raises UserError where there is none."""
    writers = {name: [each for each in several if each.write] for name, several in FORMS.items()}
    names = [name for name, several in writers.items() if several]
    if form not in names:
        raise UserError(f"unknown form {form!r}{suggest(form, names)}; forms to write: {', '.join(names)}")
    return writers[form]


def method_to_write(form: str, adapter: str, method: str = "") -> str:
    """The method of which an adapter is to be written.

    Args:
      form: in which.
      adapter: its folder, or folder or hub name of a published drafter; empty for an adapter that ships.
      method: where it was said.

    Raises:
      UserError: an unknown form, one that is not for this method, or one of several methods without a folder.
    """
    methods = [each.method for each in check_form(form)]
    if not method and adapter and len(methods) > 1:
        method = adapter_method(adapter)
    if not method and len(methods) > 1:
        raise UserError(f"the form {form} is for {_either(methods)}: say which with --method, or give --adapter")
    if method and method not in methods:
        raise UserError(f"the form {form} is for {_either(methods)}, not {method}")
    return method or methods[0]


def _either(methods: Iterable[str]) -> str:
    return f"method {' or '.join(methods)}"


def _stored(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """A tensor as the file holds it. Raises UserError where some weights are too large for the dtype."""
    if array.dtype.kind in "iub":
        return np.asarray(array, order="C")
    with np.errstate(over="ignore"):  # said below
        stored = np.asarray(array.astype(jnp.dtype(dtype)), order="C")
    if not np.all(np.isfinite(stored.astype(np.float32))):
        raise UserError(f"some weights of {name!r} do not fit {dtype}; give --dtype bfloat16 or float32")
    return stored
