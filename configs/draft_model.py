"""Draft models (Leviathan et al., 2023): a smaller base, made of some layers of the base or of shapes of its own.

`draft_smollm2` keeps three layers of the default model and distils them on its own answers (as DistillSpec, Zhou et
al., 2023, does with whole models). The other two have the shapes that the PPD thesis (6.4.2) and common practice pair;
trained, their draft models begin from random weights. Published draft models need no training: `--draft-model NAME`.
"""

from jaxspec.methods import DraftModel
from jaxspec.training.run_config import RunConfig
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.weights.shapes import LLAMA2_7B, LLAMA_68M

RUNS: dict[str, RunConfig] = {
    # Layers from both ends: the first ones make of embeddings what all the others work on, the last one speaks the
    # language of the vocabulary projection. In int8 they take about 11 MB.
    "draft_smollm2": RunConfig(
        model="smollm2-135m",
        method=DraftModel(layers=(0, 1, 29), length=5),
        tree="chain:3",
        draft_vocabulary=8192,
        train=TrainConfig(
            steps=20000,
            batch_size=4,
            insertions=128,
            positions="text",
            learning_rate=5e-4,
            warmup=200,
            clip=1.0,
            ema=0.999,
            adapter_dtype="int8",
        ),
    ),
    "draft_vicuna_7b": RunConfig(
        model="lmsys/vicuna-7b-v1.3",
        method=DraftModel(shapes=LLAMA_68M, length=5),
        tree="chain:5",
        data=DataConfig(answers=50000, max_prompt_tokens=1024, max_answer_tokens=512),
        train=TrainConfig(
            steps=20000, batch_size=32, sequence_length=1536, insertions=512, learning_rate=3e-4, warmup=500
        ),
    ),
    "draft_llama2_70b": RunConfig(
        model="meta-llama/Llama-2-70b-chat-hf",
        method=DraftModel(shapes=LLAMA2_7B, length=5),
        tree="chain:5",
        data=DataConfig(answers=50000, max_prompt_tokens=1024, max_answer_tokens=512),
        train=TrainConfig(
            steps=20000, batch_size=32, sequence_length=1536, insertions=512, learning_rate=1e-4, warmup=500, remat=True
        ),
    ),
}
