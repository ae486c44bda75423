"""What makes a race fair: the order changes, and nothing is timed that compiles."""

import itertools
from types import SimpleNamespace

from jaxspec.tuning.race import in_turn

NAMES = ["autoregressive", "ppd", "medusa"]


def answer(compile_seconds=0.0):
    return SimpleNamespace(compile_seconds=compile_seconds)


def test_the_order_changes_so_that_nobody_always_follows_the_same_one():
    warm = {name: lambda: [answer()] for name in NAMES}
    orders = [[name for name, _ in in_turn(warm, number)] for number in range(60)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert orders == [[name for name, _ in in_turn(warm, number)] for number in range(60)]  # when resumed, too
    for place in range(3):
        counts = [sum(order[place] == name for order in orders) for name in NAMES]
        assert min(counts) >= 10, counts
    assert all(one == other[::-1] for one, other in zip(orders[::2], orders[1::2], strict=True))
    followers = {pair for order in orders for pair in itertools.pairwise(order)}
    assert len(followers) == 6


def test_what_compiled_runs_again_and_only_that():
    first, second = [answer(), answer(3.0)], [answer(), answer()]
    results = {name: [second] for name in NAMES} | {"ppd": [first, second]}
    skipped = []
    runs = {name: iter(found).__next__ for name, found in results.items()}
    answers = dict(in_turn(runs, 0, SimpleNamespace(skip=skipped.append)))
    assert len(skipped) == 1
    assert all(found is second for found in answers.values()) and answers.keys() == set(NAMES)
