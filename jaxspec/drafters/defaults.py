"""The default shape of a drafter's drafts: rows chosen in every step, by chance and cost, down to none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxspec.decoding.method import method_text
from jaxspec.drafters.budget import Budget, Size, default_rows
from jaxspec.drafters.costs import GREEDY, SAMPLED, RowCosts, find_costs
from jaxspec.drafters.drafter import FREE_ROWS, Drafter, join_notes
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

    The smallest is the root alone, the largest has the last of the given numbers of rows, or more where the method
    needs more; one lies half way. Where a method adds rows, such as probes, the smallest with these has a candidate: by
    replays of PPD and Hidden Transfer a step with one less is not worth a size of its own. Where other sources draft
    without such rows (`drafts_without_added`), the sizes are of nodes alone, and two further ones have added rows.

    Args:
      drafter: whatever its shape.
      costs: of rows.
      batch_size: texts decoded together.
      rows: of a text in the largest step and in further ones, rising.
    """
    most = default_rows(drafter.sources, rows[-1])
    budget = Budget(most)
    added = budget.added(drafter.sources)
    least = 2 + added if added else 1

    def steps(smallest: int) -> set[int]:
        """Rows of a few steps from the smallest to the largest."""
        return {smallest, (smallest + most) // 2, most} | {count for count in rows if smallest < count < most}

    alone, complete = set(), steps(least) - {1}
    if drafts_without_added(drafter.sources, batch_size * most):
        alone, complete = steps(1) - {1}, {least, most}
    sizes = [Size(1, 0, 0), *(Size(count, 0, 0, True) for count in sorted(alone))]
    sizes += [Size(count, 0, 0) for count in sorted(complete)]
    drafter = dataclasses.replace(drafter, shape=budget)

    def cost(size: Size, kind: int) -> float:
        """Of the rows, and of drafting where there is a draft."""
        drafting = drafting_costs(drafter, costs, size.nodes_alone)[kind] if size.rows > 1 else 0.0
        return costs(batch_size * counted_rows(drafter, size), kind) + drafting

    priced = [dataclasses.replace(x, greedy=cost(x, GREEDY), sampled=cost(x, SAMPLED)) for x in sizes]
    takes_time = any(source.facts.takes_time for source in drafter.sources)
    guessed = costs.typical or (takes_time and cost_name(drafter) not in costs.drafting)
    return dataclasses.replace(drafter, shape=Budget(most, tuple(priced), guessed))


def drafts_without_added(sources: Sequence[Source], rows: int) -> bool:
    """Whether steps of nodes alone are worth sizes of their own, where the largest step has so many rows.

    One method adds rows, and others look candidates up in every step, while methods that take time rest as that one
    does. Where rows are free one program runs all.
    """
    others = [source.facts for source in sources if not source.facts.adds_rows]
    free = rows <= FREE_ROWS.get(jax.default_backend(), 0)
    return 0 < len(others) < len(sources) and not free and not any(facts.takes_time for facts in others)


def has_default(drafter: Drafter) -> bool:
    """Whether a drafter's sizes are the default ones for one text: not those of a user or of `jaxspec tune`."""
    sizes = drafter.shape.sizes if isinstance(drafter.shape, Budget) else ()

    def kinds(sizes: Sequence[Size]) -> list[tuple[int, bool]]:
        return [(size.rows, size.nodes_alone) for size in sizes]

    return bool(sizes) and kinds(sizes) == kinds(with_default(drafter).shape.sizes)


def counted_rows(drafter: Drafter, size: Size) -> float:
    """Rows of a step of some size, probes for the share of the layers that they run through."""
    if not size.has_added:
        return size.rows
    facts = [source.facts for source in drafter.sources if source.facts.probes]
    share = facts[0].probe_cost / facts[0].probe_rows if facts else 1.0
    return size.rows - drafter.shape.added(drafter.sources) * (1 - share)


def drafting_costs(drafter: Drafter, costs: RowCosts, nodes_alone: bool = False) -> tuple[float, float]:
    """What drafting adds to a greedy and to a sampled step: as measured, else by the weights that it reads.

    After a step of nodes alone methods that add rows draft nothing.
    """
    if (name := cost_name(drafter)) in costs.drafting:
        return costs.drafting[name]
    drafting = [source for source in drafter.sources if not (nodes_alone and source.facts.adds_rows)]
    share = sum(_share(source, drafter.model) for source in drafting)
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
