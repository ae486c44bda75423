"""The settings of a benchmark, and the names of the drafters that it compares."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxspec.bench.questions import MT_BENCH, Question
from jaxspec.config import MeshConfig, SamplingConfig
from jaxspec.decoding.acceptance import AcceptanceName
from jaxspec.decoding.sampling import make_sampler
from jaxspec.drafters import DrafterSpec, parse_drafter
from jaxspec.errors import UserError, check_at_least
from jaxspec.weights.load import DEFAULT_MODEL

REFERENCE = "autoregressive"
AGAIN = f"{REFERENCE} again"  # against itself: how far two ways differ that do not
_RUN = tyro.conf.arg(name="run", metavar="RUN")


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """The questions, the drafters that answer them, and how they decode.

    Attributes:
      runs: a drafter, as in --run ppd --run "bita tree=sparse:64 vocabulary=8192 adapter=DIR". Without a tree, or with
        `auto`, a run decodes as `jaxspec decode` does by default: by the choice of `jaxspec tune`, else with rows
        chosen in every step by their costs. Both are files of the user's; the results name the tree that was taken.
        tree=own is the adapter's, whoever runs it. Autoregressive decoding always runs; named twice it races itself.
        Default: every method that can draft for the base: those whose adapter ships and those that need none.
      data: question files, JSONL or parquet, separated by commas.
      model: smollm2-135m (the default), a Hugging Face directory or hub name, a base that `jaxspec train` or
        `jaxspec export` wrote, or a GGUF file.
      dtype: dtype of the weights, or exact: bfloat16 weights, with everything else as exact as in float32; default
        float32 on CPU, float16 on GPUs without bfloat16, bfloat16 elsewhere.
      weights: kernels in few bits, which decode the same text as autoregressive decoding of such a base: int8, a scale
        per column; int4 or int4-64, a scale per 32 or 64 rows of a column. Default: as dtype says.
      limit: number of questions, the same from every category; 0 asks all. With batch-size 1 a benchmark may be resumed
        with a larger limit.
      max_new_tokens: tokens per turn.
      batch_size: questions answered together.
      temperature: sampling temperature; 0 is greedy.
      mt_bench_temperatures: sample MT-Bench's categories each at its own temperature, 0 to 0.7.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens up to this probability.
      min_p: drop tokens less probable than this fraction of the best.
      accept: match, rejection, block or typical, as for `jaxspec decode`: the same text, another of the same
        distribution (rejection and block), or lossy.
      seed: sampling seed; every further repeat takes the next one.
      repeats: how often all questions are asked.
      wording: instructions around questions whose file has none: plain, or those of the papers or their released code.
      shots: number of a file's questions to show, with their answers, in front of each of the others.
      skip_placeholders: leave out questions of SPEED-Bench whose texts its script has not filled in, rather than refuse
        the file.
      chat: wrap questions in the tokenizer's chat template, where it has one.
      template: another chat template by name: llama2, llama2-short, vicuna, vicuna-short, falcon or another of
        docs/models.md; or variables for the tokenizer's template, as in enable_thinking=false.
      mesh: devices that share the work.
      peers: also ask Hugging Face transformers on PyTorch, greedily and with prompt lookup; one question at a time.
      assistant: also ask transformers with assisted generation by this smaller model.
    """

    runs: Annotated[tuple[str, ...], _RUN, tyro.conf.UseAppendAction] = ()
    data: str = ""
    model: str = DEFAULT_MODEL
    dtype: str = ""
    weights: str = ""
    limit: int = 0
    max_new_tokens: int = 128
    batch_size: int = 1
    temperature: float = 0.0
    mt_bench_temperatures: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    accept: AcceptanceName = "match"
    seed: int = 0
    repeats: int = 1
    wording: Literal["plain", "space", "bita", "amphista", "hidden_transfer"] = "plain"
    shots: int = 0
    skip_placeholders: bool = False
    chat: bool = True
    template: str = ""
    mesh: MeshConfig = MeshConfig()
    peers: bool = False
    assistant: str = ""

    def sampling(self, temperature: float) -> SamplingConfig:
        """The sampling settings at a temperature."""
        return SamplingConfig(temperature, self.top_k, self.top_p, self.min_p)

    def temperature_of(self, question: Question) -> float:
        """The temperature at which a question is answered."""
        return MT_BENCH.get(question.category, self.temperature) if self.mt_bench_temperatures else self.temperature


def check_bench(config: BenchConfig) -> None:
    """Raise UserError for settings that make no sense, before anything is loaded."""
    check_at_least(config, {"limit": 0, "shots": 0, "max_new_tokens": 2, "batch_size": 1, "repeats": 1})
    make_sampler(config.sampling(config.temperature))
    if config.assistant and not config.peers:
        raise UserError("--assistant needs --peers")
    if config.peers and config.mesh.devices > 1:
        raise UserError("peers run on one device: leave --mesh or --peers out")
    if config.peers and config.batch_size > 1:
        raise UserError(f"peers answer one question at a time: batch-size must be 1, got {config.batch_size}")
    name_runs(config.runs)
    if not config.data:
        raise UserError("give question files with --data FILE[,FILE]")
    names = [Path(file).name for file in config.data.split(",")]
    if len(set(names)) < len(names):
        raise UserError(f"question files must have different names, got {', '.join(names)}")


def name_runs(texts: Sequence[str]) -> dict[str, DrafterSpec]:
    """Drafters by their names, autoregressive decoding first; named twice it races itself.

    An adapter is part of a name only where nothing else tells two drafters apart.

    Raises:
      UserError: a drafter that cannot be read, or two of the same name.
    """
    runs = [parse_drafter(text) for text in texts]
    names = [dataclasses.replace(run, adapter=None).text for run in runs]
    alike = Counter(names)
    named: dict[str, DrafterSpec] = {}
    for name, run in zip(names, runs, strict=True):
        name = run.text if alike[name] > 1 else name
        if name == REFERENCE in named:
            name = AGAIN
        if name in named:
            raise UserError(f"two runs are called {name!r}: give them other settings, or adapters with other names")
        named[name] = run
    return {REFERENCE: parse_drafter(REFERENCE)} | named
