"""Seconds of a step of the base against rows, batch and cache, on which the arithmetic of every method rests.

PPD Figure 6.6b and Hidden Transfer Figure 1: as long as a step waits for memory, further rows are nearly free. The
time that it takes at least to read the weights and the cache is shown next to it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import jax

from jaxspec.config import ModelConfig, command_line
from jaxspec.decoding.draft import PyTree
from jaxspec.errors import UserError, check_at_least, suggest
from jaxspec.files import display_name, exclusive, read_json, writable, write_atomically, write_json
from jaxspec.machine import device_name
from jaxspec.markdown import table
from jaxspec.model.decoder import abstract_params
from jaxspec.model.quantized import Quantized
from jaxspec.plotting import picture
from jaxspec.tuning.latency import bare, step_times
from jaxspec.tuning.memory import bandwidth, cache_bytes, device_memory, step_bytes
from jaxspec.versions import code_version
from jaxspec.weights.layouts import block_for, kernels_by_shape, read_layouts
from jaxspec.weights.load import DEFAULT_MODEL, check_dtype, default_dtype, load_model, load_shapes, weights_dtype
from jaxspec.weights.model import Model
from jaxspec.weights.parts import as_held
from jaxspec.weights.quantizing import check_form, small, small_shapes
from jaxspec.weights.shapes import LLAMA_7B, LLAMA_13B, MOBILELLAMA_1_4B, TINY

SIZES = {"1b": MOBILELLAMA_1_4B, "7b": LLAMA_7B, "13b": LLAMA_13B, "tiny": TINY}
LATENCY = "latency.json"
_HEAD = ("device", "jax", "settings", "shapes", "code", "bytes_per_second", "began", "curves")
_CURVE = {"model", "dtype", "batch_size", "cache_length", "seconds", "memory_seconds"}


@dataclasses.dataclass(frozen=True)
class LatencyConfig:
    """Settings of the measurement.

    Attributes:
      models: smollm2-135m, 1b, 7b, 13b, tiny (random weights of these shapes), or what `load_model` takes.
      rows: rows of a step, the root included.
      batch_sizes: prompts decoded together.
      cache_lengths: slots of the cache.
      rounds: measurements of each step, all sizes in turn.
      dtype: of the weights, or exact: bfloat16 weights, with all else as exact as in float32; default float32 on CPU,
        float16 on GPUs without bfloat16, bfloat16 elsewhere.
      weights: int8, int4 or int4-64: kernels in few bits; default: as dtype says.
    """

    models: tuple[str, ...] = (DEFAULT_MODEL,)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batch_sizes: tuple[int, ...] = (1,)
    cache_lengths: tuple[int, ...] = (512,)
    rounds: int = 9
    dtype: str = ""
    weights: str = ""


def check_latency(config: LatencyConfig) -> None:
    """Raise UserError for settings that cannot be measured."""
    if not config.models:
        raise UserError("give at least one value for models")
    check_at_least(config, {"rows": 1, "batch_sizes": 1, "cache_lengths": 64, "rounds": 1})
    if config.dtype:
        check_dtype(config.dtype)
    check_form(config.weights)
    names = [display_name(name) for name in config.models]
    if len(set(names)) < len(names):
        raise UserError(f"models need different names, got {', '.join(names)}")
    for name in config.models:
        if name not in SIZES and name != DEFAULT_MODEL and "/" not in name and not Path(name).exists():
            hint = suggest(name, [DEFAULT_MODEL, *SIZES])
            raise UserError(f"model {name!r}{hint}: no such shapes, file or hub name")


def check_fits(name: str, shapes: ModelConfig, dtype: str, config: LatencyConfig) -> None:
    """Raise UserError for shapes whose weights and caches do not fit in the device's memory, or no form of weights."""
    itemsize = weights_dtype(dtype).itemsize
    params = small_shapes(abstract_params(shapes, weights_dtype(dtype)), config.weights)
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    needed += _copied(params, dtype, config) * itemsize
    in_cache = 4 if dtype == "exact" else itemsize
    largest = cache_bytes(shapes, max(config.batch_sizes), max(config.cache_lengths), in_cache)
    needed += (len(config.rows) + 1) * largest  # every number of rows has a state of its own, and a copy is at work
    if needed > 0.9 * device_memory():
        sizes = f"{needed / 2**30:.1f} GiB and the device has {device_memory() / 2**30:.1f} GiB"
        raise UserError(f"{name} in {dtype} {config.weights}".rstrip() + f" needs {sizes}")


def _copied(params: PyTree, dtype: str, config: LatencyConfig) -> int:
    """Plain weights that are copied to other layouts for steps of these sizes; none but on a CPU."""
    if jax.default_backend() != "cpu":
        return 0
    layouts, sizes = read_layouts(dtype), [rows * batch for rows in config.rows for batch in config.batch_sizes]
    return sum(
        len({block_for(layouts, rows, shape) for rows in sizes} - {0}) * len(kernels) * math.prod(shape)
        for shape, kernels in kernels_by_shape(params).items()
    )


def random_model(name: str, config: ModelConfig, dtype: str, weights: str = "") -> Model:
    """Random weights of published shapes, as `load_model` takes `dtype` and `weights`.

    Steps take as long as with trained ones. Raises UserError for shapes that do not have that form.
    """

    @functools.partial(jax.jit, static_argnums=1)
    def fill(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, weights_dtype(dtype))

    def made(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array | Quantized:  # no more than one is held as floats
        array = fill(jax.random.key(leaf.size), leaf.shape)
        return small(array, jax.tree_util.keystr(path, simple=True, separator="/"), weights, name)

    params = jax.tree.map_with_path(made, jax.eval_shape(as_held, abstract_params(config)))
    return Model(name, config, params, "random", exact=dtype == "exact")


def measure_steps(config: LatencyConfig, folder: Path) -> dict[str, Any]:
    """Median seconds of a step for every model, batch, cache length and number of rows; the rows in turn.

    Args:
      config: what to measure.
      folder: latency.json, latency.md and latency.png are written there after every curve. The same settings resume
        after the last one.

    Raises:
      UserError: settings that cannot be measured, a model that cannot be loaded or does not fit, or a folder that holds
        a benchmark or what was measured with other settings.
    """
    check_latency(config)
    dtype = config.dtype or default_dtype()
    for name in set(config.models) & set(SIZES):
        check_fits(name, SIZES[name], dtype, config)
    if (writable(folder) / "bench.json").exists():
        raise UserError(f"{folder} holds a benchmark; give another --output")
    with exclusive(folder):
        results = _begin(config, folder)
        if results["curves"]:
            write_latency(results, folder)  # a kill may have come before table and picture
        left = _cases(results["settings"])[len(results["curves"]) :]
        for number, sizes in itertools.groupby(left, key=lambda case: case[0]):
            name = config.models[number]
            if name in SIZES:
                model = random_model(name, SIZES[name], dtype, config.weights)
            else:
                model = load_model(name, dtype, weights=config.weights)
            for _, batch_size, cache_length in sizes:
                curve = _measure_curve(model, batch_size, cache_length, config)
                memory_seconds = step_bytes(model, batch_size, cache_length) / results["bytes_per_second"]
                results["curves"].append(curve | {"memory_seconds": memory_seconds})
                write_latency(results, folder)
            del model  # before the next one takes its place in memory
    return results


def _cases(settings: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Number of the model, batch size and cache length of every curve, in their order."""
    return list(itertools.product(range(len(settings["models"])), settings["batch_sizes"], settings["cache_lengths"]))


def _begin(config: LatencyConfig, folder: Path) -> dict[str, Any]:
    """The part of this measurement that the folder holds, without curves at first. Raises UserError for another's."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(LatencyConfig)}
    settings["models"] = [display_name(name) for name in config.models]
    shapes = repr([SIZES.get(name) or load_shapes(name) for name in config.models])
    head = {"device": device_name(), "jax": jax.__version__, "settings": settings, "code": code_version()}
    head["shapes"] = hashlib.sha256(shapes.encode()).hexdigest()[:16]
    head = json.loads(json.dumps(head))  # as a file holds it
    if not (folder / LATENCY).exists():
        began = time.strftime("%Y-%m-%d")
        return head | {"bytes_per_second": bandwidth(config.rounds), "began": began, "curves": []}
    before = read_latency(folder)
    if len(before["curves"]) == len(_cases(before["settings"])):
        del head["code"]  # nothing is left to measure
    if any(before[name] != value for name, value in head.items()):
        raise UserError(
            f"{folder} holds what was measured with other settings, models, code or devices; give another --output"
        )
    return before


def _measure_curve(model: Model, batch_size: int, cache_length: int, config: LatencyConfig) -> dict[str, Any]:
    drafters = {rows: bare(model, rows) for rows in config.rows}
    seconds = step_times(drafters, cache_length, config.rounds, batch_size)
    return {
        "model": display_name(model.name),
        "dtype": model.precision,
        "batch_size": batch_size,
        "cache_length": cache_length,
        "seconds": {str(rows): value for rows, value in seconds.items()},
    }


def read_latency(folder: Path) -> dict[str, Any]:
    """The results that `measure_steps` has written. Raises UserError for a file that lacks some of them."""
    file = folder / LATENCY
    results = read_json(file, _HEAD)
    whole = [curve.keys() >= _CURVE for curve in results["curves"]]
    if not whole or not all(whole) or results["settings"].keys() != vars(LatencyConfig()).keys():
        raise UserError(f"{file}: other settings or curves than `jaxspec bench latency` writes; give another folder")
    return results


def write_latency(results: dict[str, Any], folder: Path) -> None:
    """Write latency.json, latency.md and latency.png."""
    write_json(folder / LATENCY, results)
    plot_latency(results, folder / "latency.png")
    lines = ["# Milliseconds of a step by rows", "", *latency_table(results), "", "![latency](latency.png)", ""]
    write_atomically(folder / "latency.md", "\n".join(lines).encode())


def latency_table(results: dict[str, Any]) -> list[str]:
    """Milliseconds by rows, a line per curve, with what reading weights and cache alone would take."""
    curves, planned = results["curves"], len(_cases(results["settings"]))
    unfinished = "" if len(curves) == planned else f" **Unfinished: {len(curves)} of {planned} curves are there.**"
    heads = ["model", "batch", "cache", "memory alone", *(f"{rows} rows" for rows in curves[0]["seconds"])]
    rows = [
        [f"{curve['model']} ({curve['dtype']})", curve["batch_size"], curve["cache_length"]]
        + [f"{1e3 * seconds:.1f}" for seconds in (curve["memory_seconds"], *curve["seconds"].values())]
        for curve in curves
    ]
    return [
        f"`{command_line(['jaxspec', 'bench', 'latency'], results['settings'], LatencyConfig())}`",
        "",
        f"{results['device']}, {results['bytes_per_second'] / 1e9:.1f} GB/s, jax {results['jax']}, {results['began']}, "
        f"code {results['code']}. *Memory alone*: the time it takes to read weights and cache.{unfinished}",
        "",
        *table(heads, rows),
    ]


def plot_latency(results: dict[str, Any], file: Path) -> None:
    """Draw a panel per model, with what memory alone would take."""
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
