"""A table of the kernels of decoding steps, compiled for a GPU that need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxspec.bench.absent import (
    absent_drafter,
    absent_model,
    abstract_base,
    abstract_drafter,
    abstract_state,
    lower_step,
)
from jaxspec.bench.needs import device_bytes, measure_needs, readable
from jaxspec.config import MeshConfig
from jaxspec.drafters import parse_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError, check_at_least
from jaxspec.generation.job import cache_capacity
from jaxspec.markdown import table
from jaxspec.model.base import Base
from jaxspec.parallel.chips import GPUS, absent_mesh
from jaxspec.trees import from_paths
from jaxspec.weights.load import DEFAULT_MODEL, load_shapes
from jaxspec.weights.quantizing import check_form


@dataclasses.dataclass(frozen=True)
class KernelsConfig:
    """Steps to compile.

    Attributes:
      topology: the GPU: h100, a100, l4 or t4.
      models: bases, by the names of published models.
      rows: rows of steps that verify a chain and draft nothing.
      drafters: drafters, as --method takes them, of the first base.
      batch_size: texts decoded together.
      length: of prompt and answer together, in tokens.
      dtype: of the bases.
      weights: int8, int4 or int4-64: their kernels in few bits; default: as dtype says.
    """

    topology: str = "h100"
    models: tuple[str, ...] = (
        DEFAULT_MODEL,
        "mtgv/MobileLLaMA-1.4B-Chat",
        "lmsys/vicuna-7b-v1.3",
        "Qwen/Qwen3-8B",
    )
    rows: tuple[int, ...] = (1, 8, 16, 64)
    drafters: tuple[str, ...] = (
        "ppd tree=sparse:16",
        "hidden_transfer",
        "suffix tree=best:8",
        "hydra",
        "eagle tree=best:16",
        "amphista+suffix tree=best:16",
        "eagle+suffix tree=best:16",
    )
    batch_size: int = 1
    length: int = 500
    dtype: str = "bfloat16"
    weights: str = ""


def compile_steps(config: KernelsConfig, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Compile all steps.

    Args:
      config: which.
      say: told of every step.

    Returns:
      For each step its `model`, `drafter`, `rows`, the bytes of the base's `weights` and `cache`, and what
      `measure_needs` returns.

    Raises:
      UserError: an unknown GPU, base or drafter, or a compiler that is missing.
    """
    if config.topology not in GPUS:
        raise UserError(f"topology {config.topology!r}: kernels are those of a GPU, {', '.join(GPUS)}")
    if not (config.rows or config.drafters):
        raise UserError("nothing to compile: give at least one value for rows, or for drafters")
    check_at_least(config, {"batch_size": 1, "length": 1} | ({"rows": 1} if config.rows else {}))
    check_form(config.weights)
    mesh, chip = absent_mesh(MeshConfig(), config.topology)
    bases = {
        model: abstract_base(load_shapes(model), config.dtype, mesh, form=config.weights) for model in config.models
    }
    chosen = {model: dict(_drafters(config, model, base)) for model, base in bases.items()}
    steps = []
    for model, base in bases.items():
        if config.length > (longest := base.decoder.config.max_positions):
            raise UserError(f"length must be at most {longest}, the context of {model}, got {config.length}")
        for name, drafter in chosen[model].items():
            say(f"{model}, {name}")
            capacity = cache_capacity(config.length, 8)
            begun = abstract_state(base, abstract_drafter(drafter, base, mesh), mesh, config.batch_size, capacity)
            needs = measure_needs(lower_step(*begun, mesh), base, chip)
            facts = {"model": model, "drafter": name, "rows": drafter.num_rows, "weights": device_bytes(base.params)}
            facts["cache"] = device_bytes(begun[1].cache)
            steps.append(facts | needs)
    return steps


def _drafters(config: KernelsConfig, model: str, base: Base) -> Iterator[tuple[str, Drafter]]:
    nothing = autoregressive(absent_model(model, base))
    for rows in config.rows:
        chain = from_paths([(0,) * depth for depth in range(1, rows)])
        yield f"{rows} row{'s' if rows > 1 else ''}", dataclasses.replace(nothing, shape=chain)
    for text in config.drafters if model == config.models[0] else ():
        yield text, absent_drafter(parse_drafter(text), model, base)


def kernel_table(steps: list[dict[str, Any]]) -> list[str]:
    """The results of `compile_steps` as a Markdown table; with XLA's kernels for products / with the library's.

    *Read* is a share of weights and cache, and leaves out that results of products are read again.
    """
    heads = [
        "base",
        "step",
        "kernels",
        "a layer",
        "outside",
        "in branches",
        "read",
        "written",
        "large arrays",
        "least, ms",
    ]
    return table(heads, map(_row, steps))


def _row(step: dict[str, Any]) -> list[str]:
    both = list(step["kernels"].values())

    def cell(text: Callable[[dict[str, Any]], str]) -> str:
        return " / ".join("-" if "reason" in each else text(each) for each in both)

    return [
        step["model"].rpartition("/")[2],
        step["drafter"],
        cell(lambda each: f"{each['total']}"),
        cell(lambda each: f"{each['per_layer']:.1f}"),
        cell(lambda each: f"{each['outside']}"),
        cell(lambda each: f"{each['in_branches']}"),
        cell(lambda each: f"{(each['read'] - each['products']) / (step['weights'] + step['cache']):.2f}"),
        cell(lambda each: readable(each["written"])),
        cell(lambda each: f"{sum(each['large'].values())}"),
        cell(lambda each: f"{1000 * each['least_seconds']:.2f}"),
    ]
