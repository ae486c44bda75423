"""The papers' ablations as data: what is trained for each table. The lab trains every row with several seeds.

The tables about decoding are in `decoding_studies.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.early_exit import EarlyExit
from experiments.lab.entries import Entry
from jaxspec.decoding.method import Method
from jaxspec.methods import PPD, SPACE, Amphista, BiTA, HiddenTransfer, Hydra, Medusa
from jaxspec.trees import TreePlan


@dataclasses.dataclass(frozen=True)
class SpeedRow:
    """A row of a table of speeds.

    Attributes:
      adapter: what drafts: a method, whose adapter ships, or the study and the label of a training.
      tree: the draft tree, or its specification.
      draft_vocabulary: how many tokens may be drafted; 0 is all.
    """

    adapter: str | tuple[str, str]
    tree: str | TreePlan
    draft_vocabulary: int = 0


@dataclasses.dataclass(frozen=True)
class Study:
    """One table.

    Attributes:
      name: short, for files and options.
      title: what is compared.
      source: where the paper has it.
      rows: what is trained, or what decodes, by label.
    """

    name: str
    title: str
    source: str
    rows: Mapping[str, Entry] | Mapping[str, SpeedRow]


def _rows(
    methods: Mapping[str, Method], learning_rate: float, rates: Mapping[str, float] | None = None
) -> dict[str, Entry]:
    """Trainings that share a learning rate, but for those with one of their own in `rates`."""
    rates = dict.fromkeys(methods, learning_rate) | dict(rates or {})
    return {label: Entry(label, method, rates[label]) for label, method in methods.items()}


def _distilled(**settings: Any) -> BiTA:
    return BiTA(objective="distillation", **settings)


def _transfer(*layers: int, **settings: Any) -> HiddenTransfer:
    return HiddenTransfer(distances=len(layers), layers=layers, **settings)


DISTILLED = "trained by distillation instead of the paper's hard labels"
_GIVES_SPEEDS = f"which gives speeds; judged here by accuracy, {DISTILLED}"
_SHARED = "here separate maps divide the updates among them, while joint ones learn from all"
_PLAIN = "whose figures are those that Table 6.5 gives without distillation; here all are distilled"
_START = "all start as hidden states of random text tokens at their layer"
_LATE = (0, 5, 10, 15, 20, 25)
# Learning rates, the best of a few in trials of 40 updates
_PROBES = 3e-2
_TRANSFER = 7e-3
_HEADS = 3e-3
_LAYERS = 1e-3  # heads behind layers of their own

STUDIES = (
    Study("bita_prompting", "BiTA: prompting design", "BiTA Table 3, which gives speeds; judged here by accuracy",
        _rows({
            "masks only, hard labels": BiTA(prompting="none"),
            "shallow, hard labels": BiTA(prompting="shallow"),
            "deep, hard labels": BiTA(),
            "masks only": _distilled(prompting="none"),
            "shallow": _distilled(prompting="shallow"),
            "deep": _distilled(),
        }, _PROBES)),
    Study("bita_prompts", "BiTA: number of prompt tokens", f"BiTA Figure 8, {_GIVES_SPEEDS}",
        _rows({str(n): _distilled(prompts=n) for n in (1, 4, 8, 16, 32, 64)}, _PROBES)),
    Study("bita_masks", "BiTA: five mask tokens",
        f"BiTA Figure 9, {DISTILLED}, at a learning rate of 1e-2, since 3e-2, that of the other tables, lost a probe; "
        "see the decoding table",
        _rows({"5": _distilled(distances=5)}, 1e-2)),
    Study("bita_objective", "BiTA: labels or distillation", "not in the paper",
        _rows({"hard labels": BiTA(), "distillation": _distilled()}, _PROBES)),
    Study("bita_entry", "BiTA: masks that join late", f"PPD section 7.4.2, an idea; {_START}; BiTA {DISTILLED}",
        _rows({str(layer): _distilled(initial="text", entry=layer) for layer in _LATE}, _PROBES)),
    Study("space_training", "SPACE: what is trained, three masks",
        "section 3.1, which tunes the whole base; here masks weigh as much as the text",
        _rows({
            "mask alone": SPACE(distances=3, tuning="none"),
            "LoRA": SPACE(distances=3),
            "LoRA, distillation": SPACE(distances=3, objective="distillation"),
            "LoRA, p_ar = 1": SPACE(distances=3, p_ar=1.0),
        }, _LAYERS, {"mask alone": _PROBES})),
    Study("space_quality", "SPACE: is quality lost?",
        "SPACE Table 6 in small: LoRA, five masks; equations 1 and 3 are means of their own, not sums as in the paper",
        _rows({
            "SFT (p_ar = 1)": SPACE(p_ar=1.0),
            "SAR-SFT": SPACE(weighting="tokens"),
            "SAR-SFT, masks weigh as much as the text": SPACE(),
        }, _LAYERS)),
    Study("transfer_first", "Hidden Transfer: layer of the first step", "Hidden Transfer Figure 5",
        _rows({str(layer): _transfer(layer) for layer in (5, 10, 15, 20, 25)}, _TRANSFER)),
    Study("transfer_second", "Hidden Transfer: layer of the second step, the first at 10",
        f"Hidden Transfer Figure 6, where the first is at 15 of 32; {_SHARED}",
        _rows({str(layer): _transfer(10, layer) for layer in (10, 15, 20, 25)}, _TRANSFER)),
    Study("transfer_masked", "Hidden Transfer: does the second step need to see the first?",
        f"Hidden Transfer Figure 7, the steps at 10 and 15 of 30 layers instead of 15 and 20 of 32; {_SHARED}",
        _rows({"seen": _transfer(10, 15), "masked": _transfer(10, 15, masked=True)}, _TRANSFER)),
    Study("transfer_training", "Hidden Transfer: how the maps are trained", f"not in the paper; {_SHARED}",
        _rows({
            "separate": _transfer(10, 14, 18),
            "separate, real states": _transfer(10, 14, 18, train_visibility="real"),
            "separate, real states, KL(pseudo || base)": _transfer(
                10, 14, 18, train_visibility="real", direction="reverse"
            ),
            "joint": _transfer(10, 14, 18, training="joint"),
            "joint, KL(pseudo || base)": _transfer(10, 14, 18, training="joint", direction="reverse"),
        }, _TRANSFER)),
    Study("transfer_exits", "Hidden Transfer against early exit and Medusa",
        "Hidden Transfer Figure 3, whose layers 25, 30 and 35 of 40 are as high as 19, 22 and 26 of 30; the others are "
        "the lower ones of the adapter that ships; all learn the base's distributions, and the maps "
        "all at once by KL(base || pseudo)",
        _rows({
            "hidden transfer": _transfer(10, 14, 18, training="joint"),
            "early exit": EarlyExit((10, 14, 18)),
            "hidden transfer, layers 19, 22, 26": _transfer(19, 22, 26, training="joint"),
            "early exit, layers 19, 22, 26": EarlyExit((19, 22, 26)),
            "Medusa": Medusa(heads=3, lm_head="full", alignment=1.0, labels=0.0, decay=1.0),
        }, _TRANSFER, dict.fromkeys(("early exit", "early exit, layers 19, 22, 26", "Medusa"), _HEADS))),
    Study("ppd_epts", "PPD: ensemble prompt tokens", f"PPD Table 6.4, which goes to 100, {_PLAIN}",
        _rows({str(n): PPD(ensemble=n) for n in (1, 4, 10)}, _PROBES)),
    Study("ppd_objective", "PPD: distillation or labels", "PPD Table 6.5, which also varies epochs and batches",
        _rows({
            "distillation": PPD(),
            "distillation, KL(student || base)": PPD(direction="reverse"),
            "hard labels": PPD(objective="hard"),
        }, _PROBES)),
    Study("ppd_prefix", "PPD: prefix tuning", "PPD Table 6.6",
        _rows({"without": PPD(), "1 per distance": PPD(prefix_tokens=1)}, _PROBES)),
    Study("ppd_head", "PPD: a decoding head of its own",
        "PPD Table 6.7; the two stages divide the updates, where the thesis trains the second in addition",
        _rows({
            "none": PPD(),
            "1-stage": PPD(head="one_stage"),
            "1-stage, the rate of heads": PPD(head="one_stage"),
            "2-stage": PPD(head="two_stage"),
        }, _PROBES, {"1-stage, the rate of heads": _HEADS})),
    Study("ppd_masks", "PPD: attention masks of 4 EPTs", f"PPD Table 6.8, of 100 EPTs, {_PLAIN}",
        _rows({mask: PPD(ensemble=4, mask=mask) for mask in ("ensemble", "decoder", "encoder")}, _PROBES)),
    Study("ppd_aggregation", "PPD: aggregation of 4 EPTs", f"PPD Table 6.9, of 100 EPTs, {_PLAIN}",
        _rows({"average": PPD(ensemble=4), "learned": PPD(ensemble=4, aggregation="learned")}, _PROBES)),
    Study("ppd_exits", "PPD: multi-exit ensemble", "PPD Table 6.10",
        _rows({str(k): PPD(multi_exit=k) for k in (1, 2, 3)}, _PROBES)),
    Study("ppd_entry", "PPD: prompt tokens that join late", f"PPD section 7.4.2, an idea; {_START}",
        _rows({str(layer): PPD(entry=layer) for layer in _LATE}, _PROBES)),
    Study("heads", "Heads: Medusa, Hydra and Amphista",
        "Amphista Figure 1; Hydra's heads are given the true tokens before theirs, the others' are not",
        _rows({
            "Medusa": Medusa(),
            "Medusa, Amphista's losses": Medusa(alignment=1.0, decay=1.0),
            "Hydra": Hydra(),
            "Hydra++": Hydra(prefix_attention=True, blocks=4, alignment=1.0, labels=0.0),
            "Amphista": Amphista(),
        }, _HEADS, dict.fromkeys(("Hydra", "Hydra++", "Amphista"), _LAYERS))),
    Study("amphista_variants", "Amphista: variants", "Amphista Tables 4 and 5, their accuracies",
        _rows({
            "Amphista": Amphista(),
            "w/o auto-embedding": Amphista(self_attention_layers=0),
            "w/o position encoding": Amphista(position_encoding=False),
            "w/o staged adaptation": Amphista(adaptation_layers=0),
            "one adaptation layer": Amphista(adaptation_layers=1),
            "w/o sampled token": Amphista(sampled_token=False),
            "Amphista-alpha": Amphista(self_attention_layers=2),
        }, _LAYERS, {"w/o staged adaptation": _HEADS})),
    Study("amphista_losses", "Amphista: its two losses", "equation 7, which gives no weights",
        _rows({
            "both": Amphista(),
            "alignment alone": Amphista(labels=0.0),
            "labels alone": Amphista(alignment=0.0),
        }, _LAYERS)),
    Study("medusa_lm_head", "Medusa: vocabulary projections", "not in the papers",
        _rows({
            "tied": Medusa(), "low rank, 32": Medusa(lm_head="low_rank", rank=32), "full": Medusa(lm_head="full"),
        }, _HEADS)),
)  # fmt: skip
