"""The shapes of a tiny base of every family that is written, two layers each, with what sets it apart."""

from jaxspec.config import RopeScaling
from tests.helpers.model import tiny_config

EXAMPLES = {
    "llama": tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral": tiny_config(sliding_window=5),
    "qwen2": tiny_config(qkv_bias=True, sliding_window=5, full_layers=(1,)),
    "qwen3": tiny_config(head_norms=True),
    "gemma2": tiny_config(
        norms="around",
        activation="gelu_tanh",
        score_cap=50.0,
        score_scale=24**-0.5,
        embedding_scale=32**0.5,
        sliding_window=5,
        full_layers=(1,),
    ),
    "gemma3_text": tiny_config(
        norms="around",
        activation="gelu_tanh",
        head_norms=True,
        embedding_scale=32**0.5,
        sliding_window=5,
        full_layers=(1,),
        rope_theta=1e6,
        local_rope_theta=1e4,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
    "phi3": tiny_config(
        rotary_dim=12,
        rope_scaling=RopeScaling(
            "longrope", 4.0, 16, attention_factor=1.2, short_factors=(1.0,) * 6, long_factors=(2.0,) * 6
        ),
    ),
    "glm": tiny_config(rotary_dim=8, qkv_bias=True),
    "olmo2": tiny_config(norms="after", joint_norms=True),
    "granite": tiny_config(embedding_scale=12.0, residual_scale=0.22, score_scale=0.01, logit_scale=0.125),
    "falcon": tiny_config(norm="layer", parallel=True, gated=False, activation="gelu", head_dim=8),
}
