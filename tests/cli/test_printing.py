"""What people and programs are shown."""

import contextlib
import dataclasses
import io

from jaxspec.cli.printing import (
    Result,
    TextPrinter,
    colour,
    comparison,
    record,
    source_lines,
    summary,
)
from jaxspec.generation.divergence import Divergence
from jaxspec.generation.generate import Generation, SourceStats
from tests.helpers.tiny import make_text_model

ANSWER = Generation("p", "t", [1, 2, 3, 4, 5], [0, 1, 0, 1, 0], 2, [2, 0], [1, 0], 0.5, 2.0, 3.0)
PLAIN = dataclasses.replace(ANSWER, steps=4, offered=[], accepted=[], decode_seconds=4.0)


def test_record_and_lines_state_the_measured_figures():
    row = record(Result(ANSWER, PLAIN))
    assert row["tokens_per_step"] == 2.0 and row["tokens_per_second"] == 2.0 and row["speedup"] == 2.0
    assert row["autoregressive_tokens_per_second"] == 1.0 and row["identical_to_autoregressive"] is True
    assert row["first_divergence"] is None and "speedup" not in record(Result(ANSWER))
    line = summary("ppd", ANSWER)
    assert "5 tokens, 2.0 tokens/s, 2.00 tokens per step, accepted 50% at depth 1" in line and "compile 3.0 s" in line
    assert comparison(Result(ANSWER, PLAIN)) == "identical: yes, 2.00x autoregressive"


def test_steps_without_drafts_are_explained():
    nothing = dataclasses.replace(PLAIN, sources={"suffix": SourceStats([0, 0], [0, 0], [0.0, 0.0])})
    assert "1.00 tokens per step, nothing drafted: " in summary("suffix", nothing)
    assert "nothing drafted" not in summary("autoregressive", PLAIN)


def test_a_divergence_is_shown_with_its_gap():
    other, divergence = dataclasses.replace(PLAIN, tokens=[1, 2, 3, 4, 6]), Divergence(4, (5, 6), 2e-5)
    near, far = (Result(ANSWER, other, dataclasses.replace(divergence, gap=gap)) for gap in (2e-5, 0.5))
    assert comparison(near).startswith("identical: no, from token 5 on, by a gap of 2e-05 (a near-tie)")
    assert "near-tie" not in comparison(far)
    assert record(near)["first_divergence"]["gap"] == 2e-5


def test_an_answer_of_one_token_has_no_speed():
    single = dataclasses.replace(ANSWER, tokens=[1], steps=0, decode_seconds=0.0)
    assert single.tokens_per_second == 0 and comparison(Result(single, single)) == "identical: yes"
    assert record(Result(single, single))["speedup"] is None


def test_texts_that_are_compared_have_titles(capsys):
    model = make_text_model(num_layers=1)
    tokens = model.tokenizer.encode("hello")
    answer = dataclasses.replace(ANSWER, tokens=tokens, text="hello")
    for compare, out in ((False, "hello\n"), (True, "[ppd]\nhello\n[autoregressive]\nhello\n")):
        printer = TextPrinter(model, ["ppd"], "a remark", compare)
        for count in (1, 3, 5):
            printer.show(dataclasses.replace(answer, tokens=tokens[:count]))
        printer.finish([Result(answer, answer if compare else None)])
        shown = capsys.readouterr()
        assert shown.out == out and "(a remark)\n" in shown.err and ("identical: yes" in shown.err) == compare


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_sources_are_told_apart():
    """One bit per source: green the first, blue the second, cyan what both offered."""
    sources = {"medusa": SourceStats([4, 2], [2, 0], [2.5, 0.5]), "suffix": SourceStats([3, 0], [1, 0], [0.9, 0.0])}
    answer = dataclasses.replace(ANSWER, drafted_by=[0, 1, 2, 3, 0], sources=sources)
    assert answer.drafted == [False, True, True, True, False]
    assert [colour(bits)[0] for bits in (1, 2, 3, 4, 5)] == ["green", "blue", "cyan", "magenta", "cyan"]
    assert source_lines(answer, coloured=True) == [
        "  medusa (green): accepted 2/4 (62% expected), 0/2 (25% expected) by depth",
        "  suffix (blue): accepted 1/3 (30% expected) by depth",
    ]
    row = record(Result(answer))
    assert row["drafted_by"] == [[], ["medusa"], ["suffix"], ["medusa", "suffix"], []]
    assert row["sources"]["medusa"] == {"offered": [4, 2], "accepted": [2, 0], "expected": [2.5, 0.5]}


def test_drafted_tokens_are_green_and_half_characters_wait():
    model = make_text_model(num_layers=1)
    tokens = model.tokenizer.encode("aé!")
    answer = dataclasses.replace(ANSWER, tokens=tokens, drafted_by=[0, 1, 1, 1])
    for out, wanted in ((io.StringIO(), "aé!\n"), (Terminal(), "a\033[32mé\033[0m\033[32m!\033[0m\n")):
        printer = TextPrinter(model, ["ppd"])
        with contextlib.redirect_stdout(out):
            for count in range(len(tokens) + 1):
                printer.show(dataclasses.replace(answer, tokens=tokens[:count], drafted_by=answer.drafted_by[:count]))
            printer.finish([Result(answer)])
        assert out.getvalue() == wanted
