"""Drafters on the host: adapters, how a drafter is written, sources, loading, tuned choices."""

from jaxspec.drafters.adapter import load_adapter
from jaxspec.drafters.choices import as_chosen, choice_folder, choose_tree, tuned_choice
from jaxspec.drafters.loading import load_drafter, open_adapter, ships
from jaxspec.drafters.spec import DrafterSpec, parse_drafter
from jaxspec.methods import METHODS

__all__ = [
    "METHODS",
    "DrafterSpec",
    "as_chosen",
    "choice_folder",
    "choose_tree",
    "load_adapter",
    "load_drafter",
    "open_adapter",
    "parse_drafter",
    "ships",
    "tuned_choice",
]
