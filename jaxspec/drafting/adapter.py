"""Adapters on disk: a method's trained pytree as safetensors, and what is needed to check and use it as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from jaxspec.config import ModelConfig
from jaxspec.decoding.loop import Drafter
from jaxspec.drafting.method import Method, PyTree
from jaxspec.drafting.tree import Path as TreePath
from jaxspec.drafting.tree import TreePlan, from_paths, parse_tree
from jaxspec.drafting.tree.plan import plan_from_json
from jaxspec.errors import UserError, suggest
from jaxspec.files import read_json, write_atomically
from jaxspec.methods import METHODS
from jaxspec.model.blocks import in_blocks
from jaxspec.parallel.processes import as_leader, host
from jaxspec.weights.load import Model
from jaxspec.weights.params import params_fingerprint

SHIPPED = Path(__file__).resolve().parents[2] / "adapters"
OWN_MODEL = "model"  # folder, beside an adapter, of a base that was trained with it
_FORMAT = 1
_FREQUENT = "frequent_tokens"  # a tensor beside those of the method


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A trained adapter.

    Attributes:
      method: its method with the settings it was trained with.
      trainable: the pytree, float32.
      fingerprint: names the base it belongs to.
      info: further content of adapter.json: `base` (name), `training`, `data`, `accuracy` [M][K] per distance and
        rank, `tree` (the candidate paths of its draft tree), `draft_vocabulary` (how many tokens it drafts, 0 all).
      frequent_tokens: ids by how often the base writes them, int32, what a draft vocabulary is taken from; None where
        that was not counted.
    """

    method: Method
    trainable: PyTree
    fingerprint: str
    info: dict[str, Any]
    frequent_tokens: np.ndarray | None = None

    @property
    def digest(self) -> str:
        """12 hex digits that name these weights."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.trainable):  # one at a time: all of a whole base may not fit
            digest.update(host(leaf).tobytes())
        return digest.hexdigest()[:12]


def save_adapter(folder: Path, adapter: Adapter, dtype: str = "float32") -> None:
    """Write adapter.safetensors and adapter.json.

    Args:
      folder: created where missing.
      adapter: what to write.
      dtype: of the weights.

    Raises:
      UserError: it cannot be written there.
    """
    flat = flax.traverse_util.flatten_dict(adapter.trainable, sep="/")
    tensors = {name: host(leaf).astype(dtype) for name, leaf in flat.items()}
    if adapter.frequent_tokens is not None:
        tensors[_FREQUENT] = adapter.frequent_tokens
    weights = safetensors.numpy.save(tensors)
    head = {
        "format": _FORMAT,
        "method": adapter.method.name,
        "settings": dataclasses.asdict(adapter.method),
        "fingerprint": adapter.fingerprint,
    }
    text = json.dumps(head | adapter.info, indent=1).encode()

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "adapter.safetensors", weights)
            write_atomically(folder / "adapter.json", text)
        except OSError as error:
            raise UserError(f"{folder}: the adapter cannot be written there ({error.strerror})") from None

    as_leader(write)


def load_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Read an adapter and check it against its own settings and the base's shapes.

    Raises:
      UserError: missing or truncated files, an unknown method or setting, a tensor missing, unknown or misshapen.
    """
    head = read_json(folder / "adapter.json")
    if head.get("format") != _FORMAT:
        raise UserError(f"{folder}/adapter.json: format {head.get('format')!r} is not {_FORMAT}")
    name, settings = head.get("method"), head.get("settings", {})
    if name not in METHODS:
        raise UserError(f"{folder}/adapter.json: unknown method {name!r}")
    try:
        method = METHODS[name](**settings)
        expected = flax.traverse_util.flatten_dict(method.abstract(config), sep="/")
    except TypeError as error:
        raise UserError(f"{folder}/adapter.json: settings do not fit {name}: {error}") from None
    file = folder / "adapter.safetensors"
    try:
        flat = safetensors.numpy.load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from None
    frequent = flat.pop(_FREQUENT, None)
    if frequent is not None and not _are_tokens(frequent, config.vocab_size):
        raise UserError(f"{file}: {_FREQUENT} must hold different token ids of the vocabulary of {config.vocab_size}")
    for key in sorted(expected.keys() | flat.keys()):
        if key not in flat:
            raise UserError(f"{file}: tensor {key!r} is missing")
        if key not in expected:
            raise UserError(f"{file}: unknown tensor {key!r}")
        if flat[key].shape != expected[key].shape:
            shape, wanted = list(flat[key].shape), list(expected[key].shape)
            raise UserError(f"{file}: tensor {key!r} has shape {shape}, {name} on this base needs {wanted}")
    trainable = flax.traverse_util.unflatten_dict({k: jnp.asarray(v, jnp.float32) for k, v in flat.items()}, sep="/")
    info = {k: v for k, v in head.items() if k not in ("format", "method", "settings", "fingerprint")}
    return Adapter(method, trainable, head.get("fingerprint", ""), info, frequent)


def _are_tokens(ids: np.ndarray, vocab_size: int) -> bool:
    """Whether an array is a list of different token ids."""
    whole = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
    return whole and len(np.unique(ids)) == ids.size and bool(np.all((ids >= 0) & (ids < vocab_size)))


def find_shipped(method: str, fingerprint: str) -> Path | None:
    """The folder of the adapter that ships for a method and a base, or None."""
    for file in sorted(SHIPPED.glob("*/adapter.json")):
        try:
            head = read_json(file)
        except UserError:  # a damaged neighbour is no reason to find nothing
            continue
        if head.get("method") == method and head.get("fingerprint") == fingerprint:
            return file.parent
    return None


def method_plan(method: Method, spec: str, accuracy: Sequence[Sequence[float]] | None) -> TreePlan:
    """A draft tree for a method, from its specification (see `parse_tree`) and accuracies [M][K]."""
    return parse_tree(spec, method.name, method.max_distance, accuracy, method.probe_rows)


def adapter_plan(adapter: Adapter, tree: str | TreePlan | Sequence[TreePath] | None) -> TreePlan:
    """The draft tree to decode with.

    Args:
      adapter: a trained adapter.
      tree: a specification, a plan, a list of paths, or None for the one that the adapter carries.

    Raises:
      UserError: a bad specification, a tree without candidates or deeper than the method's distances.
    """
    method = adapter.method
    if tree is None and "tree" not in adapter.info:
        raise UserError("the adapter holds no tree; train.py writes it")
    if isinstance(tree, str):
        plan = method_plan(method, tree, adapter.info.get("accuracy"))
    elif tree is None:
        plan = plan_from_json(adapter.info["tree"], "the adapter's tree")
    else:
        plan = tree if isinstance(tree, TreePlan) else from_paths(tree)
    if not 1 <= plan.depth <= method.max_distance:
        raise UserError(f"a tree of {method.name} is 1 to {method.max_distance} candidates deep, not {plan.depth}")
    if len(plan.states) > 1 and not method.probe_distances:
        raise UserError(f"{method.name} has no probes: it takes one tree, not {len(plan.states)} that depend on them")
    return plan


def load_method(
    name: str,
    model: Model,
    adapter: str | Path | None = None,
    *,
    tree: str | TreePlan | Sequence[TreePath] | None = None,
    draft_vocabulary: int | None = None,
) -> Drafter:
    """A method ready to decode on a base.

    Args:
      name: a key of `METHODS`.
      model: the base.
      adapter: folder of a trained adapter; default the one that ships for this method and base.
      tree: the draft tree: a specification like `sparse:16`, a plan, or a list of paths; default the adapter's own.
      draft_vocabulary: draft only so many of the base's most frequent tokens; 0 drafts all; default the adapter's own.

    Raises:
      UserError: an unknown method, no adapter, one of another method or base, or a tree that does not fit.
    """
    if name in METHODS and not METHODS[name].trainable:
        if adapter is not None:
            raise UserError(f"{name} takes no adapter, got {str(adapter)!r}")
        if tree is not None:
            raise UserError(f"{name} drafts nothing and has no tree, got {str(tree)!r}")
        if draft_vocabulary is not None:
            raise UserError(f"{name} drafts nothing and has no draft vocabulary, got {draft_vocabulary}")
        return plain_drafter()
    _, loaded = open_adapter(name, model, adapter)
    return make_drafter(loaded, adapter_plan(loaded, tree), model, draft_vocabulary)


def plain_drafter(own: Model | None = None) -> Drafter:
    """Autoregressive decoding, of a method's own base where one is given."""
    return Drafter({}, from_paths([]).arrays(0), Method(), own=own)


def settle(adapter: Adapter, model: Model) -> tuple[Adapter, Model]:
    """What decodes: for a method that tunes its base an adapter and the base as tuned, else what was given."""
    method = adapter.method
    if not method.tunes_base:
        return adapter, model
    key = (method, adapter.digest)
    if key not in model.tuned:
        kept, trainable, params = method.settled(adapter.trainable, model.base)
        own = dataclasses.replace(model, params=params, fingerprint=params_fingerprint(model.config, params))
        model.tuned[key] = kept, trainable, own
    kept, trainable, own = model.tuned[key]
    return dataclasses.replace(adapter, method=kept, trainable=trainable, fingerprint=own.fingerprint), own


def make_drafter(adapter: Adapter, plan: TreePlan, model: Model, draft_vocabulary: int | None = None) -> Drafter:
    """An adapter with a tree, ready to decode.

    Args:
      adapter: what drafts.
      plan: its tree.
      model: the base.
      draft_vocabulary: as in `load_method`.

    Raises:
      UserError: a draft vocabulary that the adapter cannot give, or a rank that is not in it.
    """
    count = adapter.info.get("draft_vocabulary", 0) if draft_vocabulary is None else draft_vocabulary
    check_drafting(adapter, plan, model, count)
    adapter, own = settle(adapter, model)
    base = own.base.drafting(jnp.asarray(adapter.frequent_tokens[:count])) if count else own.base
    trainable, tree = adapter.method.prepared(adapter.trainable, base), plan.arrays(adapter.method.probe_distances)
    drafter = Drafter(trainable, tree, adapter.method, base.draft_vocabulary, own if own is not model else None)
    # A prompt's drafts are made from about as many rows as there are distances, however many nodes the tree has.
    return in_blocks(drafter, own.block_for(adapter.method.max_distance), (*adapter.method.kernels, "columns"))


def check_drafting(adapter: Adapter, plan: TreePlan, model: Model, draft_vocabulary: int) -> None:
    """Raise UserError for a draft vocabulary that the adapter cannot give, or that lacks a rank of the tree."""
    check_drafts(draft_vocabulary, 0 if adapter.frequent_tokens is None else len(adapter.frequent_tokens))
    tokens = draft_vocabulary or model.config.vocab_size
    if plan.max_rank >= tokens:
        raise UserError(f"tree: rank {plan.max_rank} is outside the vocabulary of {tokens}")


def check_drafts(count: int, most: int) -> None:
    """Raise UserError for a draft vocabulary of another size than 0, all tokens, to `most`."""
    if type(count) is not int:
        raise UserError(f"draft-vocabulary must be a whole number, got {count!r}")
    if count and not most:
        raise UserError(f"draft-vocabulary {count}: the adapter does not say which tokens are frequent")
    if not 0 <= count <= most:
        raise UserError(f"draft-vocabulary must be 0 (all tokens) or at most {most}, got {count}")


def open_adapter(name: str, model: Model, adapter: str | Path | None = None) -> tuple[Path, Adapter]:
    """The folder and content of an adapter that fits a method and a base.

    Args:
      name: a key of `METHODS`.
      model: the base.
      adapter: its folder; default the one that ships for this method and base.

    Raises:
      UserError: a method that takes none, no adapter, or one of another method or base.
    """
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{suggest(name, METHODS)}; methods: {', '.join(METHODS)}")
    if not METHODS[name].trainable:
        raise UserError(f"{name} takes no adapter")
    folder = Path(adapter) if adapter else find_shipped(name, model.fingerprint)
    if folder is None:
        raise UserError(f"no adapter of {name} ships for {model.name!r}; train one with train.py and give its folder")
    if not (folder / "adapter.json").exists():
        raise UserError(f"{folder}: no adapter there (adapter.json is missing)")
    declared = read_json(folder / "adapter.json")
    if declared.get("method") != name:
        raise UserError(f"{folder}: this adapter belongs to method {declared.get('method')!r}, not {name!r}")
    if declared.get("fingerprint") != model.fingerprint:
        beside = folder / OWN_MODEL
        hint = f"; its base was trained with it: give {beside} as the model" if beside.is_dir() else ""
        raise UserError(
            f"{folder}: this adapter was trained for another base ({declared.get('base')!r}, fingerprint "
            f"{declared.get('fingerprint')}); {model.name!r} has {model.fingerprint}{hint}"
        )
    return folder, load_adapter(folder, model.config)
