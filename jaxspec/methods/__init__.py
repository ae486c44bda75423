"""One file per paper, and the table of all methods by name."""

from jaxspec.decoding.method import Method
from jaxspec.methods.amphista import Amphista
from jaxspec.methods.bita import BiTA
from jaxspec.methods.dflash import DFlash
from jaxspec.methods.draft_model import DraftModel
from jaxspec.methods.eagle import Eagle
from jaxspec.methods.hidden_transfer import HiddenTransfer
from jaxspec.methods.hydra import Hydra
from jaxspec.methods.lookahead import Jacobi, Lookahead
from jaxspec.methods.medusa import Medusa
from jaxspec.methods.mtp import Mtp
from jaxspec.methods.ppd import PPD
from jaxspec.methods.prompt_lookup import PromptLookup
from jaxspec.methods.rest import Rest
from jaxspec.methods.self_speculative import SelfSpeculative
from jaxspec.methods.space import SPACE
from jaxspec.methods.suffix import Suffix
from jaxspec.methods.token_recycling import TokenRecycling

_TRAINED = (PPD, BiTA, SPACE, HiddenTransfer, Medusa, Hydra, Amphista, Eagle, DFlash, DraftModel, Mtp)
_ALL = (Method, *_TRAINED, PromptLookup, Suffix, Rest, TokenRecycling, Lookahead, Jacobi, SelfSpeculative)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in _ALL}

__all__ = [
    "METHODS",
    "PPD",
    "SPACE",
    "Amphista",
    "BiTA",
    "DFlash",
    "DraftModel",
    "Eagle",
    "HiddenTransfer",
    "Hydra",
    "Jacobi",
    "Lookahead",
    "Medusa",
    "Mtp",
    "PromptLookup",
    "Rest",
    "SelfSpeculative",
    "Suffix",
    "TokenRecycling",
]
