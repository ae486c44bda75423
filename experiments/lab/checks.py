"""Jobs that decode: whether drafting leaves the text as it is, and how fast unions are."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.bench.device_figures import of_one_size
from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError, first_line
from jaxspec.generation.divergence import NEAR_TIE, Divergence, first_divergence
from jaxspec.generation.generate import Generation, generate
from jaxspec.machine import Stopwatch, device_name
from jaxspec.training.examples import read_prompts
from jaxspec.tuning.race import Trial, race
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model

FAILURES = (UserError, jax.errors.JaxRuntimeError)  # of one drafter or size, which the others outlive


@functools.lru_cache(maxsize=1)
def default_model(dtype: str) -> Model:
    """The default model; the last one is kept for the next job of the same process."""
    return load_model(DEFAULT_MODEL, dtype)


def precision(dtype: str) -> contextlib.AbstractContextManager[None]:
    """Full precision of products in float32, as jaxspec's programs have it: GPUs round their factors to 10 bits."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


def check_equality(
    drafter: str, tree: str | None, dtype: str, temperature: float, prompt_tokens: int, new_tokens: int, prompts: int
) -> dict[str, Any]:
    """Decode with a drafter and autoregressively, and compare every answer.

    Args:
      drafter: a method or a union, as `load_drafter` takes it.
      tree: its tree, likewise; None for its own.
      dtype: of the default model's weights.
      temperature: of sampling; 0 is greedy.
      prompt_tokens: join shipped prompts until each prompt has so many tokens; 0 for shipped prompts as they are, all
        of one size of buffers, so that one set of programs is compiled.
      new_tokens: of an answer at most.
      prompts: how many.

    Returns:
      `identical` in words, `differences` beyond rounding, `tokens_per_step`, and every answer's own figures.
    """
    with precision(dtype), Stopwatch() as watch:
        ours = load_drafter(drafter, default_model(dtype), tree=tree)
        texts = choose_prompts(ours.model, prompt_tokens, new_tokens, prompts, _depth(ours))
        sampling = SamplingConfig(temperature=temperature)
        answers, plain = (generate(d, texts, new_tokens, sampling=sampling) for d in (ours, autoregressive(ours.model)))
        differences = [
            first_divergence(ours.model, text, answer.tokens, reference.tokens, sampling, max_new_tokens=new_tokens)
            for text, answer, reference in zip(texts, answers, plain, strict=True)
        ]
    return {
        "device": device_name(),
        "rows": ours.num_rows,
        "nodes": ours.num_nodes,
        "identical": _of(sum(difference is None for difference in differences), len(answers)),
        "differences": sum(difference is not None and difference.gap >= NEAR_TIE for difference in differences),
        "tokens_per_step": _tokens_per_step(answers),
        "answers": [
            _compared(text, answer, difference)
            for text, answer, difference in zip(texts, answers, differences, strict=True)
        ],
        "seconds": round(watch.seconds, 2),
        "compile_seconds": round(watch.compile_seconds, 2),
    }


def choose_prompts(model: Model, prompt_tokens: int, new_tokens: int, count: int, depth: int) -> list[list[int]]:
    """Token ids of shipped prompts, of one size of buffers; or of several joined, until they have so many tokens.

    Args:
      model: the base.
      prompt_tokens: of each prompt at least; 0 for shipped prompts as they are.
      new_tokens: of an answer at most.
      count: how many.
      depth: of the deepest tree.
    """
    shipped = read_prompts("")
    if not prompt_tokens:
        return of_one_size([model.encode(text) for text in shipped], new_tokens, depth)[:count]
    texts = itertools.cycle(shipped)
    return [_joined(model, texts, prompt_tokens) for _ in range(count)]


def _joined(model: Model, texts: itertools.cycle[str], tokens: int) -> list[int]:
    """The next texts in one prompt, as many as it takes."""
    text = next(texts)
    while len(ids := model.encode(text)) < tokens:
        text = f"{text}\n\n{next(texts)}"
    return ids


def race_unions(drafters: list[str], tree: str, dtype: str, prompts: int, new_tokens: int) -> dict[str, Any]:
    """Speed of drafters beside autoregressive decoding of the same prompts, in turn, without compilation.

    Args:
      drafters: methods or unions, as `load_drafter` takes them; one that fails is named with its error.
      tree: of all of them.
      dtype: of the default model's weights.
      prompts: how many.
      new_tokens: of an answer at most.

    Returns:
      By drafter, `autoregressive` among them: tokens per step and second, speed relative to autoregressive decoding as
      the median over prompts, and in words how many answers are identical.
    """
    with precision(dtype), Stopwatch() as watch:
        model = default_model(dtype)
        ready, errors = _load_all(drafters, tree, model)
        depth = max(map(_depth, ready.values()), default=0)
        texts = choose_prompts(model, 0, new_tokens, prompts, depth)
        for name, drafter in list(ready.items()):
            try:
                generate(drafter, texts[:1], new_tokens, max_steps=8)  # compiles
            except FAILURES as error:
                del ready[name]
                errors[name] = _failure(error)
        trials = race(model, ready, texts, new_tokens, SamplingConfig())
    return {
        "device": device_name(),
        "drafters": {trial.name: _raced(trial, ready.get(trial.name), len(texts)) for trial in trials} | errors,
        "seconds": round(watch.seconds, 2),
        "compile_seconds": round(watch.compile_seconds, 2),
    }


def _load_all(names: Sequence[str], tree: str, model: Model) -> tuple[dict[str, Drafter], dict[str, Any]]:
    """The drafters, and the errors of those that cannot be raced."""
    ready, errors = {}, {}
    for name in names:
        try:
            drafter = load_drafter(name, model, tree=tree)
            if drafter.model is not model:
                raise UserError(f"{name} decodes on a base of its own")
            ready[name] = drafter
        except FAILURES as error:
            errors[name] = _failure(error)
    return ready, errors


def _depth(drafter: Drafter) -> int:
    return drafter.device_shape.depth


def _failure(error: Exception) -> dict[str, str]:
    return {"error": first_line(error)[:200]}


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def _tokens_per_step(answers: Sequence[Generation]) -> float:
    return sum(max(a.new_tokens - 1, 0) for a in answers) / max(sum(a.steps for a in answers), 1)


def _compared(prompt: Sequence[int], answer: Generation, difference: Divergence | None) -> dict[str, Any]:
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": answer.new_tokens,
        "steps": answer.steps,
        "divergence": difference and difference.as_json(),
    }


def _raced(trial: Trial, drafter: Drafter | None, prompts: int) -> dict[str, Any]:
    return {
        "rows": drafter.num_rows if drafter else 1,
        "tokens_per_step": trial.tokens_per_step,
        "tokens_per_second": trial.tokens_per_second,
        "speedup": trial.speedup,
        "identical": _of(trial.identical, prompts),
    }
