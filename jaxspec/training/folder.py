"""The folder of a run: run.json says which run it holds, and one run at a time writes there."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.drafters.adapter import OWN_MODEL
from jaxspec.errors import UserError
from jaxspec.files import display_name, exclusive, read_json, restore_folder, writable, write_json
from jaxspec.parallel.processes import as_leader, check_alike, leader_in
from jaxspec.training.data import ORDER, cache_file
from jaxspec.training.run_config import RunConfig, check_same_run, describe
from jaxspec.weights.load import Model

BEST = "best"  # folder of the best adapter so far
_PARTS = ("adapter.json", "checkpoints", "log.jsonl")  # any of which shows that a folder is in use


def check_output(output: Path, there: bool, resume: bool) -> None:
    """Raise UserError for a folder where this run cannot begin or resume; `there` says whether it holds a run.json."""
    if there and not resume:
        raise UserError(f"{output} already holds a run; continue it with --resume or give another --output")
    if not there and any((output / name).exists() for name in _PARTS):
        raise UserError(f"{output} holds parts of a run without its run.json; give another --output")


def identify(config: RunConfig, model: Model) -> dict[str, Any]:
    """The identity of a run, for run.json: settings, base and the content of its prompts, without local paths."""
    run, data = describe(config), config.data
    del run["data"]["cache"]
    sources = [run["data"], *run["data"]["mixture"]]
    for part, name in ((run, "model"), (run, "tree"), *((source, "prompts") for source in sources)):
        part[name] = display_name(part[name])
    limits = (data.held_out_tokens, data.max_answer_tokens)
    answers = [cache_file(model, data, limit).stem for limit in limits]
    run |= {"fingerprint": model.fingerprint, "answers": answers, "order": ORDER, "dtype": str(model.dtype)}
    return json.loads(json.dumps(run))


@contextlib.contextmanager
def claim(output: Path, identity: dict[str, Any], resume: bool) -> Iterator[None]:
    """Lock a new folder, or with `resume` the folder of the same run (see `identify`), while the run lasts.

    Raises:
      UserError: the folder holds another run, is in use by another process, or cannot be written.
    """
    file = output / "run.json"
    there = file.exists()  # asked once: the first process writes it as soon as all have asked
    check_alike(json.dumps([identity, there]).encode(), "the run")
    check_output(output, there, resume)
    if there:
        check_same_run(read_json(file, identity), identity, output)
    as_leader(functools.partial(writable, output))
    with leader_in(exclusive(output)):
        as_leader(functools.partial(_begin, output, identity))
        check_alike(str(file.exists()).encode(), f"what {output} holds")
        yield


def _begin(output: Path, identity: dict[str, Any]) -> None:
    """Undo an interrupted swap, and write run.json."""
    for name in (BEST, OWN_MODEL):
        restore_folder(output / name)
    write_json(output / "run.json", identity)
