"""Orbax checkpoints of a run, written in the background, completely or not at all."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxspec.errors import UserError, first_line
from jaxspec.model.base import Base
from jaxspec.parallel.sharding import mesh_of, placed, tree_shardings
from jaxspec.training.step import TrainState, Update, first_state


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


def begin(checkpoints: Checkpoints, update: Update, seed: int, base: Base) -> TrainState:
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
