"""Shapes of the published bases that configs/ trains for: what depends on them alone works without a network."""

from __future__ import annotations

import dataclasses

from jaxspec.config import ModelConfig, RopeScaling

SMOLLM2_135M = ModelConfig(
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
)

LLAMA_7B = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_positions=2048,
    rms_norm_eps=1e-6,
)
LLAMA_13B = dataclasses.replace(
    LLAMA_7B, hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40, num_kv_heads=40
)
LLAMA_33B = dataclasses.replace(
    LLAMA_7B, hidden_size=6656, intermediate_size=17920, num_layers=60, num_heads=52, num_kv_heads=52
)
MOBILELLAMA_1_4B = dataclasses.replace(
    LLAMA_7B, hidden_size=2048, intermediate_size=5632, num_layers=24, num_heads=16, num_kv_heads=16
)

LLAMA2_7B = dataclasses.replace(LLAMA_7B, max_positions=4096, rms_norm_eps=1e-5)
LLAMA2_13B = dataclasses.replace(LLAMA_13B, max_positions=4096, rms_norm_eps=1e-5)
LLAMA2_70B = dataclasses.replace(
    LLAMA2_7B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8
)
LLAMA31_8B = dataclasses.replace(
    LLAMA_7B,
    vocab_size=128256,
    intermediate_size=14336,
    num_kv_heads=8,
    max_positions=131072,
    rope_theta=500000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
    rms_norm_eps=1e-5,
)
LLAMA_68M = dataclasses.replace(
    LLAMA_7B, hidden_size=768, intermediate_size=3072, num_layers=2, num_heads=12, num_kv_heads=12, head_dim=64
)
QWEN15_14B = dataclasses.replace(
    LLAMA_13B, vocab_size=152064, intermediate_size=13696, max_positions=32768, rope_theta=1e6, qkv_bias=True
)
QWEN3_8B = dataclasses.replace(
    LLAMA_7B,
    vocab_size=151936,
    intermediate_size=12288,
    num_layers=36,
    num_kv_heads=8,
    max_positions=40960,
    rope_theta=1e6,
    head_norms=True,
)
TINY = ModelConfig(  # no model that there is: to try a command with
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=2048,
    rms_norm_eps=1e-5,
)

SHAPES: dict[str, ModelConfig] = {  # by the name that `load_model` takes
    "smollm2-135m": SMOLLM2_135M,
    "JackFram/llama-68m": LLAMA_68M,
    "double7/vicuna-68m": LLAMA_68M,
    "mtgv/MobileLLaMA-1.4B-Chat": MOBILELLAMA_1_4B,
    "lmsys/vicuna-7b-v1.3": LLAMA_7B,
    "lmsys/vicuna-13b-v1.3": LLAMA_13B,
    "lmsys/vicuna-33b-v1.3": LLAMA_33B,
    "meta-llama/Llama-2-7b-hf": LLAMA2_7B,
    "meta-llama/Llama-2-7b-chat-hf": LLAMA2_7B,
    "meta-llama/Llama-2-13b-hf": LLAMA2_13B,
    "meta-llama/Llama-2-13b-chat-hf": LLAMA2_13B,
    "meta-llama/Llama-2-70b-hf": LLAMA2_70B,
    "meta-llama/Llama-2-70b-chat-hf": LLAMA2_70B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA31_8B,
    "Qwen/Qwen1.5-14B": QWEN15_14B,
    "Qwen/Qwen3-8B": QWEN3_8B,
}
