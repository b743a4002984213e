"""Compiling for a GPU that this machine need not have."""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from lab_kernels import add_one, blackwell_matmul, matmul, num_sms_built_for, shifted, sum_of_tiles

import lab
from lab import toolchain

X = jax.ShapeDtypeStruct((128, 128), jnp.float32)
A = jax.ShapeDtypeStruct((256, 256), jnp.float16)


def test_both_gpus_in_one_process_in_turn():
    # Mosaic hands ptxas the first architecture of the process: the order is the point.
    for gpu, target in (("h200", "sm_90a"), ("b200", "sm_100a"), ("h200", "sm_90a")):
        compiled = lab.compile_for(gpu, add_one, X)
        assert f".target {target}" in compiled.ptx
        assert f".target\t{target}" in compiled.sass
        assert 16 <= compiled.registers <= 255
        assert compiled.spill_bytes == 0
        assert compiled.smem_bytes == 64 * 128 * 4 + 8  # The tile and one barrier.
        assert 0 < compiled.compile_seconds < 60
        assert compiled.gpu == gpu


FIRST = """
import jax, jax.numpy as jnp
from lab_kernels import add_one
import lab

x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
assert ".target sm_100a" in lab.compile_for("b200", add_one, x).ptx
print([launch.is_kernel for launch in lab.launches("h200", add_one, x)])
if lab.on_gpu():
    assert (add_one(jnp.zeros((128, 128))) == 1).all()
"""


def test_a_process_that_begins_with_another_gpu_still_compiles_whole_programs():
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[True]", done.stderr[-2000:]


def test_each_gpu_has_its_own_tensor_core():
    a = jax.ShapeDtypeStruct((128, 128), jnp.float16)
    compiled = lab.compile_for("b200", blackwell_matmul, a, a)
    assert "tcgen05.mma" in compiled.ptx and "UTCHMMA" in compiled.sass
    with pytest.raises(ValueError, match="uses (tcgen05|tmem), which 'h200' has not"):
        lab.compile_for("h200", blackwell_matmul, a, a)
    with pytest.raises(ValueError, match="uses wgmma, which 'b200' has not"):
        lab.compile_for("b200", matmul, a, a)


def test_a_second_compile_of_the_same_kernel_tells_the_same():
    first, second = lab.compile_for("h200", add_one, X), lab.compile_for("h200", add_one, X)
    assert (first.registers, first.smem_bytes, first.ptx) == (second.registers, second.smem_bytes, second.ptx)


def test_a_kernel_that_spills():
    spills = lab.compile_for("h200", lambda a, b: matmul(a, b, tile_n=256), A, A)
    fits = lab.compile_for("h200", matmul, A, A)
    assert spills.registers == 255 and spills.spill_bytes > 500
    assert any("serialized" in remark for remark in spills.remarks)
    assert fits.registers < 255 and fits.spill_bytes == 0 and fits.remarks == ()
    assert "wgmma" in fits.ptx and "HGMMA" in fits.sass


def test_kernels_of_one_function_are_listed():
    compiled = lab.compile_for("b200", lambda x, a: (add_one(add_one(x)), jnp.sin(x)), X, A)
    assert len(compiled.kernels) == 2
    compiled = lab.compile_for("h200", lambda x, a: (add_one(x), matmul(a, a)), X, A, name="both")
    small, large = compiled.kernels
    assert compiled.name == "both"
    assert (small.smem_bytes, large.smem_bytes) == (32776, compiled.smem_bytes)
    assert compiled.registers == max(small.registers, large.registers)
    assert "wgmma" not in small.ptx and "wgmma" in large.ptx


def test_the_kernel_is_built_for_the_sms_of_the_named_gpu():
    x = jax.ShapeDtypeStruct((128,), jnp.int32)
    jitted = jax.jit(num_sms_built_for)  # Traced for one GPU, it must not serve for the other.
    assert "132" in lab.compile_for("h200", jitted, x).ptx
    assert "148" in lab.compile_for("b200", jitted, x).ptx


def test_nothing_is_printed_and_nothing_left_behind(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # For C++.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = dict(os.environ)
    for gpu in ("h200", "b200"):  # ptxas fails inside of JAX for one of them.
        lab.compile_for(gpu, add_one, X)
    assert capfd.readouterr() == ("", "") and os.listdir(tmp_path) == []
    assert os.environ == environment


def test_output_still_goes_where_it_went(capfd):
    lab.compile_for("h200", add_one, X)
    os.write(1, b"to one")
    os.write(2, b"to two")
    assert capfd.readouterr() == ("to one", "to two")


SHARDED = jax.P("x")


@pytest.mark.parametrize("devices", [2, 4, {"x": 2, "y": 2}, {"y": 2, "x": 4}], ids=str)
def test_a_kernel_that_writes_to_another_gpu(devices):
    fn = jax.shard_map(shifted, in_specs=SHARDED, out_specs=SHARDED)
    compiled = lab.compile_for("h200", fn, X, devices=devices)
    assert "red.release.sys" in compiled.ptx and "fence.acquire.sys" in compiled.ptx
    assert compiled.spill_bytes == 0 and compiled.registers <= 255 and len(compiled.kernels) == 1


def test_kernels_for_several_gpus_are_listed_beside_each_other():
    fn = jax.shard_map(lambda x: shifted(shifted(x) + 1), in_specs=SHARDED, out_specs=SHARDED)
    assert len(lab.compile_for("h200", fn, X, devices=2).kernels) == 2


def test_no_mesh_is_left_behind():
    fn = jax.shard_map(shifted, in_specs=SHARDED, out_specs=SHARDED)
    before = jax.sharding.get_abstract_mesh()
    lab.compile_for("h200", fn, X, devices=2)
    assert jax.sharding.get_abstract_mesh() == before
    with pytest.raises(ValueError, match="evenly divisible"):  # It raises inside of the mesh.
        lab.compile_for("h200", fn, jax.ShapeDtypeStruct((127, 128), jnp.float32), devices=2)
    assert jax.sharding.get_abstract_mesh() == before
    assert lab.compile_for("h200", add_one, X).spill_bytes == 0


@pytest.mark.parametrize("devices", [0, -1, 2.0, True, {}, {"x": 0}, "4"], ids=str)
def test_devices_that_make_no_mesh_are_refused(devices):
    with pytest.raises(ValueError, match=r"devices = .*; it must be a number of GPUs.*devices=4 or devices=dict"):
        lab.compile_for("h200", add_one, X, devices=devices)


def test_an_unknown_gpu_is_refused_by_name():
    with pytest.raises(ValueError, match="'a100' is not known; it must be one of 'h200', 'b200'"):
        lab.compile_for("a100", add_one, X)


def test_arrivals_that_do_not_wait_for_loads_are_found():
    tiles = jax.ShapeDtypeStruct((5, 64, 128), jnp.float32)
    found = {fence: lab.compile_for("h200", functools.partial(sum_of_tiles, fence=fence), tiles) for fence in (0, 1)}
    (arrival,) = found[False].early_arrivals
    assert arrival.startswith("SYNCS.ARRIVE") and ", after LDS" in arrival
    assert found[True].early_arrivals == []
    assert dataclasses.replace(found[True], kernels=tuple(found.values())).early_arrivals == [arrival]


# From a kernel in which ptxas 13.0 wrote a constant of the second product while the first one read its register.
OVERWRITTEN = """
HGMMA.64x64x16.F32 R24, R56, gdesc[UR20].tnspB, RZ, !UPT
HGMMA.64x64x16.F32 R24, R60, gdesc[UR4].tnspB, R24, gsb0
IMAD.MOV.U32 R57, RZ, RZ, 0x3c003c00
HGMMA.64x64x16.F32 R24, R56, gdesc[UR52].tnspB, R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x1
@P0 LDS.128 R60, [R57]
ISETP.NE.AND P1, PT, R58, RZ, PT
LDSM.16.M88.4 R56, [R2]
WARPGROUP.DEPBAR.LE gsb0, 0x0
SHFL.IDX PT, R56, R57, RZ, 0x1f
"""


def test_writes_to_registers_that_a_wgmma_reads_are_found():
    """Not once its group has been waited for, and not where a register is read."""
    record = dict.fromkeys(field.name for field in dataclasses.fields(lab.compiling.Compiled)) | dict(kernels=())
    compiled = lab.compiling.Compiled(**record)
    vars(compiled)["sass"] = "".join(f"/*0000*/ {line} ;\n" for line in OVERWRITTEN.split("\n") if line)
    early, late = compiled.overwritten_operands
    assert early.startswith("IMAD.MOV.U32 R57, RZ, RZ, 0x3c003c00, after HGMMA.64x64x16.F32 R24, R56, gdesc[UR20]")
    assert late.startswith("LDSM.16.M88.4 R56, [R2], after HGMMA.64x64x16.F32 R24, R56, gdesc[UR52]")


def test_instructions_and_blocks_that_fit():
    compiled = lab.compile_for("h200", add_one, X)
    assert compiled.threads == 128 and compiled.opcodes["EXIT"] >= 1
    assert sum(compiled.opcodes.values()) == len(compiled.instructions) > 10
    fits = lambda **how: dataclasses.replace(compiled, **how).blocks_per_sm
    assert fits(registers=16, smem_bytes=0) == 16  # 2,048 threads.
    assert fits(registers=129, smem_bytes=0) == 3  # 136 registers each.
    assert fits(registers=16, smem_bytes=115_712) == 2 and fits(registers=16, smem_bytes=115_713) == 1


def test_lane_semantics_are_refused_by_name():
    lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

    def body(x, o):
        o[...] = x[...] + 1

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((256,), jnp.float32), compiler_params=lane)
    with pytest.raises(ValueError, match="has Lane semantics .*use Warpgroup semantics"):
        lab.compile_for("h200", kernel, jax.ShapeDtypeStruct((256,), jnp.float32))


def test_a_function_without_kernels_is_refused():
    with pytest.raises(ValueError, match="launches no Mosaic GPU kernel"):
        lab.compile_for("h200", lambda x: x + 1, X)


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_function_prints_while_it_is_traced_is_shown(capsys, raises):
    def aloud(x):
        print("traced with", x.shape)
        return add_one(x).reshape(3 if raises else -1)

    with pytest.raises(TypeError) if raises else contextlib.nullcontext():
        lab.compile_for("h200", aloud, X)
    assert capsys.readouterr().out == f"traced with {X.shape}\n"


def test_too_much_shared_memory_is_refused():
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        lab.compile_for("h200", lambda a: matmul(a, a, tile_m=256, tile_n=256), A)


@pytest.mark.parametrize("missing", ["jax_plugins.xla_cuda13", "ptxas"])
def test_missing_wheels_are_named_with_what_to_install(monkeypatch, missing):
    find_spec = toolchain.importlib.util.find_spec
    hidden = {"jax_plugins.xla_cuda13": ("jax_plugins.xla_cuda13",), "ptxas": ("nvidia",)}[missing]
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.os.path, "exists", lambda path: False)
    toolchain.tool.cache_clear()
    toolchain.device.cache_clear()
    with pytest.raises(lab.ToolchainMissing, match=r'pip install "pallas-cookbook\[aot\]"'):
        lab.compile_for("h200", add_one, X)
    toolchain.tool.cache_clear()
    toolchain.device.cache_clear()


@pytest.mark.parametrize("before", ["", "import jax; jax.devices()"])
def test_it_works_without_jax_platforms_before_and_after_jax_has_looked_for_gpus(before):
    code = f"""
{before}
import jax, jax.numpy as jnp
from lab_kernels import add_one
import lab
print(lab.compile_for("h200", add_one, jax.ShapeDtypeStruct((64, 128), jnp.float32)).registers > 0)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr
