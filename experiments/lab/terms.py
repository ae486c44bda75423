"""The terms that all entries have in common: the base, its answers, and the budget of a training."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.prompts import HELD_OUT, held_out_prompts, prompts_digest, training_prompts
from jaxspec.errors import UserError, differences
from jaxspec.files import locked, read_json, write_atomically
from jaxspec.training.data import AnsweredPrompt, cache_file, prepare_answers
from jaxspec.training.examples import select_prompts
from jaxspec.training.settings import DataConfig
from jaxspec.weights.load import DEFAULT_MODEL
from jaxspec.weights.model import Model

NODES = (4, 16, 64)  # of drafts, the root included
DTYPE = "float32"  # on accelerators too: rounding is to decide nothing
SHIPPED_ANSWERS = Path(__file__).parent / "answers"


@dataclasses.dataclass(frozen=True)
class Terms:
    """What all entries have in common.

    Attributes:
      model: the base.
      updates: of a training.
      trial_updates: of the training that tries a learning rate.
      sequences: answers per update, all in one pass.
      insertions: insertion points per answer at most.
      text: training answers; those held out choose the learning rate and calibrate chances, and are never trained on.
      held_out: answers that are scored.
      live: of these the first so many are decoded as a check of the replay.
      small_vocabulary: draft vocabulary of the second column; all tokens are drafted in the first.
    """

    model: str = DEFAULT_MODEL
    updates: int = 500
    trial_updates: int = 100
    sequences: int = 4
    insertions: int = 48
    text: DataConfig = DataConfig(
        answers=2000, held_out=32, max_prompt_tokens=192, max_answer_tokens=128, held_out_tokens=128
    )
    held_out: int = HELD_OUT
    live: int = 12
    small_vocabulary: int = 8192

    def stored(self) -> dict[str, Any]:
        """The terms as terms.json has them."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "text"}
        answers = {"answers": self.text.answers, "validation": self.text.held_out}
        limits = {"answer_tokens": self.text.max_answer_tokens, "prompt_tokens": self.text.max_prompt_tokens}
        return fields | answers | limits


@dataclasses.dataclass(frozen=True)
class Data:
    """Prompts and answers of a lab, in its work folder.

    Attributes:
      training: prompts to train on and to validate with.
      scoring: prompts whose answers are scored.
    """

    training: DataConfig
    scoring: DataConfig


def write_prompts(terms: Terms, work: Path) -> Data:
    """Write the prompts into the work folder. Returns where the text comes from."""
    files = {}
    for name, prompts in (("training", training_prompts()), ("held_out", held_out_prompts())):
        file, lines = work / f"{name}.jsonl", "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        files[name] = str(file)
        if not file.exists() or file.read_text() != lines:
            write_atomically(file, lines.encode())
    together = 32 if jax.default_backend() == "cpu" else 256
    training = dataclasses.replace(
        terms.text, prompts=files["training"], cache=str(work / "answers"), batch_size=together
    )
    return Data(training, dataclasses.replace(training, prompts=files["held_out"], answers=terms.held_out, held_out=0))


@functools.lru_cache(maxsize=4)
def _selected(model: Model, data: DataConfig) -> list:
    return select_prompts(model, data)


def answers_of(model: Model, data: DataConfig) -> tuple[list[AnsweredPrompt], list[AnsweredPrompt]]:
    """Held-out and training answers of a base: the shipped ones, those of the work folder, or made now.

    Of several processes one makes them, and the others wait.
    """
    file = cache_file(model, data, data.max_answer_tokens)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f".{file.stem}.making")):
        shipped = SHIPPED_ANSWERS / f"{file.stem}.jsonl.gz"
        if shipped.exists() and not file.exists():
            write_atomically(file, gzip.decompress(shipped.read_bytes()))
        return prepare_answers(model, data, _selected(model, data))


def scored_texts(model: Model, data: Data) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers that are scored, those of one token left out: no step follows it."""
    _, answers = answers_of(model, data.scoring)
    return [(a.prompt_tokens, a.answer_tokens) for a in answers if len(a.answer_tokens) > 1]


def describe_terms(terms: Terms, model: Model, data: Data) -> dict[str, Any]:
    """The terms with the base and digests of prompts and answers, which are made where they are missing."""
    digests = {}
    for name, config in (("training", data.training), ("scoring", data.scoring)):
        rows = [[a.prompt_tokens, a.answer_tokens] for part in answers_of(model, config) for a in part]
        digests[f"{name}_answers"] = digest(rows)
    base = {"fingerprint": model.fingerprint, "prompts": prompts_digest()}
    return terms.stored() | base | digests


def check_terms(results: Path, terms: Mapping[str, Any]) -> None:
    """Raise UserError where a folder of results has other terms, as far as they are given."""
    file = results / "terms.json"
    held = read_json(file) if file.exists() else {}
    if changed := differences({name: held[name] for name in terms if name in held}, terms if held else {}):
        raise UserError(f"{results} holds results of other terms ({'; '.join(changed)}); give another --results")


def digest(value: Any) -> str:
    """12 hex digits that name a plain value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
