"""Training data that published methods share, cut as their configs cut it.

ShareGPT has about 68,000 conversations, which the papers' scripts cut at the 2,048 tokens of a Vicuna. Here every turn
of the assistant is an answer of its own, learned behind all the turns before it where these have up to 1,536 tokens; a
run says how many had more. An epoch is as many turns as there are conversations.

ShareGPT's answers are another model's, and most papers train on them as they are; accuracies measured on them are of
that model's words. `--data.regenerate` has the base answer the same conversations, which is what decoding meets.
"""

import dataclasses

from jaxspec.config import DataConfig

SHAREGPT = DataConfig(
    prompts="Aeala/ShareGPT_Vicuna_unfiltered",
    column="conversations",
    answers=68000,
    max_prompt_tokens=1536,
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
