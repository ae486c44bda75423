"""Steps of several sizes, compiled for this processor and for TPUs that are not here."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.absent import abstract_base, abstract_state, lower_step
from jaxspec.config import MeshConfig
from jaxspec.decoding.drafter import DeviceDrafter
from jaxspec.decoding.loop import decode
from jaxspec.decoding.shape import Best
from jaxspec.decoding.source import Calibrations, DeviceSource
from jaxspec.drafters import METHODS
from jaxspec.methods import Eagle, Suffix
from jaxspec.parallel.chips import absent_mesh
from jaxspec.training.run_config import load_config
from jaxspec.trees import chain
from jaxspec.tuning.latency import StepTimer
from tests.helpers.methods import union

CAPACITY = 2048

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.mark.parametrize("method", [Suffix(), Eagle(depth=5)], ids=["no_layers", "late"])
def test_a_step_copies_no_cache_here(tiny, method):
    """Nor does what writes into them look at all of what is there."""
    timer = StepTimer(union([method], tiny, 8).with_tree("best:1@1,4@2,8@3"), 1, 128)
    assert (timer.state.unread is not None) == (method.name == "eagle")
    hlo = decode.lower(timer.decoding, timer.state, np.int32(4)).compile().as_text()
    cache = f"f32\\[1,{tiny.config.num_kv_heads},128,{tiny.config.head_dim}\\]"
    assert re.search(f"= {cache}[^ ]* dynamic-update-slice", hlo)
    assert not re.findall(f"= \\(?{cache}[^ ]* copy", hlo)


@pytest.mark.parametrize("batch", [1, 8])
def test_no_branch_copies_a_cache(batch):
    """With a step of each size in a branch of its own, the caches stay where and as they are."""
    mesh, _ = absent_mesh(MeshConfig(), "v5e:2x2x1")
    shapes = dataclasses.replace(load_config("ppd_smollm2").shapes, num_layers=12)  # more than fit into fast memory
    base, lookup = abstract_base(shapes, "bfloat16", mesh), METHODS["prompt_lookup"]()

    def make():
        calibrations = Calibrations(jnp.array([0.0, 0.5, 1.0]), jnp.zeros((3, lookup.length, 2)))
        source = DeviceSource({}, calibrations, lookup)
        trees = (chain(3).arrays(0),)
        return DeviceDrafter((source,), Best(trees, 16, 0, 0, 15, (1, 4, 16), costs=jnp.ones((2, 3))))

    begun = abstract_state(base, jax.eval_shape(make), mesh, batch, CAPACITY)
    hlo = lower_step(*begun, mesh).compile().as_text()
    bodies = {part.split(" ", 1)[0]: part for part in re.split(r"\n(?=%|ENTRY)", hlo)}
    [names] = re.findall(r"branch_computations=\{([^}]*)\}", hlo)
    cache = f"bf16\\[{batch},{shapes.num_kv_heads},{CAPACITY},{shapes.head_dim}\\]"
    branches = [bodies[name] for name in names.split(", ")]
    assert len(branches) == 3 and all(re.search(cache, branch) for branch in branches)
    copied = re.compile(f"= {cache}[^ ]* copy\\(")  # copy-start is no copy but a read ahead, into fast memory
    assert not [line for branch in branches for line in branch.splitlines() if copied.search(line)]
