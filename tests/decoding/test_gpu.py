"""Decoding through the kernels for GPUs: interpreted on the CPU, and compiled for GPUs that are not here."""

import dataclasses

import pytest

from jaxspec.drafters.drafter import autoregressive
from jaxspec.generation.generate import generate
from jaxspec.methods import PPD, Hydra, Suffix
from jaxspec.model import gpu, gpu_attention, gpu_cache
from jaxspec.trees import State, efficient, make_plan
from tests.helpers.methods import union, untrained_drafter
from tests.helpers.tiny import TINY, make_prompts, make_tiny

OF_ITS_OWN = dataclasses.replace(TINY, rms_norm_eps=2e-5)  # so that no program of another test is taken


def drafter_of(kind, model):
    if kind == "probes":
        plan = make_plan([State((), (3,), 0), State(((0,), (1,), (0, 0)), (3, 1, 2, 0), 2)])
        return untrained_drafter(PPD(), model, plan)
    if kind == "heads":
        return untrained_drafter(Hydra(), model, efficient([3, 2]))
    return union([Suffix()], model, 4)


@pytest.mark.parametrize("kind", ["probes", "heads", "lookup"])
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
