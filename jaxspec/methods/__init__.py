"""One file per paper. `METHODS` is the only place that lists them."""

from __future__ import annotations

from jaxspec.methods.base import Method
from jaxspec.methods.ppd import PPD

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (Method, PPD)}

__all__ = ["METHODS", "PPD", "Method"]
