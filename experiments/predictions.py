"""Predicted texts, replayed: ten edits of a file, drafted by a lookup: python -m experiments.predictions.

The answer is the edited file, whatever the base would write: a lookup sees the text alone, so a tiny model reads it. It
has the file in the prompt, as the predicted text, in both, or in neither.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec.generation.text
from jaxspec.cli.options import parse
from jaxspec.cli.program import enable_compilation_cache, run_main
from jaxspec.drafters import load_drafter
from jaxspec.markdown import table
from jaxspec.model.decoder import Decoder
from jaxspec.tuning.record import record
from jaxspec.tuning.replay import replay
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model


@dataclasses.dataclass(frozen=True)
class Options:
    """Replay predicted texts.

    Attributes:
      model: whose tokenizer splits the file, and which reads it.
      method: a lookup.
      trees: what makes drafts.
    """

    model: str = DEFAULT_MODEL
    method: str = "prompt_lookup"
    trees: tuple[str, ...] = ("best:4", "best:8", "best:16")


def edits(file: str) -> dict[str, str]:
    """The file after each of ten edits, by what was done."""
    branch = file[file.index("        if any(stop in text") : file.index("        self._move(text)\n        return")]
    hint = r": (?:Callable\[\[list\[int\]\], str\]|Sequence\[str\]|Sequence\[int\]|int|str|bool|list\[int\])(?=[,)= ])"
    check = '        if isinstance(stop, str):\n            raise ValueError(f"stop must be a list, got {stop!r}")\n'
    clear = '    def clear(self) -> None:\n        """Forget all tokens."""\n        self.tokens = []\n\n'
    limit = "      limit: largest number of tokens; 0: no limit.\n"
    return {
        "a method renamed": _replaced(file, {"_send": "_emit_text"}),
        "an attribute renamed": _replaced(file, {"_before": "_settled"}),
        "the class renamed": _replaced(file, {"class TextStream": "class GrowingText"}),
        "an argument added": _replaced(
            file,
            {
                "final: bool) -> str": "final: bool, limit: int = 0) -> str",
                "hold nothing back.\n": "hold nothing back.\n" + limit,
                "self.tokens += tokens\n": "self.tokens += tokens[: limit - known] if limit else tokens\n",
            },
        ),
        "a method moved": _moved(file, "_whole", "_text"),
        "docstrings removed": re.sub(r'\n +"""[^"]*"""', "", file),
        "type hints removed": re.sub(hint, "", file),
        "a check added": _replaced(file, {"        self._decode, self": check + "        self._decode, self"}),
        "a method added": _replaced(file, {"    def _text(self": clear + "    def _text(self"}),
        "a branch removed": _replaced(file, {branch: ""}),
    }


def _replaced(file: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        if old not in file:
            raise ValueError(f"the file holds no {old!r}")
        file = file.replace(old, new)
    return file


def _moved(file: str, name: str, before: str) -> str:
    """The file with its last method `name` above `before`."""
    others, method = file.split(f"    def {name}(")
    return _replaced(others.rstrip() + "\n", {f"    def {before}(": f"    def {name}({method}\n    def {before}("})


def smallest(model: Model) -> Model:
    """A model that reads quickly, of the same tokens: what it makes of them no lookup asks."""
    small = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 8}
    small |= dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)
    config = dataclasses.replace(model.config, **small)
    params = Decoder(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return dataclasses.replace(model, config=config, params=params)


def tokens_per_step(
    options: Options, prompt: Sequence[int], answers: Sequence[Sequence[int]], prediction: Sequence[int] | None
) -> dict[str, np.ndarray]:
    """Of every answer, by tree."""
    drafter = load_drafter(options.method, smallest(load_model(options.model)), tree=options.trees[-1])
    predictions = None if prediction is None else [prediction] * len(answers)
    recordings = record(drafter, [(prompt, answer) for answer in answers], predictions=predictions, batch_size=5)
    replays = {tree: replay(recordings, drafter.with_tree(tree)) for tree in options.trees}
    return {tree: replayed.tokens / replayed.steps for tree, replayed in replays.items()}


def main(args: list[str]) -> None:
    """Replay, and print a table."""
    options = parse(Options, args)
    enable_compilation_cache()
    model, file = load_model(options.model), inspect.getsource(jaxspec.generation.text)
    changed, own = edits(file), model.encode_plain(file)
    answers = [model.encode_plain(text) for text in changed.values()]
    asked, given = "Write the file.", f"Change this file.\n\n{file}"
    columns = {}
    for where, text, prediction in (
        ("neither", asked, None),
        ("prompt", given, None),
        ("prediction", asked, own),
        ("both", given, own),
    ):
        columns[where] = tokens_per_step(options, model.encode(text), answers, prediction)
    for tree in options.trees:
        rows = [[name, *(f"{columns[where][tree][i]:.2f}" for where in columns)] for i, name in enumerate(changed)]
        rows.append(["mean", *(f"{columns[where][tree].mean():.2f}" for where in columns)])
        print("\n".join([f"{options.method}, {tree}, file of {len(own)} tokens", *table(["edit", *columns], rows)]))


if __name__ == "__main__":
    run_main(main)
