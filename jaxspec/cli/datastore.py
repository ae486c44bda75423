"""Build a datastore of earlier answers, or of any text, that REST drafts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.cli.options import parse
from jaxspec.drafters.adapter import WEIGHTS, Adapter, save_adapter
from jaxspec.errors import UserError
from jaxspec.files import display_name, new_folder, read_text
from jaxspec.methods.rest import Rest, build
from jaxspec.training.examples import read_jsonl, row_text
from jaxspec.weights.load import DEFAULT_MODEL, load_model
from jaxspec.weights.model import Model


@dataclasses.dataclass(frozen=True)
class DatastoreOptions:
    """Build a datastore that `jaxspec decode --method rest --adapter DIR` drafts from.

    Attributes:
      model: the base whose tokens it holds: smollm2-135m (the default), a Hugging Face directory or hub name, a base
        that `jaxspec train` or `jaxspec export` wrote, or a GGUF file.
      answers: a JSONL file with one text per line, such as the base's answers that `jaxspec train` keeps, or the output
        of `jaxspec bench` or of `jaxspec decode --json`.
      column: field of that file with the text. Token ids in COLUMN_tokens, after those in prompt_tokens, take
        precedence.
      text: a plain text file, instead of the answers or in addition.
      longest: length of the longest sequence of last tokens to look up.
      output: the directory; it must not exist.
    """

    model: str = DEFAULT_MODEL
    answers: str = ""
    column: str = "answer"
    text: str = ""
    longest: int = Rest.longest
    output: str = ""


def main(args: list[str]) -> None:
    """Parse, read, sort, write."""
    options = parse(DatastoreOptions, args)
    output = new_folder(options.output)
    if not options.answers and not options.text:
        raise UserError("give texts with --answers FILE.jsonl, with --text FILE, or both")
    Rest(longest=options.longest)  # refuses a bad one before anything is loaded
    model = load_model(options.model)
    texts = [text for text in read_texts(options, model) if text]
    if not texts:
        raise UserError(f"{options.answers or options.text}: holds no text")
    method, datastore = build(texts, longest=options.longest)
    files = [display_name(file) for file in (options.answers, options.text) if file]
    info = {"base": display_name(options.model), "data": {"files": files, "texts": len(texts)}}
    save_adapter(output, Adapter(method, datastore, model.fingerprint, info))
    megabytes = (output / WEIGHTS).stat().st_size / 1e6
    print(f"{output}: {method.size:,} tokens of {len(texts):,} text(s), {megabytes:.1f} MB")


def read_texts(options: DatastoreOptions, model: Model) -> Iterator[list[int]]:
    """Token ids of every text of the files. Raises UserError for one that cannot be read."""
    if options.answers:
        for number, row in read_jsonl(Path(options.answers)):
            yield from texts_of(f"{options.answers}:{number}", row, options.column, model)
    if options.text:
        yield model.encode_plain(read_text(Path(options.text)))


def texts_of(where: str, row: dict[str, Any], column: str, model: Model) -> Iterator[list[int]]:
    """Token ids of the texts of a row: one, or in an answer of the benchmark one per turn."""
    if tokens := row.get(f"{column}_tokens"):
        parts = (row.get("prompt_tokens", []), tokens)
        tokens = [token for part in parts for token in part] if all(isinstance(p, list) for p in parts) else [None]
        if not all(type(token) is int and 0 <= token < model.config.vocab_size for token in tokens):
            raise UserError(f"{where}: {column}_tokens must be token ids below {model.config.vocab_size}")
        yield tokens
    elif row.get(column) is None and "choices" in row:
        try:
            yield from [model.encode_plain(turn) for choice in row["choices"] for turn in choice["turns"]]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{where}: choices without turns of text") from None
    else:
        yield model.encode_plain(row_text(where, row, column))
