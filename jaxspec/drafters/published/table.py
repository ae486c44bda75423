"""The forms of published drafters by name, and how a folder is recognised as one of them."""

from __future__ import annotations

from pathlib import Path

from jaxspec.drafters.adapter import Adapter, read_head
from jaxspec.drafters.published import (
    deepspec,
    dflash,
    eagle3,
    hydra,
    medusa,
    mtp,
    ppd,
    speculators_dflash,
    speculators_eagle3,
)
from jaxspec.drafters.published.folder import CONFIGS, PublishedFolder, find_folder, hub_patterns, is_hub_name
from jaxspec.drafters.published.form import Form, Interpretation
from jaxspec.errors import UserError
from jaxspec.methods import METHODS
from jaxspec.weights.model import Model

FORMS: dict[str, tuple[Form, ...]] = {  # one for every method that a form is of
    "eagle3": (eagle3.FORM,),
    "dflash": (dflash.FORM,),
    "speculators": (speculators_eagle3.FORM, speculators_dflash.FORM),
    "deepspec": (deepspec.EAGLE3,),
    "medusa": (medusa.FORM,),
    "hydra": (hydra.FORM,),
    "ppd": (ppd.FORM,),
    "mtp": (mtp.FORM,),
}


def is_published(name_or_path: str | Path) -> bool:
    """Whether this names a published drafter rather than an adapter: a folder without adapter.json, or a hub name."""
    path = Path(name_or_path)
    if path.exists():
        return any((path / name).exists() for name in CONFIGS) and not (path / "adapter.json").exists()
    return isinstance(name_or_path, str) and is_hub_name(name_or_path)


def read_published(name_or_path: str | Path, model: Model) -> list[Interpretation]:
    """A published drafter as adapters of a base: one, or one for each way to understand it.

    Raises:
      UserError: no such folder, an unknown form, a drafter for another base, or files that are not whole.
    """
    form = _form_at(name_or_path)
    path = find_folder(name_or_path, hub_patterns(form.weights, form.further))
    return form.read(PublishedFolder(path, form.weights, form.further), model)


def method_of_published(name_or_path: str | Path) -> str:
    """The method of a published drafter. Raises UserError as `read_published`."""
    return _form_at(name_or_path).method


def adapter_method(adapter: str | Path) -> str:
    """The name of the method of an adapter's folder, or of a published drafter by its folder or hub name.

    Raises UserError for what is neither, or an unknown method.
    """
    if is_published(adapter):
        return method_of_published(adapter)
    name = read_head(Path(adapter)).get("method")
    if name not in METHODS:
        raise UserError(f"{adapter}/adapter.json: unknown method {name!r}")
    return name


def only_interpretation(name_or_path: str | Path, model: Model) -> Adapter:
    """A published drafter as an adapter. Raises UserError as `read_published`, and where there are several readings."""
    readings = read_published(name_or_path, model)
    if len(readings) > 1:
        meanings = ", or ".join(each.meaning for each in readings)
        raise UserError(
            f"{name_or_path}: its config.json can mean {len(readings)} things ({meanings}); `jaxspec import` tries "
            "them on the base's own answers: give the folder that it writes"
        )
    return readings[0].adapter


def in_base(method: str, model: Model) -> Adapter | None:
    """The drafter of a method that the base's own files hold, by the first of its readings; None where they hold none.

    Raises UserError as `read_published`.
    """
    if not is_published(model.name):
        return None
    form = _form_of(PublishedFolder(find_folder(model.name, CONFIGS)))
    return read_published(model.name, model)[0].adapter if form is not None and form.method == method else None


def _form_of(folder: PublishedFolder) -> Form | None:
    """The form of a folder by its config.json."""
    return next((form for forms in FORMS.values() for form in forms if form.recognises(folder.config)), None)


def _form_at(name_or_path: str | Path) -> Form:
    """The form of a folder or hub name: weights of an unknown form are not even fetched.

    Raises UserError for one that is unknown.
    """
    folder = PublishedFolder(find_folder(name_or_path, CONFIGS))
    form = _form_of(folder)
    if form is not None:
        return form
    keys = ("architectures", "model_type", "speculators_model_type", "peft_type")
    found = ", ".join(f"{key} {folder.config[key]!r:.60}" for key in keys if folder.config.get(key))
    known = "; ".join(f"{name} ({form.about})" for name, forms in FORMS.items() for form in forms)
    raise UserError(f"{folder.config_file}: no form of drafters that is known, found {found or 'none'}; known: {known}")
