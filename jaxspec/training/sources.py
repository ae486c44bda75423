"""Training data that published methods share, cut as their configs cut it."""

import dataclasses

from jaxspec.config import DataConfig

SHAREGPT = DataConfig(
    prompts="Aeala/ShareGPT_Vicuna_unfiltered",
    column="conversations",
    max_prompt_tokens=512,
    max_answer_tokens=512,
    held_out_tokens=512,
)
PLATYPUS = DataConfig(
    prompts="garage-bAInd/Open-Platypus",
    column="instruction",
    context_column="input",
    max_prompt_tokens=512,
    max_answer_tokens=512,
    held_out_tokens=512,
)
ANSWERED_PLATYPUS = dataclasses.replace(
    PLATYPUS, answer_column="output", max_prompt_tokens=2048, max_answer_tokens=2048, held_out_tokens=2048
)
