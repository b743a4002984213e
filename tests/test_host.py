"""Where kernels run, without `lab`, and what makes an op at home in JAX."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import cookbook
import lab
from cookbook import _device, _host

A, B = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)


def test_interpreting():
    with _host.interpreting(num_sms=2):
        assert _host.require_target("matmul") == _host.Target("the GPU interpreter", 2, interpreted=True)
        np.testing.assert_array_equal(cookbook.matmul(A, B), np.full((64, 128), 64.0))
    assert _host._target.get() is None


@pytest.mark.parametrize("target", [_host.Target("cpu", 4), _host.Target("the GPU interpreter", 4)])
@pytest.mark.parametrize("forced_first", [True, False])
def test_a_kernel_for_a_gpu_is_not_interpreted(target, forced_first):
    """Its result would be NaN: it has what the interpreter cannot do."""
    contexts = [plgpu.force_gpu_interpret_mode(), _host.building_for(target)]
    first, second = contexts if forced_first else contexts[::-1]
    with first, second, pytest.raises(RuntimeError, match="are interpreted.*lab.interpret"):
        cookbook.matmul(A, B)


def test_a_kernel_for_the_interpreter_is_interpreted():
    with (
        _host.building_for(_host.Target("any", 4, interpreted=True)),
        pytest.raises(RuntimeError, match="are not interpreted"),
    ):
        cookbook.matmul(A, B)


HOPPER, BLACKWELL, AMPERE, CONSUMER = (
    ("NVIDIA H200", "9.0"), ("NVIDIA B200", "10.0"), ("NVIDIA A100", "8.0"), ("NVIDIA GeForce RTX 5090", "12.0")
)  # fmt: skip


@pytest.mark.parametrize(
    "op, major, gpu, message",
    [
        (
            "matmul",
            9,
            BLACKWELL,
            r"cookbook.matmul .* WGMMA, .*B200 has 10.0. For it there is cookbook.blackwell.matmul\. ",
        ),
        ("matmul_fp8", 9, BLACKWELL, r"For it there is cookbook.blackwell.matmul_mxfp8\. "),
        ("attention", 9, BLACKWELL, r"there is cookbook.blackwell.matmul or cookbook.blackwell.matmul_mxfp8\. "),
        ("blackwell.matmul", 10, HOPPER, r"tcgen05, .*H200 has 9.0. For it there is cookbook.matmul\. .*\"b200\""),
        ("ragged_dot", 9, BLACKWELL, r"For it there is cookbook.blackwell.ragged_dot\. "),
        ("blackwell.ragged_dot", 10, HOPPER, r"For it there is cookbook.ragged_dot\. "),
        ("blackwell.matmul_mxfp8", 10, HOPPER, r"For it there is cookbook.matmul_fp8\. "),
        ("matmul", 9, AMPERE, r"A100 has 8.0\. Say .*\"h200\""),
        ("blackwell.matmul", 10, CONSUMER, r"5090 has 12.0\. Say .*\"b200\""),
    ],
)
def test_tensor_cores_of_another_gpu(pretend_gpu, op, major, gpu, message):
    pretend_gpu(*gpu)
    with pytest.raises(RuntimeError, match=message):
        _host.require_tensor_cores(op, major)


@pytest.mark.parametrize("major, gpu", [(9, HOPPER), (10, BLACKWELL), (10, ("NVIDIA B300", "10.3"))])
def test_a_gpu_with_the_right_tensor_cores(pretend_gpu, major, gpu):
    pretend_gpu(*gpu)
    assert _host.require_tensor_cores("matmul", major) == _host.Target(gpu[0], 148)


@pytest.mark.parametrize("op", [cookbook.matmul, cookbook.matmul_wgmma])
def test_hoppers_kernels_refuse_a_blackwell(pretend_gpu, op):
    pretend_gpu(*BLACKWELL)
    with pytest.raises(RuntimeError, match="WGMMA, which Hopper alone has.*cookbook.blackwell"):
        op(A, B)


def test_kernels_without_tensor_cores_run_on_any_newer_gpu(pretend_gpu):
    pretend_gpu(*BLACKWELL)
    assert _host.require_target("softmax") == _host.Target("NVIDIA B200", 148)


# At home in JAX -------------------------------------------------------------------------------------------------------


def launch(x, y):
    """`x * y` of 256 values, by a kernel of two blocks."""

    def body(x_gmem, y_gmem, o_gmem):
        @pl.loop(0, 1)
        def _(i):
            where = pl.ds(jax.lax.div(jax.lax.axis_index("block") * 128, i + 1), 128)
            _device.store(o_gmem.at[where], x_gmem[where] * y_gmem[where])

    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _host.kernel(body, out_type=aval, grid=(2,), grid_names=("block",))(x, y)


def multiply(x, y):
    return _multiply(*_host.alike(x, y))


_multiply = jax.custom_vjp(launch)
_multiply.defvjp(lambda x, y: (launch(x, y), (x, y)), lambda kept, g: (launch(g, kept[1]), launch(g, kept[0])))


@pytest.mark.parametrize("spec", [(P("d"), P("d")), (P("d"), P()), (P(), P("d")), (P(), P())], ids=str)
def test_gradients_under_shard_map(spec):
    """With its defaults, which check over which axes a value varies."""
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    out_specs = P("d") if P("d") in spec else P()
    x, y = jnp.arange(256.0), jnp.arange(256.0) - 99
    sharded = jax.shard_map(multiply, mesh=mesh, in_specs=spec, out_specs=out_specs)
    out, pull = lab.run(lambda x, y: jax.vjp(sharded, x, y), x, y)
    np.testing.assert_array_equal(out, x * y)
    with lab.interpret():
        dx, dy = pull(x + 1)
        np.testing.assert_array_equal(dx, y * (x + 1))
        np.testing.assert_array_equal(dy, x * (x + 1))


@pytest.mark.parametrize("op", [cookbook.matmul, cookbook.softmax, cookbook.attention])
def test_a_mesh_axis_named_like_a_kernels_own_is_refused(op):
    """JAX would take the device's index for that of the block or the warpgroup, and say nothing."""
    avals = [jax.ShapeDtypeStruct((2, 64, 2, 64) if op is cookbook.attention else (64, 64), jnp.bfloat16)] * 3
    count, spec = {cookbook.matmul: (2, P()), cookbook.softmax: (1, P("role")), cookbook.attention: (3, P("role"))}[op]
    fn = jax.shard_map(lambda *args: op(*args), in_specs=(spec,) * count, out_specs=spec)
    with pytest.raises(ValueError, match="the mesh has an axis 'role'.*name the mesh's axis differently"):
        lab.compile_for("h200", fn, *avals[:count], devices=dict(role=2))


def test_names_of_kernels_axes_are_all_known():
    """Those that are written where a kernel is launched, and those of a configuration's clusters."""
    folder = pathlib.Path(_host.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py") if "lab" not in path.parts]
    found = {name for text in sources for name in re.findall(r'(?:lax\.axis_index\(|thread_name=)"(\w+)"', text)}
    found |= {name for text in sources for names in re.findall(r"_names=\(([^)]*)\)", text)
              for name in re.findall(r'"(\w+)"', names)}  # fmt: skip
    found |= {
        name for text in sources for name in re.findall(r'"(block_\w)"|dict\((part)=', text) for name in name if name
    }
    assert {"block", "role", "batch_index", "block_m", "part"} <= found <= _host.GRID_NAMES


def test_indices_have_32_bits_under_x64():
    """Without `_host.kernel` the loop's index has 64 and the block's 32: JAX does not divide one by the other."""
    x = jnp.arange(256.0)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(lab.run(launch, x, x), x * x)
        lab.compile_for("h200", launch, x, x)


@pytest.mark.parametrize("value", [2, np.int8(2), np.array(2), jnp.int32(2)])
def test_integer_options(value):
    option = _host.option("op", "n", value, int)
    assert option == 2 and type(option) is int and type(_host.option("op", "n", value, float)) is float


@pytest.mark.parametrize(
    "value, kind, fix",
    [
        (2.5, int, "n=2.5; must be one int: pass a whole number"),
        (64.0, int, "n=64.0; must be one int: pass 64"),
        (np.float32(64), int, "must be one int: pass 64"),
        (True, int, "n=True; must be one int: pass a whole number"),
        (1, bool, "n=1; must be one bool: pass True or False"),
        ("2", float, "n='2'; must be one float: pass a number"),
        (None, float, "n=None; must be one float: pass a number"),
        (1j, float, "must be one float"),
        ([2.0], float, "must be one float"),
        ([[2.0], [1.0, 2.0]], float, "must be one float"),
        (np.ones(1), float, "must be one float"),
        (float("inf"), float, "n=inf; must be finite in float32: leave it out for the default"),
        (np.float32("nan"), float, "n=nan; must be finite"),
        (1e39, float, "must be finite in float32"),
        (10**400, float, "must be finite in float32"),
    ],
)
def test_options_of_another_kind(value, kind, fix):
    with pytest.raises(ValueError, match="cookbook.op: .*" + re.escape(fix)):
        _host.option("op", "n", value, kind)


def test_other_options():
    assert (
        _host.option("op", "n", np.float64(0.1), float)
        == 0.1
        == round(_host.option("op", "n", jnp.float32(0.1), float), 6)
    )
    assert _host.option("op", "n", jnp.bfloat16(0.5), float) == 0.5
    assert _host.option("op", "n", 2**70, int) == 2**70
    assert _host.option("op", "n", jnp.array(True), bool) is True
    with pytest.raises(ValueError, match="cookbook.op: n is traced.*static_argnames"):
        jax.jit(lambda n: _host.option("op", "n", n, float))(0.5)


def test_array_likes():
    assert _host.as_array("op", "x", [[1.0, 2.0]]).shape == (1, 2)
    assert _host.as_array("op", "x", np.float32(3)).dtype == jnp.float32
    for no_array in (None, "1", {}, [[1], [2, 3]], 2**70, [None]):
        with pytest.raises(ValueError, match="cookbook.op: x=.*; must be an array .*: pass one, or numbers"):
            _host.as_array("op", "x", no_array)
    with pytest.raises(ValueError, match=r"cookbook.op: x is a Ref; must be an array: pass x\[...\]"):
        jax.jit(lambda x: _host.as_array("op", "x", jax.new_ref(x)))(1.0)


def test_configs():
    config = cookbook.softmax.Config(1)
    assert _host.require_config("softmax", config, cookbook.softmax.Config) is config
    assert _host.require_config("softmax", None, cookbook.softmax.Config) is None
    for other in (4, dict(tile_rows=1), cookbook.add.Config(), cookbook.softmax.Config):
        with pytest.raises(ValueError, match=r"config=.*; must be a cookbook.softmax.Config: pass cookbook.softmax"):
            _host.require_config("softmax", other, cookbook.softmax.Config)


def test_arrays_over_an_explicit_axis_are_refused():
    """JAX names refs and axes that the user has not; a kernel of a GPU would read a shard as if it were all."""
    mesh = jax.sharding.AbstractMesh((2, 3), ("d", "e"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    read = lambda x: _host.as_array("op", "x", x)
    with jax.sharding.use_abstract_mesh(mesh):
        for spec, over in ((P("d"), "'d'"), (P(None, "e"), "'e'"), (P(("d", "e")), "'d' and 'e'")):
            x = jax.ShapeDtypeStruct((6, 6), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
            with pytest.raises(
                ValueError, match=f"^cookbook.op: x is sharded over {over}: call it inside jax.shard_map"
            ):
                jax.eval_shape(read, x)
            assert jax.eval_shape(jax.shard_map(read, in_specs=spec, out_specs=spec), x).shape == (6, 6)


def test_forward_mode_is_refused():
    """By name, eagerly, under jit, and where a linearised function is called. Reverse mode is not, in any order."""

    def op(x, y):
        return _multiply(*_host.reverse_only("op", x, y))

    x = jnp.arange(256.0)
    loss = lambda x: (op(x, x - 9.0) ** 2).sum()
    refused = (
        lambda: jax.jvp(loss, (x,), (x,)),
        lambda: jax.jit(lambda x: jax.jvp(loss, (x,), (x,)))(x),
        lambda: jax.jvp(jax.jit(loss), (x,), (x,)),
        lambda: jax.linearize(loss, x)[1](x),
        lambda: jax.hessian(loss)(x),
    )
    with lab.interpret():
        for call in refused:
            with pytest.raises(
                ValueError, match="cookbook.op has no derivative in forward mode .*jax.grad.*op_reference"
            ):
                call()
        np.testing.assert_allclose(jax.grad(loss)(x), 2 * (x * (x - 9)) * (2 * x - 9), rtol=1e-5)


@pytest.mark.parametrize(
    "grid, launched",
    [
        ((65_535, 3), (65_535, 3)),
        ((65_536, 3), (3, 65_536)),
        ((2, 70_000, 3), (2, 3, 70_000)),
        ((300, 300, 5, 2), (2, 5, 300, 300)),  # JAX launches all but the last two axes as one.
        ((200, 300, 5, 2), (200, 300, 5, 2)),
        ((70_000,), (70_000,)),
        ((), ()),
    ],
)
def test_a_grid_of_many_blocks_is_launched_in_an_order_that_cuda_takes(grid, launched):
    names = tuple(f"axis_{size}_{i}" for i, size in enumerate(grid))
    found = _host._launchable(grid=grid, grid_names=names, num_threads=2)
    assert found["grid"] == launched and found["num_threads"] == 2
    assert [int(name.split("_")[1]) for name in found["grid_names"]] == list(launched)
    assert sorted(found["grid_names"]) == sorted(names)


def test_jaxs_own_switch_interprets(no_gpu):
    """So the copy of `_host.py` that a lifted kernel comes with runs it wherever another one interprets."""
    x = jnp.linspace(-1, 1, 300)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        np.testing.assert_allclose(cookbook.add(x, x), 2 * x, rtol=1e-6)  # A sum is rounded once.
