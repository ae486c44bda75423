"""Answer prompts: python decode.py --method ppd --prompt "Why is the sky blue?" [--compare] [--json]."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

from jaxspec import (
    Generation,
    Match,
    Model,
    SamplingConfig,
    Typical,
    UserError,
    generate,
    load_method,
    load_model,
    stream,
)
from jaxspec.cli import enable_compilation_cache, parse, run_main
from jaxspec.decoding.loop import Drafter
from jaxspec.evaluation.report import TextPrinter, comparison, record, summary
from jaxspec.model.load import DEFAULT_MODEL
from jaxspec.training.data import read_prompts


@dataclasses.dataclass(frozen=True)
class Options:
    """Answer prompts with one method, optionally beside autoregressive decoding.

    Attributes:
      method: how to draft.
      model: smollm2-135m (embedded), a Hugging Face directory or hub name, or a GGUF file.
      adapter: folder of a trained adapter; default the one that ships for this method and model.
      nodes: nodes of the draft tree, the root included; 0 takes the adapter's own tree.
      prompt: one prompt.
      prompts: a JSONL file with a prompt per line, instead.
      column: field of that file that holds the prompt.
      chat: wrap prompts in the tokenizer's chat template, where it has one.
      max_new_tokens: stop there or at an end-of-text token.
      max_length: longest prompt and answer together, in tokens; 0 takes the model's context.
      temperature: 0 is greedy.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens up to this probability.
      min_p: drop tokens less probable than this fraction of the best.
      seed: decides the text when sampling.
      accept: match is lossless; typical is faster and changes the text.
      epsilon: typical acceptance, largest threshold.
      delta: typical acceptance, factor of the entropy-dependent threshold.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      batch_size: prompts decoded together.
      compare: also decode autoregressively and say whether the outputs are identical.
      stream: print the text while it is made, even when the output is no terminal.
      json: print one JSON object per prompt.
    """

    method: str = "ppd"
    model: str = DEFAULT_MODEL
    adapter: str = ""
    nodes: int = 0
    prompt: str = ""
    prompts: str = ""
    column: str = "prompt"
    chat: bool = True
    max_new_tokens: int = 128
    max_length: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    accept: Literal["match", "typical"] = "match"
    epsilon: float = Typical.epsilon
    delta: float = Typical.delta
    dtype: str = ""
    batch_size: int = 1
    compare: bool = False
    stream: bool = False
    json: bool = False


def decode(options: Options, prompts: list[str]) -> None:
    """Load, answer, print."""
    model = load_model(options.model, options.dtype or None)
    method = load_method(options.method, model, options.adapter or None, num_nodes=options.nodes or None)
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "sampling": SamplingConfig(options.temperature, options.top_k, options.top_p, options.min_p),
        "seed": options.seed,
        "chat": options.chat,
        "max_length": options.max_length or None,
    }
    acceptance = Typical(options.epsilon, options.delta) if options.accept == "typical" else Match()
    plain = load_method("autoregressive", model)
    if options.compare:  # the first run of a program touches its memory for the first time: not what is measured
        generate(model, method, prompts[:1], acceptance=acceptance, **settings)
        generate(model, plain, prompts[:1], **settings)
    for first in range(0, len(prompts), options.batch_size):
        batch = prompts[first : first + options.batch_size]
        answers = _answer(options, model, method, batch, acceptance=acceptance, **settings)
        references = [None] * len(batch)
        if options.compare:
            references = generate(model, plain, batch, batch_size=options.batch_size, **settings)
        for answer, reference in zip(answers, references, strict=True):
            _print(options, model, answer, reference)


def _streams(options: Options) -> bool:
    """Whether the text is printed while it is made."""
    return (options.stream or sys.stdout.isatty()) and not options.json and options.batch_size == 1


def _answer(options: Options, model: Model, method: Drafter, batch: list[str], **settings: object) -> list[Generation]:
    """The batch's answers, printed on the way where they stream."""
    if not _streams(options):
        return generate(model, method, batch, batch_size=options.batch_size, **settings)
    printer = TextPrinter(model)
    for answer in stream(model, method, batch[0], **settings):
        printer.show(answer)
    printer.end()
    return [answer]


def _print(options: Options, model: Model, answer: Generation, reference: Generation | None) -> None:
    """One prompt's result: JSON, or text with a report on stderr."""
    if options.json:
        row = record(options.method, options.model, answer, reference)
        print(json.dumps(row | {"lossless": options.accept == "match"}, ensure_ascii=False), flush=True)
        return
    if not _streams(options):
        print(answer.text, flush=True)
    lossy = " (typical acceptance: the text may differ from the base's own)" if options.accept == "typical" else ""
    print(summary(options.method, answer) + lossy, file=sys.stderr)
    if reference is not None:
        print(summary("autoregressive", reference), file=sys.stderr)
        print(comparison(answer, reference), file=sys.stderr)


def main(args: list[str]) -> None:
    """Parse, check, decode."""
    options = parse(Options, args, prog="decode.py")
    if bool(options.prompt) == bool(options.prompts):
        raise UserError(
            "give a prompt with --prompt TEXT or --prompts FILE.jsonl, one of the two, and not an empty one"
        )
    if options.prompts and not Path(options.prompts).is_file():
        raise UserError(f"{options.prompts}: no such file")
    if options.batch_size < 1:
        raise UserError(f"batch-size must be at least 1, got {options.batch_size}")
    prompts = [options.prompt] if options.prompt else read_prompts(options.prompts, options.column)
    enable_compilation_cache()
    decode(options, prompts)


if __name__ == "__main__":
    run_main(main)
