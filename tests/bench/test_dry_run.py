"""What a run would need, from shapes alone."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxspec.bench.absent import abstract_base, lower_step
from jaxspec.bench.dry_run import (
    decoding_lines,
    decodings,
    drafters_of,
    dry_run_decoding,
    dry_run_training,
    training_lines,
)
from jaxspec.bench.needs import device_bytes, measure_needs, needs_text, readable
from jaxspec.config import MeshConfig
from jaxspec.decoding.method import abstract_trainable
from jaxspec.errors import UserError
from jaxspec.methods import PPD, SPACE, DraftModel, HiddenTransfer
from jaxspec.model.cache import empty_cache
from jaxspec.parallel.chips import TPUS, absent_mesh
from jaxspec.training.run_config import RunConfig, check_config, load_config, load_configs
from jaxspec.training.settings import DataConfig, TrainConfig
from jaxspec.weights.params import parameter_count
from jaxspec.weights.shapes import SHAPES
from tests.helpers.marks import slow_ones
from tests.helpers.tiny import TINY, make_tiny, on_mesh

MESH = MeshConfig(2, 2, 2)
NAMES = {"bf16": "bfloat16", "f32": "float32", "s32": "int32", "u32": "uint32", "pred": "bool"}  # HLO's and JAX's
RUN = RunConfig(
    model="tiny", method=PPD(), mesh=MESH, data=DataConfig(batch_size=4, max_prompt_tokens=64),
    train=TrainConfig(batch_size=8, microbatch=4, sequence_length=96, insertions=8),
)  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return absent_mesh(MESH)[0]


@pytest.fixture(scope="module")
def training(mesh):
    """What an update of RUN needs."""
    return dry_run_training(RUN, mesh, None, "float32")


@pytest.mark.slow
def test_bytes_are_those_of_arrays_that_lie_there(training):
    params = on_mesh(make_tiny(), MESH).params
    one = jax.devices()[0]
    real = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards if s.device == one)
    assert training["weights_bytes"] == device_bytes(params) == real
    assert training["parameters"] == parameter_count(make_tiny().params)
    embeddings = 3 * 32
    assert training["trainable"] == embeddings and training["trainable_bytes"] == 4 * embeddings
    assert training["optimizer_bytes"] == 2 * 4 * embeddings + 4  # two moments, and a count of updates
    step = training["step"]
    assert step["unread"] == 0 and step["arguments"] > real and step["flops"] > 0 and step["temporaries"] > 0
    cache = empty_cache(TINY, 4, 512, jnp.dtype("float32"))  # 64 + 256, rounded up
    assert training["answers_cache_bytes"] == sum(x.nbytes for x in jax.tree.leaves(cache)) / 8
    assert "96 trainable" in training_lines("tiny", RUN, training)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "share"), [("int8", 0.55), ("int4", 0.35)])
def test_weights_in_few_bits(form, share):
    """They take their share of the memory; a base of few rows trains and decodes with a scale per column."""
    shapes = dataclasses.replace(TINY, hidden_size=256, intermediate_size=512)
    mesh = absent_mesh(MeshConfig())[0]
    base = {each: abstract_base(shapes, "bfloat16", mesh, form=each) for each in ("", form)}
    sizes = {each: device_bytes(found.params) for each, found in base.items()}
    assert sizes[form] < share * sizes[""]
    assert parameter_count(base[form].params) == parameter_count(base[""].params)
    run = dataclasses.replace(RUN, mesh=MeshConfig())
    plain, small = (dry_run_training(run, mesh, None, "float32", each) for each in ("", "int8"))
    assert small["weights_bytes"] < plain["weights_bytes"]
    steps = dry_run_decoding(run, mesh, None, 1, 64, "float32", form="int8")["steps"]
    assert set(steps) >= {1, 16}


@pytest.mark.slow
def test_passes_are_counted(mesh, training):
    """Each of the four parts of the batch takes as many sequences a pass as `microbatch` says."""
    train = dataclasses.replace(RUN.train, microbatch=1)
    parts = dry_run_training(dataclasses.replace(RUN, train=train), mesh, TPUS["v5e"], "float32")["step"]
    once = training["step"]
    assert (parts["passes"], once["passes"]) == (2, 1)
    weights = training["weights_bytes"] + training["trainable_bytes"]
    assert parts["memory_seconds"] == (parts["arguments"] + weights) / TPUS["v5e"].bandwidth
    assert 0.8 < 2 * parts["flops"] / once["flops"] < 1.25


@pytest.mark.slow
def test_of_several_stages_the_last_is_what_is_needed(mesh):
    """It runs all of Hidden Transfer's steps, the first one only its own."""
    runs = (HiddenTransfer(layers=(0, 0, 1), training=training) for training in ("separate", "joint"))
    separate, joint = (dry_run_training(dataclasses.replace(RUN, method=m), mesh, None)["step"] for m in runs)
    assert 0.8 < separate["flops"] / joint["flops"] < 1.1


@pytest.mark.slow
def test_zero_2_holds_weights_whole(mesh):
    run = dataclasses.replace(RUN, method=SPACE(tuning="full"))
    meshes = (dataclasses.replace(MESH, zero=zero) for zero in (3, 2))
    three, two = (dry_run_training(dataclasses.replace(run, mesh=config), mesh, None) for config in meshes)
    assert two["trainable_bytes"] > 1.5 * three["trainable_bytes"]
    assert two["optimizer_bytes"] == three["optimizer_bytes"]
    # the base that all this replaces is not read, and takes its room all the same
    assert three["step"]["unread"] == three["weights_bytes"]
    assert "unread weights" in training_lines("tiny", run, three)[-1]


METHODS = [PPD(), SPACE(), HiddenTransfer(layers=(0, 1, 1)), DraftModel(layers=(0, 2))]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_steps_of_1_16_and_64_rows(mesh, method):
    run = dataclasses.replace(RUN, method=method, draft_vocabulary=12)
    found = dry_run_decoding(run, mesh, TPUS["v5e"], 2, 128)
    assert all(rows <= most for rows, most in zip(found["steps"], (1, 16, 64), strict=True))
    one, many, most = found["steps"].values()
    assert one["flops"] < many["flops"] < most["flops"]
    assert found["trainable"] == parameter_count(abstract_trainable(method, TINY))
    words = f"{found['parameters']:,} of the base, {found['trainable']:,} trainable"
    assert words in decoding_lines("tiny", run, MESH, found)[1]
    assert (found["drafter_state_bytes"] > found["cache_bytes"] / 2) == isinstance(method, DraftModel)  # 2 of 3 layers
    assert most["arguments"] - one["arguments"] > 0.9 * (found["drafter_bytes"] + found["drafter_state_bytes"])
    assert all(step["fits"] for step in found["steps"].values())
    assert one["memory_seconds"] == one["arguments"] / TPUS["v5e"].bandwidth


def few_layers(config, monkeypatch):
    """The same run on as few layers as its method allows: compilers are slow, and layers are alike."""
    method, layers = config.method, 2
    if isinstance(getattr(method, "layers", None), tuple):
        layers = len(method.layers) + 1
        method = dataclasses.replace(method, layers=tuple(range(1, layers)))
    if getattr(method, "reads", ()):
        method = dataclasses.replace(method, reads=())
    if getattr(method, "shapes", None):
        method = dataclasses.replace(method, shapes=dataclasses.replace(method.shapes, num_layers=2))
    monkeypatch.setitem(SHAPES, "few-layers", dataclasses.replace(config.shapes, num_layers=layers))
    return dataclasses.replace(config, model="few-layers", method=method, mesh=MESH)


def kinds():
    """A config of each method and each kind of base: others have other sizes, or train for longer."""
    seen, chosen = set(), []
    for name, config in load_configs().items():
        shapes = config.shapes
        base = (shapes.num_heads // shapes.num_kv_heads, shapes.qkv_bias, shapes.head_norms, shapes.tie_embeddings)
        kind = {config.method.name, base}
        chosen += [name] if kind - seen else []
        seen |= kind
    return chosen


@pytest.mark.slow
def test_every_config_can_be_divided():
    for config in load_configs().values():
        check_config(dataclasses.replace(config, mesh=MeshConfig(tensor=2)))


OF_EACH_BASE = (
    "amphista_smollm2",
    "bita_70b",
    "dflash_qwen3_8b",
    "eagle_llama3_8b",
    "hydra_vicuna_7b",
    "space_qwen_14b",
)


@pytest.mark.parametrize("name", slow_ones(kinds(), OF_EACH_BASE, str))
def test_every_kind_of_config_compiles_and_counts_its_work(name, mesh, monkeypatch):
    config = few_layers(load_config(name), monkeypatch)
    train = dataclasses.replace(config.train, batch_size=4, microbatch=0)
    found = dry_run_training(dataclasses.replace(config, train=train), mesh, None)
    assert found["trainable_bytes"] > 0 and found["step"]["flops"] > 0
    one, *trees = dry_run_decoding(config, mesh, None, 1, 128)["steps"].items()
    assert one[0] == 1 and trees and all(step["flops"] > one[1]["flops"] for _, step in trees)


@pytest.mark.parametrize(
    ("mesh", "topology", "message"),
    [
        (MeshConfig(data=64), "", "needs 64 devices"),
        (MeshConfig(data=0), "", "at least 1"),
        (MeshConfig(), "v9:2x2", "write a GPU .h100.*or a generation of TPUs"),
    ],
)
def test_devices_that_cannot_be(mesh, topology, message):
    with pytest.raises(UserError, match=message):
        absent_mesh(mesh, topology)


def test_a_platform_without_cpu_devices_is_refused(monkeypatch):
    def devices(platform):
        raise RuntimeError(f"Unknown backend: '{platform}' requested")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match="set JAX_PLATFORMS=cpu, not 'cuda'"):
        absent_mesh(MeshConfig())


class TooLarge:
    """A step that a TPU's compiler refuses."""

    def compile(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 21.95G of 15.48G hbm.\nA long table")


def test_what_a_tpus_compiler_refuses_does_not_fit():
    found = measure_needs(TooLarge(), None, TPUS["v5e"])
    assert found == {"fits": False, "reason": "RESOURCE_EXHAUSTED: Used 21.95G of 15.48G hbm."}
    assert needs_text(found).startswith("DOES NOT FIT (RESOURCE_EXHAUSTED: Used 21.95G")
    with pytest.raises(jax.errors.JaxRuntimeError):  # of no chip's memory
        measure_needs(TooLarge(), None, None)


def dry_run(command, **environment):
    """What a command says in a process of its own."""
    words = [sys.executable, "-m", *command.split(), "--dry-run", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | environment)
    return json.loads(ended.stdout)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.exhaustive
def test_a_large_base_trained_on_tpus_that_are_not_here():
    """A command in a process of its own, on four chips of a kind that was never here."""
    pytest.importorskip("libtpu")
    quickly = {"JAX_OPTIMIZATION_LEVEL": "O0", "JAX_MEMORY_FITTING_LEVEL": "O0"}  # else minutes
    found = dry_run("jaxspec train --config bita_7b --train.microbatch 1 --mesh.fsdp 4 --topology v5e:2x2x1", **quickly)
    assert found["trainable"] / found["parameters"] == pytest.approx(6.2e-4, rel=0.05)
    assert found["weights_bytes"] == pytest.approx(2 * found["parameters"] / 4, rel=0.01)
    assert found["step"]["fits"]


# Not copies into fast memory, which are asynchronous; but what all devices gather is a copy, too.
COPY = re.compile(r"= (\w+)\[([\d,]+)\]\S* (?:copy|transpose|all-gather)\(")


def lowered_loops(config, mesh):
    """The decoding loops of 1, 16 and 64 rows."""
    base = abstract_base(config.shapes, "bfloat16", mesh)
    return [lower_step(*both, mesh) for both in decodings(drafters_of(config, base), base, mesh, 1, 2000).values()]


def copied(loop):
    """Bytes of every array over 1 MB that a compiled program copies, transposes or gathers."""
    found = COPY.findall(loop.compile().as_text())
    sizes = [math.prod(map(int, shape.split(","))) * jnp.dtype(NAMES.get(kind, kind)).itemsize for kind, shape in found]
    return [size for size in sizes if size > 2**20]


@pytest.mark.slow
@pytest.mark.optimized
def test_loops_compiled_for_tpus_copy_neither_weights_nor_caches(monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setitem(SHAPES, "three layers", dataclasses.replace(SHAPES["lmsys/vicuna-7b-v1.3"], num_layers=3))
    config = dataclasses.replace(load_config("ppd_vicuna_7b"), model="three layers")
    mesh, _ = absent_mesh(MeshConfig(tensor=4), "v5e:2x2x1")
    loops = lowered_loops(config, mesh)
    assert len(loops) == 3 and not any(map(copied, loops))
    monkeypatch.setattr("jaxspec.model.cache.pin_layouts", lambda cache, rows: (cache, rows))
    jax.clear_caches()  # of what was traced with the layouts
    assert all(len(copied(loop)) >= 12 for loop in lowered_loops(config, mesh))  # both ways
    jax.clear_caches()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.00 B"), (512, "512 B"), (1.07e10, "10.7 GB"), (6.31e12, "6.31 TB"), (4e21, "4000 EB")]
)
def test_large_numbers_are_readable(count, text):
    assert readable(count) == text
