"""Pictures of drafts chosen per step: python -m experiments.unions --prompts prompts.jsonl --output docs.

unions-step.png shows one real step: candidates by source with their chances, and what survived. unions-reliability.png
shows how often candidates of a chance come true, before and after calibration, by replay of the base's own answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.cli.tune import unseen_by_all
from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.draft import Draft
from jaxspec.decoding.loop import decode
from jaxspec.decoding.prompt import prefill
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.state import Decoding
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter
from jaxspec.files import writable
from jaxspec.plotting import picture
from jaxspec.tuning.record import record
from jaxspec.tuning.replay import Replay, replay
from jaxspec.tuning.tune import own_answers
from jaxspec.weights.load import DEFAULT_MODEL, load_model

_BINS = 10  # of equal mass


@dataclasses.dataclass(frozen=True)
class Options:
    """Draw one step, and how reliable chances are.

    Attributes:
      method: the union of the step.
      prompt: of the step.
      step: its number; -1 takes the one with the most candidates of several sources.
      sources: whose chances to check, each alone, at 8 rows.
      prompts: a JSONL file of prompts, for the chances.
      limit: prompts at most.
      temperature: of the answers that are replayed.
      output: folder for the pictures.
    """

    method: str = "amphista+suffix"
    prompt: str = "Name three fruits. For each, say why people like it."
    step: int = -1
    sources: tuple[str, ...] = ("amphista", "hydra", "medusa", "suffix", "prompt_lookup")
    prompts: str = ""
    limit: int = 40
    temperature: float = 0.0
    output: str = "docs"


def main(args: list[str]) -> None:
    """Parse, load, draw."""
    options = parse(Options, args)
    folder = writable(Path(options.output))
    enable_compilation_cache()
    model = load_model(DEFAULT_MODEL)
    drafter = load_drafter(options.method, model, tree="best:8")
    all_steps = list(steps(drafter, options.prompt, 96))
    shown = max(all_steps, key=_interest) if options.step < 0 else all_steps[options.step]
    draw_step(drafter, *shown, folder / "unions-step.png")
    prompts = unseen_by_all(load_drafter(options.sources, model), options.prompts, "prompt")[: options.limit]
    sampling = SamplingConfig(options.temperature)
    texts = [text for text in own_answers(model, prompts, sampling, 128) if len(text[1]) > 1]
    found = {}
    for name in options.sources:
        alone = load_drafter(name, model, tree="best:8")
        recordings = record(alone, texts, sampling)
        sampled = options.temperature > 0
        raw = dataclasses.replace(alone.sources[0], calibration=_nothing(alone))
        before = replay(recordings, dataclasses.replace(alone, sources=(raw,)), sampled=sampled)
        found[name] = before, replay(recordings, alone, sampled=sampled)
    errors = {name: [round(calibration_error(each), 4) for each in pair] for name, pair in found.items()}
    print(json.dumps(errors, indent=1))
    name = "unions-reliability-sampled.png" if options.temperature else "unions-reliability.png"
    draw_reliability(found, folder / name)


def _nothing(drafter: Drafter) -> dict[str, list[list[float]]]:
    """A calibration that changes nothing."""
    table = [[1.0, 0.0]] * drafter.source.method.max_distance
    return {"greedy": table, "sampled": table}


def steps(drafter: Drafter, prompt: str, tokens: int) -> Iterator[tuple[list[int], Draft, int]]:
    """What has been written before each step, the draft that it verifies, and how many candidates survive."""
    model, ids = drafter.model, drafter.model.encode(prompt)
    sampler = make_sampler(SamplingConfig())
    decoding = Decoding(model.base_for(drafter.num_rows), drafter.on_device, sampler, jnp.array(model.eos), Match())
    rows = (np.array([ids], np.int32), np.array([len(ids)], np.int32), np.array([tokens]), np.zeros(1, np.uint32))
    sizes = {"capacity": len(ids) + tokens + 64, "chunk": len(ids), "width": tokens}
    state = prefill(decoding.base, decoding, *rows, **sizes)
    while not bool(state.done[0]):
        draft, count = jax.device_get(state.draft), int(state.counts[0])
        written = jax.device_get(state.tokens)[0, :count].tolist()
        state = decode(decoding, state, np.int32(1))
        yield written, draft, int(state.counts[0]) - count - 1


def _interest(step: tuple[list[int], Draft, int]) -> tuple[int, int]:
    _, draft, accepted = step
    mixed = len({int(bits) for bits, valid in zip(draft.sources[0], draft.valid[0], strict=True) if valid})
    return mixed, accepted


def draw_step(drafter: Drafter, written: Sequence[int], draft: Draft, accepted: int, file: Path) -> None:
    """Draw a draft as a tree from left to right, coloured by source, with the chance of every path."""
    model, names = drafter.model, [source.method.name for source in drafter.sources]
    tree, tokens, valid, chance = draft.tree, draft.tokens[0], draft.valid[0], np.exp(draft.log_p[0])
    x, parent = tree.depth[0], tree.parent[0]
    y = _heights(parent, valid)
    with picture(file, 1, 1, (10, 4), dpi=110) as [axes]:
        for n in np.flatnonzero(valid):
            if n:
                axes.plot([x[parent[n]], x[n]], [y[parent[n]], y[n]], color="0.7", linewidth=1, zorder=0)
            sources = [name for i, name in enumerate(names) if draft.sources[0, n] >> i & 1]
            color = "0.85" if not sources else f"C{len(names)}" if len(sources) > 1 else f"C{names.index(sources[0])}"
            label = repr(model.tokenizer.decode([int(tokens[n])]))[1:-1]
            below = f"{chance[n]:.2f}" if n else "root"
            frame = {"boxstyle": "round", "facecolor": color, "alpha": 0.45, "edgecolor": "0.6"}
            axes.text(x[n], y[n], f"{label}\n{below}", ha="center", va="center", fontsize=9, bbox=frame)
        for i, name in enumerate([*names, "several"]):
            axes.plot([], [], "s", color=f"C{i}", alpha=0.45, label=name)
        before = model.tokenizer.decode(list(written[-12:])).replace("\n", " ")
        axes.set_title(f"… {before}   ({accepted} of these survive)", fontsize=10)
        axes.set(xlim=(-0.5, x[valid].max() + 0.5), ylim=(y[valid].min() - 0.7, y[valid].max() + 0.7))
        axes.set_axis_off()
        axes.legend(fontsize=8, loc="lower left")


def _heights(parent: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Where to draw nodes [N]: leaves on lines of their own, parents before their first child."""
    children = {n: [m for m in np.flatnonzero(valid) if m and parent[m] == n] for n in range(len(parent))}
    y, lines = np.zeros(len(parent)), iter(range(len(parent)))

    def place(n: int) -> float:
        y[n] = np.mean([place(m) for m in children[n]]) if children[n] else -next(lines)
        return y[n]

    place(0)
    return y


def equal_mass(found: Replay) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates of one source in bins of equal mass: how many, their mean chance, and how often they are right."""
    tried, right = found.tried[0].astype(float), found.right[0].astype(float)
    chance = (np.arange(len(tried)) + 0.5) / len(tried)
    place = np.minimum((np.cumsum(tried) - tried / 2) / max(tried.sum(), 1) * _BINS, _BINS - 1).astype(int)
    mass, said, came = (np.bincount(place, weights=w, minlength=_BINS) for w in (tried, tried * chance, right))
    return mass, said / np.maximum(mass, 1), came / np.maximum(mass, 1)


def calibration_error(found: Replay) -> float:
    """The mean over candidates of how far their bin's chance is from how often it came true."""
    mass, said, came = equal_mass(found)
    return float((mass * np.abs(said - came)).sum() / max(mass.sum(), 1))


def draw_reliability(found: dict[str, tuple[Replay, Replay]], file: Path) -> None:
    """Draw how often candidates came true against their chance, before and after calibration, a panel per source."""
    with picture(file, 1, len(found), (3.2 * len(found), 3.4), dpi=100) as panels:
        for axes, (name, pair) in zip(panels, found.items(), strict=True):
            axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
            for label, each in zip(("before", "after"), pair, strict=True):
                _, said, came = equal_mass(each)
                axes.plot(said, came, marker=".", label=f"{label}: {calibration_error(each):.3f}")
            axes.set(title=name, xlabel="chance", xlim=(0, 1), ylim=(0, 1))
            axes.legend(fontsize=8)


if __name__ == "__main__":
    run_main(main)
