"""BiTA (Lin et al., 2024) with the settings of section 4.1, and for the default model.

About 150,000 questions from the five sets of Table 5, each asked under the two templates of Table 6, make about 300,000
answers. LIMA is GAIR's gated set in a form that is open; its second questions are asked behind the first ones' answers.
Clipping and the cut-off of 2,048 tokens, here of a prompt and its answer, are those of the released scripts, which put
one line break between a question and its `input`, here two, and drop a tenth of the prefix's values, here none.
"""

from jaxspec.methods import BiTA
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.training.sources import ALPACA_GPT4, CIP, CODE_ALPACA, LIMA, PLATYPUS


def paper_run(model: str, distances: int, family: str) -> RunConfig:
    """A run as section 4.1 describes it, with so many mask tokens and both templates of a family."""
    return RunConfig(
        model=model,
        method=BiTA(distances=distances),
        tree="efficient:5",
        data=DataConfig(
            mixture=(LIMA, ALPACA_GPT4, CODE_ALPACA, PLATYPUS, CIP),
            templates=(family, f"{family}-short"),
            answers=300000,
            max_prompt_tokens=512,
            max_answer_tokens=1536,
            held_out_tokens=512,
        ),
        train=TrainConfig(
            steps=9375,
            batch_size=128,
            microbatch=4,
            sequence_length=2048,
            insertions=64,
            learning_rate=3e-2,
            clip=1.0,
            remat=True,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "bita_7b": paper_run("meta-llama/Llama-2-7b-chat-hf", distances=3, family="llama2"),
    "bita_13b": paper_run("meta-llama/Llama-2-13b-chat-hf", distances=3, family="llama2"),
    "bita_70b": paper_run("meta-llama/Llama-2-70b-chat-hf", distances=4, family="llama2"),
    "bita_vicuna_7b": paper_run("lmsys/vicuna-7b-v1.3", distances=3, family="vicuna"),
    "bita_vicuna_13b": paper_run("lmsys/vicuna-13b-v1.3", distances=3, family="vicuna"),
    "bita_vicuna_33b": paper_run("lmsys/vicuna-33b-v1.3", distances=4, family="vicuna"),
    # Trains on a laptop, by distillation. The adapter that ships was made with it from the answers to 2,000 other
    # prompts, but its masks started as N(0, 0.02), from which two of three short trainings lost some; then
    # `jaxspec tune` chose its tree.
    "bita_smollm2": RunConfig(
        model="smollm2-135m",
        method=BiTA(objective="distillation", initial="text"),
        train=TrainConfig(
            steps=800, batch_size=4, insertions=64, learning_rate=3e-2, warmup=20, clip=1.0, eval_every=100
        ),
    ),
}
