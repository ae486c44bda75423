"""Trees as a user writes them, and as files."""

import json

import pytest

from jaxspec.errors import UserError
from jaxspec.trees import (
    cartesian,
    chain,
    dynamic_sparse_tree,
    efficient,
    from_paths,
    load_plan,
    parse_tree,
    random_tree,
    save_plan,
    sparse_tree,
    straightforward,
    stripped_tree,
)

ACCURACY = [[0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]


def parse(spec, accuracy=ACCURACY, **options):
    return parse_tree(str(spec), "ppd", 3, accuracy, **options)


@pytest.fixture
def written(tmp_path):
    """Write a file and return its path."""

    def write(content):
        file = tmp_path / "tree.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return write


@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        ("chain:3", chain(3)),
        ("straightforward:2", straightforward(2)),
        ("cartesian:3,2", cartesian([3, 2])),
        ("cartesian:4", cartesian([4])),
        ("efficient:5", efficient([5, 5, 5])),
        ("efficient:5,4", efficient([5, 4])),
        ("sparse:6", sparse_tree(ACCURACY, 6)),
        ("medusa:7", from_paths([(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0)])),
        ("random:7", random_tree(3, 10, 7)),
        ("stripped:9", stripped_tree(ACCURACY, 9).trimmed(3)),
    ],
)
def test_every_spec_names_its_builder(spec, plan):
    assert parse(spec) == plan
    assert (parse(spec).expected_tokens is not None) == spec.startswith(("sparse", "stripped"))


@pytest.mark.parametrize(("rows", "cost"), [(9, 1), (9, 2), (40, 1)])
def test_the_dynamic_tree_has_no_probes_and_states_without_use(rows, cost):
    plan, whole = parse(f"dynamic:{rows}", probe_cost=cost), dynamic_sparse_tree(ACCURACY, rows, probe_cost=cost)
    assert plan.expected_tokens >= whole.expected_tokens - 1e-9
    assert all(len(s.paths) + cost * sum(s.probes[1:]) <= rows for s in plan.states)
    assert plan.states[0].probes[0] == plan.depth
    assert plan.trimmed(plan.depth).states == plan.states


def test_a_file_of_paths(written):
    assert parse(written([[0], [1], [0, 1]])) == from_paths([(0,), (1,), (0, 1)])


@pytest.mark.parametrize("spec", ["dynamic:9", "stripped:9", "sparse:5", "efficient:2"])
def test_a_saved_plan_comes_back(written, spec):
    file = written(save_plan(parse(spec), "ppd"))
    assert parse(file, accuracy=None).states == load_plan(file, "ppd").states == parse(spec).states


def test_a_file_of_another_method_is_refused(written):
    file = written(save_plan(chain(2), "medusa"))
    with pytest.raises(UserError, match="belongs to method 'medusa', not 'ppd'") as error:
        parse(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ('{"states": []}', "belongs to method None"),
        ('{"method": "ppd"}', "neither a list of paths nor a list of tree states"),
        ('{"method": "ppd", "states": [{"needs": 1}]}', "neither a list of paths nor a list of tree states"),
        ("null", "neither a list of paths nor a list of tree states"),
        ('"chain:3"', "neither a list of paths nor a list of tree states"),
        ("[[0, 1]]", "without its parent"),
    ],
)
def test_a_bad_file_is_named(written, content, message):
    with pytest.raises(UserError, match=message) as error:
        parse(file := written(content))
    assert str(error.value).startswith(f"{file}: ")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "tree.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"tree\.json:1: not valid UTF-16"):
        parse(tmp_path / "tree.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"tree\.json: "):
        load_plan(tmp_path / "tree.json", "ppd")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("spars:6", r"'spars:6' is neither a file nor a builder \(did you mean 'sparse'\?\)"),
        ("no/such/file.json", "is neither a file nor a builder; builders: chain:LENGTH; "),
        ("", "is neither a file nor a builder"),
        ("chain", "write chain:LENGTH"),
        ("chain:", "'chain:': write chain:LENGTH"),
        ("chain:2,2", "'chain:2,2': write chain:LENGTH"),
        ("chain:1.5", "write chain:LENGTH"),
        ("sparse:many", "write sparse:NODES, the root included"),
        ("random:3,4", "write random:NODES"),
        ("dynamic:3,4", "write dynamic:ROWS"),
        ("cartesian:2,,2", "write cartesian:WIDTH,WIDTH"),
        ("efficient:", "write efficient:WIDTH or WIDTH,WIDTH"),
        ("chain:0", "at least one candidate"),
        ("cartesian:2,0", "at least one candidate"),
        ("efficient:-1", "at least one candidate"),
        ("sparse:0", "at least 1"),
        ("random:-1", "at least 1"),
        ("medusa:65", r"at least 1 \(the root\) and at most 64, got 65"),
        ("medusa:64", "'medusa:64' is too deep: ppd has candidates for 3 distances"),
        ("dynamic:-1", "whole number from 0 to 1024"),
        ("chain:4", "'chain:4' is too deep: ppd has candidates for 3 distances"),
        ("efficient:2,2,2,2", "is too deep: ppd has candidates for 3 distances"),
        ("sparse:1", "'sparse:1' has no candidates"),
        ("random:1", "'random:1' has no candidates"),
        ("dynamic:0", "'dynamic:0' has no candidates"),
        ("dynamic:1", "'dynamic:1' has no candidates"),
    ],
)
def test_bad_specifications_are_named(spec, message):
    with pytest.raises(UserError, match=message):
        parse(spec)


def test_files_are_checked_for_depth_and_candidates(written):
    with pytest.raises(UserError, match="is too deep: ppd has candidates for 3 distances"):
        parse(written([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]))
    with pytest.raises(UserError, match="has no candidates"):
        parse(written([]))


@pytest.mark.parametrize("spec", ["sparse:6", "dynamic:9", "stripped:9"])
def test_what_needs_accuracies_says_so(spec):
    with pytest.raises(UserError, match="needs the adapter's measured accuracies, and it holds none"):
        parse(spec, accuracy=None)
    assert parse("chain:2", accuracy=None) == chain(2)


@pytest.mark.parametrize(
    "states",
    [
        [{"needs": 1, "paths": [[0]], "probes": [1, 1.5]}],
        [{"needs": 1, "paths": [[0]], "probes": "11"}],
        [{"needs": -3, "paths": [[0]], "probes": [1, 1]}],
        [{"needs": 1, "paths": [[0]], "probes": [1, 0]}],
        {},
        "",
    ],
)
def test_a_tree_file_that_makes_no_sense_is_named(states, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"method": "ppd", "states": states}))
    with pytest.raises(UserError, match=r"tree\.json"):
        parse_tree(str(file), "ppd", 3, ACCURACY)


@pytest.mark.parametrize("spec", ["[[0], [1]]" * 100, "chain:100000", "cartesian:1000,1000,1000", "sparse:100000"])
def test_a_specification_beyond_all_bounds_is_refused_at_once(spec):
    with pytest.raises(UserError):
        parse_tree(spec, "ppd", 3, ACCURACY)


def test_a_file_nested_too_deep_to_read_is_refused(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"tree\.json"):
        parse_tree(str(file), "ppd", 3, ACCURACY)
