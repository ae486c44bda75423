"""DFlash (2026) for the embedded model, with the block and the Markov term of DSpark (2026)."""

from jaxspec.config import TrainConfig
from jaxspec.methods import DFlash
from jaxspec.training.run_config import RunConfig

RUNS: dict[str, RunConfig] = {
    # Trains on a laptop.
    "dflash_smollm2": RunConfig(
        model="smollm2-135m",
        method=DFlash(block=8, layers=2, vocabulary=8192, markov_rank=64),
        tree="sparse:8",
        draft_vocabulary=8192,
        train=TrainConfig(
            steps=400,
            batch_size=4,
            microbatch=2,
            insertions=96,
            learning_rate=1e-3,
            warmup=20,
            clip=1.0,
            adapter_dtype="int8",
        ),
    ),
}
