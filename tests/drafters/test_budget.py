"""Budgets of rows, and the sizes a step may have within them."""

import dataclasses

import numpy as np
import pytest

from jaxspec.drafters.budget import Budget, Size, parse_budget
from jaxspec.errors import UserError
from jaxspec.methods import PPD, PromptLookup, Suffix
from tests.helpers.methods import union
from tests.helpers.tiny import make_text_model


def test_sizes_are_written_and_read_alike():
    sources = union([Suffix(), PromptLookup()], make_text_model(num_layers=1), 8).sources
    budget = parse_budget("best:1@21,4@23.5/25,8@31", sources)
    assert budget == Budget(8, (Size(1, 21.0, 21.0), Size(4, 23.5, 25.0), Size(8, 31.0, 31.0)))
    assert parse_budget(budget.spec, sources) == budget
    shape = budget.on_device(sources)
    assert shape.sizes == (1, 4, 8) and not shape.alone
    np.testing.assert_allclose(shape.costs, [[21, 23.5, 31], [21, 25, 31]])


@pytest.mark.parametrize(("cost", "written"), [(12345.678, "12350"), (0.00012346, "0.0001235"), (1e9, "1000000000")])
def test_what_is_written_of_large_and_small_costs_is_read(cost, written):
    sources = union([Suffix()], make_text_model(num_layers=1), 8).sources
    budget = Budget(8, (Size(1, cost, cost), Size(8, 2 * cost, 2 * cost)))
    assert budget.spec.startswith(f"best:1@{written},8@") and parse_budget(budget.spec, sources).spec == budget.spec


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("best:1@1e3,4@2e3", "milliseconds like 23.5"),
        ("best:1@inf,4@inf", "milliseconds like 23.5"),
        (f"best:1@{'9' * 400},4@{'9' * 401}", "milliseconds like 23.5"),
        (f"best:{'9' * 5000}", "write best:ROWS with 2 to 4096 rows"),
        ("best:4@5", "one size has no choice to make and needs no milliseconds: best:4"),
    ],
    ids=lambda text: text[:14],
)
def test_costs_that_nothing_can_take_are_refused(tree, message):
    sources = union([Suffix()], make_text_model(num_layers=1), 8).sources
    with pytest.raises(UserError, match=message) as refused:
        parse_budget(tree, sources)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "tree", ["best:1@21,4@x", "best:1@21,4", "best:1@21,4@0", "best:4@21,2@23", "best:1@21,4@3/", "best:1@-1,4@2"]
)
def test_sizes_without_costs_are_refused(tree):
    sources = union([Suffix(), PromptLookup()], make_text_model(num_layers=1), 8).sources
    with pytest.raises(UserError, match=f"tree '{tree}': "):
        parse_budget(tree, sources)


@pytest.mark.parametrize(
    ("rows", "nodes", "owners", "distances"),
    [(4, 2, 2, 1), (8, 6, 2, 1), (12, 9, 1, 3), (16, 10, 2, 3), (20, 14, 2, 3), (28, 16, 4, 3), (64, 34, 10, 3)],
)
def test_two_of_few_rows_are_probes_and_up_to_half_of_many(rows, nodes, owners, distances):
    sources = union([PPD(), PromptLookup()], make_text_model(num_layers=1), 8).sources
    assert Budget(rows).divided(sources) == (nodes, owners, distances)


def test_probes_are_part_of_every_size_but_of_the_root_alone():
    drafter = union([PPD(), PromptLookup()], make_text_model(num_layers=1), 8)
    shape = parse_budget("best:1@1,3@2,8@3", drafter.sources).on_device(drafter.sources)
    assert shape.alone and shape.sizes == (1, 1, 6) and shape.nodes == drafter.num_nodes == 6
    assert not parse_budget("best:3@2,8@3", drafter.sources).on_device(drafter.sources).alone
    with pytest.raises(UserError, match="a size needs 3 rows, the root and all probes, or is the root alone, 1"):
        parse_budget("best:1@1,2@2,8@3", drafter.sources)


def test_sizes_of_nodes_alone_come_first():
    drafter = union([PPD(), PromptLookup()], make_text_model(num_layers=1), 8)
    budget = parse_budget("best:1@1,2n@2,8n@3/4,4@3,8@4", drafter.sources)
    shape = budget.on_device(drafter.sources)
    assert shape.sizes == (1, 2, 8, 2, 6) and (shape.alone, shape.adding, shape.nodes, shape.depth) == (3, 1, 8, 7)
    assert parse_budget(budget.spec, drafter.sources) == budget
    assert dataclasses.replace(drafter, shape=budget).num_nodes == 8


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("best:1@1,8@3,4n@2", "those of nodes alone first"),
        ("best:1@1,9n@2,8@3", "the last is the largest and has all rows"),
        ("best:1@1,8n@2", "the last is the largest and has all rows"),
        ("best:8n", "the last is the largest and has all rows"),
        ("best:1n@1,8n@2", "the last is the largest and has all rows"),
        ("best:4n@1,4n@2,8@3", "must be given in order"),
        ("best:1@1,4nn@2,8@3", "4n@MS has 4 nodes alone"),
    ],
)
def test_sizes_of_nodes_alone_in_another_order_are_refused(tree, message):
    drafter = union([PPD(), PromptLookup()], make_text_model(num_layers=1), 8)
    with pytest.raises(UserError, match=message):
        parse_budget(tree, drafter.sources)


def test_nodes_are_alone_where_nothing_adds_rows():
    drafter = union([Suffix(), PromptLookup()], make_text_model(num_layers=1), 8)
    with pytest.raises(UserError, match=r"suffix\+prompt_lookup adds no rows to nodes; leave out the n"):
        parse_budget("best:1@1,4n@2,8@3", drafter.sources)
