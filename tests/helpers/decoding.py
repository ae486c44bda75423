"""The loop without its public face: one state that tests can look into."""

import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingConfig
from jaxspec.decoding.acceptance import Match
from jaxspec.decoding.prompt import prefill
from jaxspec.decoding.sampling import make_sampler
from jaxspec.decoding.state import Decoding
from jaxspec.generation.job import bucket
from jaxspec.generation.prompts import pad_tokens
from jaxspec.parallel.sharding import in_mesh, mesh_of, put_beside


def begin(drafter, prompts, limit, sampling=SamplingConfig(), acceptance=Match(), seeds=0, capacity=128, chunk=32):
    """What decodes, and its state after prefill, of the sizes that `generate` takes: both share their programs.

    Args:
      drafter: what drafts.
      prompts: ids, of unequal lengths.
      limit: tokens to emit.
      sampling: how they are drawn.
      acceptance: which candidates survive.
      seeds: one, or one per prompt.
      capacity: of the cache.
      chunk: of prefill, which divides 32.
    """
    model = drafter.model
    rest = (drafter.on_device, make_sampler(sampling), jnp.array(model.eos or (-1,), jnp.int32))
    decoding = Decoding(model.base, *put_beside(model.params, rest), acceptance)
    tokens, lengths = pad_tokens(prompts, min(32, capacity))
    seeds, limits = np.broadcast_to(np.uint32(seeds), len(prompts)), np.full(len(prompts), limit, np.int32)
    with in_mesh(mesh_of(model.params)):
        sizes = {"capacity": capacity, "chunk": min(chunk, capacity), "width": bucket(limit, 64)}
        return decoding, prefill(model.base, decoding, tokens, lengths, limits, seeds, **sizes)
