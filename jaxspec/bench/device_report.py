"""Tables and plots of the figures of `jaxspec bench device`, made without the device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.bench.device import DEVICE
from jaxspec.files import write_atomically
from jaxspec.markdown import sections, table
from jaxspec.plotting import picture

Figure = dict[str, Any]
_STYLES = ("o-", "s--", "^:")  # of a dtype's lines


def write_device_report(results: dict[str, Any], folder: Path) -> Path:
    """Write device.md, and device.png where there is something to draw. Returns the page."""
    figures = results["figures"].values()
    total, compiled = (sum(figure[name] for figure in figures) for name in ("total_seconds", "compile_seconds"))
    parts = {"Decoding": _decoding(results), "Time of a step": _steps(results), "Training": _training(results)}
    lines = [
        f"# {results['device']}",
        "",
        f"jax {results['jax']}, {results['driver']}, {results['date']}, code {results['code']}. Measured by "
        f"`jaxspec bench device`; all figures are in {DEVICE}.",
        "",
        *sections(parts),
        f"{len(figures)} figures took {total:.0f} s, {compiled:.0f} s of them compiling.",
        "",
    ]
    if importlib.util.find_spec("matplotlib") is None:
        lines += ["No plot: matplotlib is not installed. `--report` draws it elsewhere.", ""]
    elif _draw(results, folder / "device.png"):
        lines += ["![device](device.png)", ""]
    write_atomically(folder / "device.md", "\n".join(lines).encode())
    return folder / "device.md"


def _decoding(results: dict[str, Any]) -> list[str]:
    """The table of drafters on the default model."""
    found = list(_of_kind(results, "decode"))
    if not found:
        return []
    heads = ["dtype", "drafter", "rows", "tokens per step", "tokens/s", "speed", "step cost", "identical"]
    settings, answers = results["settings"], max(figure.get("answers", 0) for _, figure in found)
    form = f"Kernels in {settings['weights']}. " if settings["weights"] else ""
    about = (
        f"{form}{answers} prompts, greedy, up to {settings['max_new_tokens']} tokens, one at a time, all answers "
        "together. *Speed* and *step cost*: over those of autoregressive decoding of the same base. *Largest gap*: "
        "between the logits of the two tokens where an output first differs; small gaps are ties."
    )
    return [about, "", *table([*heads, "largest gap"], [_decoding_row(key, figure) for key, figure in found])]


def _decoding_row(key: tuple[str, ...], figure: Figure) -> list[Any]:
    dtype, name, rows = key
    if "error" in figure:
        return [dtype, name, rows, figure["error"]]
    rates = [f"{figure['tokens_per_step']:.2f}", f"{figure['tokens_per_second']:.0f}"]
    if "speedup" not in figure:
        return [dtype, name, rows, *rates, 1, 1]
    gaps = [difference["gap"] for difference in figure["differences"] if difference["gap"] is not None]
    rates += [f"{figure['speedup']:.2f}", f"{figure['step_cost']:.2f}"]
    same = f"{figure['identical']} of {figure['answers']}"
    return [dtype, name, figure["rows"], *rates, same, f"{max(gaps):.2g}" if gaps else ""]


def _steps(results: dict[str, Any]) -> list[str]:
    """The table of steps with random weights, one line per shape and batch size, and that of prefill."""
    lines, streams = [], []
    for (name, batch), curve in _curves(results).items():
        sizes = [f"{rows} row{'s' * (rows > 1)}" for rows in curve]
        cells = [
            figure.get("error") or f"{figure['milliseconds']:.1f} ({figure['share_of_bandwidth']:.0%})"
            for figure in curve.values()
        ]
        lines += [f"**{name}, {batch}**", "", *table(sizes, [cells]), ""]
    for (name, *rest), figure in _of_kind(results, "step"):
        if rest == ["prefill"] and "error" not in figure:
            rates = (figure["tokens_per_second"], figure["streaming_gigabytes_per_second"])
            streams.append([name, *(f"{rate:.0f}" for rate in rates)])
    if not lines and not streams:
        return []
    about = (
        f"Random weights in {_weights(results)}, a cache of 512 slots. Milliseconds of a step by rows, and in brackets "
        "the share that it reaches of the speed at which the same process streams a large array."
    )
    return [about, "", *lines, *table(["shapes", "prefill, tokens/s", "streaming, GB/s"], streams)]


def _training(results: dict[str, Any]) -> list[str]:
    """The table of updates."""
    rows = []
    for key, figure in _of_kind(results, "train"):
        if "error" in figure:
            rows.append([*key, figure["error"]])
            continue
        rates = (f"{figure['groups_per_second']:.0f}", f"{figure['seconds_per_update']:.3f}")
        rows.append([*key, *rates, f"{figure['gigabytes']:.1f}"])
    if not rows:
        return []
    about = "One sequence of 512 tokens with 64 insertion points an update, activations recomputed, weights in "
    heads = ["shapes", "method", "insertion groups per second", "seconds per update", "memory of an update, GB"]
    return [f"{about}{_weights(results)}.", "", *table(heads, rows)]


def _weights(results: dict[str, Any]) -> str:
    """What random weights are in."""
    return results["settings"]["weights"] or "bfloat16"


def _of_kind(results: dict[str, Any], kind: str) -> Iterator[tuple[tuple[str, ...], Figure]]:
    """The figures of a kind, with the remaining parts of their keys."""
    for key, figure in results["figures"].items():
        first, *rest = key.split("/")
        if first == kind:
            yield tuple(rest), figure


def _curves(results: dict[str, Any]) -> dict[tuple[str, str], dict[int, Figure]]:
    """Figures of steps, by shapes and batch size, then by rows."""
    curves: dict[tuple[str, str], dict[int, Figure]] = {}
    for (name, *rest), figure in _of_kind(results, "step"):
        if len(rest) == 2:
            curves.setdefault((name, rest[0]), {})[int(rest[1].split()[0])] = figure
    return curves


def _draw(results: dict[str, Any], file: Path) -> bool:
    """Draw step time, share of bandwidth and speed by rows. Returns whether there was anything to draw."""
    curves = {
        key: {rows: f for rows, f in curve.items() if "error" not in f} for key, curve in _curves(results).items()
    }
    curves = {key: curve for key, curve in curves.items() if curve}
    speeds: dict[tuple[str, str], dict[int, float]] = {}
    for (dtype, name, _), figure in _of_kind(results, "decode"):
        if "speedup" in figure:
            speeds.setdefault((name, dtype), {})[figure["rows"]] = figure["speedup"]
    if not curves and not speeds:
        return False
    with picture(file, 1, 3, (16, 4), dpi=100) as (times, shares, gains):
        for (name, batch), curve in curves.items():
            label = f"{name}, {batch}"
            times.plot(list(curve), [f["milliseconds"] for f in curve.values()], marker=".", label=label)
            shares.plot(list(curve), [f["share_of_bandwidth"] for f in curve.values()], marker=".", label=label)
        names, dtypes = (list(dict.fromkeys(key[i] for key in speeds)) for i in (0, 1))
        for (name, dtype), by_rows in speeds.items():
            style, color = _STYLES[dtypes.index(dtype) % len(_STYLES)], f"C{names.index(name)}"
            rows, values = zip(*sorted(by_rows.items()), strict=True)
            gains.plot(rows, values, style, color=color, label=f"{name}, {dtype}")
        gains.axhline(1, color="gray", linewidth=1)
        times.set(xlabel="rows", ylabel="milliseconds per step", ylim=(0, None), title="time of a step")
        shares.set(xlabel="rows", ylabel="share", ylim=(0, None), title="share of the streaming bandwidth")
        gains.set(xlabel="rows", ylabel="times autoregressive", title="speed of the default model")
        for axes in (times, shares, gains):
            axes.set_xscale("log", base=2)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines
    return True
