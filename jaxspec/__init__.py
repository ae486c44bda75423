"""Lossless parallel decoding for LLaMA-style language models in JAX and Flax.

model = jaxspec.load_model()
drafter = jaxspec.load_drafter("ppd", model)
[answer] = jaxspec.generate(drafter, ["Why is the sky blue?"])
"""

import importlib
import os
from typing import Any

from jaxspec.versions import check_versions

check_versions()
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its advice is to install PyTorch

_NAMES = {  # by the module that defines them, which is imported when one is first asked for
    "jaxspec.config": ("ModelConfig", "SamplingConfig"),
    "jaxspec.decoding.acceptance": ("Block", "Match", "Rejection", "Typical"),
    "jaxspec.drafters.drafter": ("Drafter", "autoregressive"),
    "jaxspec.drafters.loading": ("load_drafter",),
    "jaxspec.errors": ("UserError",),
    "jaxspec.generation.generate": ("Generation", "generate", "stream"),
    "jaxspec.serving.engine": ("Engine", "Limits"),
    "jaxspec.training.settings": ("DataConfig", "TrainConfig"),
    "jaxspec.weights.load": ("load_model",),
    "jaxspec.weights.model": ("Model",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_MODULE_OF, "tree"])


def __getattr__(name: str) -> Any:
    if name == "tree":
        return importlib.import_module("jaxspec.trees")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
