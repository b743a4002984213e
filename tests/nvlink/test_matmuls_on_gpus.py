"""The products across GPUs on hosts with 2 and more. Elsewhere test_matmuls.py compiles them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab

pytestmark = pytest.mark.several_gpus
PRODUCTS = {
    "all_gather_matmul": (jax.P("x"), jax.P(None, "x"), jax.P(None, "x")),
    "matmul_reduce_scatter": (jax.P(None, "x"), jax.P("x"), jax.P("x")),
}
PEERS = {
    "all_gather_matmul": lambda a, b: jax.lax.all_gather(a, "x", tiled=True) @ b,
    "matmul_reduce_scatter": lambda a, b: jax.lax.psum_scatter(a @ b, "x", tiled=True),
}
SIZES = [(8, 8, 8), (100, 200, 104), (264, 1000, 520), (1000, 72, 1032), (1024, 1024, 1024)]  # m, k, n of a device.
each_product = pytest.mark.parametrize("op", PRODUCTS)


def operands(mesh, op, m, k, cols, dtype=jnp.bfloat16):
    n = mesh.size
    shapes = ((n * m, k), (k, n * cols)) if op == "all_gather_matmul" else ((n * m, n * k), (n * k, cols))
    draw = np.random.default_rng(0).standard_normal
    pairs = zip(shapes, PRODUCTS[op], strict=False)
    return [jax.device_put(draw(shape).astype(dtype), jax.NamedSharding(mesh, spec)) for shape, spec in pairs]


def product(mesh, op, fn=None, **kwargs):
    fn = fn or (lambda a, b: getattr(cookbook, op)(a, b, "x", **kwargs))
    *ins, out = PRODUCTS[op]
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=tuple(ins), out_specs=out))


def error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def poison(mesh):
    """Fills free memory with NaN, so that values that are not written show."""
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    jax.block_until_ready(jax.jit(lambda: jnp.full((mesh.size, 1 << 27), jnp.nan), out_shardings=sharding)())


@each_product
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_is_as_exact_as_xlas_and_equal_to_the_bit(mesh, op, sizes, dtype):
    a, b = operands(mesh, op, *sizes, dtype)
    fn = product(mesh, op)
    poison(mesh)
    first, *others = [np.asarray(out) for out in [fn(a, b) for _ in range(5)]]
    for other in others:
        np.testing.assert_array_equal(first, other)
    wanted = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert error(first, wanted) <= 1.5 * error(product(mesh, op, PEERS[op])(a, b), wanted) + 1e-6


@each_product
@pytest.mark.parametrize("fields", [dict(cluster_m=2), dict(tile_m=256, tile_n=128, cluster_n=2)], ids=str)
def test_a_product_in_clusters(mesh, op, fields):
    a, b = operands(mesh, op, 1000, 1024, 1024)
    out = product(mesh, op, config=getattr(cookbook, op).Config(**fields))(a, b)
    assert error(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64)) < 5e-3


def two_layers(gathers, scatters, n):
    """x @ w @ w.T over the number of columns of w on all devices, which is about x."""
    return lambda x, w: (scatters(gathers(x, w), w.T) / (512 * n)).astype(x.dtype)


def test_products_in_a_scan_and_donated(mesh):
    ours = two_layers(
        lambda a, b: cookbook.all_gather_matmul(a, b, "x"),
        lambda a, b: cookbook.matmul_reduce_scatter(a, b, "x"),
        mesh.size,
    )
    xlas = two_layers(*PEERS.values(), mesh.size)
    x, w = operands(mesh, "all_gather_matmul", 512, 512, 512)
    results = []
    for layers in (ours, xlas):
        once = lambda x, w, layers=layers: ((x + layers(x, w)) / 2).astype(x.dtype)
        loop = lambda x, w, once=once: jax.lax.scan(lambda x, _: (once(x, w), None), x, length=20)[0]
        fn = jax.shard_map(loop, mesh=mesh, in_specs=PRODUCTS["all_gather_matmul"][:2], out_specs=jax.P("x"))
        fn, out = jax.jit(fn, donate_argnums=0), x + 0
        for _ in range(3):
            out = fn(out, w)
        results.append(out)
    assert error(*results) < 5e-2  # bfloat16, rounded 60 times.


@each_product
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_a_product(mesh, op, check_vma):
    ours, peer = lambda a, b: getattr(cookbook, op)(a, b, "x"), PEERS[op]
    a, b = operands(mesh, op, 264, 512, 520)
    ins = PRODUCTS[op][:2]
    grads = []
    for fn in (ours, peer):
        loss = lambda a, b, fn=fn: jnp.sum(fn(a, b).astype(jnp.float32) ** 2)
        grad = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=ins, out_specs=ins, check_vma=check_vma)
        grads.append(jax.jit(grad)(a, b))
    for mine, its in zip(*grads, strict=True):
        assert error(mine, its) < 1e-2


@each_product
@pytest.mark.parametrize("axis", ["a", "b", ("a", "b"), ("b", "a")], ids=str)
def test_a_product_on_a_mesh_of_two_axes(op, axis):
    if not lab.on_gpu() or jax.device_count() not in (4, 8):
        pytest.skip("needs a host with 4 or 8 Hopper or newer GPUs")
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(mesh, jax.P(("a", "b")))
    draw = lambda seed: np.random.default_rng(seed).standard_normal((mesh.size * 64, 512)).astype(jnp.bfloat16)
    a, b = (jax.device_put(draw(seed), sharding) for seed in (0, 1))
    peers = dict(
        all_gather_matmul=lambda a, b: jax.lax.all_gather(a, axis, tiled=True) @ b.T,
        matmul_reduce_scatter=lambda a, b: jax.lax.psum_scatter(a @ b.T, axis, tiled=True),
    )
    spec = jax.P(("a", "b"))
    run = lambda fn: jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(a, b)
    assert error(run(lambda a, b: getattr(cookbook, op)(a, b.T, axis)), run(peers[op])) < 1e-2
