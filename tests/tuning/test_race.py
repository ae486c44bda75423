"""What makes a race fair: the order changes, and nothing is timed that compiles."""

import dataclasses
import itertools
from types import SimpleNamespace

from jaxspec.tuning.race import in_turn

NAMES = ["autoregressive", "ppd", "medusa"]


def test_the_order_changes_so_that_nobody_always_follows_the_same_one():
    def warm(name):
        return [SimpleNamespace(compile_seconds=0.0)]

    orders = [[name for name, _ in in_turn(NAMES, warm, number)] for number in range(60)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert orders == [[name for name, _ in in_turn(NAMES, warm, number)] for number in range(60)]  # when resumed, too
    for place in range(3):
        counts = [sum(order[place] == name for order in orders) for name in NAMES]
        assert min(counts) >= 10, counts
    assert all(one == other[::-1] for one, other in zip(orders[::2], orders[1::2], strict=True))
    followers = {pair for order in orders for pair in itertools.pairwise(order)}
    assert len(followers) == 6


def test_what_compiled_runs_again_and_only_that():
    ran = []

    def run(name):
        first = name not in ran
        ran.append(name)
        return [Answer(0.0), Answer(3.0 if first and name == "ppd" else 0.0, len(ran))]

    answers = dict(in_turn(NAMES, run, 0))
    assert sorted(ran) == sorted([*NAMES, "ppd"])
    assert not any(answer.compile_seconds for found in answers.values() for answer in found)
    assert answers["ppd"][1].number == len(ran[: ran.index("ppd") + 2])


@dataclasses.dataclass(frozen=True)
class Answer:
    """As much of a `Generation` as counts here."""

    compile_seconds: float
    number: int = 0
