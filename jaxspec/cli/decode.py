"""Answer prompts, optionally compared with autoregressive decoding; or report the memory that decoding would need."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxspec.cli.options import DrafterOptions, given_options, parse
from jaxspec.cli.printing import Result, TextPrinter, record
from jaxspec.cli.program import enable_compilation_cache, mention_compilation
from jaxspec.config import MeshConfig, SamplingConfig
from jaxspec.decoding.acceptance import ACCEPTANCES, Acceptance, AcceptanceName, Typical
from jaxspec.decoding.method import abstract_trainable
from jaxspec.decoding.sampling import make_sampler
from jaxspec.drafters import DrafterSpec, load_drafter, parse_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError, check_at_least
from jaxspec.files import read_text
from jaxspec.generation.divergence import first_divergence
from jaxspec.generation.generate import Generation, iterate, stream
from jaxspec.generation.prompts import encode_prompts
from jaxspec.model.gpu import OLDEST, older_note
from jaxspec.parallel.chips import Gpu, absent_mesh
from jaxspec.training.examples import read_prompts
from jaxspec.training.run_config import load_config
from jaxspec.weights.model import Model
from jaxspec.weights.quantizing import check_form


@dataclasses.dataclass(frozen=True)
class DecodeOptions(DrafterOptions):
    """Answer prompts with one method, optionally beside autoregressive decoding.

    Attributes:
      model: a Hugging Face directory or hub name, a base that `jaxspec train` or `jaxspec export` wrote, or a GGUF
        file; default smollm2-135m, in a dry run the config's.
      tree: draft tree: auto (the default: the choice of `jaxspec tune` for this machine, else the best nodes of all
        methods, as many as pay in every step), own (the adapter's), BUILDER:NUMBERS (sparse:16, dynamic:60,
        stripped:60, chain:3, straightforward:3, cartesian:3,2, efficient:5, medusa:64, random:16), best:ROWS (the best
        nodes, chosen in every step; best:1@21,5@26 also chooses their number, by its milliseconds) or a JSON file.
      draft_vocabulary: draft only this many tokens, those that the base uses most; the output stays the same. 0 drafts
        all; default the adapter's size.
      prompt: one prompt.
      prompts: a JSONL file with one prompt per line, instead.
      column: field of that file with the prompt.
      prediction: a file with the text that the answer is expected to be, mostly, such as code that the prompt asks to
        change: lookups draft from it; the answer is the same.
      chat: wrap prompts in the chat template, where there is one.
      max_new_tokens: largest number of new tokens; an end-of-text token ends the answer earlier.
      max_length: longest prompt and answer together, in tokens; 0 takes the model's context, in a dry run at most 2048.
      temperature: sampling temperature; 0 is greedy.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens up to this probability.
      min_p: drop tokens less probable than this fraction of the best.
      repetition_penalty: divides positive logits of tokens that the prompt or the answer has, and multiplies negative
        ones; 1 is off.
      presence_penalty: subtracted from logits of tokens that the answer has.
      frequency_penalty: likewise, as many times as the answer has them.
      seed: sampling seed, which determines the text.
      accept: match gives the text of autoregressive decoding; rejection, when sampling, another text of the same
        distribution; so does block, which accepts more, but of chains of one method alone; typical, when sampling, is
        lossy.
      epsilon: largest threshold of typical acceptance.
      delta: factor of the entropy-dependent threshold of typical acceptance.
      batch_size: prompts decoded together.
      compare: also decode autoregressively and say whether the outputs are identical.
      compare_with: decode with this drafter, too, and compare all, as in --compare-with "medusa+suffix tree=best:5
        vocabulary=8192"; may be repeated.
      stream: print the text while it is made, even when the output is no terminal.
      json: print one JSON object per prompt, or the figures of a dry run as one.
      mesh: devices that share the work.
      dry_run: compile decoding steps from shapes alone, by default in bfloat16, and print their memory, operations and
        kernels per device; the devices need not be there. Steps are those of 1, 16 and 64 rows of a config's method, or
        those of the drafter that --method names, as it ships or would be trained.
      config: for a dry run: the named training run that gives the method and the base's shapes; default ppd_smollm2.
      topology: for a dry run: what to compile for: h100, a100, l4, t4 (needs jax-cuda13-plugin, no GPU) or a slice of
        TPUs like v5e:2x2x1 (needs libtpu).
    """

    model: str = ""
    tree: str = ""
    draft_vocabulary: int | None = None
    prompt: str = ""
    prompts: str = ""
    column: str = "prompt"
    prediction: str = ""
    chat: bool = True
    max_new_tokens: int = 128
    max_length: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    accept: AcceptanceName = "match"
    epsilon: float = Typical.epsilon
    delta: float = Typical.delta
    batch_size: int = 1
    compare: bool = False
    compare_with: Annotated[tuple[str, ...], tyro.conf.arg(metavar="DRAFTER"), tyro.conf.UseAppendAction] = ()
    stream: bool = False
    json: bool = False
    mesh: MeshConfig = MeshConfig()
    dry_run: bool = False
    config: str = ""
    topology: str = ""

    def sampling(self) -> SamplingConfig:
        """The sampling settings."""
        return SamplingConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(SamplingConfig)})

    def acceptance(self) -> Acceptance:
        """The acceptance rule."""
        settings = {"epsilon": self.epsilon, "delta": self.delta} if self.accept == "typical" else {}
        return ACCEPTANCES[self.accept](**settings)

    @property
    def room(self) -> dict[str, Any]:
        """The settings of `encode_prompts`."""
        return {"max_new_tokens": self.max_new_tokens, "chat": self.chat, "max_length": self.max_length or None}

    @property
    def compared(self) -> bool:
        """Whether to decode autoregressively, too."""
        return self.compare or bool(self.compare_with)

    @functools.cached_property
    def drafters(self) -> list[DrafterSpec]:
        """The drafter, and those that it is compared with."""
        own = self.drafter(tree=self.tree or None, vocabulary=self.draft_vocabulary)
        return [own, *map(parse_drafter, self.compare_with)]


_DRY_RUN_ALONE = ("config", "topology")
_DRY_RUN_TOO = (
    *("dry_run", "model", "dtype", "weights", "batch_size", "max_length", "mesh", "json"),
    *("method", "tree", "draft_vocabulary"),
)


def main(args: list[str]) -> None:
    """Parse, check, decode."""
    options = parse(DecodeOptions, args)
    check_dry_run(options)
    if options.dry_run:
        dry_run(options)
    else:
        check(options)
        decode(options)


def check_dry_run(options: DecodeOptions) -> None:
    """Raise UserError for options that only a dry run takes, and in a dry run for those that it does not take."""
    given = given_options(options)
    if not options.dry_run:
        if {*given} & {*_DRY_RUN_ALONE}:
            raise UserError("--config and --topology go with --dry-run")
        return
    if useless := [name.replace("_", "-") for name in given if name not in _DRY_RUN_ALONE + _DRY_RUN_TOO]:
        raise UserError(f"--dry-run decodes nothing: it does not go with --{useless[0]}")
    [spec] = options.drafters
    if spec.adapter or spec.draft or spec.draft_adapter:
        raise UserError(f"drafter {spec.text!r}: a dry run reads no adapter or draft model, leave it out")


def check(options: DecodeOptions) -> None:
    """Raise UserError for options that make no sense, before anything is loaded."""
    if options.prompt and options.prompts:
        raise UserError("give --prompt TEXT or --prompts FILE.jsonl, not both")
    if not (options.prompt or options.prompts):
        raise UserError("give a prompt that is not empty: --prompt TEXT, or --prompts FILE.jsonl for several")
    if options.prompts and not Path(options.prompts).is_file():
        raise UserError(f"{options.prompts}: no such file")
    if options.prediction and not Path(options.prediction).is_file():
        raise UserError(f"--prediction {options.prediction}: no such file")
    if options.stream and (options.json or options.batch_size > 1):
        raise UserError("--stream prints one text while it is made: it goes with neither --json nor --batch-size")
    check_at_least(options, {"batch_size": 1})
    specs = options.drafters
    if again := [text for i, text in enumerate(options.compare_with, 1) if specs[i] in specs[:i]]:
        raise UserError(f"--compare-with {again[0]!r}: that drafter is there twice")
    make_sampler(options.sampling())  # this and the next refuse bad settings
    options.acceptance()


def decode(options: DecodeOptions) -> None:
    """Load, answer, print."""
    prompts = [options.prompt] if options.prompt else read_prompts(options.prompts, options.column)
    enable_compilation_cache()
    mention_compilation()
    model = options.load_model(options.mesh)
    encoded = encode_prompts(model, prompts, **options.room)  # refuses a bad prompt before any is answered
    drafters = choose_drafters(options, model)
    drafter, *others = drafters
    for text, other in zip(options.compare_with, others, strict=True):
        if other.model is not drafter.model:
            raise UserError(f"--compare-with {text!r}: that is another base than {drafter.name} decodes on")
    acceptance = options.acceptance()
    same_text = acceptance.same_text(options.temperature)
    if not options.json:
        names, remark = [drafter.name, *options.compare_with], "" if same_text else acceptance.remark
        printer = TextPrinter(drafter.model, names, remark, options.compared)
        for results in answers(options, drafters, prompts, encoded, printer.show):
            printer.finish(results)
        return
    facts = {"method": drafter.name, "model": drafter.model.name, "base": drafter.model.fingerprint}
    facts |= {"accept": options.accept, "lossless": same_text or acceptance.lossless}
    for first, *rest in answers(options, drafters, prompts, encoded):
        compared = dict(zip(options.compare_with, map(record, rest), strict=True))
        row = facts | record(first) | ({"compared_with": compared} if compared else {})
        print(json.dumps(row, ensure_ascii=False), flush=True)


def choose_drafters(options: DecodeOptions, model: Model) -> list[Drafter]:
    """The drafters with the trees that were asked for; says on stderr how they were chosen and what they decode on."""
    drafters, remarks, acceptance = [], [], options.acceptance()
    for spec in options.drafters:
        spec = spec.accepted_by(acceptance)
        drafter = load_drafter(spec, model, batch_size=options.batch_size, temperature=options.temperature)
        base = f"{spec.text} decodes on the base that it has tuned, not on {model.name}"
        remarks += [drafter.note, "" if drafter.model is model else base]
        drafters.append(drafter)
    for line in filter(None, dict.fromkeys(remarks)):
        print(line, file=sys.stderr)
    return drafters


def answers(
    options: DecodeOptions,
    drafters: Sequence[Drafter],
    prompts: Sequence[str],
    encoded: Sequence[Sequence[int]],
    show: Callable[[Generation], None] | None = None,
) -> Iterator[list[Result]]:
    """Every drafter's answer to each prompt, beside that of autoregressive decoding where the two are compared.

    `encoded` are the prompts' token ids. `show` is called with an answer of the first drafter whenever it has grown.
    """
    model, acceptance, sampling = drafters[0].model, options.acceptance(), options.sampling()
    settings = options.room | {"sampling": sampling, "seed": options.seed}
    shows, ours = [show, *[None] * len(drafters)], settings | {"acceptance": acceptance}
    if options.prediction:
        ours["prediction"] = read_text(Path(options.prediction))
    sides = [answers_of(options, each, prompts, ours, shown) for each, shown in zip(drafters, shows, strict=False)]
    references = itertools.repeat(None)
    if options.compared:
        references = answers_of(options, autoregressive(model), prompts, settings)

    def result(ids: Sequence[int], answer: Generation, reference: Generation | None) -> Result:
        if not reference or not acceptance.same_text(options.temperature):
            return Result(answer, reference)
        decoded, limit = (answer.tokens, reference.tokens), options.room["max_new_tokens"]
        divergence = first_divergence(model, ids, *decoded, sampling, options.seed, limit)
        return Result(answer, reference, divergence)

    for ids, *each, reference in zip(encoded, *sides, references, strict=False):
        yield [result(ids, answer, reference) for answer in each]


def answers_of(
    options: DecodeOptions,
    drafter: Drafter,
    prompts: Sequence[str],
    settings: dict[str, Any],
    show: Callable[[Generation], None] | None = None,
) -> Iterator[Generation]:
    """One drafter's answer per prompt; `show` sees it grow.

    Where several are compared, each warms up first, which compiles, touches the memory and, unless its answer is short
    or the machine busy, settles what sizes cost: the first timing is like the others. Its compile time counts for the
    first answer. For a fair comparison all stop equally often.
    """
    size, compile_seconds = options.batch_size, 0.0
    if options.compared:
        [warm, *_] = iterate(drafter, prompts[:size], batch_size=size, max_steps=2, **settings)
        compile_seconds = warm.compile_seconds
    if (options.stream or sys.stdout.isatty()) and not options.json and size == 1:
        grown = (stream(drafter, prompt, **settings) for prompt in prompts)
    else:  # every answer in one piece
        grown = zip(iterate(drafter, prompts, batch_size=size, **settings), strict=True)
    for pieces in grown:
        for answer in pieces:
            if show:
                show(answer)
        yield dataclasses.replace(answer, compile_seconds=answer.compile_seconds + compile_seconds)
        compile_seconds = 0.0


def dry_run(options: DecodeOptions) -> None:
    """Compile steps for devices that need not exist, and print their memory and operations."""
    from jaxspec.bench.dry_run import decoding_lines, dry_run_decoding  # imports modules that only training needs

    check_form(options.weights)
    mesh, chip = absent_mesh(options.mesh, options.topology)  # before JAX looks for devices
    if isinstance(chip, Gpu) and chip.capability < OLDEST:
        print(older_note(chip.kind), file=sys.stderr)
    name, dtype = options.config or "ppd_smollm2", options.dtype or "bfloat16"
    config, [spec] = load_config(name), options.drafters
    if options.model:
        config = dataclasses.replace(config, model=options.model)
        abstract_trainable(config.method, config.shapes)  # refuses settings that do not fit the base
    longest = config.shapes.max_positions
    length = options.max_length or min(longest, 2048)
    if options.batch_size < 1 or not 1 <= length <= longest:
        raise UserError(
            f"give a batch-size of at least 1 and a max-length of at most {longest}, got {options.batch_size} and "
            f"{length}"
        )
    named = spec if {"method", "tree", "draft_vocabulary"} & {*given_options(options)} else None
    found = dry_run_decoding(config, mesh, chip, options.batch_size, length, dtype, named, options.weights)
    lines = decoding_lines(name, config, options.mesh, found)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines))
