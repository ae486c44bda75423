"""Load a drafter from its text: find adapters, check that they fit the base, choose a tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxspec.config import ModelConfig
from jaxspec.drafters.adapter import OWN_MODEL, WEIGHTS, Adapter, find_shipped, load_adapter, read_head
from jaxspec.drafters.choices import Use, shaped
from jaxspec.drafters.draft_source import draft_source
from jaxspec.drafters.draft_steps import with_steps
from jaxspec.drafters.drafter import Drafter, finalized, join_notes
from jaxspec.drafters.published import adapter_method, in_base, is_published, method_of_published, only_interpretation
from jaxspec.drafters.source import Source
from jaxspec.drafters.spec import DrafterSpec, parse_drafter
from jaxspec.errors import UserError
from jaxspec.methods import METHODS
from jaxspec.methods.draft_model import DraftModel
from jaxspec.trees import TreePlan
from jaxspec.trees.arrays import Path as TreePath
from jaxspec.weights.model import Model
from jaxspec.weights.params import params_fingerprint


def load_drafter(
    text: str | Sequence[str] | DrafterSpec,
    model: Model,
    adapter: str | Path | None = None,
    *,
    tree: str | TreePlan | Sequence[TreePath] | None = None,
    draft_vocabulary: int | None = None,
    batch_size: int = 1,
    temperature: float | None = None,
    slots: int | None = None,
    draft_model: Model | str | Path | None = None,
    draft_adapter: str | Path | None = None,
) -> Drafter:
    """A method, or a union of several, ready to decode on a base.

    Args:
      text: a drafter as `parse_drafter` reads it, such as `ppd`, `lookahead:window=5,ngram=4` or `medusa+suffix
        tree=best:5 vocabulary=8192`, or what that returned; or a list of methods. The arguments from `adapter` on,
        without `batch_size`, `temperature` and `slots`, are short forms of its settings. Settings of a method whose
        adapter brings them are those that its class calls `adjustable`: `draft_model:confidence=0.5`.
      model: the base.
      adapter: folder of a trained adapter, folder or hub name of a published drafter, or folder of a datastore; default
        the one that ships for this method and base. In a union it goes to the method that it belongs to.
      tree: the draft tree: `own`, the adapter's own, and `best:8` for a union; a specification like `sparse:16`;
        `best:8` for the best nodes of all offers, chosen in every step, within so many rows; a plan; or a list of
        paths. Default `auto`, the fastest way to decode that `jaxspec tune` has found on this machine, which may be
        autoregressive decoding; where it was not run, the best nodes of all offers, as many as pay in every step, down
        to none.
      draft_vocabulary: draft only so many of the base's most frequent tokens; 0 drafts all; default the adapter's own.
      batch_size: prompts decoded together, for `auto`.
      temperature: of sampling, for the choice of `jaxspec tune`; 0 is greedy. Without it a choice counts only where the
        same was tuned for greedy decoding and for sampling.
      slots: of a server, in place of `batch_size` for the choice of `jaxspec tune`: texts decoded together at most.
      draft_model: of the method `draft_model`: a base, as `load_model` takes or returns it; or the folder of one
        made of this one's layers by `jaxspec train`. Default the one that ships for this base.
      draft_adapter: folder of an adapter of PPD, or of another method with probes, for the draft model; or the name of
        the method, for the adapter of it that ships for the draft model.

    Raises:
      UserError: a drafter that cannot be read, a setting given in the text and as an argument, no adapter, one of
        another method or base, a draft model with other tokens, or a tree that does not fit.
    """
    spec = text if isinstance(text, DrafterSpec) else parse_drafter(text)
    spec = spec.with_settings(
        tree=tree, vocabulary=draft_vocabulary, adapter=adapter, draft=draft_model, draft_adapter=draft_adapter
    )
    return shaped(_with_adapters(spec, model), spec.tree, spec.vocabulary, Use(batch_size, temperature, slots))


def _with_adapters(spec: DrafterSpec, model: Model) -> Drafter:
    """The methods with their adapters, on the base that they decode on."""
    names, draft = [each.method.name for each in spec.methods], spec.draft
    joined = "+".join(names)
    facts = [each.method.facts(model.config) for each in spec.methods]
    folders = {} if spec.adapter is None else {_owner(names, spec.adapter, model.config): spec.adapter}
    for what, given in {"draft model": draft, "draft adapter": spec.draft_adapter}.items():
        if given is not None and DraftModel.name not in names:
            raise UserError(f"{joined}: a {what} is for the method {DraftModel.name}")
    if draft is not None:
        if DraftModel.name in folders:
            raise UserError(
                f"{DraftModel.name} takes an adapter or a draft model, not both; got {str(spec.adapter)!r} too"
            )
        if not isinstance(draft, Model) and (Path(draft) / "adapter.json").exists():
            folders[DraftModel.name], draft = draft, None
    sources, own, notes = [], model, []
    for name, known, each in zip(names, facts, spec.methods, strict=True):
        settings = dict(each.settings)
        if known.adapter and settings and each.method.adjustable is None:
            raise UserError(f"{each.text}: the settings of {name} are those of its adapter")
        if not known.adapter:
            source = Source(each.method, {}, model.config)
        elif draft is not None and name == DraftModel.name:
            source, note = draft_source(draft, model, **settings)
            notes.append(note)
        else:
            loaded = open_adapter(name, model, folders.get(name))
            notes.append(_other_weights(name, loaded, model))
            final, decodes = finalized(loaded.method, loaded.trainable, model)
            if decodes is not model:
                if sum(each.trained for each in facts) > 1:
                    raise UserError(
                        f"{joined}: {name} tunes the base, and the other adapters are of the base as it was"
                    )
                own = decodes
            source = Source(dataclasses.replace(final.method, **settings), final.trainable, model.config, loaded)
        sources.append(source)
    if spec.draft_adapter is not None:
        sources = [_stepped(source, spec.draft_adapter, model) for source in sources]
    return Drafter(tuple(sources), own, note=join_notes(*notes))


def _other_weights(name: str, adapter: Adapter, model: Model) -> str:
    """A line where an adapter was trained on the base with weights in another form; empty where it was not."""
    trained, ours = adapter.info.get("weights", ""), model.weights
    if trained == ours:
        return ""
    with_what = [f"{weights} weights" if weights else "weights as floats" for weights in (trained, ours)]
    return f"the adapter of {name} was trained on a base with {with_what[0]}, and decodes with {with_what[1]}"


def _stepped(source: Source, adapter: str | Path, model: Model) -> Source:
    """A draft model that drafts in steps of an adapter, given like `draft_adapter`; any other source as it is."""
    if not isinstance(source.method, DraftModel):
        return source
    draft = source.method.as_draft_model(source.trainable, model.base)
    config, fingerprint = draft.decoder.config, params_fingerprint(draft.decoder.config, draft.params)
    folder = find_shipped(adapter, fingerprint) if adapter in METHODS else Path(adapter)
    if folder is None:
        raise UserError(f"no adapter of {adapter} ships for this draft model: train one, or give its folder")
    head = read_head(folder)
    wanted = head.get("fingerprint")
    if wanted != fingerprint:
        whose = "the base" if wanted == model.fingerprint else f"another base ({head.get('base')!r})"
        raise UserError(f"{folder}: a draft adapter belongs to the draft model, and this one to {whose}")
    return with_steps(source, load_adapter(folder, config, head))


def _owner(names: Sequence[str], adapter: str | Path, config: ModelConfig) -> str:
    """The one of several methods that an adapter belongs to. Where one alone takes any, `open_adapter` checks it."""
    takers = [name for name in names if METHODS[name]().facts(config).adapter]
    if not takers:
        raise UserError(f"{'+'.join(names)} takes no adapter, got {str(adapter)!r}")
    if len(takers) == 1:
        return takers[0]
    declared = adapter_method(adapter)
    if declared not in takers:
        raise UserError(f"{adapter}: this adapter belongs to method {declared!r}, not to {' or '.join(takers)}")
    return declared


def ships(name: str, model: Model) -> bool:
    """Whether a method can draft for a base as it is: without an adapter, with one of this installation or the base."""
    facts = METHODS[name]().facts(model.config)
    if not facts.adapter:
        return facts.distances > 0
    folder = find_shipped(name, model.fingerprint)
    if folder is None:
        return _module(name, model) is not None
    return (folder / WEIGHTS).exists()


def _module(name: str, model: Model) -> Adapter | None:
    """The adapter that the base's own files hold; None for methods whose adapters are no modules, and where none is."""
    return in_base(name, model) if METHODS[name]().facts(model.config).adapter == "module" else None


def open_adapter(name: str, model: Model, adapter: str | Path | None = None) -> Adapter:
    """The adapter that fits a method and a base; the arguments of `load_drafter`.

    Raises:
      UserError: a method that takes none, no adapter, or one of another method or base.
    """
    if not METHODS[name]().facts(model.config).adapter:
        raise UserError(f"{name} takes no adapter")
    if adapter and is_published(adapter):
        if (method := method_of_published(adapter)) != name:
            raise UserError(f"{adapter}: this drafter belongs to method {method!r}, not {name!r}")
        return only_interpretation(adapter, model)
    folder = Path(adapter) if adapter else find_shipped(name, model.fingerprint)
    if folder is None and (module := _module(name, model)):
        return module
    if folder is None:
        raise UserError(_how_to_make(name, model))
    if not adapter and not (folder / WEIGHTS).exists():
        raise UserError(
            f"the adapter of {name} is too large for the installed package: take the folder adapters/{folder.name} "
            "from the project's repository and give it with --adapter, from Python with adapter="
        )
    head = read_head(folder)
    if head.get("method") != name:
        raise UserError(
            f"{folder}: this adapter belongs to method {head.get('method')!r}, not {name!r}; "
            "--method must name the adapter's, or be left out"
        )
    if head.get("fingerprint") != model.fingerprint:
        beside = folder / OWN_MODEL
        hint = "give its base with --model, or train an adapter for this one"
        if beside.is_dir():
            hint = f"its base was trained with it: give {beside} as the model"
        raise UserError(
            f"{folder}: this adapter was trained for another base ({head.get('base')!r}, fingerprint "
            f"{head.get('fingerprint')}); {model.name!r} has {model.fingerprint}; {hint}"
        )
    return load_adapter(folder, model.config, head)


def _how_to_make(name: str, model: Model) -> str:
    """Advice where no adapter ships."""
    facts = METHODS[name]().facts(model.config)
    if facts.adapter == "module":
        return f"{name} is a part of the base's own files, and {model.name!r} has none; see docs/published.md"
    if not facts.trained:
        command = f"jaxspec {facts.adapter}"
        return f"{name} needs an adapter that `{command}` builds: run it and give its folder with --adapter"
    hint = ", or name another base with --draft-model" if name == DraftModel.name else ""
    return f"no adapter of {name} ships for {model.name!r}; train one with `jaxspec train` and give its folder{hint}"
