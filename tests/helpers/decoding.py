"""The loop without its public face: one state that tests can look into."""

import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.loop import Decoding, prefill, start
from jaxspec.drafting.sampling import make_sampler
from jaxspec.parallel.sharding import in_mesh, mesh_of, put_beside


def begin(drafter, prompt, limit, count=1, sampling=SamplingConfig(), acceptance=Match(), first_seed=0, capacity=128):
    """What decodes and its state after prefill, of `count` rows that ask the same prompt with one seed each."""
    model = drafter.model
    rest = (drafter.on_device, make_sampler(sampling), jnp.array(model.eos or (-1,), jnp.int32))
    decoding = Decoding(model.base, *put_beside(model.params, rest), acceptance)
    tokens, lengths = np.tile(np.array(prompt, np.int32), (count, 1)), np.full(count, len(prompt), np.int32)
    seeds = np.arange(count, dtype=np.uint32) + np.uint32(first_seed)
    with in_mesh(mesh_of(model.params)):
        cache, prompts = prefill(model.base, tokens, lengths, capacity=capacity, chunk=len(prompt))
        return decoding, start(decoding, cache, prompts, np.full(count, limit, np.int32), seeds, width=limit)
