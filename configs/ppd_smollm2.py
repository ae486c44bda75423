"""PPD for the embedded SmolLM2-135M-Instruct: trains on a laptop."""

from jaxspec.config import DataConfig, ModelConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.trainer import RunConfig

CONFIG = RunConfig(
    model="smollm2-135m",
    shapes=ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rope_theta=100000.0,
        rms_norm_eps=9.999999747378752e-06,
        tie_embeddings=True,
    ),
    method=PPD(),
    data=DataConfig(),
    train=TrainConfig(steps=500, batch_size=4, microbatch=2, insertions=128, learning_rate=3e-2),
)
