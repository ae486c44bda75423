"""Lossless parallel decoding for LLaMA-style language models in JAX and Flax.

model = jaxspec.load_model()
drafter = jaxspec.load_drafter("ppd", model)
[answer] = jaxspec.generate(drafter, ["Why is the sky blue?"])
"""

import os

from jaxspec.versions import check_versions

check_versions()
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its advice is to install PyTorch

from jaxspec import trees as tree
from jaxspec.config import DataConfig, ModelConfig, SamplingConfig, TrainConfig
from jaxspec.decoding.acceptance import Match, Rejection, Typical
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import Generation, generate, stream
from jaxspec.serving.engine import Engine, Limits
from jaxspec.weights.load import Model, load_model

__all__ = [
    "DataConfig",
    "Drafter",
    "Engine",
    "Generation",
    "Limits",
    "Match",
    "Model",
    "ModelConfig",
    "Rejection",
    "SamplingConfig",
    "TrainConfig",
    "Typical",
    "UserError",
    "autoregressive",
    "generate",
    "load_drafter",
    "load_model",
    "stream",
    "tree",
]
