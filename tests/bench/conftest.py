"""A tiny model, questions and adapters, and a whole benchmark of them."""

from tests.helpers.bench import files, finished, model, quickly

__all__ = ["files", "finished", "model", "quickly"]
