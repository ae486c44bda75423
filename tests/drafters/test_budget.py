"""Budgets of rows, and the sizes a step may have within them."""

import pytest

from jaxspec.drafters.budget import Budget
from jaxspec.methods import PPD, PromptLookup, Suffix
from tests.helpers.methods import union
from tests.helpers.tiny import make_text_model


def test_sizes_go_from_no_draft_to_the_whole_budget():
    model = make_text_model(num_layers=1)
    drafter = union([Suffix(), PromptLookup()], model, 8)
    several = drafter.shape.with_sizes(drafter.sources)
    assert [rows for rows, _ in several.sizes] == [1, 4, 8]
    assert several.on_device(drafter.sources).sizes == (1, 4, 8)
    assert several.with_sizes(drafter.sources) == several


@pytest.mark.parametrize(
    ("rows", "nodes", "owners"), [(5, 2, 1), (8, 5, 1), (12, 9, 1), (16, 10, 2), (20, 14, 2), (28, 16, 4), (64, 34, 10)]
)
def test_up_to_half_of_the_rows_are_probes(rows, nodes, owners):
    sources = union([PPD(), PromptLookup()], make_text_model(num_layers=1), 8).sources
    assert Budget(rows).divided(sources) == (nodes, owners, 3)


def test_probes_are_part_of_every_size():
    drafter = union([PPD(), PromptLookup()], make_text_model(num_layers=1), 8)
    nodes = drafter.num_nodes
    shape = drafter.shape.with_sizes(drafter.sources).on_device(drafter.sources)
    assert shape.nodes == nodes < 8 and shape.sizes[0] == 1 and shape.sizes[-1] == nodes
