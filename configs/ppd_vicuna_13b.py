"""PPD for Vicuna-13B v1.3 with the settings of the thesis (section 6.1.2)."""

from jaxspec.config import DataConfig, ModelConfig, TrainConfig
from jaxspec.methods import PPD
from jaxspec.training.trainer import RunConfig

CONFIG = RunConfig(
    model="lmsys/vicuna-13b-v1.3",
    shapes=ModelConfig(
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        max_positions=2048,
        rms_norm_eps=1e-6,
    ),
    method=PPD(distances=3, ensemble=1, decay=0.8),
    data=DataConfig(answers=50000, max_prompt_tokens=512, max_answer_tokens=512, held_out_tokens=512),
    train=TrainConfig(steps=25000, batch_size=4, sequence_length=1024, insertions=64, learning_rate=1e-2, remat=True),
)
