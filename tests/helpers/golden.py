"""What transformers computes for the tiny models: `python -m tests.helpers.golden` writes golden.json again.

The test of every day compares with the file and needs no torch; a slow one compares with transformers itself.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from jaxspec.bench.peers import cache_name
from jaxspec.config import ModelConfig
from jaxspec.weights.hf import save_directory
from tests.helpers.model import VARIANTS, random_params, random_tokens

GOLDEN = Path(__file__).parents[1] / "model" / "golden.json"
LENGTH = 24
POSITIONS = (1, 8, 15, 23)


def hf_logits(folder: Path, tokens: np.ndarray, one_by_one: bool = False) -> np.ndarray:
    """Logits [T, V] of one sequence [T] from transformers in float32.

    Args:
      folder: a model directory.
      tokens: the sequence.
      one_by_one: feed single tokens over a cache. transformers takes the frequencies of `dynamic` rope from the
        length so far and leaves rotated keys alone: only then do they follow from each row's own position, as ours do.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, cache, logits = torch.tensor(tokens, dtype=torch.long)[None], None, []
    name = cache_name(model)
    with torch.no_grad():
        for part in ids.split(1 if one_by_one else ids.shape[1], dim=1):
            out = model(part, use_cache=one_by_one, **{name: cache})
            cache = out[name] if one_by_one else None
            logits.append(out.logits[0].numpy())
    return np.concatenate(logits)


def save_variant(variant: str, folder: Path) -> tuple[ModelConfig, np.ndarray]:
    """Write a tiny model; its config and the sequence to run."""
    config = VARIANTS[variant]
    save_directory(folder, config, random_params(config))
    return config, random_tokens((LENGTH,), seed=7)


def live_logits(variant: str, folder: Path) -> np.ndarray:
    """Logits [T, V] from transformers of a variant saved in `folder`."""
    config, tokens = save_variant(variant, folder)
    return hf_logits(
        folder, tokens, one_by_one=config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
    )


def main() -> None:
    """Write golden.json."""
    lines = []
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            logits = live_logits(variant, Path(folder))
        rows = {str(t): [round(float(x), 6) for x in logits[t]] for t in POSITIONS}
        lines.append(f"{json.dumps(variant)}: {json.dumps(rows)}")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
