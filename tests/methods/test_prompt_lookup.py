"""Prompt lookup: the longest match, of several the last, and what followed it."""

import pytest

from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.errors import UserError
from jaxspec.generation.generate import generate, generate_many
from jaxspec.methods import PromptLookup
from jaxspec.trees import chain
from tests.helpers.drafting import offered_after
from tests.helpers.tiny import make_prompts


def draft_after(method, text):
    """The candidates that are drafted after a text, the root left out."""
    paths = offered_after(method, text, min(method.length, 3), width=1)
    return list(max(paths, key=len, default=()))[:3]


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 4, 9, 2, 7, 8, 1, 2], [3, 4, 9]),  # the longer match, although the shorter one is later
        ([5, 2, 3, 0, 6, 2, 4, 0, 2], [4, 0, 2]),  # the later of two equal ones
        ([7, 1, 2, 1, 2], [1, 2, 1]),  # a repetition is taken to go round
        ([4, 4], [4, 4, 4]),
        ([0, 0, 0], [0, 0, 0]),  # token 0 is not padding
        ([1, 2, 3, 4], []),
        ([3], []),
    ],
)
def test_what_followed_the_longest_match_is_the_draft(text, drafted):
    assert draft_after(PromptLookup(), text) == drafted


def test_longest_bounds_the_match():
    text = [1, 2, 3, 9, 8, 2, 3, 5, 6, 1, 2, 3]
    assert draft_after(PromptLookup(longest=3), text) == [9, 8, 2]
    assert draft_after(PromptLookup(longest=2, length=2), text) == [5, 6]


@pytest.mark.slow
def test_it_needs_no_adapter_and_rows_that_are_refilled_begin_anew(tiny):
    drafter, prompts = load_drafter("prompt_lookup", tiny, tree="own"), make_prompts(7)
    assert drafter.plan == chain(3) and drafter.num_rows == 4
    plain = [a.tokens for a in generate(autoregressive(tiny), prompts, 24)]
    assert dict(generate_many(drafter, prompts, 24, batch_size=3, refill=2, steps_per_chunk=3)) == dict(
        enumerate(plain)
    )


def test_settings_are_checked():
    with pytest.raises(UserError, match="length must be at least 1, got 0"):
        PromptLookup(length=0)
