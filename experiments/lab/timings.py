"""Jobs that time steps, in this process or in one with other flags of XLA: python -m experiments.lab.timings JSON.

JSON is {"function": "time_steps" or "time_drafter", ...settings}; the last line printed is the result.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.lab.checks import FAILURES, default_model, precision
from jaxspec.bench.device_figures import shapes_of
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError, first_line
from jaxspec.machine import Stopwatch, device_name
from jaxspec.tuning.latency import STEPS, bare, step_times
from jaxspec.tuning.memory import bandwidth, step_bytes
from jaxspec.tuning.steps import random_model
from jaxspec.weights.model import Model

NO_GRAPHS = "--xla_gpu_enable_command_buffer="
_ROOT = Path(__file__).parents[2]
_ROUNDS = 5
_MANY = 32  # steps of a sample on accelerators, where starting a program takes as long as a small step
_PROGRAM = "jit_decode"  # XLA's name of the decode loop
_KEPT = ("*thunk_sequence*", "*after_optimizations.txt")
_NO_WORK = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "opt-barrier"}


def time_steps(
    shapes: str,
    dtype: str,
    rows: list[int],
    batch_sizes: list[int],
    cache_length: int,
    without_graphs: bool = False,
    seconds: float = 240,
) -> dict[str, Any]:
    """Milliseconds of a step of verification by batch size and rows, of random weights.

    Args:
      shapes: 7b, 1b, 13b, tiny, or smollm2-135m.
      dtype: of the weights.
      rows: of a step, the root included.
      batch_sizes: prompts decoded together; one that fails, as for want of memory, is named with its error.
      cache_length: slots of the cache.
      without_graphs: in a process of its own, in which XLA starts every kernel by itself, not by CUDA graphs.
      seconds: limit of that process.
    """
    settings = {"shapes": shapes, "dtype": dtype, "rows": rows, "batch_sizes": batch_sizes}
    settings["cache_length"] = cache_length
    if without_graphs:
        return run_apart({"function": "time_steps"} | settings, NO_GRAPHS, seconds)
    with _report() as results, precision(dtype):
        speed = bandwidth(_ROUNDS)
        model = random_model(shapes, shapes_of(shapes), dtype)
        results["gigabytes_per_second"] = speed / 1e9
        results["curves"] = [_curve(model, rows, batch, cache_length, speed) for batch in batch_sizes]
    return results


def time_drafter(
    drafter: str,
    trees: list[str],
    dtype: str,
    cache_length: int,
    batch_size: int = 1,
    without_graphs: bool = False,
    seconds: float = 240,
) -> dict[str, Any]:
    """Milliseconds of a whole step of the default model, drafting included, by tree; `autoregressive` among them.

    Args:
      drafter: a method or a union, as `load_drafter` takes it.
      trees: its trees.
      dtype: of the weights.
      cache_length: slots of the cache.
      batch_size: prompts decoded together.
      without_graphs: as in `time_steps`.
      seconds: likewise.
    """
    settings = {"drafter": drafter, "trees": trees, "dtype": dtype, "cache_length": cache_length}
    settings["batch_size"] = batch_size
    if without_graphs:
        return run_apart({"function": "time_drafter"} | settings, NO_GRAPHS, seconds)
    with _report() as results, precision(dtype):
        model = default_model(dtype)
        drafters = {tree: load_drafter(drafter, model, tree=tree) for tree in trees}
        everyone = {"autoregressive": autoregressive(model)} | drafters
        results["milliseconds"] = _milliseconds(everyone, batch_size, cache_length)
    return results


def dump_program(settings: dict[str, Any], folder: str, seconds: float = 240) -> dict[str, Any]:
    """Time in a process of its own, and keep what XLA made of the decode loop.

    Args:
      settings: {"function": "time_steps" or "time_drafter", ...its settings}; a file for every number of rows and batch
        size, or tree.
      folder: the programs and the sequences of their thunks are put there, compressed.
      seconds: limit of that process.

    Returns:
      What was timed, the names of the files, and for each what it starts, counted.
    """
    with tempfile.TemporaryDirectory() as name:
        flags = f"--xla_dump_to={name} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={_PROGRAM}"
        # A program that comes from the cache on disk is not compiled, and so not dumped.
        timed = run_apart(settings, flags, seconds, {"JAX_ENABLE_COMPILATION_CACHE": "false"})
        files = sorted({file for kept in _KEPT for file in Path(name).glob(kept) if f".{_PROGRAM}." in file.name})
        if not files:
            raise UserError("XLA dumped no program")
        counts = {file.name: _counted(file) for file in files}
        Path(folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            (Path(folder) / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    return {"timed": timed, "files": [f"{file.name}.gz" for file in files], "counts": counts}


def run_apart(
    settings: Mapping[str, Any], flags: str, seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Time in a process with further flags of XLA, which reads them once, when it starts.

    It takes of a GPU's memory only what it needs, beside this process. Raises UserError where it fails, takes too long,
    or does not find the device that this process has.
    """
    changes = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "experiments.lab.timings", json.dumps(settings)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **changes, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"timing in a process of its own took more than {seconds:g} seconds") from None
    if done.returncode:
        raise UserError(f"timing in a process of its own failed: {done.stderr[-1000:].strip()}")
    results = json.loads(done.stdout.splitlines()[-1])
    if results["device"] != device_name():  # JAX falls back to a CPU where it cannot use the GPU
        raise UserError(f"timing in a process of its own ran on {results['device']}, not on {device_name()}")
    return results


@contextlib.contextmanager
def _report() -> Iterator[dict[str, Any]]:
    """Results that begin with where they were measured and end with how long it took."""
    results: dict[str, Any] = {"device": device_name(), "xla_flags": os.environ.get("XLA_FLAGS", "")}
    with Stopwatch() as watch:
        yield results
    results["seconds"], results["compile_seconds"] = round(watch.seconds, 2), round(watch.compile_seconds, 2)


def _curve(model: Model, rows: list[int], batch_size: int, cache_length: int, speed: float) -> dict[str, Any]:
    """Milliseconds by rows, beside those of reading weights and cache, or the error."""
    curve: dict[str, Any] = {"batch_size": batch_size}
    try:
        curve["milliseconds"] = _milliseconds({str(n): bare(model, n) for n in rows}, batch_size, cache_length)
    except FAILURES as error:
        return curve | {"error": first_line(error)[:200]}
    return curve | {"memory_milliseconds": 1e3 * step_bytes(model, batch_size, cache_length) / speed}


def _milliseconds(drafters: Mapping[str, Drafter], batch_size: int, cache_length: int) -> dict[str, float]:
    """Of a step with each."""
    steps = STEPS if jax.default_backend() == "cpu" else _MANY
    deepest = max(drafter.device_shape.depth for drafter in drafters.values())
    steps = max(1, min(steps, cache_length // 2 // (deepest + 1)))  # what they accept must fit beside the prompt
    times = step_times(drafters, cache_length, _ROUNDS, batch_size, steps=steps)
    return {name: 1e3 * value for name, value in times.items()}


def _counted(file: Path) -> dict[str, Any]:
    text = file.read_text()
    return count_thunks(text) if "thunk_sequence" in file.name else count_instructions(text)


def count_thunks(text: str) -> dict[str, dict[str, int]]:
    """How many thunks of each kind a sequence has, by how deep they lie: the loop's body is one level down."""
    counts: dict[str, Counter[str]] = {}
    for line in text.splitlines():
        if found := re.match(r"(\s*)(?:\d+:\s*)?(k[A-Z]\w*)", line):
            counts.setdefault(str(len(found[1].expandtabs(2)) // 2), Counter())[found[2]] += 1
    return {depth: dict(kinds.most_common()) for depth, kinds in counts.items()}


def count_instructions(text: str) -> dict[str, dict[str, int]]:
    """Instructions of the decode loop's body that do work, by kind: nearly one kernel each on a GPU.

    Returns:
      `body`: of every step; `nested`: of the branches and loops inside, all together. Empty where there is no loop.
    """
    computations, entry = _computations(text)
    body, nested = Counter(), Counter()
    loops = [line for line in computations.get(entry, []) if _opcode(line) == "while"]
    for loop in loops:
        _count(computations, re.findall(r"body=%?([\w.\-]+)", loop), body, nested)
    return {"body": dict(body.most_common()), "nested": dict(nested.most_common())}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation of a program, and the name of the first to run."""
    computations, name, entry = {}, "", ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = found[2]
            computations[name] = []
            entry = name if found[1] else entry
        elif name and " = " in line:
            computations[name].append(line)
    return computations, entry


def _opcode(line: str) -> str:
    found = re.search(r"\s([a-z][a-z0-9\-]*)\(", line.partition(" = ")[2])
    return found[1] if found else ""


def _count(
    computations: Mapping[str, list[str]], names: Iterable[str], here: Counter[str], nested: Counter[str]
) -> None:
    """Count in some computations, and in those that they run."""
    for line in (line for name in names for line in computations.get(name, [])):
        opcode = _opcode(line)
        if opcode == "call":  # also what goes into a CUDA graph
            _count(computations, re.findall(r"to_apply=%?([\w.\-]+)", line), here, nested)
        elif opcode and opcode not in _NO_WORK:
            here[opcode] += 1
        if opcode in ("while", "conditional"):
            inner = re.findall(r"(?:body|condition|\w+_computation)=%?([\w.\-]+)", line)
            branches = re.findall(r"branch_computations=\{([^}]*)\}", line)
            inner += [name.strip(" %") for found in branches for name in found.split(",")]
            _count(computations, inner, nested, nested)


def main(arguments: list[str]) -> None:
    """Print the result of the settings that are given as JSON."""
    settings = json.loads(arguments[0])
    functions = {function.__name__: function for function in (time_steps, time_drafter)}
    print(json.dumps(functions[settings.pop("function")](**settings)))


if __name__ == "__main__":
    main(sys.argv[1:])
