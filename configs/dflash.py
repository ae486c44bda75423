"""DFlash (2026) by its paper's recipe, and for the default model.

The paper trains for six epochs on about 800,000 answers that the base writes itself, 512 blocks in each. Which prompts,
and how many answers a batch holds, we have not been able to check: the prompts are those that EAGLE-3 names, the batch
is ours.
"""

import dataclasses

from jaxspec.methods import DFlash
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.training.sources import CONVERSATIONS

_ANSWERS, _BATCH = 800000, 64
_UPDATES = 6 * _ANSWERS // _BATCH

DATA = DataConfig(
    mixture=CONVERSATIONS,
    answers=_ANSWERS,
    max_prompt_tokens=2048,
    max_answer_tokens=1024,
    held_out_tokens=1024,
)
SHORT = dataclasses.replace(DATA, template="vicuna", max_prompt_tokens=1536, max_answer_tokens=512, held_out_tokens=512)


def paper_run(model: str, block: int, decay: float, mask_token: int, data: DataConfig = DATA) -> RunConfig:
    """A run as the paper describes it, on texts as long as the data's prompts and answers."""
    return RunConfig(
        model=model,
        method=DFlash(
            block=block,
            layers=5,
            taps_count=5,
            sample_from_anchor=False,
            from_newest=False,
            even=False,
            mask_token=mask_token,
            head_norms=True,
            start="random",
            decay=decay,
        ),
        tree=f"chain:{block - 1}",
        data=data,
        train=TrainConfig(
            steps=_UPDATES,
            batch_size=_BATCH,
            microbatch=1,
            sequence_length=data.max_prompt_tokens + data.max_answer_tokens,
            insertions=512,
            learning_rate=6e-4,
            warmup=_UPDATES // 25,
            clip=1.0,
            remat=True,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "dflash_qwen3_8b": paper_run("Qwen/Qwen3-8B", 16, 0.867, 151669),  # exp(-1 / 7)
    "dflash_llama3_8b": paper_run("meta-llama/Llama-3.1-8B-Instruct", 10, 0.819, 128255),  # exp(-1 / 5)
    # Not in the paper: as LLaMA-3.1, within the 2,048 positions of these bases, which have no token to spare for masks.
    "dflash_vicuna_7b": paper_run("lmsys/vicuna-7b-v1.3", 10, 0.819, -1, SHORT),
    "dflash_vicuna_13b": paper_run("lmsys/vicuna-13b-v1.3", 10, 0.819, -1, SHORT),
    # Trains on a laptop, with DSpark's block and Markov term.
    "dflash_smollm2": RunConfig(
        model="smollm2-135m",
        method=DFlash(block=8, layers=2, vocabulary=8192, markov_rank=64),
        tree="sparse:8",
        draft_vocabulary=8192,
        data=DataConfig(answers=3500),
        train=TrainConfig(
            steps=600,
            batch_size=4,
            microbatch=2,
            insertions=96,
            learning_rate=1e-3,
            warmup=30,
            clip=1.0,
            adapter_dtype="int8",
        ),
    ),
}
