"""The papers' ablations on a base that everyone can run: many small trainings, equal within a table.

Every variant is a method with its settings; one that several tables share is trained once. Trainings are ordinary
runs in folders of their own, so that a killed study goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.evaluation.early_exit import EarlyExit
from jaxspec.files import write_atomically
from jaxspec.methods import PPD, SPACE, Amphista, BiTA, HiddenTransfer, Hydra, Medusa
from jaxspec.methods.base import Method
from jaxspec.model.load import Model
from jaxspec.training.data import cache_file
from jaxspec.training.run_config import RunConfig, describe, training_settings
from jaxspec.training.trainer import Trainer

_LARGE = 20_000_000  # parameters; projections of whole vocabularies are not kept


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a paper concludes from a table, or what is asked of it here: one variant is better than another, or is not.

    Attributes:
      one: label of a variant.
      other: label of another.
      text: the conclusion, in our words.
      gains: whether the first is the better one; False: there is nothing to choose the first for.
      distance: the one whose predictions are judged; 0: the mean of all that both have.
      best: how many candidates count as the best.
      perplexity: judge instead whether the first one's perplexity of held-out answers is no higher than the other's,
        whatever `gains`.
    """

    one: str
    other: str
    text: str
    gains: bool = True
    distance: int = 0
    best: int = 1
    perplexity: bool = False


@dataclasses.dataclass(frozen=True)
class Study:
    """One table.

    Attributes:
      name: short, for files.
      title: what is compared.
      source: where the paper has it.
      learning_rate: of all variants but those of `rates`.
      variants: methods by label.
      claims: what the paper concludes.
      axis: name of the quantity that the labels are values of, where a curve says more than rows.
      by_distance: draw every variant's accuracies against the distance.
      rates: learning rates of variants that learn better with another.
      training: other settings in which all of its trainings differ from those of other tables.
    """

    name: str
    title: str
    source: str
    learning_rate: float
    variants: dict[str, Method]
    claims: tuple[Claim, ...] = ()
    axis: str = ""
    by_distance: bool = False
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    training: Mapping[str, int] = dataclasses.field(default_factory=dict)


def _over(values: Iterable[Any], build: Callable[[Any], Method]) -> dict[str, Method]:
    return {str(value): build(value) for value in values}


def _distilled(**settings: Any) -> BiTA:
    return BiTA(objective="distillation", **settings)


def _transfer(*layers: int, **settings: Any) -> HiddenTransfer:
    return HiddenTransfer(distances=len(layers), layers=layers, **settings)


DISTILLED = "trained by distillation instead of the paper's hard labels"
_GIVES_SPEEDS = f"which gives speeds; judged here by accuracy, {DISTILLED}"
_SHARED = "here separate maps divide the updates among them and joint ones learn from all"
_PLAIN = "whose figures are those that Table 6.5 gives without distillation; here all distil"
_FEW_POINTS = ", at up to 32 positions an answer"
_ENSEMBLES = {"insertions": 32}  # with ten EPTs every position is thirty rows
_LATE = (0, 5, 10, 15, 20, 25)
# Learning rates, the best of a few in trials of 40 updates
_TRANSFER = 7e-3
_HEADS = 3e-3
_LAYERS = 1e-3  # heads behind layers of their own

STUDIES = (
    Study(
        "bita_prompting", "BiTA: prompting design", f"BiTA Table 3, {_GIVES_SPEEDS}", 3e-2,
        {"masks only": _distilled(prompting="none"), "shallow": _distilled(prompting="shallow"), "deep": _distilled()},
        (
            Claim("shallow", "masks only", "shallow prompts help a little"),
            Claim("deep", "shallow", "deep prompts help more"),
            Claim("deep", "shallow", "and more where five candidates count, as many as the paper's tree takes", best=5),
            Claim("deep", "masks only", "deep prompts beat masks alone"),
        ),
    ),
    Study(
        "bita_prompts", "BiTA: number of prompt tokens", f"BiTA Figure 8, {_GIVES_SPEEDS}", 3e-2,
        _over((1, 4, 8, 16, 32, 64), lambda n: _distilled(prompts=n)),
        (
            Claim("16", "1", "sixteen predict better than one"),
            Claim("16", "8", "more prompts help, up to about 16"),
            Claim("64", "16", "beyond 16 nothing is gained", gains=False),
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
        (Claim("distillation", "hard labels", "what all other tables do instead of the paper predicts better"),),
    ),
    Study(
        "bita_entry", "BiTA: masks that join late", f"PPD section 7.4.2, an idea; BiTA {DISTILLED}", 3e-2,
        _over(_LATE, lambda layer: _distilled(entry=layer)), axis="layer of entry",
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
        (Claim("LoRA", "mask alone", "a base that is tuned guesses better behind masks"),),
        rates={"mask alone": 3e-2},
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
            Claim("SAR-SFT", "SFT (p_ar = 1)", "learning to guess costs no quality", perplexity=True),
            Claim(
                "SAR-SFT, masks weigh as much as the text", "SFT (p_ar = 1)",
                "not even where masks weigh as much as the text", perplexity=True,
            ),
        ),
        training={"steps": 250, "insertions": 8, "sequence_length": 192},
    ),
    Study(
        "transfer_first", "Hidden Transfer: layer of the first step", "Hidden Transfer Figure 5", _TRANSFER,
        _over((5, 10, 15, 20, 25), lambda layer: _transfer(layer)),
        (
            Claim("15", "25", "from the middle to the top accuracy drops rapidly"),
            Claim("5", "15", "below the middle nothing is gained", gains=False),
        ),
        "layer of the first step",
    ),
    Study(
        "transfer_second", "Hidden Transfer: layer of the second step, the first at 10",
        f"Hidden Transfer Figure 6, where the first is at 15 of 32; {_SHARED}", _TRANSFER,
        _over((10, 15, 20, 25), lambda layer: _transfer(10, layer)),
        (
            Claim("10", "15", "a little above the first step nothing is lost", gains=False, distance=2),
            Claim("15", "25", "a second step near the top is worse", distance=2),
        ),
        "layer of the second step",
    ),
    Study(
        "transfer_masked", "Hidden Transfer: does the second step need to see the first?",
        f"Hidden Transfer Figure 7, the steps at 10 and 15 of 30 layers instead of 15 and 20 of 32; {_SHARED}",
        _TRANSFER,
        {"seen": _transfer(10, 15), "masked": _transfer(10, 15, masked=True)},
        (Claim("seen", "masked", "the second step is better when it sees the first", distance=2),),
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
            Claim("separate", "separate, real states", "maps that see pseudo states, as in decoding, predict better"),
            Claim(
                "separate, real states", "separate, real states, KL(pseudo || base), as the paper",
                "so do those that learn by KL(base || pseudo)",
            ),
            Claim("joint", "joint, KL(pseudo || base)", "and all at once too"),
            Claim("joint", "separate", "all at once predict better than one after the other, in as many updates"),
        ),
    ),
    Study(
        "transfer_exits", "Hidden Transfer against early exit and Medusa",
        "Hidden Transfer Figure 3, whose layers 25, 30 and 35 of 40 are as high as 19, 22 and 26 of 30; the others are "
        "the lower ones of the adapter that ships; all learn the base's distributions", _TRANSFER,
        {
            "hidden transfer": _transfer(10, 14, 18, training="joint"),
            "early exit": EarlyExit((10, 14, 18)),
            "hidden transfer, layers 19, 22, 26": _transfer(19, 22, 26, training="joint"),
            "early exit, layers 19, 22, 26": EarlyExit((19, 22, 26)),
            "Medusa": Medusa(heads=3, lm_head="full", alignment=1.0, labels=0.0, decay=1.0),
        },
        (
            Claim("hidden transfer", "early exit", "pseudo states beat reading the same layers directly"),
            Claim(
                "hidden transfer, layers 19, 22, 26", "early exit, layers 19, 22, 26",
                "at the paper's relative depths too",
            ),
            Claim("hidden transfer", "Medusa", "and heads on the last layer"),
            Claim("hidden transfer, layers 19, 22, 26", "Medusa", "from the paper's depths too"),
        ),
        by_distance=True,
        rates={label: _HEADS for label in ("early exit", "early exit, layers 19, 22, 26", "Medusa")},
    ),
    Study(
        "ppd_epts", "PPD: ensemble prompt tokens", f"PPD Table 6.4, {_PLAIN}{_FEW_POINTS}", 3e-2,
        _over((1, 4, 10), lambda n: PPD(ensemble=n)),
        (
            Claim("4", "1", "more EPTs generally predict better"),
            Claim("10", "1", "ten predict better than one"),
        ),
        "EPTs",
        training=_ENSEMBLES,
    ),
    Study(
        "ppd_objective", "PPD: distillation or labels", "PPD Table 6.5", 3e-2,
        {
            "distillation": PPD(),
            "distillation, KL(student || base)": PPD(direction="reverse"),
            "hard labels": PPD(objective="hard"),
        },
        (Claim("distillation", "hard labels", "distillation predicts better than labels"),),
    ),
    Study(
        "ppd_prefix", "PPD: prefix tuning", "PPD Table 6.6", 3e-2,
        {"without": PPD(), "1 per distance": PPD(prefix_tokens=1)},
        (Claim("without", "1 per distance", "prefix tuning makes predictions worse"),),
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
            Claim("none", "1-stage", "a head trained in one stage makes predictions worse"),
            Claim("none", "1-stage, the rate of heads", "at the rate of other heads, which the thesis has not, too"),
            Claim("2-stage", "none", "one trained in two stages, of half the updates, makes them a little better"),
        ),
        rates={"1-stage, the rate of heads": _HEADS},
    ),
    Study(
        "ppd_masks", "PPD: attention masks of 4 EPTs", f"PPD Table 6.8, of 100 EPTs, {_PLAIN}{_FEW_POINTS}", 3e-2,
        {mask: PPD(ensemble=4, mask=mask) for mask in ("ensemble", "decoder", "encoder")},
        (
            Claim("ensemble", "decoder", "the ensemble mask beats the decoder mask"),
            Claim("ensemble", "encoder", "the ensemble mask beats the encoder mask"),
        ),
        training=_ENSEMBLES,
    ),
    Study(
        "ppd_aggregation", "PPD: aggregation of 4 EPTs", f"PPD Table 6.9, of 100 EPTs, {_PLAIN}{_FEW_POINTS}", 3e-2,
        {"average": PPD(ensemble=4), "learned": PPD(ensemble=4, aggregation="learned")},
        (Claim("average", "learned", "learned weights are slightly worse than the average"),),
        training=_ENSEMBLES,
    ),
    Study(
        "ppd_exits", "PPD: multi-exit ensemble", "PPD Table 6.10", 3e-2,
        _over((1, 2, 3), lambda k: PPD(multi_exit=k)),
        (Claim("1", "2", "averaging the last two layers is worse"), Claim("1", "3", "so is averaging three")),
        "exits",
    ),
    Study(
        "ppd_entry", "PPD: prompt tokens that join late", "PPD section 7.4.2, an idea", 3e-2,
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
            Claim("Amphista", "Medusa", "Amphista's second head is right more often than Medusa's", distance=2),
            Claim("Amphista", "Medusa", "so is its fourth", distance=4),
            Claim("Amphista", "Medusa, Amphista's losses", "and not for its losses alone", distance=2),
        ),
        by_distance=True,
        rates={"Hydra": _LAYERS, "Hydra++": _LAYERS, "Amphista": _LAYERS},
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
            Claim("Amphista", "w/o auto-embedding", "heads that see each other predict better"),
            Claim("Amphista", "w/o staged adaptation", "adapted states predict better"),
            Claim("Amphista", "w/o sampled token", "the sampled token predicts better"),
        ),
        rates={"w/o staged adaptation": _HEADS},
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


def run_name(run: RunConfig, model: Model) -> str:
    """A folder name that belongs to these settings, this base and these prompts alone."""
    answers = cache_file(model, run.data, run.data.max_answer_tokens).stem
    settings = training_settings(describe(run))
    values = [settings["method"], settings["train"], run.train.eval_answers, run.data.answers, answers]
    return f"{run.method.name}-{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]}"


def run_variant(run: RunConfig, model: Model, folder: Path) -> dict[str, Any]:
    """Train a variant, or go on with it, or read what it came to.

    Returns:
      Settings, how many answers were seen and of how many, held-out accuracies [M][K], trainable parameters, training
      speed, and where the method tunes its base the perplexities of held-out answers and what that is made of.
    """
    result = folder / "result.json"
    if not result.exists():
        adapter = Trainer(run, model, folder, resume=(folder / "run.json").exists()).run()
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        figures = {
            "method": {"name": run.method.name} | dataclasses.asdict(run.method),
            "training": dataclasses.asdict(run.train),
            "accuracy": adapter.info["accuracy"],
            "positions": adapter.info["accuracy_positions"],
            "answers": adapter.info["data"]["answers"],
            "answers_seen": adapter.info["data"]["answers_seen"],
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(adapter.trainable)),
            "groups_per_second": [row["groups_per_second"] for row in rows if "loss" in row][-1],
        }
        figures |= {name: adapter.info[name] for name in ("perplexity", "answer_entropies") if name in adapter.info}
        write_atomically(result, json.dumps(figures).encode())
        shutil.rmtree(folder / "checkpoints")
        if figures["parameters"] > _LARGE:
            (folder / "adapter.safetensors").unlink()
    return json.loads(result.read_text())


def run_studies(
    base: RunConfig, model: Model, output: Path, studies: Sequence[Study], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Train every variant of every study.

    Args:
      base: data and training settings that all share.
      model: the base.
      output: a folder with a folder per training.
      studies: which.
      say: told what is being done.

    Returns:
      {study: {label: figures}}.
    """
    results: dict[str, dict[str, Any]] = {}
    for study in studies:
        results[study.name] = {}
        for label, method in study.variants.items():
            rate = study.rates.get(label, study.learning_rate)
            train = dataclasses.replace(base.train, **{"learning_rate": rate, **study.training})
            run = dataclasses.replace(base, method=method, tree="chain:1", train=train)
            say(f"{study.title}: {label}")
            folder = output / run_name(run, model)
            results[study.name][label] = run_variant(run, model, folder) | {"run": folder.name}
    return results
