"""The default shape of a drafter's drafts: rows chosen in every step, by chance and cost, down to none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxspec.decoding.method import method_text
from jaxspec.drafters.budget import Budget, Size, default_rows
from jaxspec.drafters.costs import GREEDY, SAMPLED, RowCosts, find_costs
from jaxspec.drafters.drafter import Drafter, join_notes
from jaxspec.drafters.source import Source
from jaxspec.weights.model import Model
from jaxspec.weights.params import parameter_count

_MOST = 64  # rows
# Rows are doubled while that makes a step longer by less than this share of a step of one row, which makes one token: a
# draft of twice as many rows hardly brings half a token more.
_WORTH_DOUBLING = 0.5


def with_default(drafter: Drafter, batch_size: int = 1, costs: RowCosts | None = None) -> Drafter:
    """The drafter with rows chosen in every step, among a few sizes.

    Args:
      drafter: whatever its shape.
      batch_size: texts decoded together.
      costs: of rows; default those of this machine (`find_costs`).

    Raises:
      UserError: settings that need too many rows.
    """
    if not drafter.drafts:
        return drafter
    costs = costs or find_costs(drafter.model, batch_size)
    chosen = with_sizes(drafter, costs, batch_size, [_most_rows(costs, batch_size)])
    return dataclasses.replace(chosen, note=join_notes(drafter.note, costs.note))


def _most_rows(costs: RowCosts, batch_size: int) -> int:
    """Rows of a text in the largest step that may pay."""
    most, allowed = 2, _WORTH_DOUBLING * costs(batch_size)
    while most < _MOST and costs(2 * most * batch_size) - costs(most * batch_size) < allowed:
        most *= 2
    return most


def with_sizes(drafter: Drafter, costs: RowCosts, batch_size: int, rows: Sequence[int]) -> Drafter:
    """The drafter with a few sizes of steps, priced by the costs of their rows and of drafting.

    The smallest is the root alone. Where a method adds rows, such as probes, the next has these and a candidate: by
    replays of PPD and Hidden Transfer a step with one less is not worth a size of its own. The largest has the last of
    the given numbers of rows, or more where the method needs more; one lies half way to it.

    Args:
      drafter: whatever its shape.
      costs: of rows.
      batch_size: texts decoded together.
      rows: of a text in the largest step and in further ones, rising.
    """
    most = default_rows(drafter.sources, rows[-1])
    drafter = dataclasses.replace(drafter, shape=Budget(most))
    added = most - drafter.num_nodes
    least = 2 + added if added else 1
    sizes = sorted({1, least, (least + most) // 2, most} | {count for count in rows if least < count < most})
    drafting = drafting_costs(drafter, costs)

    def cost(count: int, kind: int) -> float:
        """Of the rows, and of drafting where there is a draft."""
        return costs(batch_size * counted_rows(drafter, count), kind) + (drafting[kind] if count > 1 else 0.0)

    priced = tuple(Size(count, cost(count, GREEDY), cost(count, SAMPLED)) for count in sizes)
    takes_time = any(source.facts.takes_time for source in drafter.sources)
    guessed = costs.typical or (takes_time and cost_name(drafter) not in costs.drafting)
    return dataclasses.replace(drafter, shape=Budget(most, priced, guessed))


def has_default(drafter: Drafter) -> bool:
    """Whether a drafter's sizes are the default ones for one text: not those of a user or of `jaxspec tune`."""
    sizes = drafter.shape.sizes if isinstance(drafter.shape, Budget) else ()
    return bool(sizes) and [s.rows for s in sizes] == [s.rows for s in with_default(drafter).shape.sizes]


def counted_rows(drafter: Drafter, rows: int) -> float:
    """Rows of a step of so many, probes for the share of the layers that they run through."""
    if rows == 1:
        return 1.0
    facts = [source.facts for source in drafter.sources if source.facts.probes]
    share = facts[0].probe_cost / facts[0].probe_rows if facts else 1.0
    added = drafter.num_rows - drafter.num_nodes
    return rows - added * (1 - share)


def drafting_costs(drafter: Drafter, costs: RowCosts) -> tuple[float, float]:
    """What drafting adds to a greedy and to a sampled step: as measured, else by the weights that it reads."""
    if (name := cost_name(drafter)) in costs.drafting:
        return costs.drafting[name]
    share = sum(_share(source, drafter.model) for source in drafter.sources)
    return share * costs(1, GREEDY), share * costs(1, SAMPLED)


def cost_name(drafter: Drafter) -> str:
    """The name of a drafter's costs: its methods with their settings and weights, and its draft vocabulary."""
    methods = []
    for source in drafter.sources:
        weights = source.digest if source.adapter or source.weights else ""
        methods.append(" ".join(filter(None, (method_text(source.method), weights))))
    return f"{'+'.join(sorted(methods))} vocabulary={max(source.draft_vocabulary for source in drafter.sources)}"


def _share(source: Source, model: Model) -> float:
    """The weights that a source reads for a draft, as a share of those that a step of the base reads."""
    facts, config = source.facts, model.config
    if not facts.takes_time:
        return 0.0
    parameters, head = parameter_count(model.params), config.vocab_size * config.hidden_size
    layer, drafted = (parameters - head) / config.num_layers, source.draft_vocabulary or config.vocab_size
    passes = max(facts.distances / 2, 1) if facts.own_layers else 1  # about half of all levels are skipped
    layers = max(parameter_count(source.trainable), facts.own_layers * layer / 2)
    return (layers + passes * drafted * config.hidden_size) / parameters
