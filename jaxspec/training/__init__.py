"""Self-generated data, the trainer, checkpoints, held-out accuracy."""
