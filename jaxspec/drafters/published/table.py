"""The forms of published drafters by name, and how a folder is recognised as one of them."""

from __future__ import annotations

from pathlib import Path

from jaxspec.drafters.adapter import Adapter
from jaxspec.drafters.published import eagle3, speculators
from jaxspec.drafters.published.folder import CONFIG, PublishedFolder, find_folder, is_hub_name
from jaxspec.drafters.published.form import Form, Interpretation
from jaxspec.errors import UserError
from jaxspec.weights.load import Model

FORMS: dict[str, Form] = {
    "eagle3": eagle3.FORM,
    "speculators": speculators.EAGLE3,
}


def is_published(name_or_path: str | Path) -> bool:
    """Whether this names a published drafter rather than an adapter: a folder without adapter.json, or a hub name."""
    path = Path(name_or_path)
    if path.exists():
        return (path / CONFIG).exists() and not (path / "adapter.json").exists()
    return isinstance(name_or_path, str) and is_hub_name(name_or_path)


def read_published(name_or_path: str | Path, model: Model) -> list[Interpretation]:
    """A published drafter as adapters of a base: one, or one for each way to understand it.

    Raises:
      UserError: no such folder, an unknown form, a drafter for another base, or files that are not whole.
    """
    folder = PublishedFolder(find_folder(name_or_path))
    return FORMS[_form_of(folder)].read(folder, model)


def method_of_published(name_or_path: str | Path) -> str:
    """The method of a published drafter. Raises UserError as `read_published`."""
    return FORMS[_form_of(PublishedFolder(find_folder(name_or_path)))].method


def only_interpretation(name_or_path: str | Path, model: Model) -> Adapter:
    """A published drafter as an adapter. Raises UserError as `read_published`, and where there are several readings."""
    readings = read_published(name_or_path, model)
    if len(readings) > 1:
        meanings = ", or ".join(each.meaning for each in readings)
        raise UserError(
            f"{name_or_path}: its config.json can mean two things ({meanings}); `jaxspec import` tries both on the "
            "base's own answers: give the folder that it writes"
        )
    return readings[0].adapter


def _form_of(folder: PublishedFolder) -> str:
    """The form of a folder. Raises UserError for one that is unknown."""
    for name, form in FORMS.items():
        if form.recognises(folder.config):
            return name
    said = {key: folder.config.get(key) for key in ("architectures", "model_type", "speculators_model_type")}
    found = ", ".join(f"{key} {value!r:.60}" for key, value in said.items() if value)
    known = "; ".join(f"{name} ({form.about})" for name, form in FORMS.items())
    raise UserError(f"{folder.config_file}: no form of drafters that is known, found {found or 'none'}; known: {known}")
