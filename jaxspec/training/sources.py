"""Training data that published methods share, cut as their configs cut it.

ShareGPT's answers are another model's, and most papers train on them as they are; accuracies measured on them are of
that model's words. `--data.regenerate` has the base answer the same conversations, which is what decoding meets.
"""

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
