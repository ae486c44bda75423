"""Training: the base's answers as data, the trainer, checkpoints, held-out accuracy."""
