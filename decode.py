"""Answer prompts: python decode.py --method ppd --prompt "Why is the sky blue?" [--compare] [--json].

python decode.py --dry-run --config bita_7b --mesh.tensor 4 says what that would need, without weights or devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jaxspec import (
    Generation,
    Model,
    SamplingConfig,
    Typical,
    UserError,
    load_method,
    load_model,
    stream,
)
from jaxspec.bench.dry_run import decoding_lines, dry_run_decoding
from jaxspec.cli.options import enable_compilation_cache, parse, run_main
from jaxspec.cli.printing import TextPrinter, comparison, record, summary
from jaxspec.config import MeshConfig
from jaxspec.decoding.acceptance import ACCEPTANCES, Acceptance
from jaxspec.decoding.divergence import Divergence, first_divergence
from jaxspec.decoding.generate import iterate
from jaxspec.decoding.loop import Drafter
from jaxspec.decoding.prompts import encode_prompts
from jaxspec.drafting.adapter import Adapter, adapter_plan, make_drafter, open_adapter
from jaxspec.drafting.choice import find_choice, load_tuned
from jaxspec.drafting.sampling import make_sampler
from jaxspec.errors import check_at_least
from jaxspec.methods import METHODS
from jaxspec.parallel.chips import absent_mesh
from jaxspec.training.configs import load_config
from jaxspec.training.examples import read_prompts
from jaxspec.weights.load import DEFAULT_MODEL


@dataclasses.dataclass(frozen=True)
class Options:
    """Answer prompts with one method, optionally beside autoregressive decoding.

    `--dry-run` compiles steps for devices that need not exist instead; `--dry-run --help` lists its options.

    Attributes:
      method: how to draft.
      model: smollm2-135m (embedded), a Hugging Face directory or hub name, a base that train.py or export.py made,
        or a GGUF file.
      adapter: folder of a trained adapter; default the one that ships for this method and model.
      tree: draft tree: auto (what tune.py chose for this machine), BUILDER:NUMBERS (sparse:16, dynamic:60, chain:3,
        straightforward:3, cartesian:3,2, efficient:5, random:16) or a JSON file; empty takes the adapter's own.
      draft_vocabulary: draft only so many of the tokens that the base itself uses most; the output stays the same. 0
        drafts all; default the adapter's own.
      prompt: one prompt.
      prompts: a JSONL file with a prompt per line, instead.
      column: field of that file that holds the prompt.
      chat: wrap prompts in the tokenizer's chat template, where it has one.
      template: another one by name: llama2, llama2-short, vicuna, vicuna-short or falcon.
      max_new_tokens: stop there or at an end-of-text token.
      max_length: longest prompt and answer together, in tokens; 0 takes the model's context.
      temperature: 0 is greedy.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens up to this probability.
      min_p: drop tokens less probable than this fraction of the best.
      seed: decides the text when sampling.
      accept: match gives the text of autoregressive decoding; rejection, when sampling, another text of the same
        distribution; typical is lossy.
      epsilon: typical acceptance, largest threshold.
      delta: typical acceptance, factor of the entropy-dependent threshold.
      dtype: of the weights; default float32 on CPU, bfloat16 elsewhere.
      batch_size: prompts decoded together.
      compare: also decode autoregressively and say whether the outputs are identical.
      stream: print the text while it is made, even when the output is no terminal.
      json: print one JSON object per prompt.
      mesh: devices that share the work.
    """

    method: str = "ppd"
    model: str = DEFAULT_MODEL
    adapter: str = ""
    tree: str = ""
    draft_vocabulary: int | None = None
    prompt: str = ""
    prompts: str = ""
    column: str = "prompt"
    chat: bool = True
    template: str = ""
    max_new_tokens: int = 128
    max_length: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    accept: Literal["match", "rejection", "typical"] = "match"
    epsilon: float = Typical.epsilon
    delta: float = Typical.delta
    dtype: str = ""
    batch_size: int = 1
    compare: bool = False
    stream: bool = False
    json: bool = False
    mesh: MeshConfig = MeshConfig()


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a decoding step needs of every device, from shapes alone, for 1, 16 and 64 rows.

    Attributes:
      config: name of a training run, for its method and its base's shapes.
      model: another base for its shapes alone, as without --dry-run.
      dtype: of the weights.
      batch_size: prompts decoded together.
      max_length: longest prompt and answer together, in tokens.
      mesh: devices that share the work; none of them is needed.
      topology: compile for this slice of TPUs, like v5e:2x2x1 (needs the package libtpu).
      json: print the figures as JSON.
      dry_run: this.
    """

    config: str = "ppd_smollm2"
    model: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    batch_size: int = 1
    max_length: int = 2048
    mesh: MeshConfig = MeshConfig()
    topology: str = ""
    json: bool = False
    dry_run: bool = True


def dry_run(args: list[str]) -> None:
    """Compile steps that cannot run here, and print what they need."""
    options = parse(DryRun, args, prog="decode.py --dry-run")
    config = load_config(options.config)
    if options.model:
        config = dataclasses.replace(config, model=options.model)
        config.method.abstract(config.shapes)  # refuses settings that do not fit the base
    if options.batch_size < 1 or not 1 <= options.max_length <= config.shapes.max_positions:
        raise UserError(
            f"give a batch-size of at least 1 and a max-length of at most {config.shapes.max_positions}, got "
            f"{options.batch_size} and {options.max_length}"
        )
    absent = absent_mesh(options.mesh, options.topology)
    found = dry_run_decoding(config, *absent, options.batch_size, options.max_length, options.dtype)
    lines = decoding_lines(options.config, config, options.mesh, found)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines))


def decode(options: Options, prompts: list[str], sampling: SamplingConfig, acceptance: Acceptance) -> None:
    """Load, answer, print."""
    model = load_model(options.model, options.dtype or None, options.mesh, options.template)
    method = _method(options, model)
    if method.own:
        print(f"{options.method} decodes on the base that it has tuned, not on {model.name}", file=sys.stderr)
    model = method.own or model  # both sides
    plain = load_method("autoregressive", model)
    settings = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": options.seed}
    settings |= {"chat": options.chat, "max_length": options.max_length or None, "batch_size": options.batch_size}
    encoded = encode_prompts(model, prompts, options.max_new_tokens, options.chat, settings["max_length"])
    references, compiled = itertools.repeat(None), {}
    if options.compare:  # compile both and touch their memory, so that the first timing is like the others
        first = prompts[: options.batch_size]
        [warm, *_] = iterate(model, method, first, acceptance=acceptance, max_steps=2, **settings)
        [warm_reference, *_] = iterate(model, plain, first, max_steps=2, **settings)
        compiled = {"answer": warm.compile_seconds, "reference": warm_reference.compile_seconds}
        references = _references(options, model, plain, prompts, settings)
    answers = _answers(options, model, method, prompts, acceptance, settings)
    for ids, answer, reference in zip(encoded, answers, references, strict=False):
        answer = _also_compiled(answer, compiled.pop("answer", 0.0))
        reference = reference and _also_compiled(reference, compiled.pop("reference", 0.0))
        parting = None
        if reference and acceptance.same_text(options.temperature):
            parting = first_divergence(model, ids, answer.tokens, reference.tokens, sampling, options.seed)
        _print(options, method.method.name, model, answer, reference, parting, acceptance)


def _also_compiled(answer: Generation, seconds: float) -> Generation:
    """With what was compiled for it before."""
    return dataclasses.replace(answer, compile_seconds=answer.compile_seconds + seconds)


def _method(options: Options, model: Model) -> Drafter:
    """The method with the tree that was asked for; says where another way would be faster."""
    if options.tree == "auto":
        tuning = {"batch_size": options.batch_size, "temperature": options.temperature}
        method, line = load_tuned(options.method, model, options.adapter or None, **tuning)
        print(line, file=sys.stderr)
        return method
    if options.method in METHODS and not METHODS[options.method].trainable:
        settings = {"tree": options.tree or None, "draft_vocabulary": options.draft_vocabulary}
        return load_method(options.method, model, options.adapter or None, **settings)
    folder, adapter = open_adapter(options.method, model, options.adapter or None)
    if not options.tree:
        _advise(options, model, folder, adapter)
    return make_drafter(adapter, adapter_plan(adapter, options.tree or None), model, options.draft_vocabulary)


def _advise(options: Options, model: Model, folder: Path, adapter: Adapter) -> None:
    """Say so where tune.py found that autoregressive decoding is faster."""
    try:
        choice = find_choice(folder, adapter, model, options.batch_size, options.temperature)
    except UserError as error:
        print(f"warning: {error}", file=sys.stderr)
        return
    if choice and choice.plan is None:
        print(f"tune.py found no tree of {options.method} that pays on this machine; try --tree auto", file=sys.stderr)


def _streams(options: Options) -> bool:
    """Whether the text is printed while it is made."""
    return (options.stream or sys.stdout.isatty()) and not options.json and options.batch_size == 1


def _answers(
    options: Options, model: Model, method: Drafter, prompts: list[str], acceptance: Acceptance, settings: dict
) -> Iterator[Generation]:
    """One answer per prompt; its text is printed on the way unless the result is JSON."""
    if not _streams(options):
        yield from iterate(model, method, prompts, acceptance=acceptance, **settings)
        return
    for prompt in prompts:
        if options.compare:
            print(f"[{method.method.name}]")
        printer = TextPrinter(model)
        for answer in _streamed(model, method, prompt, {"acceptance": acceptance} | settings):
            printer.show(answer)
        printer.end()
        yield answer


def _references(
    options: Options, model: Model, plain: Drafter, prompts: list[str], settings: dict
) -> Iterator[Generation]:
    """Autoregressive decoding's answers, with as many stops on the way as the method's."""
    if not _streams(options):
        yield from iterate(model, plain, prompts, **settings)
        return
    for prompt in prompts:
        [*_, answer] = _streamed(model, plain, prompt, settings)
        yield answer


def _streamed(model: Model, method: Drafter, prompt: str, settings: dict) -> Iterator[Generation]:
    """One answer, piece by piece."""
    return stream(model, method, prompt, **{k: v for k, v in settings.items() if k != "batch_size"})


def _print_text(model: Model, answer: Generation) -> None:
    """In colours on a terminal, which need the text of every token."""
    if not sys.stdout.isatty():
        print(answer.text)
        return
    printer = TextPrinter(model)
    printer.show(answer)
    printer.end()


def _print(
    options: Options,
    name: str,
    model: Model,
    answer: Generation,
    reference: Generation | None,
    parting: Divergence | None,
    acceptance: Acceptance,
) -> None:
    """One prompt's result: JSON, or texts on stdout with a report on stderr."""
    if options.json:
        row = record(name, options.model, answer, reference, parting)
        row |= {"accept": options.accept, "lossless": acceptance.lossless, "base": model.fingerprint}
        print(json.dumps(row, ensure_ascii=False), flush=True)
        return
    if not _streams(options):
        if reference:
            print(f"[{name}]")
        _print_text(model, answer)
    if reference:
        print(f"[autoregressive]\n{reference.text}")
    sys.stdout.flush()
    remark = "" if acceptance.same_text(options.temperature) else f" ({acceptance.remark})"
    print(summary(name, answer) + remark, file=sys.stderr)
    if reference:
        print(summary("autoregressive", reference), file=sys.stderr)
        print(comparison(answer, reference, parting), file=sys.stderr)


def main(args: list[str]) -> None:
    """Parse, check, decode."""
    if "--dry-run" in args:
        dry_run(args)
        return
    options = parse(Options, args, prog="decode.py")
    if bool(options.prompt) == bool(options.prompts):
        raise UserError(
            "give a prompt with --prompt TEXT or --prompts FILE.jsonl, one of the two, and not an empty one"
        )
    if options.prompts and not Path(options.prompts).is_file():
        raise UserError(f"{options.prompts}: no such file")
    if options.stream and (options.json or options.batch_size > 1):
        raise UserError("--stream prints one text while it is made: it goes with neither --json nor --batch-size")
    if options.tree == "auto" and options.draft_vocabulary is not None:
        raise UserError("--tree auto also takes the draft vocabulary that tune.py chose: leave --draft-vocabulary out")
    check_at_least(options, {"batch_size": 1})
    prompts = [options.prompt] if options.prompt else read_prompts(options.prompts, options.column)
    sampling = SamplingConfig(options.temperature, options.top_k, options.top_p, options.min_p)
    make_sampler(sampling)  # refuses bad settings before anything is loaded
    settings = {"epsilon": options.epsilon, "delta": options.delta} if options.accept == "typical" else {}
    acceptance = ACCEPTANCES[options.accept](**settings)
    enable_compilation_cache()
    decode(options, prompts, sampling, acceptance)


if __name__ == "__main__":
    run_main(main)
