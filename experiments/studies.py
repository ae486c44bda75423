"""The papers' ablations, a table each: what is trained, and what the paper concludes from it.

Every variant is a method with its settings. Decoding's tables are in `ablation_decoding.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.early_exit import EarlyExit
from jaxspec.drafting.method import Method
from jaxspec.methods import PPD, SPACE, Amphista, BiTA, HiddenTransfer, Hydra, Medusa


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """What a paper concludes from a table, or what is asked of it here: one variant is better than another, or is not.

    Attributes:
      one: label of a variant.
      other: label of another.
      text: the conclusion, in our words.
      gains: whether the first is the better one; False: there is nothing to choose the first for.
      distance: the one whose predictions are judged; 0: the mean of all that both have.
      ours: no conclusion of a paper, but a question of ours.
      perplexity: judge instead whether the first one's perplexity of held-out answers is no higher than the other's,
        whatever `gains`.
    """

    one: str
    other: str
    text: str
    gains: bool = True
    distance: int = 0
    ours: bool = False
    perplexity: bool = False


@dataclasses.dataclass(frozen=True)
class Study:
    """One table.

    Attributes:
      name: short, for files.
      title: what is compared.
      source: where the paper has it.
      learning_rate: of all variants that have none of their `own`.
      variants: methods by label.
      conclusions: what the paper concludes, and questions of ours.
      axis: name of the quantity that the labels are values of, where a curve says more than rows.
      by_distance: draw every variant's accuracies against the distance.
      training: settings in which all of its trainings differ from those of other tables.
      own: settings of single variants, by label, such as a rate with which one learns better.
    """

    name: str
    title: str
    source: str
    learning_rate: float
    variants: dict[str, Method]
    conclusions: tuple[Conclusion, ...] = ()
    axis: str = ""
    by_distance: bool = False
    training: Mapping[str, int] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def settings(self, label: str) -> dict[str, float]:
        """Where the training of a variant differs from those of other tables."""
        return {"learning_rate": self.learning_rate, **self.training, **self.own.get(label, {})}


def _over(values: Iterable[Any], build: Callable[[Any], Method]) -> dict[str, Method]:
    return {str(value): build(value) for value in values}


def _rate(value: float) -> dict[str, float]:
    return {"learning_rate": value}


def _distilled(**settings: Any) -> BiTA:
    return BiTA(objective="distillation", **settings)


def _transfer(*layers: int, **settings: Any) -> HiddenTransfer:
    return HiddenTransfer(distances=len(layers), layers=layers, **settings)


SEEDS = "seeds"
DISTILLED = "trained by distillation instead of the paper's hard labels"
_GIVES_SPEEDS = f"which gives speeds; judged here by accuracy, {DISTILLED}"
_SHARED = "here separate maps divide the updates among them and joint ones learn from all"
_PLAIN = "whose figures are those that Table 6.5 gives without distillation; here all distil"
_FEW_POINTS = ", at up to 32 positions an answer"
_ENSEMBLES = {"insertions": 32}  # with ten EPTs every position is thirty rows
_START = "all start as hidden states of random text tokens at their layer"
_LATE = (0, 5, 10, 15, 20, 25)
# Learning rates, the best of a few in trials of 40 updates
_TRANSFER = 7e-3
_HEADS = 3e-3
_LAYERS = 1e-3  # heads behind layers of their own

_REPEATED = {  # methods whose trainings are repeated, with learning rates
    "PPD": (PPD(), 3e-2),
    "BiTA": (_distilled(initial="text"), 3e-2),
    "Hidden Transfer": (_transfer(10, 14, 18, training="joint"), _TRANSFER),
}

STUDIES = (
    Study(
        SEEDS, "How far trainings of one method lie apart", "Not in the papers: the spread that verdicts rest on", 3e-2,
        {f"{name}, seed {seed}": method for name, (method, _) in _REPEATED.items() for seed in range(3)},
        own={
            f"{name}, seed {seed}": _rate(rate) | {"seed": seed}
            for name, (_, rate) in _REPEATED.items() for seed in range(3)
        },
    ),
    Study(
        "bita_prompting", "BiTA: prompting design", "BiTA Table 3, which gives speeds; judged here by accuracy", 3e-2,
        {
            "masks only, hard labels": BiTA(prompting="none"),
            "shallow, hard labels": BiTA(prompting="shallow"),
            "deep, hard labels": BiTA(),
            "masks only": _distilled(prompting="none"),
            "shallow": _distilled(prompting="shallow"),
            "deep": _distilled(),
        },
        (
            Conclusion("shallow, hard labels", "masks only, hard labels", "shallow prompts help a little"),
            Conclusion("deep, hard labels", "shallow, hard labels", "deep prompts help more"),
            Conclusion("deep, hard labels", "masks only, hard labels", "deep prompts beat masks alone"),
            Conclusion("shallow", "masks only", "shallow prompts help a little by distillation too", ours=True),
            Conclusion("deep", "shallow", "deep prompts help more by distillation too", ours=True),
            Conclusion("deep", "masks only", "deep prompts beat masks alone by distillation too", ours=True),
        ),
    ),
    Study(
        "bita_prompts", "BiTA: number of prompt tokens", f"BiTA Figure 8, {_GIVES_SPEEDS}", 3e-2,
        _over((1, 4, 8, 16, 32, 64), lambda n: _distilled(prompts=n)),
        (
            Conclusion("16", "1", "sixteen predict better than one"),
            Conclusion("16", "8", "more prompts help, up to about 16"),
            Conclusion("64", "16", "beyond 16 nothing is gained", gains=False),
        ),
        "prompt tokens",
    ),
    Study(
        "bita_masks", "BiTA: five mask tokens",
        f"BiTA Figure 9, {DISTILLED}, at a learning rate of 1e-2, since 3e-2, that of the other tables, lost a probe; "
        "see the decoding table",
        1e-2,
        {"5": _distilled(distances=5)},
    ),
    Study(
        "bita_objective", "BiTA: labels or distillation", "not in the paper", 3e-2,
        {"hard labels": BiTA(), "distillation": _distilled()},
        (Conclusion("distillation", "hard labels", "distillation predicts better than the paper's labels", ours=True),),
    ),
    Study(
        "bita_start", "BiTA: where masks start",
        f"BiTA section 4.1: N(0, 0.02), three trainings each; {DISTILLED}", 3e-2,
        {f"{initial}, seed {seed}": _distilled(initial=initial) for initial in ("normal", "text") for seed in range(3)},
        own={f"{initial}, seed {seed}": {"seed": seed} for initial in ("normal", "text") for seed in range(3)},
    ),
    Study(
        "bita_entry", "BiTA: masks that join late", f"PPD section 7.4.2, an idea; {_START}; BiTA {DISTILLED}", 3e-2,
        _over(_LATE, lambda layer: _distilled(initial="text", entry=layer)), axis="layer of entry",
    ),
    Study(
        "space_training", "SPACE: what is trained, three masks",
        "section 3.1, which tunes the whole base; here masks weigh as much as the text", _LAYERS,
        {
            "mask alone": SPACE(distances=3, tuning="none"),
            "LoRA": SPACE(distances=3),
            "LoRA, distillation": SPACE(distances=3, objective="distillation"),
            "LoRA, p_ar = 1": SPACE(distances=3, p_ar=1.0),
        },
        (Conclusion("LoRA", "mask alone", "a base that is tuned guesses better behind masks", ours=True),),
        own={"mask alone": _rate(3e-2)},
    ),
    Study(
        "space_quality", "SPACE: is quality lost?",
        "SPACE Table 6 in small: LoRA, five masks, 250 updates of two answers, with their prompts at most 192 tokens, "
        "each cut in 8 places where p_ar < 1", _LAYERS,
        {
            "SFT (p_ar = 1)": SPACE(p_ar=1.0),
            "SAR-SFT": SPACE(weighting="tokens"),
            "SAR-SFT, masks weigh as much as the text": SPACE(),
        },
        (
            Conclusion("SAR-SFT", "SFT (p_ar = 1)", "learning to guess costs no quality", perplexity=True),
            Conclusion(
                "SAR-SFT, masks weigh as much as the text", "SFT (p_ar = 1)",
                "not even where masks weigh as much as the text", perplexity=True, ours=True,
            ),
        ),
        training={"steps": 250, "insertions": 8, "sequence_length": 192},
    ),
    Study(
        "transfer_first", "Hidden Transfer: layer of the first step", "Hidden Transfer Figure 5", _TRANSFER,
        _over((5, 10, 15, 20, 25), lambda layer: _transfer(layer)),
        (
            Conclusion("15", "25", "from the middle to the top accuracy drops rapidly"),
            Conclusion("5", "15", "below the middle nothing is gained", gains=False),
            Conclusion("10", "15", "nor just below it", gains=False),
        ),
        "layer of the first step",
    ),
    Study(
        "transfer_second", "Hidden Transfer: layer of the second step, the first at 10",
        f"Hidden Transfer Figure 6, where the first is at 15 of 32; {_SHARED}", _TRANSFER,
        _over((10, 15, 20, 25), lambda layer: _transfer(10, layer)),
        (
            Conclusion("10", "15", "a little above the first step nothing is lost", gains=False, distance=2),
            Conclusion("15", "25", "a second step near the top is worse", distance=2),
        ),
        "layer of the second step",
    ),
    Study(
        "transfer_masked", "Hidden Transfer: does the second step need to see the first?",
        f"Hidden Transfer Figure 7, the steps at 10 and 15 of 30 layers instead of 15 and 20 of 32; {_SHARED}",
        _TRANSFER,
        {"seen": _transfer(10, 15), "masked": _transfer(10, 15, masked=True)},
        (Conclusion("seen", "masked", "the second step is better when it sees the first", distance=2),),
        by_distance=True,
    ),
    Study(
        "transfer_training", "Hidden Transfer: how the maps are trained", f"not in the paper; {_SHARED}", _TRANSFER,
        {
            "separate": _transfer(10, 14, 18),
            "separate, real states": _transfer(10, 14, 18, train_visibility="real"),
            "separate, real states, KL(pseudo || base), as the paper": _transfer(
                10, 14, 18, train_visibility="real", direction="reverse"
            ),
            "joint": _transfer(10, 14, 18, training="joint"),
            "joint, KL(pseudo || base)": _transfer(10, 14, 18, training="joint", direction="reverse"),
        },
        (
            Conclusion(
                "separate", "separate, real states", "maps that see pseudo states, as in decoding, predict better",
                ours=True,
            ),
            Conclusion(
                "separate, real states", "separate, real states, KL(pseudo || base), as the paper",
                "so do those that learn by KL(base || pseudo)", ours=True,
            ),
            Conclusion("joint", "joint, KL(pseudo || base)", "and all at once too", ours=True),
            Conclusion(
                "joint", "separate", "all at once predict better than one after the other, in as many updates",
                ours=True,
            ),
        ),
    ),
    Study(
        "transfer_exits", "Hidden Transfer against early exit and Medusa",
        "Hidden Transfer Figure 3, whose layers 25, 30 and 35 of 40 are as high as 19, 22 and 26 of 30; the others are "
        "the lower ones of the adapter that ships; all learn the base's distributions, and the maps "
        "all at once by KL(base || pseudo)", _TRANSFER,
        {
            "hidden transfer": _transfer(10, 14, 18, training="joint"),
            "early exit": EarlyExit((10, 14, 18)),
            "hidden transfer, layers 19, 22, 26": _transfer(19, 22, 26, training="joint"),
            "early exit, layers 19, 22, 26": EarlyExit((19, 22, 26)),
            "Medusa": Medusa(heads=3, lm_head="full", alignment=1.0, labels=0.0, decay=1.0),
        },
        (
            Conclusion("hidden transfer", "early exit", "pseudo states beat reading the same layers directly"),
            Conclusion(
                "hidden transfer, layers 19, 22, 26", "early exit, layers 19, 22, 26",
                "at the paper's relative depths too",
            ),
            Conclusion("hidden transfer", "Medusa", "and heads on the last layer"),
            Conclusion("hidden transfer, layers 19, 22, 26", "Medusa", "from the paper's depths too"),
        ),
        by_distance=True,
        own=dict.fromkeys(("early exit", "early exit, layers 19, 22, 26", "Medusa"), _rate(_HEADS)),
    ),
    Study(
        "ppd_epts", "PPD: ensemble prompt tokens", f"PPD Table 6.4, which goes to 100, {_PLAIN}{_FEW_POINTS}", 3e-2,
        _over((1, 4, 10), lambda n: PPD(ensemble=n)),
        (
            Conclusion("4", "1", "more EPTs generally predict better"),
            Conclusion("10", "1", "ten predict better than one"),
        ),
        "EPTs",
        training=_ENSEMBLES,
    ),
    Study(
        "ppd_objective", "PPD: distillation or labels", "PPD Table 6.5, which also varies epochs and batches", 3e-2,
        {
            "distillation": PPD(),
            "distillation, KL(student || base)": PPD(direction="reverse"),
            "hard labels": PPD(objective="hard"),
        },
        (Conclusion("distillation", "hard labels", "distillation predicts better than labels"),),
    ),
    Study(
        "ppd_prefix", "PPD: prefix tuning", "PPD Table 6.6", 3e-2,
        {"without": PPD(), "1 per distance": PPD(prefix_tokens=1)},
        (Conclusion("without", "1 per distance", "prefix tuning makes predictions worse"),),
    ),
    Study(
        "ppd_head", "PPD: a decoding head of its own",
        "PPD Table 6.7; the two stages divide the updates, where the thesis trains the second in addition", 3e-2,
        {
            "none": PPD(),
            "1-stage": PPD(head="one_stage"),
            "1-stage, the rate of heads": PPD(head="one_stage"),
            "2-stage": PPD(head="two_stage"),
        },
        (
            Conclusion("none", "1-stage", "a head trained in one stage makes predictions worse"),
            Conclusion(
                "none", "1-stage, the rate of heads", "at the rate of other heads, which the thesis has not, too",
                ours=True,
            ),
            Conclusion("2-stage", "none", "one trained in two stages, of half the updates, makes them a little better"),
        ),
        own={"1-stage, the rate of heads": _rate(_HEADS)},
    ),
    Study(
        "ppd_masks", "PPD: attention masks of 4 EPTs", f"PPD Table 6.8, of 100 EPTs, {_PLAIN}{_FEW_POINTS}", 3e-2,
        {mask: PPD(ensemble=4, mask=mask) for mask in ("ensemble", "decoder", "encoder")},
        (
            Conclusion("ensemble", "decoder", "the ensemble mask beats the decoder mask"),
            Conclusion("ensemble", "encoder", "the ensemble mask beats the encoder mask"),
        ),
        training=_ENSEMBLES,
    ),
    Study(
        "ppd_aggregation", "PPD: aggregation of 4 EPTs", f"PPD Table 6.9, of 100 EPTs, {_PLAIN}{_FEW_POINTS}", 3e-2,
        {"average": PPD(ensemble=4), "learned": PPD(ensemble=4, aggregation="learned")},
        (Conclusion("average", "learned", "learned weights are slightly worse than the average"),),
        training=_ENSEMBLES,
    ),
    Study(
        "ppd_exits", "PPD: multi-exit ensemble", "PPD Table 6.10", 3e-2,
        _over((1, 2, 3), lambda k: PPD(multi_exit=k)),
        (Conclusion("1", "2", "averaging the last two layers is worse"), Conclusion("1", "3", "so is averaging three")),
        "exits",
    ),
    Study(
        "ppd_entry", "PPD: prompt tokens that join late", f"PPD section 7.4.2, an idea; {_START}", 3e-2,
        _over(_LATE, lambda layer: PPD(entry=layer)), axis="layer of entry",
    ),
    Study(
        "heads", "Heads: Medusa, Hydra and Amphista",
        "Amphista Figure 1; Hydra's heads are given the true tokens before theirs, the others' are not", _HEADS,
        {
            "Medusa": Medusa(),
            "Medusa, Amphista's losses": Medusa(alignment=1.0, decay=1.0),
            "Hydra": Hydra(),
            "Hydra++": Hydra(prefix_attention=True, blocks=4, alignment=1.0, labels=0.0),
            "Amphista": Amphista(),
        },
        (
            Conclusion("Amphista", "Medusa", "Amphista's second head is right more often than Medusa's", distance=2),
            Conclusion("Amphista", "Medusa", "so is its fourth", distance=4),
            Conclusion("Amphista", "Medusa, Amphista's losses", "and not for its losses alone", distance=2, ours=True),
        ),
        by_distance=True,
        own=dict.fromkeys(("Hydra", "Hydra++", "Amphista"), _rate(_LAYERS)),
    ),
    Study(
        "amphista_variants", "Amphista: variants", "Amphista Tables 4 and 5, their accuracies", _LAYERS,
        {
            "Amphista": Amphista(),
            "w/o auto-embedding": Amphista(self_attention_layers=0),
            "w/o position encoding": Amphista(position_encoding=False),
            "w/o staged adaptation": Amphista(adaptation_layers=0),
            "one adaptation layer": Amphista(adaptation_layers=1),
            "w/o sampled token": Amphista(sampled_token=False),
            "Amphista-alpha": Amphista(self_attention_layers=2),
        },
        (
            Conclusion("Amphista", "w/o auto-embedding", "heads that see each other predict better"),
            Conclusion("Amphista", "w/o staged adaptation", "adapted states predict better"),
            Conclusion("Amphista", "w/o sampled token", "the sampled token predicts better"),
        ),
        own={"w/o staged adaptation": _rate(_HEADS)},
    ),
    Study(
        "amphista_losses", "Amphista: its two losses", "equation 7, which gives no weights", _LAYERS,
        {
            "both": Amphista(),
            "alignment alone": Amphista(labels=0.0),
            "labels alone": Amphista(alignment=0.0),
        },
    ),
    Study(
        "medusa_lm_head", "Medusa: vocabulary projections", "not in the papers", _HEADS,
        {"tied": Medusa(), "low rank, 32": Medusa(lm_head="low_rank", rank=32), "full": Medusa(lm_head="full")},
    ),
)  # fmt: skip
