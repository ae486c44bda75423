"""Drafters on the host: adapters, how a drafter is written, sources, loading, tuned choices."""

from jaxspec.drafters.adapter import load_adapter
from jaxspec.drafters.choices import choice_folder, choose_tree, shaped
from jaxspec.drafters.loading import load_drafter, open_adapter, ships
from jaxspec.drafters.published import adapter_method
from jaxspec.drafters.spec import DrafterSpec, parse_drafter
from jaxspec.methods import METHODS

__all__ = [
    "METHODS",
    "DrafterSpec",
    "adapter_method",
    "choice_folder",
    "choose_tree",
    "load_adapter",
    "load_drafter",
    "open_adapter",
    "parse_drafter",
    "shaped",
    "ships",
]
