"""Drafters on the host: adapters, sources, loading by a method's name (`METHODS`), tuned choices."""

from jaxspec.drafters.choices import as_chosen, choice_folder, choose_tree, tuned_choice
from jaxspec.drafters.loading import METHODS, load_adapter, load_drafter, method_names, open_adapter, ships

__all__ = [
    "METHODS",
    "as_chosen",
    "choice_folder",
    "choose_tree",
    "load_adapter",
    "load_drafter",
    "method_names",
    "open_adapter",
    "ships",
    "tuned_choice",
]
