"""Lossless parallel decoding for LLaMA-style language models in JAX and Flax.

model = jaxspec.load_model()
method = jaxspec.load_method("ppd", model)
[answer] = jaxspec.generate(model, method, ["Why is the sky blue?"])
"""

import os

from jaxspec.versions import check_versions

check_versions()
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its advice is to install PyTorch

from jaxspec.config import DataConfig, ModelConfig, SamplingConfig, TrainConfig
from jaxspec.decoding.acceptance import Match, Rejection, Typical
from jaxspec.decoding.generate import Generation, generate, stream
from jaxspec.drafting import tree
from jaxspec.drafting.adapter import load_method
from jaxspec.drafting.choice import load_tuned
from jaxspec.errors import UserError
from jaxspec.weights.load import Model, load_model

__all__ = [
    "DataConfig",
    "Generation",
    "Match",
    "Model",
    "ModelConfig",
    "Rejection",
    "SamplingConfig",
    "TrainConfig",
    "Typical",
    "UserError",
    "generate",
    "load_method",
    "load_model",
    "load_tuned",
    "stream",
    "tree",
]
