"""PPD for MobileLLaMA-1.4B with the settings of the thesis (section 6.1.2)."""

from jaxspec.config import DataConfig, ModelConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.trainer import RunConfig

CONFIG = RunConfig(
    model="mtgv/MobileLLaMA-1.4B-Chat",
    shapes=ModelConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        max_positions=2048,
        rms_norm_eps=1e-6,
    ),
    method=PPD(distances=3, ensemble=1, decay=0.8),
    data=DataConfig(answers=50000, max_prompt_tokens=512, max_answer_tokens=512, held_out_tokens=512),
    train=TrainConfig(steps=25000, batch_size=4, sequence_length=1024, insertions=64, learning_rate=1e-2),
)
