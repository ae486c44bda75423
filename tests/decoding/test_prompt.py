"""Prompts in chunks: what is remembered of each row, and what a chunk costs."""

import re

import numpy as np
import pytest

from jaxspec.config import SamplingConfig
from jaxspec.decoding.prompt import read, start
from jaxspec.drafters import load_drafter
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.job import decoding_of
from jaxspec.methods import DraftModel, Eagle, Hydra
from tests.helpers.decoding import begin
from tests.helpers.methods import union
from tests.helpers.tiny import make_prompts

B, W, CAPACITY = 3, 8, 64


def programs(model):
    """Those that read a further chunk and that start to decode, compiled."""
    decoding = decoding_of(autoregressive(model), B, SamplingConfig())
    tokens, counts, seeds = np.ones((B, W), np.int32), np.full(B, W, np.int32), np.zeros(B, np.uint32)
    chunk, base = (tokens, counts, seeds), model.base
    reading = read(base, decoding, None, *chunk, capacity=CAPACITY)
    further = read.lower(base, decoding, reading, *chunk, capacity=CAPACITY).compile().as_text()
    ending = start.lower(base, decoding, reading.memory, reading.last, counts, seeds, width=W).compile().as_text()
    return further, ending


def test_a_chunk_copies_no_cache_and_makes_no_logits(tiny):
    further, ending = programs(tiny)
    config = tiny.config
    cache = f"f32[{B},{config.num_kv_heads},{CAPACITY},{config.head_dim}]"
    assert cache in further
    assert not re.findall(rf"= {re.escape(cache)}\S* copy\(", further)
    head = f"f32[{config.hidden_size},{config.vocab_size}]"
    assert head in ending and head not in further


@pytest.mark.parametrize("chunk", [8, 32])
def test_sources_observe_every_token_and_the_first_one_emitted(tiny, chunk):
    """Rows that end within a chunk and with one, in the first, a middle and the last chunk."""
    text = [token for prompt in make_prompts(20, seed=4) for token in prompt]
    prompts = [text[:length] for length in (5, 8, 13, 16, 17, 32)]
    _, state = begin(load_drafter("prompt_lookup", tiny), prompts, 4, chunk=chunk)
    for row, prompt in enumerate(prompts):
        assert state.lengths[row] == len(prompt)
        known = [*prompt, int(state.tokens[row, 0])]
        assert state.method_states[0].own[row, : len(known)].tolist() == known


@pytest.mark.parametrize(
    "method",
    [Eagle(depth=2, reads=(0, 1, 2)), DraftModel(length=2), Hydra(heads=2, prefix_attention=True)],
    ids=lambda method: method.name,
)
def test_a_row_is_remembered_as_if_it_were_alone(tiny, method):
    """The drafts after prompts of unequal length, read in one chunk to four, are those of each prompt by itself."""
    text = [token for prompt in make_prompts(20, seed=4) for token in prompt]
    prompts, drafter = [text[:length] for length in (5, 8, 17, 32)], union([method], tiny, 6)
    _, together = begin(drafter, prompts, 4, chunk=8)
    drafts = []
    for row, prompt in enumerate(prompts):
        _, alone = begin(drafter, [prompt], 4, chunk=8)
        drafts.append(alone.draft.tokens[0].tolist())
        assert alone.draft.valid[0].tolist() == together.draft.valid[row].tolist()
        assert together.draft.tokens[row].tolist() == drafts[-1]
    assert len({tuple(draft) for draft in drafts}) > 1
