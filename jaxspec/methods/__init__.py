"""One file per paper."""

from jaxspec.methods.amphista import Amphista
from jaxspec.methods.bita import BiTA
from jaxspec.methods.dflash import DFlash
from jaxspec.methods.draft_model import DraftModel
from jaxspec.methods.eagle import Eagle
from jaxspec.methods.hidden_transfer import HiddenTransfer
from jaxspec.methods.hydra import Hydra
from jaxspec.methods.lookahead import Jacobi, Lookahead
from jaxspec.methods.medusa import Medusa
from jaxspec.methods.ppd import PPD
from jaxspec.methods.prompt_lookup import PromptLookup
from jaxspec.methods.rest import Rest
from jaxspec.methods.self_speculative import SelfSpeculative
from jaxspec.methods.space import SPACE
from jaxspec.methods.suffix import Suffix
from jaxspec.methods.token_recycling import TokenRecycling

__all__ = [
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
    "PromptLookup",
    "Rest",
    "SelfSpeculative",
    "Suffix",
    "TokenRecycling",
]
