"""The papers' tables about decoding as data: trees and numbers of tokens against speed; and what else is measured."""

from __future__ import annotations

from experiments.studies import DISTILLED, Conclusion, Entry, study
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
    study("bita_decoding", "BiTA: trees",
        "BiTA Table 4, with the adapter that ships, which was distilled; all tokens are drafted",
        {
            "straightforward": Entry("bita", "straightforward:3"),
            **{f"full tree, k = {k}": Entry("bita", f"cartesian:{k},{k},{k}") for k in (1, 2, 3, 4)},
            "efficient tree": Entry("bita", "efficient:5"),
            "efficient tree, thinning": Entry("bita", "efficient:5,4,3"),
        },
        Conclusion("full tree, k = 1", "straightforward", "masks on every candidate pay"),
        Conclusion("full tree, k = 2", "full tree, k = 4", "wide full trees cost more than they bring"),
        Conclusion("efficient tree", "straightforward", "the efficient tree is faster than straightforward"),
        *(Conclusion("efficient tree", f"full tree, k = {k}", f"and than full trees of {k}") for k in (1, 2, 3, 4))),
    study("bita_prompting_speed", "BiTA: speed by prompting design, efficient tree", f"BiTA Table 3, {DISTILLED}",
        {label: Entry(("bita_prompting", label), "efficient:5") for label in ("masks only", "shallow", "deep")},
        Conclusion("shallow", "masks only", "shallow prompts are a little faster"),
        Conclusion("deep", "shallow", "deep prompts are much faster"),
        Conclusion("deep", "masks only", "deep prompts are faster than masks alone")),
    study("bita_prompts_speed", "BiTA: speed against the number of prompt tokens, efficient tree",
        f"BiTA Figure 8, {DISTILLED}",
        {str(n): Entry(("bita_prompts", str(n)), "efficient:5") for n in (1, 4, 8, 16, 32, 64)},
        Conclusion("16", "1", "sixteen are faster than one"),
        Conclusion("16", "8", "more are faster, up to about 16"),
        Conclusion("64", "16", "beyond 16 nothing is gained", gains=False),
        axis="prompt tokens"),
    study("bita_masks_speed", "BiTA: speed against the number of mask tokens, efficient tree",
        "BiTA Figure 9, with one adapter, trained with five masks by distillation, at a rate of 1e-2, and cut to "
        "fewer; the paper trains a model for every number",
        {str(m): Entry(("bita_masks", "5"), efficient([5] * m)) for m in (1, 2, 3, 4, 5)},
        Conclusion("3", "1", "three masks are faster than one"),
        Conclusion("3", "5", "three masks are faster than five"),
        Conclusion("4", "5", "and so are four"),
        axis="mask tokens"),
    study("space_masks_speed", "SPACE: speed against the number of mask tokens, chain",
        "SPACE Figure 6, with one adapter, trained with five masks and cut to shorter chains; the paper trains a model "
        "for every number",
        {str(m): Entry("space", chain(m)) for m in (1, 2, 3, 4, 5)},
        Conclusion("3", "1", "three masks are faster than one"),
        Conclusion("5", "3", "five masks are faster than three"),
        axis="mask tokens"),
    study("amphista_variants_speed", "Amphista: variants, trees of 22 nodes", "Amphista Tables 4 and 5",
        {
            **{label: Entry(("heads", label), "sparse:22") for label in _COMPARED},
            **{label: Entry(("amphista_variants", label), "sparse:22") for label in _VARIANTS},
        },
        Conclusion("Amphista", "Medusa", "Amphista is faster than Medusa"),
        Conclusion("Amphista", "Hydra++", "and faster than Hydra++"),
        Conclusion("Amphista", "w/o auto-embedding", "the auto-embedding block pays"),
        Conclusion("Amphista", "w/o staged adaptation", "staged adaptation pays"),
        Conclusion("Amphista", "one adaptation layer", "two layers are faster than one"),
        Conclusion("Amphista", "w/o sampled token", "the sampled token pays"),
        Conclusion("Amphista-alpha", "Amphista", "a second self-attention layer pays")),
    study("heads_nodes", "Heads: nodes of the tree",
        "Amphista Table 6, with the adapters that ship: three heads, hundreds of updates, all tokens drafted",
        {f"{label}, {n} nodes": Entry(name, f"sparse:{n}") for label, name in _HEADS.items() for n in _NODES},
        Conclusion("Amphista, 64 nodes", "Amphista, 22 nodes", "more nodes are faster"),
        Conclusion("Amphista, 22 nodes", "Medusa, 22 nodes", "Amphista is faster than Medusa in small trees"),
        Conclusion("Amphista, 64 nodes", "Medusa, 64 nodes", "and in large ones"),
        Conclusion("Amphista, 22 nodes", "Hydra++, 22 nodes", "Amphista is faster than Hydra++ in small trees"),
        Conclusion("Amphista, 64 nodes", "Hydra++, 64 nodes", "and in large ones")),
    study("draft_vocabulary", "Draft vocabulary: tokens that may be drafted, trees of 4 nodes", "not in the papers",
        {
            f"{label}, {count or 'all'}": Entry(name, "sparse:4", count)
            for label, name in {"PPD": "ppd", "Medusa": "medusa"}.items()
            for count in (4096, 8192, 16384, 0)
        },
        Conclusion("PPD, 8192", "PPD, all", "a draft vocabulary of 8192 pays for PPD", ours=True),
        Conclusion("Medusa, 8192", "Medusa, all", "and for Medusa", ours=True)),
)  # fmt: skip

# Both lossless rules of acceptance are compared with these drafters, at these temperatures
SAMPLED = {
    "SPACE, chain of 3": Entry("space", "chain:3"),
    "Medusa, chain of 3": Entry("medusa", "chain:3"),
    "SPACE, 5 nodes": Entry("space", "sparse:5"),
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
