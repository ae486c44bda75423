"""Measure an accelerator in one go: the most valuable figures first, each written as soon as it is measured.

1. decode  the default model with drafters and trees of several sizes, beside autoregressive decoding
2. step    random weights of larger shapes: a step's time by rows and batch, beside that of reading the weights
3. train   updates of methods with probes on the largest of those shapes

The same command resumes an interrupted run. Figures that would exceed the time limit are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.bench.device_figures import decode_figure, forget_models, prefill_figure, step_figure, training_figure
from jaxspec.errors import UserError, check_at_least, first_line, suggest
from jaxspec.files import display_name, exclusive, read_json, writable, write_json
from jaxspec.machine import Stopwatch, device_name, this_machine
from jaxspec.training.examples import read_prompts
from jaxspec.tuning.steps import SIZES
from jaxspec.versions import code_version
from jaxspec.weights.load import DEFAULT_MODEL, check_dtype, embedded_model_path
from jaxspec.weights.quantizing import check_form

DEVICE = "device.json"
FIRST = ("hidden_transfer", "hydra", "space")  # the best of each kind: probes, heads, a tuned base
OTHERS = ("ppd", "bita", "medusa", "amphista")
TREES = (8, 32, 128)  # rows
ROWS = {1: (1, 8, 16, 32, 64, 128, 256), 8: (1, 8, 32), 32: (1, 8)}  # by batch size
TRAINED = ("ppd", "bita", "hidden_transfer")
_FULL = "out of memory"
_GUESS = {"decode": 60.0, "step": 25.0, "train": 90.0}  # seconds of a figure before the first of its kind is known


Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DeviceConfig:
    """The figures to measure, in this order.

    Attributes:
      minutes: time limit, loading and compiling included; 0 for none.
      dtypes: dtypes of the default model's weights, in turn.
      shapes: 7b, 1b, 13b, smollm2-135m, or tiny to try the command: random weights of these shapes.
      drafters: methods whose adapter comes with jaxspec; default the best of each kind, then the others.
      trees: rows per step, for each drafter.
      limit: number of prompts.
      max_new_tokens: tokens per answer.
      prompts: a JSONL file with a prompt per line; default some that come with jaxspec.
      weights: int8, int4 or int4-64: kernels in few bits, of all these bases; default: as their dtype says.
      cpu: measure although JAX finds no accelerator.
    """

    minutes: float = 0.0
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    shapes: tuple[str, ...] = ("7b", "1b", "13b")
    drafters: tuple[str, ...] = FIRST + OTHERS
    trees: tuple[int, ...] = TREES
    limit: int = 12
    max_new_tokens: int = 128
    prompts: str = ""
    weights: str = ""
    cpu: bool = False


def check_device(config: DeviceConfig) -> None:
    """Raise UserError for settings that cannot be measured, or where there is no accelerator."""
    if not config.dtypes:
        raise UserError("give at least one value for dtypes")
    check_at_least(config, {"minutes": 0, "limit": 1, "max_new_tokens": 2, "trees": 2})
    for dtype in config.dtypes:
        check_dtype(dtype)
    check_form(config.weights)
    known = [*SIZES, DEFAULT_MODEL]
    for name in config.shapes:
        if name not in known:
            raise UserError(f"unknown shapes {name!r}{suggest(name, known)}; shapes: {', '.join(known)}")
    for name in config.drafters:
        if name not in FIRST + OTHERS:
            raise UserError(f"unknown drafter {name!r}{suggest(name, FIRST + OTHERS)}")
    if jax.default_backend() == "cpu" and not config.cpu:
        raise UserError("JAX finds no accelerator here, only a CPU; measure it with --cpu")
    embedded_model_path()  # or an error, as for prompts
    read_prompts(config.prompts)


def plan(config: DeviceConfig) -> dict[str, Callable[[], Figure]]:
    """All figures, the most valuable first: what measures each, by its key KIND/MODEL/..."""
    first = [name for name in config.drafters if name in FIRST]
    others = [name for name in config.drafters if name not in FIRST]
    tasks = [
        *_decoding(config, config.dtypes[0], first),
        *(task for name in config.shapes[:1] for task in [*_steps(config, name), *_training(config, name)]),
        *(task for dtype in config.dtypes[1:] for task in _decoding(config, dtype, first)),
        *(task for name in config.shapes[1:] for task in _steps(config, name)),
        *(task for dtype in config.dtypes for task in _decoding(config, dtype, others)),
    ]
    return dict(tasks)  # both begin with autoregressive decoding


_Tasks = Iterator[tuple[str, Callable[[], Figure]]]


def _decoding(config: DeviceConfig, dtype: str, drafters: list[str]) -> _Tasks:
    sizes = [("autoregressive", 1)] if drafters else []
    for name, rows in [*sizes, *((name, rows) for rows in config.trees for name in drafters)]:
        yield f"decode/{dtype}/{name}/{rows}", functools.partial(decode_figure, dtype, name, rows, config)


def _steps(config: DeviceConfig, name: str) -> _Tasks:
    yield f"step/{name}/prefill", functools.partial(prefill_figure, name, config.weights)
    for batch, sizes in ROWS.items():
        for rows in sizes:
            measure = functools.partial(step_figure, name, batch, rows, config.weights)
            yield f"step/{name}/batch {batch}/{rows} rows", measure


def _training(config: DeviceConfig, name: str) -> _Tasks:
    for method in TRAINED:
        yield f"train/{name}/{method}", functools.partial(training_figure, name, method, config.weights)


def measure_device(config: DeviceConfig, folder: Path, began: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure what is missing and still fits the time limit; device.json is written after every figure.

    A compilation cannot be interrupted, so the last one may exceed the limit. Figures that failed for another reason
    than memory are tried again.

    Args:
      config: the figures to measure.
      folder: folder of device.json.
      began: `time.monotonic()` at the start of the time limit.
      say: takes a line per figure.

    Raises:
      UserError: settings that cannot be measured, or a folder with the figures of another device or other settings.
    """
    check_device(config)
    end = began + 60 * config.minutes if config.minutes else math.inf
    with exclusive(writable(folder)):
        results = _begin(config, folder)
        figures = results["figures"]
        missing = {key: task for key, task in plan(config).items() if _is_missing(figures.get(key))}
        with contextlib.suppress(_TimeIsUp), _until(end):
            held = ""
            for key, task in missing.items():
                if end - time.monotonic() < expected_seconds(key, figures):
                    continue
                model = key.split("/")[1]
                if model != held:
                    forget_models()
                    held = model
                figures[key] = _measure(task)
                write_json(folder / DEVICE, results)
                say(f"{key}: {summary(figures[key])}")
        if left_out := [key for key in missing if key not in figures]:
            say(f"left out, as {config.minutes:g} minutes are up: {', '.join(left_out)}")
    return results


def _is_missing(figure: Figure | None) -> bool:
    return figure is None or not figure.get("error", _FULL).startswith(_FULL)


class _TimeIsUp(BaseException):
    """The time limit is over. A BaseException, because the interrupted code has no error to handle."""


@contextlib.contextmanager
def _until(end: float) -> Iterator[None]:
    """Raise _TimeIsUp in the block at that time, for a figure that takes longer than expected."""

    def stop(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    left = max(end - time.monotonic(), 1e-3) if math.isfinite(end) else 0
    signal.setitimer(signal.ITIMER_REAL, left, 1.0)  # repeated: the interrupted code may swallow any exception
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def expected_seconds(key: str, known: dict[str, Figure]) -> float:
    """Seconds that a figure may take: those of the longest in its group or kind so far, else a guess."""
    kind = key.partition("/")[0]
    for prefix in (key.rpartition("/")[0], kind):
        if seconds := [figure["total_seconds"] for name, figure in known.items() if name.startswith(prefix)]:
            return max(seconds)
    return _GUESS[kind]


def _measure(task: Callable[[], Figure]) -> Figure:
    with Stopwatch() as watch:
        try:
            figure = task()
        except jax.errors.JaxRuntimeError as error:
            full = "RESOURCE_EXHAUSTED" in str(error) or "OUT_OF_MEMORY" in str(error)
            figure = {"error": f"{_FULL if full else 'failed'} ({first_line(error)[:200]})"}
        except UserError as error:
            figure = {"error": str(error)}
    if "error" in figure:
        forget_models()
    return figure | {
        "compile_seconds": round(watch.compile_seconds, 2),
        "total_seconds": round(watch.compile_seconds + watch.seconds, 2),
    }


def summary(figure: Figure) -> str:
    """One line about a figure."""
    shown = {k: v for k, v in figure.items() if isinstance(v, str | int | float) and not k.endswith("_seconds")}
    parts = [
        f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown.items()
    ]
    return ", ".join([*parts, f"{figure['total_seconds']:.0f} s, {figure['compile_seconds']:.0f} s of them compiling"])


def _begin(config: DeviceConfig, folder: Path) -> dict[str, Any]:
    """The folder's results for this device and these settings, or new ones."""
    settings = {name: getattr(config, name) for name in ("limit", "max_new_tokens", "weights")}
    settings["prompts"] = display_name(config.prompts)
    head = {
        "device": device_name(),
        "machine": this_machine(),
        "driver": driver(),
        "jax": jax.__version__,
        "code": code_version(),
        "settings": settings,
    }
    if not (folder / DEVICE).exists():
        return head | {"date": time.strftime("%Y-%m-%d"), "figures": {}}
    before = read_device(folder)
    for name in head:
        if before[name] != head[name]:
            raise UserError(
                f"{folder}/{DEVICE} has figures of another {name} ({before[name]}, this is {head[name]}); "
                "give another --output"
            )
    return before


def driver() -> str:
    """The platform version that JAX reports, and the version of NVIDIA's driver where there is one."""
    lines = jax.devices()[0].client.platform_version.splitlines()
    nvidia = Path("/proc/driver/nvidia/version")
    return ", ".join([*lines, *(nvidia.read_text().splitlines()[:1] if nvidia.exists() else [])])


def read_device(folder: Path) -> dict[str, Any]:
    """Read the results of `measure_device`. Raises UserError for other content."""
    fields = ("device", "machine", "jax", "driver", "code", "date", "figures", "settings")
    return read_json(folder / DEVICE, fields)
