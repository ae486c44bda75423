"""The picture of a training."""

import pytest

from jaxspec.training.logs import plot_training
from tests.helpers.files import write_jsonl


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws rows of a log; returns the lines of a panel, by default the accuracies', as lists of (step, value)."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **settings: figures.append(figure))

    def draw(*rows, panel=2):
        log = tmp_path / "log.jsonl"
        write_jsonl(log, [{"step": 1, "loss": 2.0}, *rows])
        plot_training(log, tmp_path / "training.png")
        return [list(map(tuple, line.get_xydata())) for line in figures[-1].axes[panel].lines]

    return draw


def held_out(step, answers, accuracy):
    tops = {"top1": [accuracy], "top10": [accuracy + 0.5]}
    return {"step": step, "held_out": answers, "tokens_per_step": 1 + 2 * accuracy} | tops


def test_the_curve_is_of_the_same_answers_and_the_end_a_point_of_its_own(drawn):
    """Update 2 was evaluated twice, before and after a kill."""
    rows = [held_out(2, 16, 0.1), held_out(2, 16, 0.1), held_out(4, 16, 0.25), held_out(4, 100, 0.5)]
    curve, end, *_ = drawn(*rows)
    assert curve == [(2, 0.1), (4, 0.25)] and end == [(4, 0.5)]
    assert drawn(*rows, panel=1) == [[(2, 1.2), (4, 1.5)], [(4, 2.0)]]


def test_the_end_may_be_of_as_many_answers_or_the_only_evaluation(drawn):
    assert drawn(held_out(2, 8, 0.25), held_out(4, 8, 0.5), held_out(4, 8, 0.5))[:2] == [
        [(2, 0.25), (4, 0.5)],
        [(4, 0.5)],
    ]
    assert drawn(held_out(4, 8, 0.5))[:2] == [[], [(4, 0.5)]]


def test_training_text_is_drawn_as_a_running_mean(drawn):
    updates = [{"step": step, "loss": 1.0, "top1@1": float(step % 2)} for step in range(1, 23)]
    *_, mean = drawn(*updates, held_out(22, 8, 0.5))
    assert [step for step, _ in mean] == [20, 21, 22] and all(abs(value - 0.5) < 1e-9 for _, value in mean)
    *_, none = drawn(*updates[:19], held_out(22, 8, 0.5))
    assert none == []
