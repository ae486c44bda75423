"""Replay recorded offers: how many steps any union takes with any budget, without decoding.

A replay makes the drafts that decoding would make and compares them with the recorded answer, step by step. It runs no
model, so that a thousand steps take a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.config import SamplingConfig
from jaxspec.decoding.draft import Draft, Offer, calibrated
from jaxspec.decoding.pace import Pace, in_cheapest_steps
from jaxspec.decoding.paths import follow
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.shape import Best, StaticTree
from jaxspec.decoding.tree import Tree
from jaxspec.drafters.budget import Budget
from jaxspec.drafters.costs import kind_of
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.job import bucket
from jaxspec.tuning.record import Recording

_BINS = 200  # of chances


@dataclasses.dataclass(frozen=True)
class Replay:
    """Steps and time that decoding recorded answers with a shape would take.

    Attributes:
      steps: [A] int, forward passes of each answer after prefill.
      tokens: [A] int, of each answer, its first left out.
      time: of all batches, in the unit of the shape's costs, with drafting; where it has but one size, steps.
      tried: [S, X] int, candidates behind accepted tokens, by source and by their chance, in X equal bins from 0 to 1;
        none where a fixed tree does not ask for chances.
      right: [S, X] int, how many of them were accepted.
    """

    steps: np.ndarray
    tokens: np.ndarray
    time: float
    tried: np.ndarray
    right: np.ndarray

    @property
    def tokens_per_step(self) -> float:
        """Over all answers."""
        return float(self.tokens.sum() / max(self.steps.sum(), 1))


@flax.struct.dataclass
class _Setting:
    """Constants of a replay.

    Attributes:
      shape: what makes drafts.
      costs: [1, K], of a step of each size.
      adds: [S], what the draft of each source adds to a step of the smallest size.
      tables: of each source, its calibration [1, M, 2].
      probing: which source has probes, if one does (static).
      resting: which sources rest while no draft pays (static).
    """

    shape: StaticTree | Best
    costs: jax.Array
    adds: jax.Array
    tables: list[jax.Array]
    probing: int | None = flax.struct.field(pytree_node=False)
    resting: tuple[bool, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class _State:
    """State of a batch's replay.

    Attributes:
      at: [B] int32, place in the answer of the newest token.
      probed: [B, M] int32, for each distance how many levels above the last accepted node the owner of its probe is:
        0 for its own probe, more for one that it borrows from an ancestor, -1 for none.
      pace: of the rows.
      trees: the fixed tree that is filled next; empty where drafts are chosen per step.
      steps: [B] int32.
      time: scalar.
      tried: [S, X] int32, see `Replay`.
      right: [S, X] int32, likewise.
    """

    at: jax.Array
    probed: jax.Array
    pace: Pace
    trees: list[Tree]
    steps: jax.Array
    time: jax.Array
    tried: jax.Array
    right: jax.Array


def replay(
    recordings: Sequence[Recording],
    drafter: Drafter,
    sources: Sequence[int] | None = None,
    batch_size: int = 1,
    temperature: float = 0.0,
    drafting: Sequence[float] = (),
    paced: bool = True,
) -> Replay:
    """The steps that a drafter needs for recorded answers.

    Args:
      recordings: of its sources, or of more.
      drafter: its sources, in the order of `sources`, and its budget or fixed tree.
      sources: which of the recorded ones they are; default all.
      batch_size: B, answers to decode together, in their order.
      temperature: that the answers were drawn at, which decides how chances are calibrated.
      drafting: what the draft of each of its sources adds to a step of the root alone; other sizes cost what they do
        with it. Default nothing.
      paced: whether sources rest as in decoding with several sizes; not where several stand for one.
    """
    shape = drafter.device_shape
    if isinstance(shape, Best):
        shape = shape.replace(trees=())  # of what sources expand the candidates are recorded
    chosen = range(len(drafter.sources)) if sources is None else sources
    probing = next((i for i, source in enumerate(drafter.sources) if source.facts.probes), None)
    sampler = make_sampler(SamplingConfig(temperature))
    tables = [jnp.asarray(source.calibrations().at(sampler)) for source in drafter.sources]
    counts = np.array([len(recording.answer) - 1 for recording in recordings])
    missing = -len(counts) % batch_size
    T = bucket(max(counts), 64, 64)

    def batched(arrays: Sequence[np.ndarray], length: int, value: int = 0) -> np.ndarray:
        """Arrays of answers as one [G, B, length, ...]; a last batch is filled up."""
        first = np.full((len(arrays) + missing, length, *arrays[0].shape[1:]), value, arrays[0].dtype)
        for row, array in zip(first, arrays, strict=False):
            row[: len(array)] = array
        return first.reshape(-1, batch_size, *first.shape[1:])

    given = [[_asked(recording.offers[i], shape.width) for recording in recordings] for i in chosen]
    offers = [jax.tree.map(lambda *xs: batched(xs, T), *of_source) for of_source in given]
    answers = batched([r.answer for r in recordings], T + shape.depth + 2, -1)
    ends = np.pad(counts, (0, missing)).reshape(-1, batch_size)
    costs = jnp.ones((1, 1)) if shape.costs is None else shape.costs[kind_of(temperature), None]
    facts = [source.facts for source in drafter.sources]
    resting = tuple(paced and shape.costs is not None and f.takes_time and not f.adds_rows for f in facts)
    alone = isinstance(drafter.shape, Budget) and drafter.shape.sizes[:1] and drafter.shape.sizes[0].rows == 1
    adds = jnp.array(drafting if alone and drafting else [0.0] * len(facts), jnp.float32)
    setting = _Setting(shape, costs, adds, tables, probing, resting)
    done = jax.device_get(_replay(setting, offers, jnp.asarray(answers), jnp.asarray(ends)))
    steps = done.steps.reshape(-1)[: len(counts)]
    return Replay(steps, counts, float(done.time.sum()), done.tried.sum(axis=0), done.right.sum(axis=0))


def slowest(steps: np.ndarray, batch_size: int) -> int:
    """Steps of all batches, each as many as its slowest answer takes, of the steps [A] of answers in their order."""
    return int(np.pad(steps, (0, -len(steps) % batch_size)).reshape(-1, batch_size).max(axis=1).sum())


def _asked(offer: Offer, width: int) -> Offer:
    """At most `width` candidates per distance, as decoding would ask for: siblings share what chance there is.

    Candidates with parents stay as recorded.
    """
    return offer if offer.parent is not None else jax.tree.map(lambda x: x[..., :width], offer)


@jax.jit
def _replay(setting: _Setting, offers: list[Offer], answers: jax.Array, ends: jax.Array) -> _State:
    """The last states of G batches, one after another: drafts that rest at the end of one keep resting in the next.

    Args:
      setting: constants.
      offers: of each source, [G, B, T, M, W].
      answers: [G, B, T + P + 2].
      ends: [G, B], their last places.

    Returns:
      Arrays with G in front.
    """

    def one(idle: jax.Array, batch: tuple) -> tuple[jax.Array, _State]:
        last = _replay_batch(setting, idle, *batch)
        return last.pace.idle[0], last

    return lax.scan(one, jnp.int32(0), (offers, answers, ends))[1]


def _replay_batch(
    setting: _Setting, idle: jax.Array, offers: list[Offer], answers: jax.Array, ends: jax.Array
) -> _State:
    """The last state of one batch, whose arguments are without G; `idle` is `Pace.idle` of the batch before."""
    shape, costs, probing, resting = setting.shape, setting.costs, setting.probing, setting.resting
    B, rows = len(answers), jnp.arange(len(answers))
    M = 0 if probing is None else offers[probing].tokens.shape[2]

    def step(state: _State) -> _State:
        active = state.at < ends
        here = [
            _of_probes(offer, state) if i == probing else jax.tree.map(lambda x: x[rows, state.at], offer)
            for i, offer in enumerate(offers)
        ]
        here = [calibrated(offer, table) for offer, table in zip(here, setting.tables, strict=True)]
        pause = state.pace.rests(state.pace.trial(costs, shape.trial_size)) if any(resting) else jnp.bool_(False)
        drafts = [~(rests & pause) for rests in resting]
        if probing is not None:
            drafts[probing] = jnp.any(active & ~state.pace.blind)
        here = [offer.replace(known=offer.known & drafts[i]) for i, offer in enumerate(here)]
        draft = shape.draft(state.trees, answers[rows, state.at], here, state.pace, costs)
        following = jnp.take_along_axis(answers, state.at[:, None] + 1 + draft.tree.depth, axis=1)
        accepted = follow(draft, following)
        size = jnp.int32(0) if draft.size is None else jnp.max(jnp.where(active, draft.size, 0))
        added, paid = size >= shape.alone, True if draft.pays is None else jnp.any(draft.pays & active)
        drafting = jnp.where(size == 0, jnp.sum(setting.adds * jnp.stack(drafts)), 0.0)
        at = jnp.where(active, state.at + accepted.length + 1, state.at)
        tried, right = _outcomes(draft, following, active, len(offers))
        return _State(
            at=at,
            probed=jnp.where(added, _levels_above(draft.tree, accepted.node, M), -1),
            pace=state.pace.after(accepted.length + 1, in_cheapest_steps(costs)[:, size], at < ends, paid, added),
            trees=shape.follow(draft, accepted.node),
            steps=state.steps + active,
            time=state.time + costs[0, size] + drafting,
            tried=state.tried + tried,
            right=state.right + right,
        )

    zero, counts = jnp.zeros(B, jnp.int32), jnp.zeros((len(offers), _BINS), jnp.int32)
    pace, trees = Pace.begin(zero < ends, idle=idle), shape.begin(B)
    state = _State(zero, jnp.full((B, M), -1), pace, trees, zero, jnp.float32(0), counts, counts)
    return lax.while_loop(lambda state: jnp.any(state.at < ends), step, state)


def _levels_above(tree: Tree, node: jax.Array, distances: int) -> jax.Array:
    """Levels between a node [B] and the owner of each of its probes, [B, M]; -1 where it has none."""
    rows = jnp.arange(len(node))
    probes = tree.probes_behind(node, distances)
    owners = jnp.take_along_axis(tree.probe_owner, jnp.maximum(probes, 0), axis=1)
    return jnp.where(probes < 0, -1, tree.depth[rows, node][:, None] - tree.depth[rows[:, None], owners])


def _of_probes(offer: Offer, state: _State) -> Offer:
    """The offers of the newest token's probes, [B, M, W] of [B, T, M, W].

    A probe that is borrowed from n levels above was recorded n places before, as the prediction n distances further.
    """
    before = jnp.maximum(state.probed, 0)
    B, M = before.shape
    index = (jnp.arange(B)[:, None], state.at[:, None] - before, jnp.arange(M) + before)
    here = jax.tree.map(lambda x: x[index], offer)
    return here.replace(known=here.known & (state.probed >= 0)[..., None])


def _outcomes(draft: Draft, following: jax.Array, active: jax.Array, sources: int) -> tuple[jax.Array, jax.Array]:
    """Candidates behind accepted tokens by source and chance, [S, X], and how many are right."""
    zero = jnp.zeros((sources, _BINS), jnp.int32)
    if draft.log_p is None:
        return zero, zero
    parent = draft.tree.parent
    right = draft.tokens == jnp.take_along_axis(following, parent, axis=1)
    on_path = jnp.all(right[:, None] | ~draft.tree.ancestors | (draft.tree.depth == 0)[:, None], axis=-1)
    counts = draft.valid & (draft.tree.depth > 0) & jnp.take_along_axis(on_path, parent, axis=1) & active[:, None]
    chance = jnp.exp(draft.log_p - jnp.take_along_axis(draft.log_p, parent, axis=1))
    place = jnp.clip(jnp.where(counts, chance, 0.0) * _BINS, 0, _BINS - 1).astype(jnp.int32)
    own = (draft.sources >> jnp.arange(sources)[:, None, None]) & 1  # [S, B, N]
    source = jnp.arange(sources)[:, None, None]
    return zero.at[source, place].add(own * counts), zero.at[source, place].add(own * (counts & right))
