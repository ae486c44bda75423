"""How long one step of the base takes against rows, batch and cache: what every method's arithmetic rests on.

PPD Figure 6.6b and Hidden Transfer Figure 1: as long as a step waits for memory, further rows are nearly free. The
time that reading the weights and the cache must take is measured beside.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.markdown import row, rule
from jaxspec.config import ModelConfig, command_line
from jaxspec.errors import UserError, check_at_least, suggest
from jaxspec.files import alone_in, known_as, read_json, writable, write_atomically
from jaxspec.machine import device_name
from jaxspec.model.blocks import FEW_ROWS
from jaxspec.model.decoder import abstract_params
from jaxspec.plotting import picture
from jaxspec.progress import Progress
from jaxspec.tuning.latency import StepTimer, bare, in_rounds
from jaxspec.versions import code_version
from jaxspec.weights.load import DEFAULT_MODEL, Model, check_dtype, load_model, load_shapes
from jaxspec.weights.shapes import LLAMA_7B, LLAMA_13B, MOBILELLAMA_1_4B

SHAPES = {"1b": MOBILELLAMA_1_4B, "7b": LLAMA_7B, "13b": LLAMA_13B}
LATENCY = "latency.json"
_HEAD = ("device", "jax", "settings", "shapes", "code", "bytes_per_second", "began", "curves")
_CURVE = ("model", "dtype", "batch_size", "cache_length", "seconds", "memory_seconds")
_MOVED = 1 << 28  # bytes of the array that bandwidth is measured with
_TIMES = 8  # in one program, so that starting it does not count


@dataclasses.dataclass(frozen=True)
class LatencyConfig:
    """What to measure.

    Attributes:
      models: smollm2-135m, 1b, 7b, 13b (random weights of these shapes), or what `load_model` takes.
      rows: rows of a step, the root included.
      batch_sizes: prompts decoded together.
      cache_lengths: slots of the cache.
      rounds: measurements of each step, all sizes in turn.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
    """

    models: tuple[str, ...] = (DEFAULT_MODEL,)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batch_sizes: tuple[int, ...] = (1,)
    cache_lengths: tuple[int, ...] = (512,)
    rounds: int = 9
    dtype: str = ""


def check_latency(config: LatencyConfig) -> None:
    """Raise UserError for settings that cannot be measured."""
    for name in ("models", "rows", "batch_sizes", "cache_lengths"):
        if not getattr(config, name):
            raise UserError(f"give at least one value for {name.replace('_', '-')}")
    check_at_least(config, {"rows": 1, "batch_sizes": 1, "cache_lengths": 64, "rounds": 1})
    if config.dtype:
        check_dtype(config.dtype)
    names = [known_as(name) for name in config.models]
    if len(set(names)) < len(names):
        raise UserError(f"models need different names, got {', '.join(names)}")
    for name in config.models:
        if name not in SHAPES and name != DEFAULT_MODEL and "/" not in name and not Path(name).exists():
            raise UserError(
                f"model {name!r}{suggest(name, [DEFAULT_MODEL, *SHAPES])}: no such shapes, file or hub name"
            )


def random_model(name: str, config: ModelConfig, dtype: str) -> Model:
    """Random weights of published shapes: steps take as long as with trained ones."""
    fill = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, dtype), static_argnums=1)
    params = jax.tree.map(lambda leaf: fill(jax.random.key(leaf.size), leaf.shape), abstract_params(config))
    return Model(name, config, params, "random")


def check_fits(name: str, shapes: ModelConfig, dtype: str, config: LatencyConfig) -> None:
    """Raise UserError for shapes whose weights and caches the device's memory does not hold."""
    itemsize, rows = jnp.dtype(dtype).itemsize, min(config.rows) * min(config.batch_sizes)
    copies = 2 if jax.default_backend() == "cpu" and rows <= FEW_ROWS else 1  # a second layout, for few rows on CPU
    needed = copies * sum(leaf.size for leaf in jax.tree.leaves(abstract_params(shapes))) * itemsize
    largest = cache_bytes(shapes, max(config.batch_sizes), max(config.cache_lengths), itemsize)
    needed += (len(config.rows) + 1) * largest  # every number of rows has a state of its own, and a copy is at work
    if needed > 0.9 * device_bytes():
        sizes = f"{needed / 2**30:.1f} GiB and the device has {device_bytes() / 2**30:.1f} GiB"
        raise UserError(f"{name} in {dtype} needs {sizes}")


def device_bytes() -> int:
    """Memory of the device that JAX computes on."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bandwidth(rounds: int) -> float:
    """Bytes per second that the device moves, the best of a few rounds of reading a large array and of changing it."""
    x, repeat = jnp.zeros((1024, _MOVED // 4096), jnp.float32), functools.partial(jax.lax.fori_loop, 0, _TIMES)
    again = lambda x, total: jnp.sum(x + total[:, None], axis=1)  # noqa: E731 (each time another sum)
    read = jax.jit(lambda x: repeat(lambda _, total: again(x, total), jnp.zeros(1024))).lower(x).compile()
    change = jax.jit(lambda x: repeat(lambda _, x: x + 1, x), donate_argnums=0).lower(x).compile()
    rates = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(read(x))
        halfway = time.perf_counter()
        x = jax.block_until_ready(change(x))
        rates.append(max(_MOVED / (halfway - began), 2 * _MOVED / (time.perf_counter() - halfway)))
    return _TIMES * max(rates[1:])


def step_bytes(model: Model, batch_size: int, cache_length: int) -> int:
    """Bytes that one step must read: every weight but unread embeddings, and the whole cache."""
    c, params = model.config, model.params
    embedding = 0 if c.tie_embeddings else params["embedding"].nbytes
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - embedding
    return weights + cache_bytes(c, batch_size, cache_length, model.dtype.itemsize)


def cache_bytes(config: ModelConfig, batch_size: int, cache_length: int, itemsize: int) -> int:
    """Bytes of all layers' keys and values."""
    return 2 * config.num_layers * batch_size * config.num_kv_heads * cache_length * config.head_dim * itemsize


def measure_steps(config: LatencyConfig, folder: Path) -> dict[str, Any]:
    """Median seconds of a step for every model, batch, cache length and number of rows; the rows in turn.

    Args:
      config: what to measure.
      folder: latency.json, latency.md and latency.png are written there after every curve; with the same settings it
        goes on behind the last one.

    Raises:
      UserError: settings that cannot be measured, a model that cannot be loaded or does not fit, or a folder that holds
        a benchmark or what was measured with other settings.
    """
    check_latency(config)
    dtype = config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    for name in set(config.models) & set(SHAPES):
        check_fits(name, SHAPES[name], dtype, config)
    if (writable(folder) / "bench.json").exists():
        raise UserError(f"{folder} holds a benchmark; give another --output")
    with alone_in(folder):
        results = _begun(config, folder)
        if results["curves"]:
            write_latency(results, folder)  # a kill may have come before table and picture
        left = _cases(results["settings"])[len(results["curves"]) :]
        for number, sizes in itertools.groupby(left, key=lambda case: case[0]):
            name = config.models[number]
            model = random_model(name, SHAPES[name], dtype) if name in SHAPES else load_model(name, dtype)
            for _, batch, cache in sizes:
                results["curves"].append(_curve(config, model, batch, cache, results["bytes_per_second"]))
                write_latency(results, folder)
            del model  # before the next one takes its place in memory
    return results


def _cases(settings: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Number of the model, batch size and cache length of every curve, in their order."""
    return list(itertools.product(range(len(settings["models"])), settings["batch_sizes"], settings["cache_lengths"]))


def _begun(config: LatencyConfig, folder: Path) -> dict[str, Any]:
    """What the folder holds of these curves, or the head of what it is to hold. Raises UserError for any others."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(LatencyConfig)}
    settings["models"] = [known_as(name) for name in config.models]
    shapes = repr([SHAPES.get(name) or load_shapes(name) for name in config.models])
    head = {"device": device_name(), "jax": jax.__version__, "settings": settings, "code": code_version()}
    head["shapes"] = hashlib.sha256(shapes.encode()).hexdigest()[:16]
    head = json.loads(json.dumps(head))  # as a file holds it
    if not (folder / LATENCY).exists():
        began = time.strftime("%Y-%m-%d")
        return head | {"bytes_per_second": bandwidth(config.rounds), "began": began, "curves": []}
    before = read_latency(folder)
    different = {name for name, value in head.items() if before[name] != value}
    whole = "settings" not in different and len(before["curves"]) == len(_cases(settings))
    if different - ({"code"} if whole else set()):
        raise UserError(
            f"{folder} holds what was measured with other settings, models, code or devices; give another --output"
        )
    return before


def _curve(config: LatencyConfig, model: Model, batch: int, cache: int, bytes_per_second: float) -> dict[str, Any]:
    seconds = _in_turn(model, batch, cache, config.rows, config.rounds)
    return {
        "model": known_as(model.name),
        "dtype": str(model.dtype),
        "batch_size": batch,
        "cache_length": cache,
        "seconds": {str(rows): value for rows, value in seconds.items()},
        "memory_seconds": step_bytes(model, batch, cache) / bytes_per_second,
    }


def _in_turn(model: Model, batch: int, cache: int, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    timers: dict[int, Callable[[], float]] = {}
    name = f"{model.name}, batch {batch}, cache {cache}"
    with Progress(name, len(sizes) * (rounds + 1), "runs") as progress:
        for number, rows in enumerate(sizes, 1):
            timers[rows] = StepTimer(bare(model, rows), batch, cache)
            progress.update(number, f"{rows} rows compiled")
        return in_rounds(timers, rounds, lambda done: progress.update(len(sizes) + done))


def read_latency(folder: Path) -> dict[str, Any]:
    """What `measure_steps` has written there. Raises UserError for a file that lacks some of it."""
    file = folder / LATENCY
    results = read_json(file)
    lacking = [name for name in _HEAD if name not in results]
    lacking = lacking or [name for curve in results["curves"] for name in _CURVE if name not in curve]
    if lacking:
        raise UserError(f"{file}: not what `bench.py latency` writes now: {lacking[0]} is missing; give another folder")
    known = {field.name for field in dataclasses.fields(LatencyConfig)}
    if results["settings"].keys() != known or not results["curves"]:
        raise UserError(
            f"{file}: not what `bench.py latency` writes now: other settings, or no curve; give another folder"
        )
    return results


def write_latency(results: dict[str, Any], folder: Path) -> None:
    """Write latency.json, latency.md and latency.png."""
    write_atomically(folder / LATENCY, json.dumps(results, indent=1).encode())
    plot_latency(results, folder / "latency.png")
    lines = ["# Milliseconds of a step by rows", "", *latency_table(results), "", "![latency](latency.png)", ""]
    write_atomically(folder / "latency.md", "\n".join(lines).encode())


def latency_table(results: dict[str, Any]) -> list[str]:
    """Milliseconds by rows, a line per curve, with what reading weights and cache alone would take."""
    rows = list(results["curves"][0]["seconds"])
    gigabytes = results["bytes_per_second"] / 1e9
    lines = [
        f"`{command_line(['python', 'bench.py', 'latency'], results['settings'], LatencyConfig())}`",
        "",
        f"{results['device']}, {gigabytes:.1f} GB/s, jax {results['jax']}, {results['began']}, version "
        f"{results['code']} of what decodes. *Memory alone*: to read weights and cache.",
    ]
    done, asked = len(results["curves"]), len(_cases(results["settings"]))
    lines[-1] += "" if done == asked else f" **Unfinished: {done} of {asked} curves are there.**"
    heads = ["model", "batch", "cache", "memory alone", *(f"{r} rows" for r in rows)]
    lines += ["", row(heads), rule(len(heads))]
    for curve in results["curves"]:
        cells = [f"{curve['model']} ({curve['dtype']})", curve["batch_size"], curve["cache_length"]]
        cells += [f"{1e3 * s:.1f}" for s in (curve["memory_seconds"], *curve["seconds"].values())]
        lines.append(row(cells))
    return lines


def plot_latency(results: dict[str, Any], file: Path) -> bool:
    """Draw a panel per model, with what memory alone would take. Returns that there is something to see."""
    models = list(dict.fromkeys(curve["model"] for curve in results["curves"]))
    with picture(file, 1, len(models), (5.5 * len(models), 4), dpi=100) as grid:
        for axes, model in zip(grid, models, strict=True):
            for number, curve in enumerate(c for c in results["curves"] if c["model"] == model):
                rows, times = zip(*((int(r), 1e3 * s) for r, s in curve["seconds"].items()), strict=True)
                label = f"batch {curve['batch_size']}, cache {curve['cache_length']}"
                axes.plot(rows, times, marker=".", color=f"C{number}", label=label)
                axes.axhline(1e3 * curve["memory_seconds"], color=f"C{number}", linestyle=":", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set(xlabel="rows", ylabel="milliseconds per step", ylim=(0, None))
            axes.set_title(f"{model} (dotted: memory alone)")
            axes.legend(fontsize=8)
    return True
