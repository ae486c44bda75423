"""Lossless parallel decoding for LLaMA-style language models in JAX and Flax."""
