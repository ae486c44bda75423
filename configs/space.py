"""SPACE (Yi et al., 2024): full fine-tuning as in the paper (4.1, A.1), and for the default model.

Two epochs of the six sets of Table 3, whose numbers add up to 166,999 answers (section 4.1 says 166,993). Five are on
the hub. Oaast-SFT is there in no form that can be read: the paper's is `oaast_sft.json` of LLaMA-Factory, with columns
instruction, input, output and history. Write its rows as conversations to `oaast_sft.jsonl` in the working directory, a
line `{"messages": [{"role": "user", "content": ...}, ...]}` each, or do without: `--data.mixture.3.weight 0`.
"""

from jaxspec.methods import SPACE
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import DataConfig, TextSource, TrainConfig
from jaxspec.training.sources import ALPACA_GPT4, ALPACA_GPT4_ZH, CODE_ALPACA, LIMA, PLATYPUS, answered

MIXTURE = (
    answered(ALPACA_GPT4_ZH),
    answered(ALPACA_GPT4),
    answered(LIMA),
    TextSource("oaast_sft.jsonl", column="messages", weight=20202),
    answered(CODE_ALPACA),
    answered(PLATYPUS),
)
ANSWERS = int(sum(source.weight for source in MIXTURE))

# Questions are asked in LLaMA-2's template, which the tuned base then carries; the paper mentions none.
LLAMA2 = "llama2-short"


def paper_run(model: str, batch_size: int = 32, template: str = "") -> RunConfig:
    """A run as 4.1 and A.1 describe it: 4 sequences for each of 8 devices, of 32 above 14B."""
    return RunConfig(
        model=model,
        method=SPACE(tuning="full", weighting="sums"),
        tree="chain:5",
        data=DataConfig(
            mixture=MIXTURE,
            template=template,
            answers=ANSWERS,
            max_prompt_tokens=2048,
            max_answer_tokens=2048,
            held_out_tokens=2048,
        ),
        train=TrainConfig(
            steps=2 * ANSWERS // batch_size,
            batch_size=batch_size,
            microbatch=4,
            sequence_length=4096,
            insertions=1,
            learning_rate=5e-5,
            clip=1.0,
            remat=True,
        ),
    )


RUNS: dict[str, RunConfig] = {
    "space_llama2_7b": paper_run("meta-llama/Llama-2-7b-hf", template=LLAMA2),
    "space_llama2_13b": paper_run("meta-llama/Llama-2-13b-hf", template=LLAMA2),
    "space_llama2_70b": paper_run("meta-llama/Llama-2-70b-hf", batch_size=128, template=LLAMA2),
    # The successor of the paper's Qwen-14B, in the same shapes; `--model Qwen/Qwen-14B` trains that one.
    "space_qwen_14b": paper_run("Qwen/Qwen1.5-14B"),
    # Full fine-tuning that ends in a checkpoint of the whole base. The loss is the paper's (equations 1 to 4). The text
    # is half of the base's own answers, each seen once, where the paper takes other people's answers, twice.
    "space_smollm2": RunConfig(
        model="smollm2-135m",
        method=SPACE(tuning="full", weighting="sums"),
        tree="chain:5",
        train=TrainConfig(steps=500, batch_size=2, insertions=64, learning_rate=5e-5, warmup=10, clip=1.0),
    ),
    # LoRA on the base's own answers: a small adapter that trains on a laptop. The masks learn the base's whole
    # distributions instead of the paper's hard labels (equation 3): each says more than one token does, which counts
    # where updates are few. For the same reason all masks together weigh as much as all the text before them, where the
    # paper counts a mask as one token (`weighting`).
    "space_smollm2_lora": RunConfig(
        model="smollm2-135m",
        method=SPACE(objective="distillation"),
        tree="sparse:3",
        train=TrainConfig(
            steps=240, batch_size=2, insertions=48, learning_rate=1e-3, warmup=10, clip=1.0, adapter_dtype="int8"
        ),
    ),
}
