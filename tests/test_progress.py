"""Lines about long work."""

import pytest

from jaxspec.progress import Progress


@pytest.mark.parametrize(("done", "left"), [(4, 3.2), (6, 2.4)])
def test_the_estimate_forgets_slow_first_units(capsys, monkeypatch, done, left):
    """Two units that compile for a minute each, then ten of 24 seconds."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("racing", 12, "runs") as progress:
        for number in range(1, done + 1):
            now[0] += 60 if number <= 2 else 24
            progress.update(number)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "racing: 1/12 runs" and last.startswith("racing: ")
    said = float(last.split(",")[2].split()[0])
    assert said == pytest.approx(left, abs=0.05)


def test_the_last_line_says_how_long_it_took(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("answers", 2, "answers", done=1) as progress:
        now[0] += 7
        progress.update(2, "a note")
    assert capsys.readouterr().err == "answers: 2/2 answers in 7 s  a note\n"


def test_the_estimate_leaves_out_what_is_skipped(capsys, monkeypatch):
    """Three programs that compile for a minute each, and twelve runs of a second."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("racing", 12, "runs") as progress:
        for number in range(1, 4):
            now[0] += 60
            progress.skip(60)
            now[0] += 1
            progress.update(number)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "racing: 3/12 runs, 1.00/s, 0.1 min left"
