"""The part of docs/claims.md about code and mathematics against conversation, from docs/domains.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.page import section
from experiments.lab.ranks import plans_of, ranks_from
from experiments.lab.statistics import LEVEL, Difference, Spread, compare, shown, tokens_per_step
from jaxspec.files import read_json
from jaxspec.trees.plan import count_steps

_FILE = Path(__file__).parents[2] / "docs" / "domains.json"
_TREES = {  # fixed trees of about 64 rows; SPACE's of 36 is the paper's
    "ppd": "stripped:64", "bita": "efficient:5", "hidden_transfer": "sparse:16", "space": "chain:5",
    "medusa": "sparse:64", "amphista": "sparse:64",
}  # fmt: skip
_SOURCES = {  # of code and of mathematics; of other methods no paper says it
    "ppd": ("PPD, 6.2", "PPD, 6.2"),
    "bita": ("BiTA, Table 1", "BiTA, Table 7"),
    "space": ("SPACE, Table 1", "SPACE, Table 4"),
    "amphista": ("Amphista, A.2.2", "Amphista, A.2.2"),
}
_PLAIN, _OTHERS = "conversation", ("code", "mathematics")
_LABEL = "fixed"


def domain_sections() -> list[str]:
    """The conclusions; none where nothing was recorded."""
    if not _FILE.exists():
        return []
    held = read_json(_FILE)
    methods = [*_SOURCES, *(method for method in held["drafters"] if method not in _SOURCES)]
    lines = [line for method in methods for line in _lines(held, method)]
    counts = {name: [count for group, count in held["questions"] if group == name] for name in (_PLAIN, *_OTHERS)}
    asked = ", ".join(f"{len(each)} of {name} with {sum(each)} turns" for name, each in counts.items())
    text = (
        f"Questions: {asked}. The default model answers with at most {held['setting']['tokens']} tokens, and steps of "
        "a fixed tree are counted as above. A step of one tree costs the same whatever the text is: gains in speed are "
        "those in tokens per step. All turns of a question count as one; p values are not corrected. Conversation is "
        "writing, roleplay, stem and humanities of MT-Bench, five questions of each; code is HumanEval, mathematics "
        "that of Spec-Bench, which is GSM8K. The papers compare with others: BiTA and SPACE code with CIP (Table 1), "
        "mathematics with subtasks of MT-Bench (Tables 7 and 4); PPD code and mathematics with all of MT-Bench (6.2). "
        "Amphista has figures of HumanEval and GSM8K alone, beside those of MT-Bench in Table 1."
    )
    heads = ["claim", "source", "method", "tokens per step", "difference", "p", "verdict"]
    return [section("Exploratory: code and mathematics", text, heads, lines)]


def _lines(held: dict[str, Any], method: str) -> list[list[str]]:
    if method not in held["drafters"]:
        said = zip(_OTHERS, _SOURCES[method], strict=True)
        return [[_claim(group), source, method, "", "", "", "**not reached**"] for group, source in said]
    scores = scores_of(held, method)
    found = []
    for group, source in zip(_OTHERS, _SOURCES.get(method, ("", "")), strict=True):
        difference = compare([scores[group]], [scores[_PLAIN]], _LABEL, Spread())
        made = " against ".join(f"{tokens_per_step(scores[name], _LABEL):.2f}" for name in (group, _PLAIN))
        low, high = (difference.value + sign * difference.half_width() for sign in (-1, 1))
        about = [_claim(group), source, f"{method}, {_TREES[method]}"]
        measured = [made, f"{difference.value:+.2f} ({low:+.2f} to {high:+.2f})", shown(difference.p_value)]
        found.append([*about, *measured, _verdict(difference)])
    return found


def _claim(group: str) -> str:
    return f"{group} gains more than {_PLAIN}"


def _verdict(difference: Difference) -> str:
    if difference.p_value >= LEVEL:
        return f"**undecided**; a difference of {difference.detectable(LEVEL):.2f} would have been seen"
    return "**holds**" if difference.value > 0 else "**the opposite holds**"


def scores_of(held: dict[str, Any], method: str) -> dict[str, dict[str, Any]]:
    """By group a score as the lab has it, of questions with all their turns; `held` is the file's content."""
    drafted = held["drafters"][method]
    [plan] = plans_of(_TREES[method], method, drafted["accuracy"])
    steps = [count_steps(plan, ranks_from(words)) if words[0] else 0 for words in drafted["ranks"]]
    turns = np.repeat(np.arange(len(held["questions"])), [count for _, count in held["questions"]])
    summed = [np.bincount(turns, values) for values in (held["answer_tokens"], steps)]
    scores = {}
    for name in (_PLAIN, *_OTHERS):
        kept = [i for i, (group, _) in enumerate(held["questions"]) if group == name and summed[0][i]]
        tokens, counted = (values[kept].astype(int).tolist() for values in summed)
        scores[name] = {"tokens": tokens, "drafts": {_LABEL: {"steps": counted}}}
    return scores
