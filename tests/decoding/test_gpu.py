"""Decoding through the kernels for GPUs: interpreted on the CPU, and compiled for GPUs that are not here."""

import dataclasses
import re

import pytest

from jaxspec.bench.dry_run import abstract_base, abstract_state, lower_step
from jaxspec.config import MeshConfig
from jaxspec.decoding.drafter import DeviceDrafter
from jaxspec.decoding.shape import StaticTree
from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, Hydra, Suffix
from jaxspec.model import gpu, gpu_attention, gpu_cache
from jaxspec.trees import State, efficient, from_paths, make_plan
from jaxspec.weights.shapes import SHAPES
from tests.helpers.gpus import absent_gpus, compiled
from tests.helpers.methods import union, untrained_drafter
from tests.helpers.tiny import TINY, make_prompts, make_tiny

OF_ITS_OWN = dataclasses.replace(TINY, num_layers=1, rms_norm_eps=2e-5)  # so that no program of another test is taken
SHAPES_OF_FOUR = dataclasses.replace(SHAPES["smollm2-135m"], num_layers=4)
CAPACITY = 512


def drafter_of(kind, model):
    if kind == "probes":
        plan = make_plan([State((), (3,), 0), State(((0,), (1,), (0, 0)), (3, 1, 2, 0), 2)])
        return untrained_drafter(PPD(), model, plan)
    if kind == "heads":
        return untrained_drafter(Hydra(), model, efficient([3, 2]))
    return union([Suffix()], model, 4)


@pytest.mark.parametrize("kind", ["probes", pytest.param("heads", marks=pytest.mark.slow), "lookup"])
def test_same_tokens_as_autoregressive_through_the_kernels(monkeypatch, kind):
    model, prompts, kernels = make_tiny(OF_ITS_OWN), make_prompts(3), set()
    plain = generate(autoregressive(model), prompts, 16, batch_size=3)
    drafter, launch = drafter_of(kind, model), gpu.launch

    def watched(kernel, *args, **options):
        kernels.add(getattr(kernel, "func", kernel).__name__)
        return launch(kernel, *args, **options)

    for module in (gpu_attention, gpu_cache):
        monkeypatch.setattr(module, "launch", watched)
    monkeypatch.setattr(gpu, "_INTERPRET", True)
    ours = generate(drafter, prompts, 16, batch_size=3)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    assert kernels == {"_kernel", "_pick", "_write"}


def program(shapes, mesh, batch_size, drafter, dtype="bfloat16"):
    """A step on GPUs that are not here."""
    base = abstract_base(shapes, dtype, mesh)
    return compiled(lower_step(*abstract_state(base, drafter, mesh, batch_size, CAPACITY), mesh))


def fixed(rows):
    return DeviceDrafter((), StaticTree(from_paths([(0,) * depth for depth in range(1, rows)]).arrays(0)))


def moved(text):
    """Arrays of four dimensions, as caches are, that a program copies or gathers."""
    return re.findall(r"= [^=]*\[\d+,\d+,\d+,\d+\][^=]* (?:copy|all-gather)(?:-start)?\(", text)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("rows", [1, 16])
def test_a_layer_attends_by_one_kernel_and_no_cache_is_copied(rows):
    text = program(SHAPES_OF_FOUR, absent_gpus(MeshConfig()), 1, fixed(rows))
    assert not moved(text)
    kernels = re.findall(r'= .* custom-call\(.*custom_call_target="__gpu\$xla.gpu.triton"', text)
    assert len(kernels) == SHAPES_OF_FOUR.num_layers + 2  # one picks the path, and one writes it


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2}])
def test_two_gpus_gather_no_cache(axes):
    shapes = dataclasses.replace(SHAPES_OF_FOUR, num_heads=8, num_kv_heads=4)
    text = program(shapes, absent_gpus(MeshConfig(**axes)), 2, fixed(16))
    assert not moved(text)
    assert len(re.findall("xla.gpu.triton", text)) == shapes.num_layers + 2
