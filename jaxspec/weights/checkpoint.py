"""Orbax checkpoints of whole bases, as a full fine-tuning writes them.

config.json     as in a Hugging Face directory, with end-of-text ids and the base's fingerprint
params/         the parameter tree, an Orbax checkpoint
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config import ModelConfig
from jaxspec.errors import UserError, first_line
from jaxspec.files import read_json
from jaxspec.model.decoder import abstract_params
from jaxspec.parallel.processes import is_leader
from jaxspec.parallel.sharding import placed, put_beside
from jaxspec.weights.families import parse_config
from jaxspec.weights.hf import write_config
from jaxspec.weights.params import params_fingerprint
from jaxspec.weights.parts import as_held, with_split_gates
from jaxspec.weights.quantizing import small_tree

_PARAMS = "params"
_FINGERPRINT = "jaxspec_fingerprint"  # of the parameters as written: other dtypes may round to another one


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds such a checkpoint."""
    return (folder / _PARAMS).is_dir()


def save_checkpoint(folder: Path, config: ModelConfig, params: dict, eos: tuple[int, ...] = ()) -> None:
    """Write config.json and params/ into a folder."""
    import orbax.checkpoint as ocp  # here and below, since whoever only decodes would wait for it

    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / _PARAMS).resolve(), with_split_gates(params))
    fingerprint = params_fingerprint(config, params)  # every process must take part
    if is_leader():
        write_config(folder, config, eos, **{_FINGERPRINT: fingerprint})


def load_checkpoint(
    folder: Path, dtype: jnp.dtype, mesh: Mesh | None = None, form: str = ""
) -> tuple[ModelConfig, dict, str]:
    """Config, parameters and fingerprint of a checkpoint, on whatever devices it was written.

    For `dtype`, `mesh` and `form` see `load_params`; here the floats are all read before they are quantized.

    Raises:
      UserError: a file is missing or damaged, or the parameters do not match the config.
    """
    import orbax.checkpoint as ocp

    file = folder / "config.json"
    content = read_json(file)
    if not isinstance(content.get(_FINGERPRINT), str):
        raise UserError(f"{file}: key {_FINGERPRINT!r} is missing; `jaxspec train` writes it")
    config = parse_config(content, str(file))
    wanted = placed(abstract_params(config, dtype), mesh)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore((folder / _PARAMS).resolve(), wanted)
    except Exception as error:  # Orbax raises many kinds
        raise UserError(f"{folder / _PARAMS}: not a checkpoint of these shapes ({first_line(error)})") from None
    params = jax.tree.map(jnp.asarray, params)
    held = small_tree(as_held(params), form, str(folder))
    return config, put_beside(params, held), content[_FINGERPRINT]
