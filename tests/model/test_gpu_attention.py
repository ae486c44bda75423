"""The attention kernel for GPUs, interpreted on the CPU, and what it is lowered to."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh

from jaxspec.errors import UserError
from jaxspec.model import gpu, gpu_attention
from jaxspec.model.attention import Context, attend_packed, masks_of, of_layer, reach_of
from jaxspec.model.cache import Cache
from jaxspec.weights.load import default_dtype, load_model

EPSILON = 1e-5


def mesh_of(kind, platform="gpu"):
    """Of one device, of which no more is known."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return AbstractMesh((1,), ("data",), abstract_device=device)


def random_tree(rng, count):
    """[R, R] bool: which nodes of a random tree are ancestors of which, themselves included."""
    sees = np.eye(count, dtype=bool)
    for node in range(1, count):
        sees[node] |= sees[rng.integers(node)]
    return sees


def given(lengths, rows, heads, group, size, capacity, window=None, normed=False, each=False, dtype="float32"):
    """Arguments of `attend_packed`: a random tree and random lengths per text, or `each` row with its own."""
    rng, B = np.random.default_rng(0), len(lengths)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    qkv, norms = normal(B, rows, heads, group + 2, size), (1 + normal(size) / 9, 1 + normal(size) / 9)
    cache = Cache(*((normal(B, heads, capacity, size),) for _ in range(2)))
    mask = jnp.asarray(np.stack([random_tree(rng, rows) for _ in lengths])[:, None])
    visible = jnp.asarray(lengths, jnp.int32)[:, None]
    if each:
        visible = jnp.asarray(rng.integers(0, capacity + 1, (B, rows)), jnp.int32)
    positions = visible + jnp.asarray(rng.integers(0, 9, (B, rows)), jnp.int32)
    context = Context(positions, mask, cache, visible)
    angles = 3 * jnp.asarray(rng.normal(size=(B, rows, size // 2)), jnp.float32)
    near, old = masks_of(context, window)
    rest = (near, of_layer(cache, 0), old, None, reach_of(context, window))
    return qkv, norms if normed else (), angles, EPSILON, *rest


def without(arguments):
    """The same by `attend`."""
    return (*arguments[:-1], None)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(gpu, "_INTERPRET", True)


run = jax.jit(attend_packed, static_argnums=3)

CASES = {
    "edges": dict(lengths=(0, 1, 127, 128, 129, 200), rows=5, heads=2, group=2, size=8, capacity=200),
    "one row": dict(lengths=(70,), rows=1, heads=1, group=1, size=64, capacity=80),
    "many rows": dict(lengths=(9, 33), rows=40, heads=1, group=3, size=12, capacity=33, normed=True),
    "window": dict(lengths=(2, 150), rows=20, heads=1, group=2, size=8, capacity=160, window=17),
    "rows of their own": dict(lengths=(0, 0), rows=6, heads=2, group=1, size=8, capacity=50, each=True),
    "long": dict(lengths=(0, 3, 1000, 2000), rows=6, heads=1, group=2, size=8, capacity=2000),
    "long window": dict(lengths=(256, 1999), rows=70, heads=1, group=1, size=8, capacity=2000, window=300),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_attend(interpreted, case):
    arguments = given(**CASES[case])
    for ours, plain in zip(run(*arguments), run(*without(arguments)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)


def test_it_is_differentiated_as_attend(interpreted):
    arguments = given((3, 8), 4, 1, 2, 8, 16)

    def loss(qkv, arguments):
        return sum(jnp.sum(jnp.sin(x)) for x in attend_packed(qkv, *arguments))

    gradient = jax.jit(jax.grad(lambda qkv, rest: loss(qkv, (*rest[:2], EPSILON, *rest[2:]))))
    ours, plain = (
        gradient(qkv, (norms, angles, *rest)) for qkv, norms, angles, _, *rest in (arguments, without(arguments))
    )
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [{"cached": None}, {"rows": 129}, {"groups": 2}, {"dtype": "bfloat16"}])
def test_where_attend_stays(interpreted, monkeypatch, change):
    """Without a cache, with many rows or groups, or with a cache of another type."""
    monkeypatch.setattr("jaxspec.model.attention.attend_step", lambda *_: pytest.fail("the kernel ran"))
    qkv, norms, angles, epsilon, mask, cached, old, prefix, reach = given((3,), change.get("rows", 4), 1, 2, 8, 16)
    if "cached" in change:
        cached = old = reach = None
    if "groups" in change:
        mask = mask.reshape(1, 2, 2, 4)[..., :2]
    if "dtype" in change:
        cached = jax.tree.map(lambda x: x.astype(change["dtype"]), cached)
    function = functools.partial(attend_packed, epsilon=epsilon)
    jax.eval_shape(function, qkv, norms, angles, mask=mask, cached=cached, cached_mask=old, prefix=prefix, reach=reach)


def lowered(arguments, monkeypatch, capfd):
    """The kernels' text in a program for an H100 that is not here."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H100 80GB HBM3")):
        reach = reach_of(Context(arguments[-1].positions, None, Cache((), ()), arguments[-1].visible), None)
        assert reach is not None
        function = jax.jit(lambda *arrays: attend_packed(*arrays[:3], EPSILON, *arrays[3:]))
        function.trace(*arguments[:3], *arguments[4:]).lower(lowering_platforms=("cuda",))
    return capfd.readouterr().out


@pytest.mark.parametrize("capacity", [64, 2048])
def test_float32_is_never_rounded_to_tf32(interpreted, monkeypatch, capfd, capacity):
    arguments = given((5,), 4, 1, 2, 32, capacity)
    monkeypatch.setattr(gpu, "_INTERPRET", False)
    text = lowered(arguments, monkeypatch, capfd)
    assert text.count("tt.dot ") >= 6 and "tf32" not in text
    monkeypatch.setattr(gpu_attention, "_dot", functools.partial(jnp.dot, precision="default"))
    assert "tf32" in lowered(arguments, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", True),
        ("NVIDIA A100-SXM4-80GB", "gpu", True),
        ("Tesla T4", "gpu", False),
        ("TPU v5 lite", "tpu", False),
    ],
)
def test_devices_that_have_kernels(monkeypatch, kind, platform, expected):
    assert not gpu.has_kernels()  # here
    with jax.sharding.use_abstract_mesh(mesh_of(kind, platform)):
        assert gpu.has_kernels() == expected
        monkeypatch.setenv("JAXSPEC_KERNELS", "0")
        assert not gpu.has_kernels()


@dataclasses.dataclass
class Card:
    """A GPU of this process."""

    compute_capability: str
    platform: str = "gpu"
    device_kind: str = "a card"


@pytest.mark.parametrize(
    ("capability", "note"), [("7.5", "a card: .* a GPU of 8.0 or later"), ("9.0", "^$"), ("gfx942", "8.0")]
)
def test_an_older_card_says_so(monkeypatch, capability, note):
    monkeypatch.setattr(jax, "devices", lambda: [Card(capability)])
    assert re.search(note, gpu.plain_note())


@pytest.mark.parametrize(("capability", "dtype"), [("7.5", "float16"), ("8.0", "bfloat16"), ("gfx942", "bfloat16")])
def test_bases_are_loaded_in_float16_where_there_is_no_bfloat16(monkeypatch, capability, dtype):
    monkeypatch.setattr(jax, "devices", lambda: [Card(capability)])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert default_dtype() == dtype
    if dtype == "float16":
        with pytest.raises(UserError, match="dtype exact: a card has no bfloat16"):
            load_model(dtype="exact")


def test_a_cpu_has_nothing_to_say():
    assert gpu.plain_note() == ""
