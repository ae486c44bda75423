"""docs/leaderboard.md from the rows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.prompts import HELD_OUT, TRAINING, prompts_digest
from experiments.rows import Terms
from experiments.scores import FIXED, NODES
from jaxspec.errors import UserError
from jaxspec.files import read_json, write_atomically
from jaxspec.markdown import table
from jaxspec.training.evaluate import top

_RANKED_BY = 16  # nodes
_DISTANCES = 8  # whose accuracies are shown
Rows = Sequence[Mapping[str, Any]]

_TERMS = Terms()
_INTRO = """\
# Leaderboard

Drafters for one small base, the default model SmolLM2-135M-Instruct, all trained under the same terms and ranked by
what no hardware changes: how many tokens a step makes on held-out answers of the base.
"""
_HOW = f"""\
## Enter a method

```
python -m experiments.leaderboard enter path/to/file.py:Class --multiple 0.2
```

The class is a method as in [Adding a method](adding-a-method.md). The name of a method of this project (`medusa`), or
of a config for the default model (`space_smollm2_lora`), stands for that. The command makes the answers that are
missing, trains, scores, and writes the row and this page. If it is stopped, the same command resumes it. The present
rows of trained methods have a fifth of the usual updates (`--multiple 0.2`); a row with others needs a `--name` that
says so. CONTRIBUTING.md says how to send a row in.

- `--time` measures steps too, on a machine that does nothing else;
- `--multiple 0.02` shows in minutes whether all of it works, with a folder of its own for `--docs`;
- `--learning-rate` is the middle one of the three that are tried: the config's, or 0.001 for a method of your own;
- `python -m experiments.leaderboard answers` makes the answers alone; `report` writes this page again from the rows.

## Terms

- **Text.** The base's own greedy answers, at most {_TERMS.answer_tokens} tokens each, to prompts that everybody has:
  {TRAINING:,} to train on, most of the 240 that ship with jaxspec and others that `experiments/prompts.py` composes,
  and {HELD_OUT} to score on, about other subjects. Of the former {_TERMS.validation} are set aside to choose the
  learning rate and to calibrate chances. Rows name the prompts by their hash, now `{prompts_digest()}`, and the base by
  its fingerprint; answers differ between machines by rounding alone.
- **Budget.** {_TERMS.updates} updates, each on {_TERMS.sequences} answers at up to {_TERMS.insertions} positions: at
  the usual budget every answer is seen once. The learning rate is the best of three: the config's, a third of it and
  three times as much, each tried with a tenth of the updates. The rest of a method's recipe is its config's. With
  `--multiple` there are more or fewer updates, and the tables say so.
- **Score.** Tokens per step by [replay](unions.md#tuning) of drafts of {", ".join(map(str, NODES[:-1]))} and
  {NODES[-1]} nodes, the root included, chosen per step by the method's own chances, alone and joined with prompt
  lookup. Probe rows come on top of the nodes. Intervals are over answers and say nothing of another training. The
  replay of Token Recycling is too low: it does not see refused candidates, from which that method learns. That of
  Lookahead is too high and Jacobi's too low: what they recorded moved on by single tokens. Methods that draft along
  paths expand their own tree of {FIXED} nodes, so that the replay of another fixed tree is too low for them. A method
  that tunes its base is scored on that base's answers.
"""
_NOBODY = """\
## Nobody has entered yet

The first row makes the tables.
"""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that have been scored, the best first.

    Raises:
      UserError: rows that do not compare, of other prompts or another base.
    """
    rows = [read_json(file) for file in sorted(folder.glob("*.json"))]
    rows = [row for row in rows if "scores" in row]
    for row in rows:
        for name, expected in (("prompts", prompts_digest()), ("fingerprint", rows[0]["terms"]["fingerprint"])):
            if row["terms"][name] != expected:
                raise UserError(
                    f"{folder / row['name']}.json: {name} {row['terms'][name]!r}, not {expected!r}, do not compare; "
                    "remove it and enter again"
                )
    return sorted(rows, key=lambda row: -_tokens(row, "alone", _RANKED_BY))


def write_page(folder: Path, docs: Path) -> Path:
    """Write leaderboard.md from the rows of a folder. Returns the file."""
    rows, file = read_rows(folder), docs / "leaderboard.md"
    parts = [_INTRO, *(_tables(rows) if rows else [_NOBODY]), _HOW]
    write_atomically(file, "\n".join(parts).encode())
    return file


def _tables(rows: Rows) -> list[str]:
    heads = ["", "method", *(f"{n} nodes" for n in NODES), *(f"{n}, with lookup" for n in NODES)]
    ranking = [
        [place, _name(row), *(_cell(row, "alone", n) for n in NODES), *(_cell(row, "joined", n) for n in NODES)]
        for place, row in enumerate(rows, 1)
    ]
    trees = [[_name(row), _fixed(row, "same"), _fixed(row, "own")] for row in rows]
    accuracies = [[_name(row), *(_tops(row, k) for k in (1, 5, 10))] for row in rows]
    trained = [row for row in rows if "training" in row]
    timed = [row for row in rows if "steps" in row]
    return [
        *_section(
            "Tokens per step",
            f"In brackets the 95% interval. Ranked by {_RANKED_BY} nodes, alone.",
            heads,
            ranking,
        ),
        *_section(
            "Fixed trees",
            f"With {FIXED} nodes: the same tree for all, the first nodes of Medusa's published one, as far as a method "
            "drafts; and each one's best by its own accuracies, for methods without training a chain.",
            ["method", "same tree", "own tree"],
            trees,
        ),
        *_section(
            "Accuracy",
            "How often the best candidate, one of the five best, or one of the ten best at each distance is the token "
            "that comes. Where candidates depend on those before them: given that these are right.",
            ["method", "top-1 by distance", "top-5", "top-10"],
            accuracies,
        ),
        *_section(
            "Training",
            "With the learning rate that was chosen. Minutes are those of its updates, memory is the most that the "
            "whole process took.",
            ["method", "parameters", "updates", "learning rate", "minutes", "memory", "machine"],
            [[_name(row), *_training(row["training"])] for row in trained],
        ),
        *_section(
            "Steps",
            "Milliseconds of a step, drafting included, for one text.",
            ["method", "autoregressive", *(f"{n} nodes" for n in NODES), "machine"],
            [[_name(row), *row["steps"]["milliseconds"].values(), row["steps"]["machine"]] for row in timed],
        ),
    ]


def _section(title: str, text: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table under a title, or nothing where it has no rows."""
    return ["\n".join([f"## {title}", "", textwrap.fill(text, 120), "", *table(heads, rows), ""])] if rows else []


def _name(row: Mapping[str, Any]) -> str:
    """Of a row, with how much more than the usual training it had."""
    multiple = row["terms"]["multiple"]
    return f"`{row['name']}`" + (f", {multiple:g} times the updates" if multiple != 1 and "training" in row else "")


def _figure(row: Mapping[str, Any], part: str, nodes: int) -> Mapping[str, Any] | None:
    return row["scores"].get(part, {}).get(str(nodes))


def _tokens(row: Mapping[str, Any], part: str, nodes: int) -> float:
    return _figure(row, part, nodes)["tokens_per_step"]


def _cell(row: Mapping[str, Any], part: str, nodes: int) -> str:
    figure = _figure(row, part, nodes)
    return "" if figure is None else _with_interval(figure)


def _with_interval(figure: Mapping[str, Any]) -> str:
    low, high = figure["interval"]
    ends = "" if low is None else f" ({low:.2f} to {high:.2f})"
    return f"{figure['tokens_per_step']:.2f}{ends}"


def _fixed(row: Mapping[str, Any], part: str) -> str:
    return _with_interval(row["scores"][part])


def _tops(row: Mapping[str, Any], k: int) -> str:
    values = [f"{value:.3f}".lstrip("0") for value in top(row["scores"]["accuracy"], k)]
    return " / ".join(values[:_DISTANCES] + ["..."] * (len(values) > _DISTANCES))


def _training(found: Mapping[str, Any]) -> list[str]:
    shown: dict[str, Callable[[Any], str]] = {
        "parameters": lambda count: f"{count:,}",
        "updates": str,
        "learning_rate": lambda rate: f"{rate:g}",
        "seconds": lambda seconds: f"{seconds / 60:.1f}",
        "peak_memory": lambda size: f"{size / 2**30:.1f} GiB",
        "machine": str,
    }
    return [show(found[name]) for name, show in shown.items()]
