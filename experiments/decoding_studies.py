"""The papers' tables about decoding as data: trees and numbers of tokens against speed; and what else is measured."""

from __future__ import annotations

from experiments.studies import DISTILLED, SpeedRow, Study
from jaxspec.decoding.method import Method
from jaxspec.methods import PPD, BiTA, HiddenTransfer
from jaxspec.trees import chain, efficient

_NODES = (22, 35, 45, 64)
_COMPARED = ("Medusa", "Hydra", "Hydra++", "Amphista")
_VARIANTS = (
    "w/o auto-embedding", "w/o position encoding", "w/o staged adaptation", "one adaptation layer",
    "w/o sampled token", "Amphista-alpha",
)  # fmt: skip
_HEADS = {"Medusa": "medusa", "Hydra++": "hydra", "Amphista": "amphista"}

DECODING_STUDIES = (
    Study("bita_decoding", "BiTA: trees",
        "BiTA Table 4, with the adapter that ships, which was distilled; all tokens are drafted",
        {
            "straightforward": SpeedRow("bita", "straightforward:3"),
            **{f"full tree, k = {k}": SpeedRow("bita", f"cartesian:{k},{k},{k}") for k in (1, 2, 3, 4)},
            "efficient tree": SpeedRow("bita", "efficient:5"),
            "efficient tree, thinning": SpeedRow("bita", "efficient:5,4,3"),
        }),
    Study("bita_prompting_speed", "BiTA: speed by prompting design, efficient tree", f"BiTA Table 3, {DISTILLED}",
        {label: SpeedRow(("bita_prompting", label), "efficient:5") for label in ("masks only", "shallow", "deep")}),
    Study("bita_prompts_speed", "BiTA: speed against the number of prompt tokens, efficient tree",
        f"BiTA Figure 8, {DISTILLED}",
        {str(n): SpeedRow(("bita_prompts", str(n)), "efficient:5") for n in (1, 4, 8, 16, 32, 64)}),
    Study("bita_masks_speed", "BiTA: speed against the number of mask tokens, efficient tree",
        "BiTA Figure 9, with one adapter, trained with five masks by distillation, at a rate of 1e-2, and cut to "
        "fewer; the paper trains a model for every number",
        {str(m): SpeedRow(("bita_masks", "5"), efficient([5] * m)) for m in (1, 2, 3, 4, 5)}),
    Study("space_masks_speed", "SPACE: speed against the number of mask tokens, chain",
        "SPACE Figure 6, with one adapter, trained with five masks and cut to shorter chains; the paper trains a model "
        "for every number",
        {str(m): SpeedRow("space", chain(m)) for m in (1, 2, 3, 4, 5)}),
    Study("amphista_variants_speed", "Amphista: variants, trees of 22 nodes", "Amphista Tables 4 and 5",
        {
            **{label: SpeedRow(("heads", label), "sparse:22") for label in _COMPARED},
            **{label: SpeedRow(("amphista_variants", label), "sparse:22") for label in _VARIANTS},
        }),
    Study("heads_nodes", "Heads: nodes of the tree",
        "Amphista Table 6, with the adapters that ship: three heads, hundreds of updates, all tokens drafted",
        {f"{label}, {n} nodes": SpeedRow(name, f"sparse:{n}") for label, name in _HEADS.items() for n in _NODES}),
    Study("draft_vocabulary", "Draft vocabulary: tokens that may be drafted, trees of 4 nodes", "not in the papers",
        {
            f"{label}, {count or 'all'}": SpeedRow(name, "sparse:4", count)
            for label, name in {"PPD": "ppd", "Medusa": "medusa"}.items()
            for count in (4096, 8192, 16384, 0)
        }),
)  # fmt: skip

# Both lossless rules of acceptance are compared with these drafters, at these temperatures
SAMPLED = {
    "SPACE, chain of 3": SpeedRow("space", "chain:3"),
    "Medusa, chain of 3": SpeedRow("medusa", "chain:3"),
    "SPACE, 5 nodes": SpeedRow("space", "sparse:5"),
}
TEMPERATURES = (0.3, 0.7, 1.0, 1.3)
TOGETHER = 4  # prompts that share a seed

# Steps of these methods are timed, untrained
TIMED: dict[str, Method] = {
    "PPD": PPD(),
    "PPD from layer 10": PPD(entry=10),
    "PPD from layer 20": PPD(entry=20),
    "BiTA, 16 deep prompts": BiTA(),
    "BiTA from layer 10": BiTA(entry=10),
    "Hidden Transfer, layers 10/14/18": HiddenTransfer(),
}
