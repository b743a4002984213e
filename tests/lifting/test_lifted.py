"""A kernel on its way out: exported and loaded elsewhere, under meshes of both kinds, and from PyTorch."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType

import cookbook
import lab
from bench.peers import imports
from cookbook import _host
from lab import toolchain

H200 = _host.Target("NVIDIA H200", 132)
ROWS, VECTOR = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512,), jnp.bfloat16)
HEADS, TOKENS = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 256, 4), jnp.float32)
# An op of each family that one GPU runs, with its operands: the leading axis of each but weights is that of a batch.
OPS = {
    "add": (cookbook.add, [ROWS, ROWS], []),
    "rms_norm": (cookbook.rms_norm, [ROWS], [VECTOR]),
    "layer_norm": (cookbook.layer_norm, [ROWS], [VECTOR, VECTOR]),
    "matmul": (cookbook.matmul, [ROWS], [jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)]),
    "attention": (functools.partial(cookbook.attention, is_causal=True), [HEADS] * 3, []),
    "gated_delta_rule": (cookbook.gated_delta_rule, [HEADS] * 3 + [TOKENS] * 2, []),
    "kda": (cookbook.kda, [HEADS] * 3 + [jax.ShapeDtypeStruct(HEADS.shape, jnp.float32), TOKENS], []),
}


@pytest.fixture
def h200():
    try:
        return toolchain.devices("h200", 2)
    except lab.ToolchainMissing as missing:
        pytest.skip(str(missing))


def exported(fn, *avals) -> export.Exported:
    with _host.building_for(H200):
        return export.export(jax.jit(lambda *args: fn(*args)), platforms=["cuda"])(*avals)


@pytest.mark.parametrize("name", OPS)
def test_an_exported_op_needs_no_exception_and_compiles(name, h200):
    fn, batched, weights = OPS[name]
    program = exported(fn, *batched, *weights)
    assert program.platforms == ("cuda",) and not program.disabled_safety_checks
    there = jax.sharding.SingleDeviceSharding(h200[0])
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in (*batched, *weights)]
    assert jax.jit(program.call).lower(*avals).compile().memory_analysis().output_size_in_bytes


LOAD = """
import pathlib, sys
import jax
from jax import export

program = export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
assert not [name for name in sys.modules if name.split(".")[0] == "cookbook"]
print(*program.platforms, *map(str, program.out_avals))
try:
    jax.jit(program.call)(*(jax.numpy.ones(aval.shape, aval.dtype) for aval in program.in_avals))
    print("ran")
except ValueError as error:
    print("exported for platforms" in str(error))
"""


@pytest.mark.skipif(not imports("flatbuffers"), reason="serializing needs flatbuffers")
def test_another_process_loads_the_bytes_without_the_package(tmp_path):
    fn, batched, weights = OPS["rms_norm"]
    path = tmp_path / "op.bin"
    path.write_bytes(exported(fn, *batched, *weights).serialize())
    command = [sys.executable, "-I", "-c", LOAD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["cuda", "bfloat16[1024,512]", "ran" if lab.on_gpu() else "True"]


@pytest.mark.parametrize("name", OPS)
def test_on_an_explicit_mesh_a_kernel_needs_shard_map(name):
    fn, batched, weights = OPS[name]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    specs = (jax.P("data"),) * len(batched) + (jax.P(),) * len(weights)
    with jax.set_mesh(mesh), _host.building_for(H200):
        shared = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))
            for x, spec in zip((*batched, *weights), specs, strict=True)
        ]
        with pytest.raises(ValueError, match="is sharded over 'data': call it inside jax.shard_map"):
            jax.jit(lambda *args: fn(*args)).trace(*shared).lower(lowering_platforms=("cuda",))
        divided = jax.shard_map(fn, in_specs=specs, out_specs=jax.P("data"))
        assert "mosaic_gpu" in jax.jit(divided).trace(*shared).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("divides", [False, True])
def test_jit_alone_gathers_what_shard_map_leaves_where_it_is(divides, h200):
    mesh = jax.sharding.Mesh(np.array(h200), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    fn = cookbook.softmax
    if divides:
        fn = jax.shard_map(fn, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    with _host.building_for(H200), jax.default_device(h200[0]):
        aval = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=rows)
        text = jax.jit(lambda x: fn(x), out_shardings=rows).lower(aval).compile().as_text()
    assert ("all-gather" in text) == (not divides)


@pytest.mark.skipif(not lab.on_gpu() or not imports("torch"), reason="needs a GPU and PyTorch")
@pytest.mark.parametrize("name", ["softmax", "matmul"])
def test_from_pytorch_it_is_the_same_to_the_bit(name):
    import torch
    from jax.experimental.pallas import mosaic_gpu as plgpu

    op = getattr(cookbook, name)
    tensors = [torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(1 + (name == "matmul"))]
    got = jnp.from_dlpack(plgpu.as_torch_kernel(op)(*tensors))
    np.testing.assert_array_equal(got, jax.jit(op)(*map(jnp.from_dlpack, tensors)))
