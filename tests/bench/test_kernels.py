"""Kernels of GPU programs: counted in a small program's text, and in programs compiled for GPUs that are not here."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from jaxspec.bench.hlo import Array, parse_program
from jaxspec.bench.kernel_table import KernelsConfig, compile_steps
from jaxspec.bench.kernels import BANDWIDTH_SHARE, SECONDS, count_kernels
from jaxspec.config import MeshConfig
from jaxspec.decoding.drafter import DRAFTING
from jaxspec.errors import UserError
from jaxspec.parallel.chips import absent_mesh, check_gpu_compiler

# A step of one layer with a matrix [4, 8]: a product that is written out, one that is not, a conditional, a loop of
# three trips, and a cache [2, 4] of which one row is written in place.
PROGRAM = """HloModule jit_decode, is_scheduled=true

%fused_multiply (p0: bf16[4,8], p1: bf16[4]) -> bf16[4,8] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %p1 = bf16[4]{0} parameter(1)
  %wide = bf16[4,8]{1,0} broadcast(%p1), dimensions={0}
  ROOT %product = bf16[4,8]{1,0} multiply(%p0, %wide)
}

%fused_row (p0: bf16[100,4], p1: s32[]) -> bf16[4] {
  %p0 = bf16[100,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = bf16[1,4]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,4}
  ROOT %flat = bf16[4]{0} bitcast(%row)
}

%fused_write (p0: f32[2,4], p1: f32[1,4], p2: s32[]) -> f32[2,4] {
  %p0 = f32[2,4]{1,0} parameter(0)
  %p1 = f32[1,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[2,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%fused_gemm (p0: bf16[8,4], p1: bf16[4,8]) -> bf16[8,8] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[4,8]{1,0} parameter(1)
  ROOT %dot = bf16[8,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%dear (p: (f32[1,4])) -> (f32[1,4]) {
  %p = (f32[1,4]{1,0}) parameter(0)
  %x = f32[1,4]{1,0} get-tuple-element(%p), index=0
  %a = f32[1,4]{1,0} negate(%x)
  %b = f32[1,4]{1,0} negate(%a)
  ROOT %out = (f32[1,4]{1,0}) tuple(%b)
}

%cheap (p: (f32[1,4])) -> (f32[1,4]) {
  ROOT %p = (f32[1,4]{1,0}) parameter(0)
}

%trip (p: (f32[1,4])) -> (f32[1,4]) {
  %p = (f32[1,4]{1,0}) parameter(0)
  %x = f32[1,4]{1,0} get-tuple-element(%p), index=0
  %a = f32[1,4]{1,0} copy(%x)
  ROOT %out = (f32[1,4]{1,0}) tuple(%a)
}

%more (p: (f32[1,4])) -> pred[] {
  %p = (f32[1,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%step (state: (bf16[4,8], bf16[100,4], s32[], f32[2,4], f32[1,4], bf16[8,4])) -> (bf16[4,8], f32[2,4]) {
  %state = (bf16[4,8]{1,0}, bf16[100,4]{1,0}, s32[], f32[2,4]{1,0}, f32[1,4], /*index=5*/bf16[8,4]{1,0}) parameter(0)
  %matrix = bf16[4,8]{1,0} get-tuple-element(%state), index=0
  %table = bf16[100,4]{1,0} get-tuple-element(%state), index=1
  %at = s32[] get-tuple-element(%state), index=2
  %cache = f32[2,4]{1,0} get-tuple-element(%state), index=3
  %fresh = f32[1,4]{1,0} get-tuple-element(%state), index=4
  %rows = bf16[8,4]{1,0} get-tuple-element(%state), index=5
  %one = bf16[4]{0} fusion(%table, %at), kind=kLoop, calls=%fused_row, metadata={op_name="step/take"}
  %outer = bf16[4,8]{1,0} fusion(%matrix, %one), kind=kLoop, calls=%fused_multiply, metadata={op_name="layers_0/dot"}
  %gemm = bf16[8,8]{1,0} fusion(%rows, %matrix), kind=kCustom, calls=%fused_gemm, metadata={op_name="layers_0/dot"}
  %argument = (f32[1,4]{1,0}) tuple(%fresh)
  %branch = (f32[1,4]{1,0}) conditional(%at, %argument, %argument), branch_computations={%cheap, %dear}
  %loop = (f32[1,4]{1,0}) while(%branch), condition=%more, body=%trip, backend_config={"known_trip_count":{"n":"3"}}
  %new = f32[1,4]{1,0} get-tuple-element(%loop), index=0
  %written = f32[2,4]{1,0} fusion(%cache, %new, %at), kind=kLoop, calls=%fused_write
  ROOT %out = (bf16[4,8]{1,0}, f32[2,4]{1,0}) tuple(%outer, %written)
}

%unfinished (state: (bf16[4,8])) -> pred[] {
  %state = (bf16[4,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (argument: (bf16[4,8])) -> (bf16[4,8]) {
  %argument = (bf16[4,8]{1,0}) parameter(0)
  ROOT %while = (bf16[4,8]{1,0}) while(%argument), condition=%unfinished, body=%step
}
"""


def test_a_program_is_read_as_instructions():
    program = parse_program(PROGRAM)
    step = program.loop_body()
    assert program.entry == "main" and step.name == "step"
    one = step.by_name["one"]
    assert one.operands == ("table", "at") and one.computations("calls") == ["fused_row"]
    assert one.arrays == (Array("bf16", (4,)),) and one.arrays[0].size == 8
    assert step.by_name["branch"].computations("branch_computations") == ["cheap", "dear"]
    assert step.by_name["loop"].trips == 3 and program.computations["main"].root.trips is None
    assert [user.name for user in step.users["matrix"]] == ["outer", "gemm"]


def test_kernels_of_a_step():
    kernels = count_kernels(PROGRAM, {(4, 8)})
    assert kernels.layers == 2  # the product that is written out, and the one that is not
    assert kernels.in_branches == 2 + 3  # the dearer branch, and three trips
    assert kernels.outside == 2 + kernels.in_branches  # the embedding and the cache besides
    # of the table one row, of the cache nothing
    branches = 16 * (2 + 3)
    assert kernels.read == (8 + 4) + (64 + 8) + (64 + 64) + branches + (16 + 4)
    assert kernels.written == 8 + 64 + 128 + branches + 16
    assert kernels.products == 128
    assert kernels.large == {"bf16[4,8]": 1}  # what a product returns is its own affair
    seconds = (kernels.read + kernels.written) / (BANDWIDTH_SHARE * 1e9) + 9 * SECONDS
    assert kernels.least_seconds(1e9) == pytest.approx(seconds)


def test_a_kernel_that_writes_into_its_arguments():
    """Of a custom call the arguments that it returns are neither read nor written, but for what is new."""
    call = (
        '%call = (f32[2,4]{1,0}) custom-call(%cache, %new, %at), custom_call_target="__gpu$xla.gpu.triton", '
        "output_to_operand_aliasing={{0}: (0, {})}"
    )
    fusion = "%written = f32[2,4]{1,0} fusion(%cache, %new, %at), kind=kLoop, calls=%fused_write"
    written = "%written = f32[2,4]{1,0} get-tuple-element(%call), index=0"
    kernels, before = count_kernels(PROGRAM.replace(fusion, f"{call}\n  {written}")), count_kernels(PROGRAM)
    assert (kernels.total, kernels.read) == (before.total, before.read)
    assert kernels.written == before.written + 4  # the place where it writes counts as new


def test_a_product_that_is_added_to_an_operand():
    """It writes that, not the operands that it multiplies."""
    fusion = "%gemm = bf16[8,8]{1,0} fusion(%rows, %matrix), kind=kCustom, calls=%fused_gemm"
    call = '%gemm = (bf16[8,8]{1,0}, s8[4096]{0}) custom-call(%rows, %matrix, %sum), custom_call_target="__cublas$gemm"'
    total = "%sum = bf16[8,8]{1,0} copy(%rows)"
    text = PROGRAM.replace(fusion, f"{total}\n  {call}, output_to_operand_aliasing={{{{0}}: (2, {{}})}}")
    kernels, before = count_kernels(text), count_kernels(PROGRAM)
    assert kernels.products == before.products == 128
    assert kernels.read == before.read + 64 + 128  # by the copy, and of the sum


def test_a_compiler_of_another_jax_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.0")
    with pytest.raises(UserError, match=r"jax-cuda13-plugin 0\.1\.0, and JAX is .*pip install --no-deps"):
        check_gpu_compiler()


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(UserError, match="needs its compiler, but no GPU; install it with: pip install --no-deps"):
        absent_mesh(MeshConfig(), "h100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "v5e:2x2x1"}, "kernels are those of a GPU, h100"),
        ({"rows": (1, 0)}, "rows must be at least 1, got 0"),
        ({"batch_size": -2}, "batch-size must be at least 1"),
        ({"rows": (), "drafters": ()}, "nothing to compile"),
    ],
)
def test_steps_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        compile_steps(KernelsConfig(**options), print)


def test_drafting_is_not_of_the_base():
    """A draft model has layers, too."""
    own = "layers_0/dot"
    kernels = count_kernels(PROGRAM.replace(own, f"{DRAFTING}/{own}"))
    assert (kernels.layers, kernels.total) == (0, count_kernels(PROGRAM).total)


def compiled_for(topology, *words):
    """The figures of a dry run for a GPU that is not here."""
    command = [sys.executable, "-m", "jaxspec", "decode", "--dry-run", "--json", "--topology", topology, *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the compiler for GPUs")
def test_a_union_compiled_for_a_gpu_that_is_not_here():
    found = compiled_for("h100", "--method", "eagle+suffix", "--tree", "best:16", "--max-length", "500")
    assert found["drafter"] == "eagle+suffix tree=best:16" and list(found["steps"]) == ["1", "16"]
    one, union = found["steps"].values()
    assert one["fits"] and union["fits"]
    names = ["library"] if jax.__version__ < "0.11" else ["triton", "library"]  # XLA's Triton did not take all products
    for name in names:
        alone, together = one["kernels"][name], union["kernels"][name]
        assert together["outside"] > alone["outside"] > 0
        assert together["read"] > 0.9 * found["weights_bytes"]
        assert not alone["large"] and not together["large"]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the compiler for GPUs")
@pytest.mark.exhaustive
def test_small_weights_are_read_as_they_are():
    """No kernel is written out: groups of rows that share a scale have a kernel of ours."""
    found = compiled_for("h100", "--weights", "int4", "--method", "suffix", "--tree", "best:16", "--max-length", "500")
    assert found["weights_bytes"] < 0.65 * found["parameters"]
    for step in found["steps"].values():
        kernels = step["kernels"]["triton"]
        assert not kernels["large"] and 0.9 < kernels["read"] / (found["weights_bytes"] + found["cache_bytes"]) < 1.5
