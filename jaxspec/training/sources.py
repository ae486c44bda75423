"""Data sets of the Hugging Face hub that several papers train on.

ShareGPT has about 68,000 conversations, which the papers' scripts cut at the 2,048 tokens of a Vicuna. Here every turn
of the assistant is an answer of its own, cut at 512 tokens and learned behind all the turns before it where these have
up to 1,536; a run says how many had more. An epoch of a config is as many turns as there are conversations.

ShareGPT's answers are another model's, and most papers train on them as they are; accuracies measured on them are of
that model's words. `--data.regenerate` has the base answer the same conversations, which is what decoding meets.

The weights of the others are the numbers of questions that BiTA (Table 5) and SPACE (Table 3) give.
"""

import dataclasses

from jaxspec.training.settings import DataConfig, TextSource

SHAREGPT = DataConfig(
    prompts="Aeala/ShareGPT_Vicuna_unfiltered",
    column="conversations",
    answers=68000,
    max_prompt_tokens=1536,
    max_answer_tokens=512,
    held_out_tokens=512,
)


# With Alpaca's columns; `answered` reads the column `output`
ALPACA_GPT4 = TextSource("vicgalle/alpaca-gpt4", column="instruction", context_column="input", weight=52002)
ALPACA_GPT4_ZH = TextSource("shibing624/alpaca-zh", column="instruction", context_column="input", weight=48818)
CODE_ALPACA = TextSource("sahil2801/CodeAlpaca-20k", column="instruction", context_column="input", weight=20022)
PLATYPUS = TextSource("garage-bAInd/Open-Platypus", column="instruction", context_column="input", weight=24926)
LIMA = TextSource("64bits/lima_vicuna_format", column="conversations", regenerate=True, weight=1029)
CIP = TextSource("alespalla/chatbot_instruction_prompts", weight=50000)


# What EAGLE-3 trains on, for the base to answer
CONVERSATIONS = (
    TextSource(SHAREGPT.prompts, column="conversations", regenerate=True, weight=68000),
    TextSource("HuggingFaceH4/ultrachat_200k", "train_sft", column="messages", regenerate=True, weight=464000),
)


def answered(source: TextSource) -> TextSource:
    """A data set with its answers."""
    return dataclasses.replace(source, answer_column="" if source.regenerate else "output", regenerate=False)
