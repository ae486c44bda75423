"""The folder of a run: run.json says which run it holds, one run at a time writes there, and Orbax writes checkpoints.

Checkpoints are written in the background, completely or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxspec.drafters.adapter import OWN_MODEL
from jaxspec.errors import UserError, first_line
from jaxspec.files import display_name, exclusive, read_json, restore_folder, writable, write_json
from jaxspec.model.base import Base
from jaxspec.parallel.processes import as_leader, check_alike, leader_in
from jaxspec.parallel.sharding import mesh_of, placed, tree_shardings
from jaxspec.training.data import ORDER, cache_file
from jaxspec.training.run_config import RunConfig, check_same_run, describe
from jaxspec.training.step import TrainState, Update, first_state
from jaxspec.weights.model import Model

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
    run |= {"fingerprint": model.fingerprint, "answers": answers, "order": ORDER, "dtype": model.precision}
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
        for name in (BEST, OWN_MODEL):
            as_leader(functools.partial(restore_folder, output / name))
        as_leader(functools.partial(write_json, file, identity))
        check_alike(str(file.exists()).encode(), f"what {output} holds")
        yield


class Checkpoints:
    """The last `keep` checkpoints of one run in a folder, by the number of updates done.

    Raises:
      UserError: a write fails, because the disk is full or cannot be written.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        # which a kill leaves, as large as checkpoints
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        with self._writing():
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    @property
    def latest(self) -> int:
        """Number of updates at the last checkpoint; 0 without any."""
        return self._manager.latest_step() or 0

    def save(self, step: int, state: TrainState) -> None:
        """Begin to write a checkpoint, after finishing the one before."""
        self.finish()  # so that an error here can say which checkpoint is the last good one
        with self._writing():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        with self._writing():
            self._manager.wait_until_finished()

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Read one, to the shapes, dtypes and shardings of `like`.

        Raises:
          UserError: the checkpoint is damaged, or of another version of jaxspec.
        """
        try:
            state = self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except Exception as error:  # Orbax raises many kinds
            earlier = max((number for number in self._manager.all_steps() if number < step), default=None)
            way_out = f"; delete it and continue with --resume from step {earlier}" if earlier else ""
            raise UserError(
                f"{self._folder / str(step)}: this checkpoint cannot be read, it is damaged or from another version of "
                f"jaxspec ({first_line(error)}){way_out}"
            ) from None
        return jax.tree.map(jnp.asarray, state)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            code = re.search(r"os_error_code='(\d+)'", str(error))  # as the background writer reports a full disk
            reason = os.strerror(int(code[1])) if code else first_line(error)
            whole = [int(path.name) for path in self._folder.glob("*") if path.name.isdigit()]  # renamed when whole
            kept = f"that of step {max(whole)} is kept" if whole else "there is no earlier one"
            raise UserError(f"{self._folder}: a checkpoint cannot be written ({reason}); {kept}") from None


def starting_state(checkpoints: Checkpoints, update: Update, seed: int, base: Base) -> TrainState:
    """The state to continue from, on the devices of the base: that of the last checkpoint, or a fresh one.

    The stage of `update` is the one that the last update belonged to.
    """
    make, mesh = functools.partial(first_state, update, seed), mesh_of(base.params)
    state = jax.eval_shape(make, base)
    places = None if mesh is None else state_shardings(mesh, state, update.whole)
    if checkpoints.latest:
        return checkpoints.restore(checkpoints.latest, placed(state, mesh, places))
    return jax.jit(make, out_shardings=places)(base)


def state_shardings(mesh: Mesh, state: TrainState, whole: bool) -> TrainState:
    """Shardings of a state: weights replicated over `fsdp` or divided, the optimizer's state always divided."""
    weights = tree_shardings(mesh, state.trainable, whole)
    return TrainState(weights, tree_shardings(mesh, state.optimizer), tree_shardings(mesh, state.average, whole))
