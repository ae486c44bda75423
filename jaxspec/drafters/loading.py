"""From a method's name to a drafter that is ready to decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.config import ModelConfig
from jaxspec.decoding.method import Method
from jaxspec.decoding.tree import Path as TreePath
from jaxspec.drafters.adapter import OWN_MODEL, WEIGHTS, Adapter, find_shipped, read_adapter
from jaxspec.drafters.choices import choose_tree
from jaxspec.drafters.draft_source import draft_source
from jaxspec.drafters.draft_steps import with_steps
from jaxspec.drafters.drafter import Drafter, finalized
from jaxspec.drafters.source import Source
from jaxspec.errors import UserError, suggest
from jaxspec.files import read_json
from jaxspec.methods import METHODS
from jaxspec.methods.draft_model import DraftModel
from jaxspec.trees import TreePlan, from_paths
from jaxspec.weights.load import Model
from jaxspec.weights.params import params_fingerprint


def load_drafter(
    name: str | Sequence[str],
    model: Model,
    adapter: str | Path | None = None,
    *,
    tree: str | TreePlan | Sequence[TreePath] | None = None,
    draft_vocabulary: int | None = None,
    batch_size: int = 1,
    temperature: float = 0.0,
    draft_model: Model | str | Path | None = None,
    draft_adapter: str | Path | None = None,
) -> Drafter:
    """A method, or a union of several, ready to decode on a base.

    Args:
      name: a key of `METHODS`; for a union several of them, as a list or joined as in `medusa+prompt_lookup`. One
        without adapter may have settings: `lookahead:window=5,ngram=4`; one with an adapter those that its class calls
        `adjustable`: `draft_model:confidence=0.5`.
      model: the base.
      adapter: folder of a trained adapter, or of a datastore; default the one that ships for this method and base. In a
        union it goes to the method that it belongs to.
      tree: the draft tree: `auto`, the fastest way to decode as far as tune.py has found out, on this machine or else
        on one like it, which may be autoregressive decoding; a specification like `sparse:16`; `best:8` for the best
        nodes of all offers, chosen in every step, within so many rows; a plan; or a list of paths. Default the
        adapter's own, and `best:8` for a union.
      draft_vocabulary: draft only so many of the base's most frequent tokens; 0 drafts all; default the adapter's own.
      batch_size: prompts decoded together, for `auto`.
      temperature: of sampling, for `auto`; 0 is greedy.
      draft_model: of the method `draft_model`: a base, as `load_model` takes or returns it; or the folder of what
        train.py made of this one's layers. Default the one that ships for this base.
      draft_adapter: folder of an adapter of PPD, or of another method with probes, for the draft model; or the name of
        the method, for the adapter of it that ships for the draft model.

    Raises:
      UserError: an unknown method, methods that cannot be joined, no adapter, one of another method or base, a draft
        model with other tokens, or a tree that does not fit.
    """
    drafter = _join(_parsed(name), model, adapter, draft_model, draft_adapter)
    if tree != "auto":
        return drafter.with_tree(tree, draft_vocabulary, drafter.note)
    if draft_vocabulary is not None:
        raise UserError(f"{drafter.name}: a tree of auto brings its own draft vocabulary, got {draft_vocabulary}")
    return choose_tree(drafter, batch_size, temperature)


def _check_known(name: str) -> None:
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{suggest(name, METHODS)}; methods: {', '.join(METHODS)}")


def method_names(name: str | Sequence[str]) -> list[str]:
    """The names of a union's methods, or of the one.

    Raises:
      UserError: an unknown one, settings that it does not have, or some that cannot be joined.
    """
    return [method.name for method, _ in _parsed(name)]


def _parsed(name: str | Sequence[str]) -> list[tuple[Method, dict[str, Any]]]:
    """The methods of a union, or the one, with their settings, as in `lookahead:window=5,ngram=4+suffix`."""
    texts = name.split("+") if isinstance(name, str) else list(name)
    parsed = [_parse_method(text) for text in texts]
    methods = [method for method, _ in parsed]
    joined, names = "+".join(texts), [method.name for method in methods]
    for method in methods:
        if names.count(method.name) > 1:
            raise UserError(f"{joined}: {method.name} is there twice")
        if len(names) > 1 and not method.max_distance:
            raise UserError(f"{joined}: {method.name} drafts nothing, leave it out")
    adding = [method.name for method in methods if method.adds_rows]
    if len(adding) > 1:
        raise UserError(f"{joined}: only one method of a union can have probes or a window, got {' and '.join(adding)}")
    if not names:
        raise UserError("a union needs at least one method")
    return parsed


def _parse_method(text: str) -> tuple[Method, dict[str, Any]]:
    """A method by its name, and the settings behind it. Raises UserError for what it does not have."""
    name, _, given = text.partition(":")
    _check_known(name)
    cls, settings = METHODS[name], {}
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    if cls.takes_adapter():
        defaults = {setting: defaults[setting] for setting in cls.adjustable}
        if given and not defaults:
            raise UserError(f"{text}: the settings of {name} are those of its adapter")
    for part in given.split(",") if given else []:
        setting, _, value = part.partition("=")
        if setting not in defaults:
            known = ", ".join(defaults) or "no settings"
            raise UserError(f"{text}: {name} has no setting {setting!r}{suggest(setting, defaults)}; it has {known}")
        kind = type(defaults[setting])
        try:
            settings[setting] = kind(value)
        except ValueError:
            kinds = {int: "a whole number", float: "a number"}
            raise UserError(f"{text}: {setting} must be {kinds[kind]}, got {value!r}") from None
    return cls(**settings), settings


def _join(
    parsed: Sequence[tuple[Method, dict[str, Any]]],
    model: Model,
    adapter: str | Path | None,
    draft_model: Model | str | Path | None,
    draft_adapter: str | Path | None,
) -> Drafter:
    """The methods with their adapters, on the base that they decode on."""
    names = [method.name for method, _ in parsed]
    note, trained = "", [name for name in names if METHODS[name].trainable]
    folders = {} if adapter is None else {_owner(names, Path(adapter)): adapter}
    for what, given in {"draft model": draft_model, "draft adapter": draft_adapter}.items():
        if given is not None and DraftModel.name not in names:
            raise UserError(f"{'+'.join(names)}: a {what} is for the method {DraftModel.name}")
    if draft_model is not None:
        if DraftModel.name in folders:
            raise UserError(f"{DraftModel.name} takes an adapter or a draft model, not both; got {str(adapter)!r} too")
        if not isinstance(draft_model, Model) and (Path(draft_model) / "adapter.json").exists():
            folders[DraftModel.name], draft_model = draft_model, None
    sources, own = [], model
    for plain, settings in parsed:
        name = plain.name
        if not plain.takes_adapter():
            sources.append(Source(plain, {}))
            continue
        if draft_model is not None and name == DraftModel.name:
            source, note = draft_source(draft_model, model, **settings)
            sources.append(source)
            continue
        loaded = open_adapter(name, model, folders.get(name))
        method, trainable, decodes = finalized(loaded.method, loaded.trainable, model)
        if decodes is not model and len(trained) > 1:
            raise UserError(
                f"{'+'.join(names)}: {name} tunes the base, and the other adapters are of the base as it was"
            )
        own = own if decodes is model else decodes
        sources.append(Source(dataclasses.replace(method, **settings), trainable, loaded))
    if draft_adapter is not None:
        sources = [_stepped(source, draft_adapter, model) for source in sources]
    return Drafter(tuple(sources), own, from_paths([]), note)


def _stepped(source: Source, adapter: str | Path, model: Model) -> Source:
    """A draft model that drafts in steps of an adapter, given like `draft_adapter`; any other source as it is."""
    if not isinstance(source.method, DraftModel):
        return source
    draft = source.method.as_draft_model(source.trainable, model.base)
    config, fingerprint = draft.decoder.config, params_fingerprint(draft.decoder.config, draft.params)
    folder = find_shipped(adapter, fingerprint) if adapter in METHODS else Path(adapter)
    if folder is None:
        raise UserError(f"no adapter of {adapter} ships for this draft model: train one, or give its folder")
    declared = _declared(folder)
    wanted = declared.get("fingerprint")
    if wanted != fingerprint:
        whose = "the base" if wanted == model.fingerprint else f"another base ({declared.get('base')!r})"
        raise UserError(f"{folder}: a draft adapter belongs to the draft model, and this one to {whose}")
    return with_steps(source, load_adapter(folder, config))


def _owner(names: Sequence[str], adapter: Path) -> str:
    """The one of several methods that an adapter belongs to. Where one alone takes any, `open_adapter` checks it."""
    takers = [name for name in names if METHODS[name].takes_adapter()]
    if not takers:
        raise UserError(f"{'+'.join(names)} takes no adapter, got {str(adapter)!r}")
    if len(takers) == 1:
        return takers[0]
    declared = _declared(adapter).get("method")
    if declared not in takers:
        raise UserError(f"{adapter}: this adapter belongs to method {declared!r}, not to {' or '.join(takers)}")
    return declared


def ships(name: str, model: Model) -> bool:
    """Whether a method can draft for a base as it is: without an adapter, or with one of this installation."""
    if not METHODS[name].takes_adapter():
        return METHODS[name]().max_distance > 0
    folder = find_shipped(name, model.fingerprint)
    return folder is not None and (folder / WEIGHTS).exists()


def load_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """The adapter in a folder, of whichever method, checked against the base's shapes. Raises UserError."""
    return read_adapter(folder, config, METHODS)


def open_adapter(name: str, model: Model, adapter: str | Path | None = None) -> Adapter:
    """The adapter that fits a method and a base; the arguments of `load_drafter`.

    Raises:
      UserError: a method that takes none, no adapter, or one of another method or base.
    """
    _check_known(name)
    if not METHODS[name].takes_adapter():
        raise UserError(f"{name} takes no adapter")
    folder = Path(adapter) if adapter else find_shipped(name, model.fingerprint)
    if folder is None:
        raise UserError(_how_to_make(name, model))
    if not adapter and not (folder / WEIGHTS).exists():
        raise UserError(
            f"the adapter of {name} is too large for the installed package: take the folder adapters/{folder.name} "
            "from the project's repository and give it with --adapter, from Python with adapter="
        )
    declared = _declared(folder)
    if declared.get("method") != name:
        raise UserError(f"{folder}: this adapter belongs to method {declared.get('method')!r}, not {name!r}")
    if declared.get("fingerprint") != model.fingerprint:
        beside = folder / OWN_MODEL
        hint = f"; its base was trained with it: give {beside} as the model" if beside.is_dir() else ""
        raise UserError(
            f"{folder}: this adapter was trained for another base ({declared.get('base')!r}, fingerprint "
            f"{declared.get('fingerprint')}); {model.name!r} has {model.fingerprint}{hint}"
        )
    return load_adapter(folder, model.config)


def _how_to_make(name: str, model: Model) -> str:
    """What to do where no adapter ships."""
    if program := METHODS[name].built_with:
        return f"{name} needs an adapter that {program} builds: run it and give its folder with --adapter"
    hint = ", or name another base with --draft-model" if name == DraftModel.name else ""
    return f"no adapter of {name} ships for {model.name!r}; train one with train.py and give its folder{hint}"


def _declared(folder: Path) -> dict[str, Any]:
    """What an adapter says of itself."""
    if not (folder / "adapter.json").exists():
        raise UserError(f"{folder}: no adapter there (adapter.json is missing)")
    return read_json(folder / "adapter.json")
