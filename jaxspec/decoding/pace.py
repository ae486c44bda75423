"""When to draft: the recent speed of rows, which prices a step's time, and rests after drafts that did not pay."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

_MEMORY = 0.9  # how much the pace of one step counts after another
_MAX_BACKOFF, _LONGEST_UNIT = 16, 1024  # units of waiting between two trials, and steps of a unit, at most
_PROFITABLE = 1.1  # tokens in the time of a step of the cheapest size, which makes one
_CHEAP_TRIAL = 0.25  # of a step without a draft: what one that tries it may take in addition where a unit is one step


def in_cheapest_steps(costs: jax.Array) -> jax.Array:
    """Costs [B or 1, K] of a step of each size, in steps of the cheapest one."""
    return costs / jnp.min(costs, axis=1, keepdims=True)


@flax.struct.dataclass
class Pace:
    """The recent speed of rows, tokens per time, which prices a step's time. Older steps count less and less.

    Attributes:
      tokens: [B] float32, emitted.
      time: [B] float32, taken, in steps of the cheapest size: a server's rows come from smaller batches.
      active: [B] bool, rows that are not done.
      idle: [B] int32, steps in a row without a draft that paid (`Draft.pays`), the same in all rows.
      blind: [B] bool, whether the last step left out the rows that a method adds; of a new row True, else the same in
        all rows.
      drafting: [B] bool, rows that may have drafts.
    """

    tokens: jax.Array
    time: jax.Array
    active: jax.Array
    idle: jax.Array
    blind: jax.Array
    drafting: jax.Array

    @classmethod
    def begin(cls, active: jax.Array, drafting: jax.Array | None = None, idle: jax.Array | int = 0) -> Pace:
        """The pace of new texts: one token per step of the cheapest size; a prompt has no added rows.

        Args:
          active: [B] bool, rows that have a text.
          drafting: [B] bool, rows that may have drafts; default all.
          idle: scalar, that of the texts before them: drafts that rest there keep resting.
        """
        steps, every = jnp.full(active.shape, 1 / (1 - _MEMORY), jnp.float32), jnp.ones(active.shape, bool)
        idle = jnp.full(active.shape, idle, jnp.int32)
        return cls(steps, steps, active, idle, every, every if drafting is None else jnp.asarray(drafting))

    def after(
        self,
        emitted: jax.Array,
        time: jax.Array,
        active: jax.Array,
        paid: jax.Array | bool = True,
        added: jax.Array | bool = True,
    ) -> Pace:
        """The pace after a step.

        Args:
          emitted: [B] int32, tokens.
          time: [B or 1] float32, of the step, in steps of the cheapest size.
          active: [B] bool, rows that go on.
          paid: whether there was a draft that said that drafting pays.
          added: whether the step had the rows that a method adds.
        """
        idle = jnp.where(paid, 0, jnp.max(self.idle) + self._any_drafting)
        tokens, time = _MEMORY * self.tokens + emitted, _MEMORY * self.time + time
        blind = jnp.full(self.blind.shape, ~jnp.asarray(added))
        return Pace(tokens, time, active, jnp.full_like(self.idle, idle), blind, self.drafting)

    def joining(self, others: Pace) -> Pace:
        """The pace of new rows that join others: drafts that rest there keep resting."""
        return self.replace(idle=jnp.full_like(self.idle, jnp.max(others.idle)))

    @property
    def _any_drafting(self) -> jax.Array:
        """Whether a row that is not done may have drafts."""
        return jnp.any(self.active & self.drafting)

    def trial(self, costs: jax.Array, number: int = 1) -> jax.Array:
        """What a step that tries a draft takes in addition, [B or 1] float32, in steps of the cheapest size.

        Nothing while drafts bring so much that those which do not pay hardly count.

        Args:
          costs: [B or 1, K] float32, of a step of each size.
          number: of the size of such a step.
        """
        times = in_cheapest_steps(costs)
        tokens, time = (jnp.sum(jnp.where(self.active, x, 0.0)) for x in (self.tokens, self.time))
        return jnp.where(tokens > _PROFITABLE * time, 0.0, times[:, number] - times[:, 0])

    def rests(self, trial: jax.Array | float = 0.0) -> jax.Array:
        """Bool scalar, whether the next step has no draft.

        Drafts rest where no row may draft. They also rest after drafts that did not pay, until the next trial: it is
        due after 1, 2, 4, 8, 16, 32, 48 ... units without a draft that paid. A unit is one step. Where a trial takes
        more than `_CHEAP_TRIAL`, as with many rows on a CPU, a unit grows with the square of that: a draft that is
        twice as dear is also less likely to pay.

        Args:
          trial: [B or 1] or a number, what a step that tries a draft takes in addition, in steps of the cheapest size.
        """
        steps = jnp.round((jnp.max(jnp.maximum(trial, 0.0)) / _CHEAP_TRIAL) ** 2)
        unit = jnp.clip(steps, 1, _LONGEST_UNIT).astype(jnp.int32)
        idle = jnp.max(self.idle)
        units, within = idle // unit, idle % unit != 0
        waits = within | (jnp.bitwise_and(units, units - 1) != 0) & (units % _MAX_BACKOFF != 0)
        return waits | ~self._any_drafting
