"""How bases get in: Hugging Face, GGUF, checkpoints, names of parameters, chat templates."""
