"""Rules of acceptance from recorded p and q: python -m experiments.blocks --data question.jsonl.

Sampled texts of the base, and at every step a chain drawn from a drafter. What each rule accepts of it on average
follows from the base's p and the drafter's q at its nodes, so that all rules see the same chains:

token by token   a chain of i survives with the product of min(1, p / q)
block            the last i that wins, with h_i of `Block`
match            both draw with the same noise: the same x with m(x) = 1 / sum_y max(p_y / p_x, q_y / q_x); chains that
                 are drawn from q count m / q
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.metrics import estimate
from jaxspec.bench.questions import read_questions, stratified
from jaxspec.bench.report import interval
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Block
from jaxspec.decoding.loop import decode, verify
from jaxspec.decoding.state import DecodeState, Decoding
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter
from jaxspec.generation.job import Job, Settings
from jaxspec.markdown import table
from jaxspec.weights.load import DEFAULT_MODEL, load_model

RULES = ("match", "token by token", "block")


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare rules.

    Attributes:
      data: Spec-Bench's question.jsonl.
      model: the base.
      methods: the drafters.
      length: of chains.
      temperatures: of sampling.
      questions: how many, as many of each kind.
      max_new_tokens: of an answer.
    """

    data: str
    model: str = DEFAULT_MODEL
    methods: tuple[str, ...] = ("draft_model", "eagle")
    length: int = 4
    temperatures: tuple[float, ...] = (0.6, 1.0)
    questions: int = 12
    max_new_tokens: int = 48


@jax.jit
def expected(decoding: Decoding, state: DecodeState) -> jax.Array:
    """Candidates of the present draft that each of `RULES` accepts on average, [B, 3]; its chain is drawn from q."""
    draft, rows = state.draft, jnp.arange(len(state.done))
    _, logits, _, _ = verify(decoding, draft.tree.num_nodes, True, state)
    carried, alike, by_token = (jnp.ones(len(rows)) for _ in range(3))
    continues, accepted, losing = jnp.ones(len(rows), bool), [], []
    for node in range(1, draft.tree.max_depth + 1):  # of a chain: node d is the one at depth d
        token = draft.tokens[:, node]
        p = decoding.sampler.distribution(logits[:, node - 1])
        q = jnp.exp(draft.drawn.log_q[rows, draft.drawn.place[:, node]])
        continues &= draft.valid[:, node]
        px, qx = p[rows, token], jnp.maximum(q[rows, token], 1e-20)
        chosen_by_both = 1 / jnp.sum(jnp.maximum(p / jnp.maximum(px, 1e-30)[:, None], q / qx[:, None]), axis=-1)
        alike *= jnp.where(continues, chosen_by_both / qx, 0)
        by_token *= jnp.where(continues, jnp.minimum(1, px / qx), 0)
        carried = jnp.where(continues, jnp.minimum(1, carried * px / qx), 0)
        next_p, next_q = decoding.sampler.distribution(logits[:, node]), jnp.zeros_like(q)
        if node < draft.tree.max_depth:
            is_drawn = draft.valid[:, node + 1, None]
            next_q = jnp.where(is_drawn, jnp.exp(draft.drawn.log_q[rows, draft.drawn.place[:, node + 1]]), 0)
        excess = jnp.sum(jnp.maximum(carried[:, None] * next_p - next_q, 0), axis=-1)
        wins = jnp.where(carried < 1, excess / (excess + 1 - carried), 1.0)
        losing.append(jnp.where(continues, 1 - wins, 1.0))
        accepted.append([alike, by_token])
    in_block = sum(1 - jnp.prod(jnp.stack(losing[i:]), axis=0) for i in range(len(losing)))
    return jnp.stack([*(sum(each) for each in zip(*accepted, strict=True)), in_block], axis=-1)


def of_texts(drafter: Drafter, prompts: list[list[int]], temperature: float, max_new_tokens: int) -> np.ndarray:
    """[texts, 3], tokens per step of each rule: 1 and the mean of what it accepts along a sampled text."""
    job = Job(drafter, Settings(SamplingConfig(temperature), seed=1, acceptance=Block()), 1)
    means = []
    for prompt in prompts:
        run = job.begin([prompt], max_new_tokens, 1, *job.sizes(512, max_new_tokens))
        steps = []
        while not np.all(run.state.done):
            steps.append(np.asarray(expected(job.decoding, run.state))[0])
            run.state = decode(job.decoding, run.state, np.int32(1))
        means.append(1 + np.mean(steps, axis=0))
    return np.array(means)


def _ratio(by_token: np.ndarray, in_block: np.ndarray, axis: int) -> np.ndarray:
    return in_block.sum(axis=axis) / by_token.sum(axis=axis)


def main(args: list[str]) -> None:
    """Decode, compute, print a table."""
    options = parse(Options, args)
    enable_compilation_cache()
    model = load_model(options.model)
    questions = stratified(read_questions(options.data), options.questions)
    prompts = [ids for ids in (model.encode(question.turns[0]) for question in questions) if len(ids) <= 400]
    rows = []
    for method in options.methods:
        drafter = load_drafter(method, model, tree=f"chain:{options.length}")
        for temperature in options.temperatures:
            tokens = of_texts(drafter, prompts, temperature, options.max_new_tokens)
            ratio = interval(estimate(tokens[:, 1:].T, _ratio), 3)
            rows.append([method, temperature, *(f"{x:.3f}" for x in tokens.mean(axis=0)), ratio])
    print("\n".join(table(["drafter", "temperature", *RULES, "block / token by token"], rows)))


if __name__ == "__main__":
    run_main(main)
