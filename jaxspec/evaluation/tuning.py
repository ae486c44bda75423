"""Measure a machine, pick the tree that should be fastest on it, and make sure by decoding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.generate import Generation, generate, generate_many
from jaxspec.decoding.loop import Drafter, decode, prefill, start
from jaxspec.decoding.sampling import make_sampler
from jaxspec.errors import UserError
from jaxspec.methods.base import Method
from jaxspec.model.base import Base
from jaxspec.model.load import Model
from jaxspec.progress import Progress
from jaxspec.training.data import Answer
from jaxspec.training.evaluate import Accuracy, evaluate
from jaxspec.tree import State, TreePlan, from_paths, make_plan
from jaxspec.tree.hardware import Latency, Option, fit_latency

_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Trial:
    """What decoding with a tree came to.

    Attributes:
      name: the tree in words; `autoregressive` for none.
      tokens_per_step: over all prompts.
      tokens_per_second: the median over prompts.
      speedup: the median over prompts of the ratio to autoregressive decoding of the same prompt.
      identical: prompts whose tokens are those of autoregressive decoding.
    """

    name: str
    tokens_per_step: float
    tokens_per_second: float
    speedup: float
    identical: int


def measure_latency(
    model: Model, method: Method, trainable: dict, batch_size: int, cache_length: int, max_rows: int, rounds: int = 9
) -> Latency:
    """Seconds of a decoding step against its rows, the sizes taken in turn so that a slow moment hurts all alike.

    Each size is a root with candidates side by side, every node with one probe where the method has probes.

    Args:
      model: the base.
      method: its settings.
      trainable: its adapter.
      batch_size: B.
      cache_length: S; the measurement stands in its middle.
      max_rows: the largest size.
      rounds: measurements of each size.
    """
    base, runs = Base(model.params, model.decoder), {}
    plain = Drafter({}, from_paths([]).arrays(0), Method())
    per_node = 1 + method.probe_rows if method.probe_distances else 1
    drafters = {1: plain}
    for size in (s for s in _SIZES if s * per_node <= max_rows):
        drafters[int(size * per_node)] = Drafter(trainable, _star(size).arrays(method.probe_distances), method)
    with Progress("measuring", len(drafters) * (rounds + 1), "runs") as progress:
        for number, (rows, drafter) in enumerate(drafters.items(), 1):
            runs[rows] = _StepTimer(base, drafter, batch_size, cache_length)
            progress.update(number, f"{rows} rows compiled")
        samples = {rows: [] for rows in runs}
        for turn in range(rounds):
            for number, (rows, run) in enumerate(runs.items(), 1):
                samples[rows].append(run())
                progress.update((turn + 1) * len(runs) + number)
    return fit_latency({rows: float(np.median(values)) for rows, values in samples.items()})


def _star(nodes: int) -> TreePlan:
    paths = tuple((rank,) for rank in range(nodes - 1))
    return make_plan([State(paths, (1,) * nodes, 1)])


class _StepTimer:
    """Times a few steps of one drafter from one and the same state."""

    def __init__(self, base: Base, drafter: Drafter, batch_size: int, cache_length: int):
        self._base, self._drafter, self._sampler = base, drafter, make_sampler(SamplingConfig())
        self._eos, length = jnp.array([-1], jnp.int32), cache_length // 2
        tokens = np.ones((batch_size, length), np.int32)
        lengths = np.full(batch_size, length, np.int32)
        prefilled = prefill(base, tokens, lengths, np.zeros(0, np.int32), capacity=cache_length)
        self._state = start(
            base, drafter, self._sampler, *prefilled, lengths, np.full(batch_size, 2**30, np.int32),
            jnp.zeros(batch_size, jnp.uint32), self._eos, acceptance=Match(), width=cache_length,
        )  # fmt: skip
        self()

    def __call__(self) -> float:
        """Seconds per step."""
        state = jax.block_until_ready(jax.tree.map(jnp.copy, self._state))
        began = time.perf_counter()
        args = (self._base, self._drafter, self._sampler, self._eos, state, np.int32(_STEPS))
        jax.block_until_ready(decode(*args, acceptance=Match()))
        return (time.perf_counter() - began) / _STEPS


def measure_accuracy(
    model: Model, method: Method, trainable: dict, prompts: Sequence[str], sampling: SamplingConfig, tokens: int
) -> Accuracy:
    """Rank accuracies on the base's own answers to prompts: greedy ones, or sampled with the noise that ranks drafts.

    Raises:
      UserError: no answer is long enough to measure anything on.
    """
    plain = Drafter({}, from_paths([]).arrays(0), Method())
    ids = [model.encode(prompt) for prompt in prompts]
    answers: list[Answer] = []
    with Progress("answers", len(ids), "answers") as progress:
        for index, answer in generate_many(model, plain, ids, tokens, batch_size=min(16, len(ids)), sampling=sampling):
            answers.append(Answer(ids[index], answer))
            progress.update(len(answers))
    with Progress("accuracy", len(ids), "answers") as progress:
        base = Base(model.params, model.decoder)
        accuracy = evaluate(method, trainable, base, answers, progress.update, sampling=sampling)
    if not accuracy.positions:
        raise UserError("the answers to these prompts are too short to measure accuracies on; give more or others")
    return accuracy


def race(
    model: Model,
    drafters: dict[str, Drafter],
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: SamplingConfig,
    batch_size: int = 1,
) -> list[Trial]:
    """Decode the same prompts with every drafter and autoregressively, in turn, batch by batch.

    Args:
      model: the base.
      drafters: by name.
      prompts: texts.
      max_new_tokens: per answer.
      sampling: how tokens are drawn.
      batch_size: prompts decoded together.

    Returns:
      A trial per drafter, autoregressive decoding first.
    """
    everyone = {"autoregressive": Drafter({}, from_paths([]).arrays(0), Method())} | drafters
    settings = {"sampling": sampling, "batch_size": batch_size}
    results: dict[str, list[Generation]] = {name: [] for name in everyone}
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    with Progress("racing", len(batches) * len(everyone), "runs") as progress:
        done = 0
        for number, batch in enumerate(batches):
            names = list(everyone)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                answers = generate(model, everyone[name], batch, max_new_tokens, **settings)
                if any(answer.compile_seconds for answer in answers):  # the first run touches fresh memory
                    answers = generate(model, everyone[name], batch, max_new_tokens, **settings)
                results[name] += answers
                done += 1
                progress.update(done)
    plain = results["autoregressive"]
    return [_trial(name, answers, plain) for name, answers in results.items()]


def _trial(name: str, answers: list[Generation], plain: list[Generation]) -> Trial:
    counted = [(a, p) for a, p in zip(answers, plain, strict=True) if a.steps and p.steps]
    return Trial(
        name=name,
        tokens_per_step=sum(a.new_tokens - 1 for a, _ in counted) / max(sum(a.steps for a, _ in counted), 1),
        tokens_per_second=float(np.median([a.tokens_per_second for a, _ in counted])),
        speedup=float(np.median([a.tokens_per_second / p.tokens_per_second for a, p in counted])),
        identical=sum(a.tokens == p.tokens for a, p in zip(answers, plain, strict=True)),
    )


def plot_tuning(latency: Latency, options: Sequence[Option], trials: Sequence[Trial], picture: Path) -> None:
    """Draw latency, tokens per step, and predicted against measured speed.

    Args:
      latency: of the machine.
      options: all trees, the best predicted first.
      trials: what was measured, by the names of options.
      picture: PNG to write.
    """
    import matplotlib  # slow to import, needed once at the end

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    axes[0].plot(latency.rows, [1e3 * s for s in latency.seconds], marker=".")
    axes[0].set(xlabel="rows", ylabel="milliseconds per step", title="latency", ylim=(0, None))
    best: dict[float, Option] = {}
    for option in options:
        if option.rows not in best or best[option.rows].predicted < option.predicted:
            best[option.rows] = option
    rows = sorted(best)
    axes[1].plot(rows, [best[r].plan.expected_tokens for r in rows], marker=".")
    axes[1].set(xlabel="rows", ylabel="tokens per step", title="expected, best tree of each size")
    axes[2].plot(rows, [best[r].predicted for r in rows], marker=".", label="predicted")
    where = {option.name: option.rows for option in options} | {"autoregressive": 1}
    for trial in trials:
        color = "C1" if trial.name == "autoregressive" else "C2"
        axes[2].plot(where[trial.name], trial.tokens_per_second, "o", color=color)
    plain = next(t.tokens_per_second for t in trials if t.name == "autoregressive")
    axes[2].axhline(plain, color="C1", linewidth=0.8, label="autoregressive, measured")
    axes[2].set(xlabel="rows", ylabel="tokens per second", title="speed (dots: measured)", ylim=(0, None))
    axes[2].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)
