"""One file per paper. `METHODS` is the only place that lists them."""

from __future__ import annotations

from jaxspec.drafting.method import Method
from jaxspec.methods.amphista import Amphista
from jaxspec.methods.bita import BiTA
from jaxspec.methods.hidden_transfer import HiddenTransfer
from jaxspec.methods.hydra import Hydra
from jaxspec.methods.medusa import Medusa
from jaxspec.methods.ppd import PPD
from jaxspec.methods.space import SPACE

METHODS: dict[str, type[Method]] = {
    cls.name: cls for cls in (Method, PPD, BiTA, SPACE, HiddenTransfer, Medusa, Hydra, Amphista)
}

__all__ = ["METHODS", "PPD", "SPACE", "Amphista", "BiTA", "HiddenTransfer", "Hydra", "Medusa", "Method"]
