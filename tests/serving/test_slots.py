"""Rows of one decoding state that requests share: the size of their steps."""

import numpy as np

from jaxspec.decoding.acceptance import Match
from jaxspec.drafters.defaults import with_default
from jaxspec.generation.sizes import SizeTimes
from jaxspec.methods import PPD, PromptLookup
from jaxspec.serving import slots
from jaxspec.serving.request import Request
from jaxspec.serving.slots import Slots
from tests.helpers.methods import union
from tests.helpers.serving import LIMITS


def sized_rows(drafter):
    """Slots whose steps have one of several sizes."""
    return Slots(with_default(union([PPD(), PromptLookup()], drafter.model, 8)), Match(), LIMITS)


def place(rows, request):
    """Read a request's prompt, and give it a row."""
    reading = rows.reader(request)
    while not reading.finished:
        reading.read_chunk()
    rows.place(request, reading)


def test_a_new_request_joins_a_step_of_the_smallest_size(drafter):
    """Its own draft was chosen by the costs of one row; as many rows for all others would be dear."""
    rows, sizes = sized_rows(drafter), []
    for prompt in ([1, 2, 3], [4, 5, 6]):
        place(rows, Request(prompt, max_new_tokens=8))
        sizes.append(rows._state.draft.size.tolist())
    assert sizes[0] == [3] and sizes[1][1] == 0  # the first tries probes
    assert not rows._state.draft.valid[1, 1:].any()


def test_drafts_that_rest_keep_resting_for_the_next_request(drafter):
    """Its own first draft waits, too, as long as the drafts of those that have ended would."""
    rows, requests = sized_rows(drafter), [Request([1, 2, 3], max_new_tokens=60), Request([4, 5], max_new_tokens=60)]
    place(rows, requests[0])
    rows.advance(1)
    pace = rows._state.pace
    rows._state = rows._state.replace(pace=pace.replace(idle=pace.idle + 1000))
    rows.release(requests[:1])
    place(rows, requests[1])
    assert rows._state.pace.idle.tolist() == (pace.idle + 1000).tolist()
    assert rows._state.draft.size.tolist() == [0]


def test_further_time_counts_for_requests_that_wait_too(drafter, monkeypatch):
    """As far as there are free slots: beyond them requests wait for the ends of others."""
    rows, seen = sized_rows(drafter), []
    rows.times = {1: [SizeTimes(np.array([20.0, 24.0, 23.0, 30.0, 29.0]), 0.0)] * 2}
    place(rows, Request([1, 2, 3], max_new_tokens=8))
    monkeypatch.setattr(slots, "decode", lambda decoding, state, steps: seen.append(decoding.drafter.shape.costs))
    for waiting in (0, 1, 100):
        rows.advance(1, waiting)
    further = np.array([0, 4, 4, 10, 10])  # noise makes no size cheaper than a smaller one of its kind
    for costs, weight in zip(seen, (1, 2, LIMITS.slots), strict=True):
        np.testing.assert_allclose(costs, np.stack([20 + weight * further] * 2))


def test_where_no_request_may_draft_steps_have_no_rows_for_drafts(drafter):
    """Not even now and then, to try."""
    rows, sizes = sized_rows(drafter), []
    place(rows, Request([1, 2, 3], max_new_tokens=20, drafting=False))
    for _ in range(12):
        sizes += rows._state.draft.size.tolist()
        rows.advance(1)
    assert not any(sizes)
