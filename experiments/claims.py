"""What the papers claim of one another, and the figures that they report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from experiments.verdicts import (
    Evidence,
    Verdict,
    decoding_is_faster,
    gains_more,
    predicts_better,
    training_is_better,
    way_is_faster,
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper says.

    Attributes:
      text: in our words.
      source: where.
      judge: the verdict, from the evidence.
    """

    text: str
    source: str
    judge: Callable[[Evidence], Verdict]


CLAIMS = (
    Claim(
        "deep prompts predict better than masks alone", "our reading of BiTA, Table 3",
        partial(training_is_better, "bita_prompting", "deep, hard labels", "masks only, hard labels"),
    ),
    Claim(
        "deep prompts are faster than masks alone", "BiTA, Table 3",
        partial(decoding_is_faster, "bita_prompting_speed", "deep", "masks only"),
    ),
    Claim(
        "Hidden Transfer is faster than Medusa", "Hidden Transfer, Table 1",
        partial(way_is_faster, "hidden_transfer", "medusa"),
    ),
    Claim(
        "Hidden Transfer predicts better than Medusa", "its Figure 3",
        partial(predicts_better, "hidden_transfer", "medusa"),
    ),
    Claim("Amphista is faster than Medusa", "Amphista, Table 1", partial(way_is_faster, "amphista", "medusa")),
    Claim("Amphista is faster than Hydra++", "Amphista, Table 1", partial(way_is_faster, "amphista", "hydra")),
    Claim("Amphista predicts better than Medusa", "Amphista, Figure 1", partial(predicts_better, "amphista", "medusa")),
    Claim("PPD is faster than Medusa", "PPD, Table 6.1", partial(way_is_faster, "ppd", "medusa")),
    Claim(
        "PPD predicts distant tokens better than Medusa", "PPD, 6.3",
        partial(predicts_better, "ppd", "medusa", best=(1, 5, 10), first=2),
    ),
    Claim(
        "mathematics gains more than conversation", "BiTA, Table 7; SPACE, Table 4; PPD, 6.2; Amphista, A.2.2",
        partial(gains_more, "math_reasoning"),
    ),
    Claim(
        "code gains more than conversation", "BiTA, Table 1; SPACE, Table 1; PPD, 6.2; Amphista, A.2.2",
        partial(gains_more, "humaneval"),
    ),
)  # fmt: skip

# Speedups as the papers report them: method, base, device, figures, where they stand.
PAPERS = (
    (
        "PPD", "Vicuna-7B", "A100-40GB",
        "MT-Bench, sampled: 2.24 at 2.54 tokens per step (Medusa 2.09 at 2.51)", "Table 6.1, from its tokens/s",
    ),
    ("BiTA", "LLaMA-2-7B-chat", "A800", "XSum 2.19, MT-Bench 2.38, HumanEval-X 2.73", "Table 1"),
    ("SPACE", "LLaMA-2-7B", "A800", "XSum 1.94, HumanEval-X 3.18, at 2.23 and 3.54 tokens per step", "Table 1"),
    ("Hidden Transfer", "Vicuna-7B", "A100-80GB", "XSum 1.79, GSM8K 2.22 (Medusa 1.39 and 1.73)", "Table 1"),
    ("Amphista", "Vicuna-7B", "A100-40GB", "Spec-Bench 2.13 (Medusa 1.50, Hydra++ 2.03)", "Table 1"),
)  # fmt: skip
