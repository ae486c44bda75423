"""Do code and mathematics gain more than conversation? python -m experiments.domains --data question.jsonl code.jsonl.

The base answers the questions, and drafters that ship are recorded along its answers. domains.json keeps the rank that
a drafter gave to every token that came, of which the steps of any fixed tree can be counted; the page of the papers'
claims does that. Drafters that are in the file already are not recorded again, and what was interrupted continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.lab.ranks import words_of
from experiments.lab.terms import digest
from jaxspec.bench.questions import Question, read_questions
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.config import SamplingConfig
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import Drafter, autoregressive
from jaxspec.errors import UserError, check_at_least, differences
from jaxspec.files import exclusive, read_json, writable, write_json
from jaxspec.generation.generate import generate_many
from jaxspec.machine import device_name
from jaxspec.progress import Progress
from jaxspec.tuning.record import ranks_of, record
from jaxspec.versions import code_version
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model

GROUPS = {  # by category of a question
    **dict.fromkeys(("writing", "roleplay", "stem", "humanities"), "conversation"),
    "math_reasoning": "mathematics",
    "humaneval": "code",
}
FILE = "domains.json"
_TOGETHER = 8  # answers that are recorded at once
_KEPT = 40  # answers after which what is recorded is kept


@dataclasses.dataclass(frozen=True)
class Options:
    """Record drafters along answers to conversation, mathematics and code.

    Attributes:
      data: question files as for `jaxspec bench`; categories that are of no group are left out.
      drafters: methods whose adapters ship, joined by + where one pass can record several.
      limit: questions of a group in each file at most.
      tokens: of an answer at most.
      work: folder where the answers are kept in between.
      output: folder of domains.json.
    """

    data: tuple[str, ...]
    drafters: tuple[str, ...] = ("ppd+medusa+amphista", "bita", "hidden_transfer")
    limit: int = 80
    tokens: int = 64
    work: str = "runs/domains"
    output: str = "docs"


def main(args: list[str]) -> None:
    """Answer, record, and write what is found drafter by drafter."""
    options = parse(Options, args, prog="python -m experiments.domains")
    check_at_least(options, {"limit": 1, "tokens": 2})
    folder, work = writable(Path(options.output)), writable(Path(options.work))
    questions = [question for file in options.data for question in chosen(read_questions(file), options.limit)]
    if not questions:
        raise UserError(f"no question is of a group; categories are {', '.join(GROUPS)}")
    setting = {"files": [Path(file).name for file in options.data], "limit": options.limit, "tokens": options.tokens}
    setting["questions"] = digest([[question.id, question.turns] for question in questions])
    enable_compilation_cache()
    with exclusive(folder):
        held = read_json(folder / FILE) if (folder / FILE).exists() else {"setting": setting, "drafters": {}}
        if changed := differences(held["setting"], setting):
            raise UserError(f"{folder / FILE} holds other results ({'; '.join(changed)}); give another --output")
        model = load_model(DEFAULT_MODEL, "float32")
        missing = [names for names in options.drafters if not held["drafters"].keys() >= set(names.split("+"))]
        drafters = {names: drafter_of(names, model) for names in missing}
        texts = answers(model, questions, options.tokens, work / "answers.json", setting)
        held["questions"] = [[GROUPS[question.category], len(question.turns)] for question in questions]
        held["answer_tokens"] = [len(answer) - 1 for _, answer in texts]
        for names, drafter in drafters.items():
            identity = setting | {"base": model.fingerprint}
            held["drafters"] |= record_ranks(names, drafter, texts, work / f"{names}.json", identity)
            write_json(folder / FILE, held)


def chosen(questions: Sequence[Question], limit: int) -> list[Question]:
    """The first questions of every group."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        if group := GROUPS.get(question.category):
            groups.setdefault(group, []).append(question)
    return [question for group in groups.values() for question in group[:limit]]


def answers(
    model: Model, questions: Sequence[Question], tokens: int, file: Path, setting: dict[str, Any]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of the prompt and of the base's own answer for every turn of every question, in their order.

    Kept in `file`, and read from there if they were made with the same setting.
    """
    identity = setting | {"base": model.fingerprint}
    if file.exists() and (held := read_json(file))["setting"] == identity:
        return held["texts"]
    spoken: list[list[str]] = [[] for _ in questions]
    texts: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    with Progress("answers", sum(len(question.turns) for question in questions), "answers") as progress:
        for turn in range(max(len(question.turns) for question in questions)):
            asked = [i for i, question in enumerate(questions) if turn < len(question.turns)]
            prompts = [model.encode([*spoken[i], questions[i].turns[turn]]) for i in asked]
            sampling = SamplingConfig()
            made = generate_many(autoregressive(model), prompts, tokens, batch_size=16, sampling=sampling)
            for place, answer in made:
                i = asked[place]
                texts[i, turn] = prompts[place], answer
                spoken[i] += [questions[i].turns[turn], model.decode(answer)]
                progress.update(len(texts))
    in_order = [texts[key] for key in sorted(texts)]
    write_json(file, {"setting": identity, "texts": in_order})
    return in_order


def drafter_of(names: str, model: Model) -> Drafter:
    """Adapters that ship, recorded with many candidates. Raises UserError for one that brings a base of its own."""
    drafter = load_drafter(names.split("+"), model, tree="own").with_tree("best:64", 0)
    if drafter.model.fingerprint != model.fingerprint:
        raise UserError(f"{names} drafts for a base that it has tuned, of which these are no answers; leave it out")
    return drafter


def record_ranks(
    names: str, drafter: Drafter, texts: Sequence[tuple[list[int], list[int]]], file: Path, setting: dict[str, Any]
) -> dict[str, Any]:
    """By method `accuracy` of its adapter, `probe_rows` of a probe, and `ranks` of every answer's tokens in words.

    An answer of one token, which no step follows, has empty words. `file` has the words of the answers that are done:
    the next call with the same setting resumes there.
    """
    identity = setting | {"drafter": drafter.digest}
    held = read_json(file) if file.exists() else {}
    words: list[list[list[str]]] = held["words"] if held.get("setting") == identity else []
    with Progress(names, len(texts), "answers") as progress:
        while len(words) < len(texts):
            words += _words(drafter, texts[len(words) : len(words) + _KEPT])
            write_json(file, {"setting": identity, "words": words})
            progress.update(len(words))
    measured = {"device": device_name(), "jax": jax.__version__, "code": code_version()}
    return {
        source.method.name: {
            "accuracy": source.accuracy,
            "probe_rows": source.facts.probe_rows,
            "ranks": [of_answer[number] for of_answer in words],
        }
        | measured
        for number, source in enumerate(drafter.sources)
    }


def _words(drafter: Drafter, texts: Sequence[tuple[list[int], list[int]]]) -> list[list[list[str]]]:
    """For every answer, and every source of the drafter, a word per distance."""
    lasting = [i for i, (_, answer) in enumerate(texts) if len(answer) > 1]
    words = [[[""] * source.facts.distances for source in drafter.sources] for _ in texts]
    recordings = record(drafter, [texts[i] for i in lasting], batch_size=_TOGETHER)
    for number in range(len(drafter.sources)):
        for i, ranks in zip(lasting, ranks_of(recordings, number).along_answers, strict=True):
            words[i][number] = words_of(ranks)
    return words


if __name__ == "__main__":
    run_main(main)
