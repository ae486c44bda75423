"""Composed prompts: always the same, none twice, and held-out ones about other subjects."""

from experiments.prompts import FAMILIES, HELD_OUT, TRAINING, held_out_prompts, prompts_digest, training_prompts
from jaxspec.training.examples import read_prompts


def test_they_are_always_the_same():
    """All rows of the leaderboard are of these prompts: with other ones it begins anew."""
    assert prompts_digest() == "621f6967719c"


def test_none_is_there_twice_and_all_that_ship_are_used():
    training, held_out = training_prompts(), held_out_prompts()
    assert (len(training), len(held_out)) == (TRAINING, HELD_OUT)
    assert len({*training, *held_out}) == TRAINING + HELD_OUT
    assert {*training, *held_out} >= {*read_prompts("")}
    assert training[:200] == read_prompts("")[:200]


def test_composed_ones_that_are_held_out_are_about_other_subjects():
    shipped = {*read_prompts("")}
    training = "\n".join({*training_prompts()} - shipped)
    held_out = [prompt for prompt in held_out_prompts() if prompt not in shipped]
    for family in FAMILIES:
        unseen = family.subjects[-5:]
        assert any(subject in prompt for subject in unseen for prompt in held_out)
        assert not any(f" {subject} " in training for subject in unseen if " " in subject)


def test_every_task_is_filled():
    for prompt in [*training_prompts()[200:], *held_out_prompts()[40:]]:
        assert "{" not in prompt and prompt == prompt.strip()
