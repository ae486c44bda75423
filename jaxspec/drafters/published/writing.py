"""Write an adapter as a folder that other software reads."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published.folder import CONFIG
from jaxspec.drafters.published.table import FORMS
from jaxspec.errors import UserError, suggest
from jaxspec.files import replacing
from jaxspec.parallel.processes import is_leader
from jaxspec.weights.load import Model
from jaxspec.weights.shards import WEIGHTS

_DTYPE = "float16"  # that trained adapters are stored in


def write_published(folder: Path, adapter: Adapter, model: Model, form: str, dtype: str = "") -> str:
    """Write config.json and model.safetensors.

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
    check_form(form)
    if FORMS[form].method != adapter.method.name:
        raise UserError(f"the form {form} is for method {FORMS[form].method}, not {adapter.method.name}")
    written = FORMS[form].write(adapter, model)
    dtype = dtype or adapter.info.get("published", {}).get("dtype", _DTYPE)
    tensors = {name: _stored(name, array, dtype) for name, array in written.tensors.items()}
    config = {**written.config, "dtype": dtype, "torch_dtype": dtype}
    if is_leader():
        new = folder.with_name(f".{folder.name}.tmp")
        with replacing(folder, new):
            new.mkdir(parents=True)
            (new / CONFIG).write_text(json.dumps(config, indent=2))
            (new / WEIGHTS[0]).write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    return dtype


def check_form(form: str) -> None:
    """Raise UserError for a form that is unknown, or that is only read."""
    writers = [name for name, each in FORMS.items() if each.write]
    if form not in writers:
        raise UserError(f"unknown form {form!r}{suggest(form, writers)}; forms to write: {', '.join(writers)}")


def _stored(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """A tensor as the file holds it. Raises UserError where some weights are too large for the dtype."""
    if array.dtype.kind in "iub":
        return np.asarray(array, order="C")
    with np.errstate(over="ignore"):  # said below
        stored = np.asarray(array.astype(jnp.dtype(dtype)), order="C")
    if not np.all(np.isfinite(stored.astype(np.float32))):
        raise UserError(f"some weights of {name!r} do not fit {dtype}; give --dtype bfloat16 or float32")
    return stored
