"""Load on a server: what of its runs is a pair."""

import asyncio

import httpx
import pytest

from experiments.load import drafts_so_far, main, report, speedup
from jaxspec.errors import UserError

FIGURES = dict.fromkeys(
    ("tokens_per_step", "drafted_steps", "first_median", "first_95", "token_median", "token_95"), 1.0
)


def run(concurrency, number, drafting, *seconds, prompts=6):
    """What load.json has of a run."""
    return {
        "concurrency": concurrency,
        "round": number,
        "drafting": drafting,
        "tokens_per_second": 10.0 * (number + 1),
        "seconds": list(seconds),
        "prompts": prompts,
    } | FIGURES


def test_a_request_is_compared_with_itself_in_the_same_round():
    """Whichever run of a round came first; a round that was interrupted has no pairs."""
    results = [
        run(1, 0, True, *range(1, 7)),
        run(1, 0, False, *range(2, 14, 2)),
        run(1, 1, False, *range(20, 140, 20)),
        run(1, 1, True, *range(10, 70, 10)),
        run(1, 2, True, *[100] * 6),
        run(4, 0, True, 1.0),
        run(4, 0, False, 0.5),
    ]
    made = speedup(results, 1)
    assert (made.value, made.low, made.high) == pytest.approx((2, 2, 2))
    assert speedup(results, 4).value == 0.5
    lines = report(results).splitlines()
    assert [line.split("|")[2:5] for line in lines[2:]] == [
        [" no ", " 15.0 ", "  "],
        [" yes ", " 20.0 ", " 2.00 (2.00 to 2.00) "],
        [" no ", " 10.0 ", "  "],
        [" yes ", " 10.0 ", " 0.50 "],
    ]


def test_repeats_of_a_prompt_are_one_value():
    """Eight requests of two prompts are too few for an interval; of each the mean of logarithms counts."""
    without = [2.0, 4.0] * 4
    results = [run(1, 0, True, *[1.0] * 8, prompts=2), run(1, 0, False, *without, prompts=2)]
    results += [run(1, 1, True, *[1.0] * 8, prompts=2), run(1, 1, False, *[8.0, 4.0] * 4, prompts=2)]
    made = speedup(results, 1)
    assert (made.value, made.low, made.high) == (pytest.approx(4), None, None)  # sqrt(2 * 8) and 4
    results = [run(1, 0, True, *[1.0] * 12), run(1, 0, False, *range(1, 7), *range(1, 7))]
    assert speedup(results, 1) == speedup([run(1, 0, True, *[1.0] * 6), run(1, 0, False, *range(1, 7))], 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(404, text="not found"), "answered 404 without vllm:spec_decode_num_drafts; url must"),
        (httpx.Response(200, text="# TYPE up gauge\nup 1\n"), "answered 200 without vllm:spec"),
        (httpx.Response(200, text="<html lang=en>"), "http://here/metrics cannot be read"),
        (httpx.ConnectError("refused"), "http://here/metrics cannot be read: refused"),
    ],
)
def test_a_server_that_counts_no_drafts_is_refused(answer, message):
    def answered(request):
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def asked():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answered), base_url="http://here") as client:
            await drafts_so_far(client)

    with pytest.raises(UserError, match=message):
        asyncio.run(asked())


def test_nothing_at_once_is_refused(tmp_path):
    with pytest.raises(UserError, match="at least one value for concurrency"):
        main(["--prompts", "p.jsonl", "--concurrency", "--output", str(tmp_path)])
