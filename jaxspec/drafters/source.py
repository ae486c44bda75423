"""The host-side part of a source: a method with its adapter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.decoding.draft import PyTree
from jaxspec.decoding.method import Calibration, Facts, Method, method_text
from jaxspec.decoding.source import Calibrations, DeviceSource
from jaxspec.drafters.adapter import Adapter
from jaxspec.errors import UserError
from jaxspec.model.base import Base
from jaxspec.trees import TreePlan, chain
from jaxspec.trees.plan import plan_from_json
from jaxspec.weights.layouts import in_blocks
from jaxspec.weights.model import Model
from jaxspec.weights.parts import as_held


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A method with its adapter, as one of several that feed a draft.

    The host-side part: files, weights, settings; `DeviceSource` is a pytree in the jitted loop.

    Attributes:
      method: its settings.
      trainable: its pytree, as trained, in the host's memory where it was read from disk.
      config: shapes of the base that it drafts for.
      adapter: that it was made from; None for a method that takes none, or where other weights took its place.
      draft_vocabulary: V', how many of the base's most frequent tokens it may draft; 0: all.
      calibration: by `temperature_key`, in place of the adapter's and the method's own.
      weights: a name of weights that were added to the adapter's, or took their place.
    """

    method: Method
    trainable: PyTree
    config: ModelConfig
    adapter: Adapter | None = None
    draft_vocabulary: int = 0
    calibration: Mapping[str, Calibration] = dataclasses.field(default_factory=dict)
    weights: str = ""

    @functools.cached_property
    def facts(self) -> Facts:
        """The properties of the method on its base."""
        return self.method.facts(self.config)

    @property
    def trained(self) -> bool:
        """Whether it has an adapter that was trained."""
        return self.facts.learned and self.adapter is not None

    @property
    def digest(self) -> str:
        """A name of its weights, or of settings that are not the defaults; empty without any."""
        if self.adapter or self.weights:
            return "+".join(filter(None, (self.adapter and self.adapter.digest, self.weights)))
        text = method_text(self.method)
        return text if text != self.method.name else ""

    @property
    def tree(self) -> TreePlan:
        """The source's own tree: its adapter's, or a chain. Raises UserError for an adapter that holds none."""
        if not self.trained:
            return chain(min(self.facts.default_candidates or self.facts.distances, self.facts.distances))
        if "tree" not in self.adapter.info:
            raise UserError("the adapter holds no tree; `jaxspec train` writes it")
        return plan_from_json(self.adapter.info["tree"], "the adapter's tree")

    @property
    def accuracy(self) -> list[list[float]] | None:
        """[M][K], the adapter's measured accuracies, if it has any."""
        return self.adapter.info.get("accuracy") if self.adapter else None

    def with_vocabulary(self, count: int | None) -> Source:
        """The source with another draft vocabulary; None for the adapter's own. Raises UserError for one too large."""
        if not self.trained:
            if count is not None:
                raise UserError(f"{self.method.name} is not trained and has no draft vocabulary, got {count}")
            return self
        own = self.adapter.info.get("draft_vocabulary", 0)
        if "published" in self.adapter.info and count not in (None, own):
            tokens = (
                f"{own} tokens, which are in no order" if own else "all tokens, and does not say which are frequent"
            )
            raise UserError(f"draft-vocabulary {count}: this drafter, which was published, drafts {tokens}")
        count = own if count is None else count
        frequent = self.adapter.frequent_tokens
        check_drafts(count, 0 if frequent is None else len(frequent))
        return dataclasses.replace(self, draft_vocabulary=count)

    def on_device(self, model: Model) -> DeviceSource:
        """The device-side part, for the base that it decodes on."""
        base, method = model.base, self.method
        if self.draft_vocabulary:
            base = base.drafting(jnp.asarray(self.adapter.frequent_tokens[: self.draft_vocabulary]))
        trainable = as_held(method.prepare(jax.tree.map(jnp.asarray, self.trainable), base))
        calibrations = jax.tree.map(jnp.asarray, self.calibrations())
        source = DeviceSource(trainable, calibrations, method, base.draft_vocabulary)
        # A prompt's drafts are made from about as many rows as there are distances, however many nodes the tree has.
        block = functools.partial(model.block_for, self.facts.distances)
        return in_blocks(source, block, (*method.kernels, "columns"))

    def calibrations(self) -> Calibrations:
        """What makes scores chances, in the host's memory. Raises UserError for a damaged calibration."""
        count = self.facts.distances
        measured = (self.adapter and self.adapter.info.get("calibration")) or self._methods_own(count)
        try:
            known = {np.float32(key): table for key, table in {**measured, **self.calibration}.items()}
            temperatures = np.array(sorted(known), np.float32)
            tables = np.asarray([known[each] for each in temperatures], np.float32)
        except (KeyError, TypeError, ValueError):  # not an object, rows of unequal length, or no numbers
            temperatures = tables = np.full(1, np.nan)
        finite = np.isfinite(temperatures).all() and np.isfinite(tables).all()
        if not finite or temperatures[0] != 0 or tables.shape[1:] != (count, 2):
            wanted = f"two numbers for each of {count} distances by temperature, 0 among them"
            where, again = self.method.name, "jaxspec tune"
            if not self.calibration and self.adapter and self.adapter.folder:
                where = f"{self.adapter.folder / 'adapter.json'}"
                again = f"python -m experiments.calibrate --methods {self.method.name}"
            raise UserError(f"{where}: calibration must hold {wanted}; run `{again}` again")
        return Calibrations(temperatures, tables)

    def _methods_own(self, count: int) -> dict[str, Calibration]:
        """The method's calibration for `count` distances; beyond those measured, that of the last one."""
        known = self.method.calibration.items()
        return {key: [*table[:count], *[table[-1]] * (count - len(table))] for key, table in known}


def temperature_key(temperature: float) -> str:
    """The key of the calibration that was fitted at a temperature."""
    return f"{temperature:g}"


def learning(base: Base, method: Method, frequent: np.ndarray | None) -> Base:
    """The base that a method is trained and evaluated on: its draft vocabulary is the tokens that the method learns.

    Args:
      base: the frozen decoder.
      method: the method to train.
      frequent: token ids by how often the base writes them.
    """
    count = method.facts(base.decoder.config).learned_tokens
    return base.drafting(jnp.asarray(frequent[:count])) if count else base


def check_drafts(count: int, most: int) -> None:
    """Raise UserError for a draft vocabulary of another size than 0, all tokens, to `most`."""
    if type(count) is not int:
        raise UserError(f"draft-vocabulary must be a whole number, got {count!r}")
    if count and not most:
        raise UserError(f"draft-vocabulary {count}: the adapter does not say which tokens are frequent")
    if not 0 <= count <= most:
        raise UserError(f"draft-vocabulary must be 0 (all tokens) or at most {most}, got {count}")
