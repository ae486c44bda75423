"""What methods offer while decoding is what they predict in training, where the base scales and caps its logits.

Frequencies are those of a text beyond the original context, at its first positions too.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.config import RopeScaling
from jaxspec.methods import PPD, DFlash, DraftModel, Eagle, HiddenTransfer, Hydra, Medusa
from jaxspec.tuning.record import record
from tests.helpers.marks import slow_ones
from tests.helpers.methods import batch_of, settings, trained, union
from tests.helpers.tiny import TINY, make_tiny

LONG = RopeScaling("longrope", 4.0, 8, short_factors=(1.0,) * 4, long_factors=(1.5, 2.0, 3.0, 4.0))
CAPPED = dataclasses.replace(TINY, logit_scale=0.25, logit_cap=2.0, rope_scaling=LONG)
PROMPT, ANSWER = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]


METHODS = [
    DFlash(block=2, layers=1, tapped=(1, 3), convolution=2, selector_rank=4, selector_width=3),
    DFlash(block=2, layers=1, tapped=(1, 3), markov_rank=4, markov_tables=True, confidence_head="markov"),
    Eagle(),
    Medusa(heads=2),
    Hydra(),
    PPD(distances=2),
    DraftModel(layers=(0, 2)),
]
OTHERS = [
    DFlash(block=2, layers=1, tapped=(1, 3), markov_rank=4),
    DFlash(block=3, layers=1, tapped=(1, 3)),
    DFlash(block=2, layers=1, tapped=(1, 3), confidence_head="state"),
    Medusa(heads=2, lm_head="full"),
    HiddenTransfer(layers=(0, 1, 2)),
]


@pytest.mark.parametrize("method", slow_ones([*METHODS, *OTHERS], [*map(settings, METHODS)], settings))
def test_chances_while_decoding_are_those_of_training(method):
    """Along a given answer: of every candidate whose parents are the answer's tokens."""
    model = make_tiny(CAPPED, eos=())
    [recorded] = record(union([method], model, 6), [(PROMPT, ANSWER)], batch_size=1)
    trainable = trained(method, model.base, seed=1, scale=0.3, noise=2)
    tokens = np.array([PROMPT + ANSWER], np.int32)
    points = len(PROMPT) - 1 + np.arange(len(ANSWER) - 1)  # the token before the newest one
    logits, factors = jax.jit(method.predictions_and_factors)(trainable, model.base, batch_of(tokens, points[None]))
    log_p = np.asarray(jax.nn.log_softmax(logits) + factors)[0]
    compared = 0
    for distance, (reached, here, _, offered) in enumerate(recorded.along_answer(0)):
        if distance >= log_p.shape[1]:
            break
        for at in np.flatnonzero(reached):
            for place in np.flatnonzero(here[at]):
                token = recorded.offers[0].tokens[at, distance, place]
                np.testing.assert_allclose(offered[at, place], log_p[at, distance, token], atol=2e-3)
                compared += 1
    assert compared > 10
