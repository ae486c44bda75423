"""Reading and writing bases: Hugging Face, GGUF, checkpoints, parameter names, chat templates."""
