"""What people and programs are shown."""

import dataclasses
import io

from jaxspec.cli.printing import TextPrinter, comparison, record, summary
from jaxspec.decoding.divergence import Divergence
from jaxspec.decoding.generate import Generation
from tests.helpers.tiny import make_text_model

ANSWER = Generation("p", "t", [1, 2, 3, 4, 5], [False, True, False, True, False], 2, [2, 0], [1, 0], 0.5, 2.0, 3.0)
PLAIN = dataclasses.replace(ANSWER, steps=4, offered=[], accepted=[], decode_seconds=4.0)


def test_record_and_lines_state_the_measured_figures():
    row = record("ppd", "m", ANSWER, PLAIN)
    assert row["tokens_per_step"] == 2.0 and row["tokens_per_second"] == 2.0 and row["speedup"] == 2.0
    assert row["autoregressive_tokens_per_second"] == 1.0 and row["identical_to_autoregressive"] is True
    assert "speedup" not in record("ppd", "m", ANSWER, None)
    line = summary("ppd", ANSWER)
    assert "5 tokens, 2.0 tokens/s, 2.00 tokens per step, accepted 50% at depth 1" in line and "compile 3.0 s" in line
    assert comparison(ANSWER, PLAIN, None) == "identical: yes, 2.00x autoregressive"
    other, parting = dataclasses.replace(PLAIN, tokens=[1, 2, 3, 4, 6]), Divergence(4, (5, 6), 2e-5)
    assert comparison(ANSWER, other, parting).startswith(
        "identical: no, from token 5 on, by a gap of 2e-05 (a near-tie)"
    )
    assert "near-tie" not in comparison(ANSWER, other, dataclasses.replace(parting, gap=0.5))
    assert record("ppd", "m", ANSWER, other, parting)["first_divergence"]["gap"] == 2e-5
    assert record("ppd", "m", ANSWER, PLAIN)["first_divergence"] is None


def test_an_answer_of_one_token_has_no_speed():
    single = dataclasses.replace(ANSWER, tokens=[1], steps=0, decode_seconds=0.0)
    assert single.tokens_per_second == 0 and comparison(single, single, None) == "identical: yes"
    assert record("ppd", "m", single, single)["speedup"] is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_drafted_tokens_are_green_and_half_characters_wait():
    model = make_text_model()
    tokens = model.tokenizer.encode("aé!")
    answer = dataclasses.replace(ANSWER, tokens=tokens, drafted=[False, True, True, True])
    for out, wanted in ((io.StringIO(), "aé!\n"), (Terminal(), "a\033[32mé\033[0m\033[32m!\033[0m\n")):
        printer = TextPrinter(model, out)
        for count in range(len(tokens) + 1):
            printer.show(dataclasses.replace(answer, tokens=tokens[:count], drafted=answer.drafted[:count]))
        printer.end()
        assert out.getvalue() == wanted
