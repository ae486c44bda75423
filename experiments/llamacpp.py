"""llama.cpp and jaxspec in turn, greedily, on one GGUF file: python -m experiments.llamacpp --data question.jsonl.

Needs llama-cpp-python, built for this processor: pip install --no-binary llama-cpp-python llama-cpp-python. Texts are
not the same: llama.cpp multiplies the file's 4-bit weights with states of 8 bits, jaxspec dequantizes them to floats.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.bench.metrics import estimate
from jaxspec.bench.questions import read_questions, stratified
from jaxspec.bench.report import interval
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import writable, write_json
from jaxspec.generation.generate import generate
from jaxspec.generation.prompts import encode_prompts
from jaxspec.machine import make_room_for_programs
from jaxspec.markdown import table
from jaxspec.progress import Progress
from jaxspec.tuning.race import in_turn
from jaxspec.weights.load import DEFAULT_MODEL, embedded_model_path, load_model
from jaxspec.weights.model import Model

_REFERENCE = "jaxspec, autoregressive"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare llama.cpp and jaxspec on the default model's file.

    Attributes:
      data: a question file as for `jaxspec bench`; the first turns are asked.
      methods: what drafts in jaxspec, each with its default shape.
      limit: questions, the same number from every category; 0 is all.
      tokens: of an answer at most.
      drafted: tokens that llama.cpp's prompt lookup drafts; its authors advise 2 on a CPU, 10 on a GPU.
      threads: of llama.cpp; 0 is one for each processor core.
      output: folder for llamacpp.json.
    """

    data: str
    methods: tuple[str, ...] = ("suffix", "eagle+suffix")
    limit: int = 12
    tokens: int = 128
    drafted: tuple[int, ...] = (2, 10)
    threads: int = 0
    output: str = "runs/llamacpp"


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer: its tokens, the seconds from its first token to its last, and those of compiling."""

    tokens: list[int]
    decode_seconds: float
    compile_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second after the first one."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


Way = Callable[[Sequence[int]], list[Answer]]


def answer_of(tokens: Iterable[int], most: int, eos: Sequence[int]) -> Answer:
    """Take tokens until the end of the text or of what is allowed, and time them from the first one on."""
    taken: list[int] = []
    began = time.perf_counter()
    for token in tokens:
        taken.append(int(token))
        if len(taken) == 1:
            began = time.perf_counter()
        if len(taken) == most or token in eos:
            break
    return Answer(taken, time.perf_counter() - began)


def ways_of_llamacpp(options: Options, model: Model, longest: int) -> dict[str, Way]:
    """llama.cpp alone and with prompt lookup. Raises UserError where it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise UserError("needs llama-cpp-python: pip install --no-binary llama-cpp-python llama-cpp-python")
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    threads = options.threads or os.cpu_count()
    load = functools.partial(
        Llama,
        str(embedded_model_path()),
        n_ctx=longest,
        n_batch=longest,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def way(llama: Any) -> Way:
        def run(prompt: Sequence[int]) -> list[Answer]:
            tokens = llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
            return [answer_of(tokens, options.tokens, model.eos)]

        return run

    drafting = {
        f"llama.cpp, prompt lookup of {n}": LlamaPromptLookupDecoding(num_pred_tokens=n) for n in options.drafted
    }
    return {"llama.cpp": way(load())} | {name: way(load(draft_model=lookup)) for name, lookup in drafting.items()}


def ways_of_jaxspec(options: Options, model: Model) -> dict[str, Way]:
    """Autoregressive decoding, and every method with its default shape."""
    drafters = {_REFERENCE: autoregressive(model)}
    drafters |= {f"jaxspec, {name}": load_drafter(name, model) for name in options.methods}

    def run(drafter: Any, prompt: Sequence[int]) -> list[Answer]:
        [said] = generate(drafter, [list(prompt)], options.tokens)
        return [Answer(said.tokens, said.decode_seconds, said.compile_seconds)]

    return {name: functools.partial(run, drafter) for name, drafter in drafters.items()}


def measure(ways: dict[str, Way], prompts: Sequence[Sequence[int]]) -> dict[str, list[Answer]]:
    """The answers of all ways to all prompts, in turn; the very first prompt is asked once before, to warm up."""
    answers: dict[str, list[Answer]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[0])
    with Progress("comparing", len(prompts), "prompts") as progress:
        for number, prompt in enumerate(prompts):
            runs = {name: functools.partial(way, prompt) for name, way in ways.items()}
            for name, answer in in_turn(runs, number, progress):
                answers[name] += answer
            make_room_for_programs()
            progress.update(number + 1)
    return answers


def report(answers: dict[str, list[Answer]]) -> list[str]:
    """A line per way: its median rate, its speed beside jaxspec's autoregressive decoding, and its texts."""
    rates = {name: np.array([answer.rate for answer in each]) for name, each in answers.items()}
    rows = []
    for name, each in answers.items():
        reference = _REFERENCE if name.startswith("jaxspec") else "llama.cpp"
        same = sum(a.tokens == b.tokens for a, b in zip(each, answers[reference], strict=True))
        speed = interval(estimate(rates[name] / rates[_REFERENCE], np.median))
        rows.append([name, f"{np.median(rates[name]):.1f}", speed, f"{same} of {len(each)}"])
    return table(["", "tokens/s", "speed", "the text of the same software without drafts"], rows)


def main(args: list[str]) -> None:
    """Measure, print, write."""
    options = parse(Options, args, prog="python -m experiments.llamacpp")
    check_at_least(options, {"limit": 0, "tokens": 2, "drafted": 1, "threads": 0})
    questions = stratified(read_questions(options.data), options.limit)
    folder = writable(Path(options.output))
    enable_compilation_cache()
    model = load_model(DEFAULT_MODEL)
    prompts = encode_prompts(model, [question.turns[0] for question in questions], options.tokens, True, None)
    longest = max(map(len, prompts)) + options.tokens + max(options.drafted, default=0) + 1
    answers = measure(ways_of_llamacpp(options, model, longest) | ways_of_jaxspec(options, model), prompts)
    results = {
        "settings": dataclasses.asdict(options) | {"data": Path(options.data).name},
        "versions": {"jax": jax.__version__, "llama-cpp-python": importlib.metadata.version("llama-cpp-python")},
        "answers": {name: [dataclasses.asdict(answer) for answer in each] for name, each in answers.items()},
    }
    write_json(folder / "llamacpp.json", results)
    print("\n".join(report(answers)))


if __name__ == "__main__":
    run_main(main)
