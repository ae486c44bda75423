"""EAGLE-3 (Li et al., 2025), as its released script trains it, and for the default model.

It learns from answers that the base gives itself to the conversations of ShareGPT and UltraChat (for ours see
`training/sources.py`). The script is set to 40 epochs, and its schedule ends after 800,000 updates, which are 24 epochs
of 16 conversations; that is what is here.
"""

import dataclasses

from jaxspec.methods import Eagle
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.training.sources import CONVERSATIONS

DATA = DataConfig(
    mixture=CONVERSATIONS,
    answers=532000,
    max_prompt_tokens=1536,
    max_answer_tokens=512,
    held_out_tokens=512,
)


def script_run(model: str, vocabulary: int, template: str = "") -> RunConfig:
    """A run as the script describes it."""
    return RunConfig(
        model=model,
        method=Eagle(depth=8, unroll=7, vocabulary=vocabulary, own_head=True, start="random"),
        tree="sparse:64",
        draft_vocabulary=vocabulary,
        data=dataclasses.replace(DATA, template=template),
        train=TrainConfig(
            steps=800000,
            batch_size=16,
            microbatch=1,
            sequence_length=2048,
            insertions=512,
            learning_rate=5e-5,
            schedule="linear",
            warmup=12000,
            beta2=0.95,
            clip=0.5,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "eagle_llama3_8b": script_run("meta-llama/Llama-3.1-8B-Instruct", 32000),
    "eagle_qwen3_8b": script_run("Qwen/Qwen3-8B", 32000),  # as LLaMA-3.1
    "eagle_vicuna_7b": script_run("lmsys/vicuna-7b-v1.3", 0, "vicuna"),
    "eagle_vicuna_13b": script_run("lmsys/vicuna-13b-v1.3", 0, "vicuna"),
    # Trains on a laptop, on the base's own projection.
    "eagle_smollm2": RunConfig(
        model="smollm2-135m",
        method=Eagle(depth=5, unroll=4, reads=(2, 15, 29), direct=True, even=True, vocabulary=8192, confidence=0.3),
        tree="sparse:8",
        draft_vocabulary=8192,
        data=DataConfig(answers=3500),
        train=TrainConfig(
            steps=800,
            batch_size=4,
            microbatch=2,
            insertions=128,
            learning_rate=1e-3,
            warmup=40,
            clip=1.0,
            adapter_dtype="int8",
        ),
    ),
}
