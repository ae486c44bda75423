"""Pictures of a step of each paper, its rows and who sees whom: python -m experiments.pictures.

Everything in them comes from the methods themselves: rows and mask from `Method.rows` on a tiny random base, and what
heads read from derivatives of their logits. Writes docs/papers/NAME.svg.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.grids import Grid, svg
from jaxspec.cli.options import parse
from jaxspec.cli.program import run_main
from jaxspec.config import ModelConfig, SamplingConfig
from jaxspec.decoding.draft import Draft, DraftContext, PyTree
from jaxspec.decoding.method import Method, abstract_trainable
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.tree import Tree
from jaxspec.files import writable, write_atomically
from jaxspec.methods import PPD, SPACE, Amphista, BiTA, HiddenTransfer
from jaxspec.methods.heads import Features
from jaxspec.model.base import Base
from jaxspec.model.decoder import Decoder, abstract_params
from jaxspec.trees import cartesian, chain, dynamic_sparse_tree, efficient
from jaxspec.trees.plan import TreePlan

_CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
    tie_embeddings=False,
)
_RATES = np.array([[0.4, 0.2, 0.1], [0.3, 0.1, 0.1]])  # how often candidates are right, for the dynamic tree
_STEPS: dict[str, tuple[Method, TreePlan, str]] = {
    "ppd": (PPD(distances=2, ensemble=2), dynamic_sparse_tree(_RATES, 7), "prompt"),
    "bita": (BiTA(distances=2, prompts=3), efficient((2, 2)), "mask"),
    "space": (SPACE(distances=3, tuning="none"), chain(3), "mask"),
    "hidden_transfer": (HiddenTransfer(distances=2, layers=(2, 3)), cartesian((2, 1)), "pseudo"),
    "amphista": (Amphista(heads=4), cartesian((2, 2)), ""),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Draw a step of each paper.

    Attributes:
      output: folder for the pictures.
    """

    output: str = "docs/papers"


def pictures() -> Mapping[str, str]:
    """SVG by method."""
    base, drawn = Base(_random(abstract_params(_CONFIG)), Decoder(_CONFIG)), {}
    for name, (method, plan, word) in _STEPS.items():
        grids = [_rows_grid(method, base, plan, word)]
        drawn[name] = svg([*grids, _heads_grid(method, base)] if isinstance(method, Amphista) else grids)
    return drawn


def _random(shapes: PyTree) -> PyTree:
    """Arrays of such shapes, none of which is zero anywhere."""
    noise = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(noise.normal(size=x.shape), x.dtype), shapes)


def _rows_grid(method: Method, base: Base, plan: TreePlan, word: str) -> Grid:
    """Which rows of a step there are and what each sees.

    Args:
      method: whose rows.
      base: what they go through.
      plan: its last tree is drawn.
      word: what the paper calls a probe.
    """
    facts = method.facts(base.decoder.config)
    tree = jax.tree.map(lambda x: jnp.asarray(x[-1:]), plan.arrays(facts.probes and facts.distances))
    copies = facts.probe_rows if facts.probes else 1
    live = np.concatenate([tree.live[0], np.repeat(tree.probe_live[0], copies)]).astype(bool)
    mask, prefix, positions, joins = (np.asarray(x)[live] for x in _seen(method, base, tree))
    names = np.array([*_nodes(tree), *_probes(tree, word, copies)])[live]
    kinds = np.array(["node"] * tree.num_nodes + ["probe"] * (len(live) - tree.num_nodes))[live]
    labels = [
        f"{name}, at p{f' + {place}' if place else ''}{f', from layer {layer} on' if layer else ''}"
        for name, place, layer in zip(names, positions, joins, strict=True)
    ]
    prompts = [(f"prompt {number + 1}", "prefix") for number in range(prefix.shape[1])]
    text = np.ones((len(names), 1), bool)  # all rows of a step see the cache
    return Grid(
        "rows of a step, and what each sees",
        list(zip(labels, kinds.tolist(), strict=True)),
        [("text so far", "text"), *prompts, *zip(names.tolist(), kinds.tolist(), strict=True)],
        np.concatenate([text, prefix, mask[:, live]], axis=1),
    )


def _seen(method: Method, base: Base, tree: Tree) -> tuple[jax.Array, jax.Array, jax.Array, np.ndarray]:
    """For every row of a step: the rows it sees [R, R], the prompts [R, P], its position [R], its first layer [R]."""
    trainable = _random(abstract_trainable(method, base.decoder.config))
    joins: list[np.ndarray] = []

    def step() -> tuple[jax.Array, jax.Array, jax.Array]:
        newest, tokens = jnp.zeros(1, jnp.int32), jnp.zeros((1, tree.num_nodes), jnp.int32)
        seeds, sampler = newest.astype(jnp.uint32), make_sampler(SamplingConfig())
        ready = method.prepare(trainable, base)
        context = DraftContext(ready, base, tree, sampler, seeds, newest, newest, newest == 0, width=1, depth=1)
        rows = method.rows(context, Draft(tree, tokens, tokens == 0, tokens), {})
        count = rows.mask.shape[-1]
        joins.append(np.zeros(count, int))
        for join in rows.joins:
            joins[-1][rows.there(join.layer) :] = join.layer
        prefix = jnp.zeros((count, 0), bool) if rows.sees_prefix is None else rows.sees_prefix[0, 0]
        return rows.mask[0, 0], prefix, rows.positions[0, 0]

    return *jax.jit(step)(), joins[-1]


def _nodes(tree: Tree) -> list[str]:
    """The root, and a letter for every candidate."""
    return ["newest token", *(f"candidate {letter}" for letter in string.ascii_lowercase[: tree.num_nodes - 1])]


def _probes(tree: Tree, word: str, copies: int) -> list[str]:
    """`mask 2 of a`, and of an ensemble `prompt 2.1 of a`."""
    owners = [["newest", *string.ascii_lowercase][owner] for owner in tree.probe_owner[0]]
    numbered = zip(tree.probe_distance[0].tolist(), owners, strict=True)
    return [
        f"{word} {distance}{f'.{copy + 1}' if copies > 1 else ''} of {owner}"
        for distance, owner in numbered
        for copy in range(copies)
    ]


def _heads_grid(method: Amphista, base: Base) -> Grid:
    """What each head reads: which adaptation layer, and which heads through the block's self-attention."""
    trainable = _random(abstract_trainable(method, base.decoder.config))
    features = tuple(_random([jax.ShapeDtypeStruct((_CONFIG.hidden_size,), "float32")] * method.adaptation_layers))

    def alone(features: Features) -> jax.Array:  # without self-attention a head reads nothing but its stage
        lone = dataclasses.replace(method, self_attention_layers=0)
        return lone.predict(trainable, base, features, method.heads)

    def together(positions: jax.Array) -> jax.Array:
        return method.predict(trainable | {"positions": positions}, base, features, method.heads)

    of_stages = [np.any(np.asarray(x) != 0, axis=(1, 2)) for x in jax.jit(jax.jacobian(alone))(features)]
    of_heads = np.any(np.asarray(jax.jit(jax.jacobian(together))(trainable["positions"])) != 0, axis=(1, 3))
    heads = [(f"head {number + 1}", "probe") for number in range(method.heads)]
    return Grid(
        "heads behind the pass, and what each reads",
        heads,
        [("adaptation layer 1", "prefix"), ("adaptation layer 2", "prefix"), *heads],
        np.concatenate([np.stack(of_stages, axis=1), of_heads], axis=1),
    )


def main(args: list[str]) -> None:
    """Write the pictures."""
    folder = writable(Path(parse(Options, args, prog="python -m experiments.pictures").output))
    for name, content in pictures().items():
        write_atomically(folder / f"{name}.svg", content.encode())
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    run_main(main)
