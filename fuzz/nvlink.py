"""The ops across GPUs. On a host with several, a sweep of these ops alone has a mesh of all GPUs. In other sweeps a
process sees one GPU, and the mesh has one device, as without a GPU: the interpreter has no semaphores, so what is sent
is not seen (tests/nvlink/test_protocol.py simulates that), but shapes, padding, sizes and products are.
"""

import jax
import numpy as np

import cookbook
import lab

from .cases import Draw, Op, Values
from .elementwise import FLOATS
from .gemm import HALVES, TMA, slack


def devices() -> int:
    """All GPUs of this host: a kernel is tested on meshes of all that JAX sees."""
    return jax.device_count() if lab.on_gpu() and jax.device_count() in (2, 4, 8) else 1


def spread(op, outs: int = 1):
    """`op(case, ...)` of shards, for arrays whose leading axis has the devices."""

    def call(case, **arrays):
        auto, here = jax.sharding.AxisType.Auto, jax.devices()[: case["devices"]]
        mesh = jax.make_mesh((case["devices"],), ("x",), axis_types=(auto,), devices=here)
        spec = jax.P("x")
        one = lambda *shards: op(case, **dict(zip(arrays, (shard[0] for shard in shards), strict=True)))
        joined = lambda *shards: jax.tree.map(lambda out: out[None], tuple(one(*shards)))
        return jax.shard_map(joined, mesh=mesh, in_specs=spec, out_specs=(spec,) * outs)(*arrays.values())

    return call


def draw_shards(draw: Draw) -> dict:
    shape = [draw.size(60, zero=0), *draw.choice((), (draw.size(300, zero=0),), (3, draw.size(100, zero=0)))]
    return dict(devices=devices(), shape=shape, dtype=draw.choice(*FLOATS), values=draw.choice("normal", "nan"))


def shards(case: dict, values: Values) -> dict:
    return dict(x=values((case["devices"], *case["shape"]), case["dtype"], case["values"]))


def gather(case, x):
    return (cookbook.all_gather(x, "x"),)


def gather_reference(case, x):
    joined = x.reshape(-1, *x.shape[2:])
    return [(np.stack([joined] * len(x)), 0.0)]


def draw_whole(draw: Draw) -> dict:
    case = draw_shards(draw)
    case["shape"][0] *= case["devices"]
    return case


def scatter(case, x):
    return (cookbook.reduce_scatter(x, "x"),)


def scatter_reference(case, x):
    by_owner = lambda x: x.sum(0).reshape(len(x), -1, *x.shape[2:])
    return [(by_owner(x), 1e-6 * by_owner(np.abs(np.where(np.isfinite(x), x, 0))))]


def draw_all_to_all(draw: Draw) -> dict:
    case = draw_whole(draw)
    n, rows = case["devices"], case["shape"][0]
    sizes = draw.rng.integers(-1, 2 * rows // n + 2, (n, n)).tolist() if draw.sometimes(0.7) else None
    return case | dict(sizes=sizes, capacity=draw.choice(None, draw.number(1, 2 * rows)) if sizes else None)


def all_to_all_arrays(case: dict, values: Values) -> dict:
    return shards(case, values) | ({} if case["sizes"] is None else dict(sizes=np.asarray(case["sizes"], np.int32)))


def all_to_all(case, x, sizes=None):
    if sizes is None:
        return (cookbook.all_to_all(x, "x"),)
    return cookbook.all_to_all(x, "x", send_sizes=sizes, capacity=case["capacity"])


def all_to_all_reference(case, x, sizes=None):
    n, rows = x.shape[:2]
    if sizes is None:
        return [(x.reshape(n, n, rows // n, *x.shape[2:]).swapaxes(0, 1).reshape(x.shape), 0.0)]
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0), 1), rows)
    starts = np.concatenate([np.zeros((n, 1), int), ends[:, :-1]], 1)
    capacity = case["capacity"] or n * rows
    out, counts = np.zeros((n, capacity, *x.shape[2:])), np.zeros((n, n), np.int32)
    for receiver in range(n):
        at = 0
        for sender in range(n):
            sent = x[sender, starts[sender, receiver] : ends[sender, receiver]][: capacity - at]
            out[receiver, at : at + len(sent)], counts[receiver, sender] = sent, len(sent)
            at += len(sent)
    return [(out, 0.0), (counts, 0)]


def call_all_to_all(case, **arrays):
    return spread(all_to_all, 1 if case["sizes"] is None else 2)(case, **arrays)


def draw_product(draw: Draw) -> dict:
    of = lambda most: draw.size(most, 8 if draw.sometimes(0.95) else 1, 0, 4)
    return dict(devices=devices(), m=draw.size(100, zero=0), n=of(150), k=of(150), dtype=draw.choice(*HALVES))


def product_arrays(rows: str):
    def arrays(case: dict, values: Values) -> dict:
        n, m = case["devices"], case["m"] * (case["devices"] if rows == "all" else 1)
        shapes = dict(lhs=(n, m, case["k"]), rhs=(n, case["k"], case["n"]))
        return {name: values(shape, case["dtype"]) for name, shape in shapes.items()}

    return arrays


def gather_product(case, lhs, rhs):
    return (cookbook.all_gather_matmul(lhs, rhs, "x"),)


def gather_product_reference(case, lhs, rhs):
    rows = lhs.reshape(-1, lhs.shape[2])
    return [(np.stack([rows @ one for one in rhs]), np.stack([slack(rows, one) for one in rhs]))]


def scatter_product(case, lhs, rhs):
    return (cookbook.matmul_reduce_scatter(lhs, rhs, "x"),)


def scatter_product_reference(case, lhs, rhs):
    n, rounded = len(lhs), 2.0 ** (-8 if case["dtype"] == "bfloat16" else -11)
    parts = [a @ b for a, b in zip(lhs, rhs, strict=True)]
    error = sum(slack(a, b) for a, b in zip(lhs, rhs, strict=True)) + rounded * sum(map(np.abs, parts)) * (n > 1)
    return [(x.reshape(n, -1, x.shape[1]) for x in (sum(parts), error))]


def product_rule(case) -> str | None:
    return TMA if case["n"] % 8 or case["k"] % 8 else None


OPS = {
    "all_gather": Op(draw_shards, shards, spread(gather), gather_reference),
    "reduce_scatter": Op(draw_whole, shards, spread(scatter), scatter_reference),
    "all_to_all": Op(draw_all_to_all, all_to_all_arrays, call_all_to_all, all_to_all_reference),
    "all_gather_matmul": Op(
        draw_product, product_arrays("own"), spread(gather_product), gather_product_reference, product_rule
    ),
    "matmul_reduce_scatter": Op(
        draw_product, product_arrays("all"), spread(scatter_product), scatter_product_reference, product_rule
    ),
}  # fmt: skip
