"""Named problems of the kernels across GPUs, timed on all GPUs of this host beside XLA's and JAX's.

A time is that of `lab.timing.least_over_devices`. Bytes are those that leave a GPU over NVLink, and floating-point
operations are those of one GPU. Figures go to the folder of such hosts: `results/h200x2`.
"""

import dataclasses
import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

import cookbook
import lab
from bench.problems import BF16, NAMES, _of_jax

OPS = ("all_gather", "reduce_scatter", "all_to_all", "all_gather_matmul", "matmul_reduce_scatter")
PEER_COPY = "nvlink/peer_copy"  # The name of the rates of a plain copy in results/.
OURS = ("cookbook", "matmul")
ERROR_MAX = 1e-2  # Relative error of a 16-bit result against XLA's. Tests look closer.
SIZES = {"64KB": 2**16, "256KB": 2**18, "1MB": 2**20, "4MB": 2**22, "16MB": 2**24, "64MB": 2**26, "256MB": 2**28,
         "1GB": 2**30}  # fmt: skip
P = jax.P


@dataclasses.dataclass(frozen=True)
class Collective:
    """One problem on `n` GPUs, on a mesh of one axis "x"."""

    n: int
    op: str
    size: str  # In the problem's name.
    arrays: tuple  # (whole shape, partition) of each random array.
    impls: dict  # Functions of one device's parts of all inputs, or lists of some, the fastest of which counts.
    nbytes: int
    flops: int | None = None
    out: P = P("x")
    integers: tuple = ()  # Inputs after the random ones, each (n, ...) of int32: a row for each device.
    replicated: int | None = None  # The array that comes once more, last, whole on each device.
    parts: tuple = ()  # Peers whose result is another.
    headline: bool = False  # Whether the README shows it.
    targets: dict = dataclasses.field(default_factory=dict)  # By peer: how often its rate. "rate": TB/s or TFLOP/s.

    impl = "cookbook"

    @property
    def problem(self) -> str:
        return f"{self.op}/{self.size}/{NAMES[jnp.dtype(BF16)]}"

    @property
    def specs(self) -> tuple:
        specs = [spec for _, spec in self.arrays] + [P("x")] * len(self.integers)
        return (*specs, *[P()] * (self.replicated is not None))

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        drawn = [jax.ShapeDtypeStruct(shape, BF16) for shape, _ in self.arrays]
        integers = [jax.ShapeDtypeStruct((x.size,), jnp.int32) for x in self.integers]
        return drawn + integers + ([] if self.replicated is None else [drawn[self.replicated]])

    def inputs(self, mesh) -> list:
        """Random arrays, each its own, on the devices of `mesh`."""
        where = [jax.NamedSharding(mesh, spec) for spec in self.specs]
        keys, drawn = jax.random.split(jax.random.key(0), len(self.arrays)), []
        for key, (shape, _), sharding in zip(keys, self.arrays, where, strict=False):
            draw = jax.jit(lambda key, shape=shape: jax.random.normal(key, shape, BF16), out_shardings=sharding)
            drawn.append(draw(key))
        drawn += [jax.device_put(x.astype(np.int32).ravel(), jax.NamedSharding(mesh, P("x"))) for x in self.integers]
        return drawn if self.replicated is None else [*drawn, jax.device_put(drawn[self.replicated], where[-1])]

    def sharded(self, impl: str, fn, mesh=None):
        """`fn` of whole arrays. Those of JAX do not say over which axes their results vary."""
        fn = lambda *args, fn=fn: fn(*args)
        return jax.shard_map(fn, mesh=mesh, in_specs=self.specs, out_specs=self.out, check_vma=impl in OURS)


def cases(n: int) -> list[Collective]:
    """The problems for `n` GPUs, of the ops that there are."""
    found = [_gather(n, label, size) for label, size in SIZES.items()]
    found += [_scatter(n, label, size) for label, size in SIZES.items()]
    found += [_exchange(n, 4096, 8, 7168), _equal_exchange(n, 4096, 8, 7168)]
    small = dict(jax_mgpu=1.1, xla=1.5, rate=600) if n == 2 else {}
    found += [_gather_matmul(n, 1024, 4096, 4096, small), _gather_matmul(n, 8192, 8192, 3584, dict(matmul=0.93))]
    # At most 10 % more time than the product alone.
    hidden = dict(matmul=1 / 1.1, xla=1.3)
    found += [_matmul_scatter(n, 1024, 4096, 4096, hidden), _matmul_scatter(n, 8192, 8192, 3584, hidden)]
    return [case for case in found if hasattr(cookbook, case.op)]


def _like_xla(size: int) -> dict:
    return {"xla": 1.0} | ({"peer_copy": 0.95} if size >= 2**26 else {})


def _gather(n, label, size):
    """`size` bytes are a GPU's shard."""
    impls = {
        "cookbook": lambda x: cookbook.all_gather(x, "x"),
        "xla": lambda x: jax.lax.all_gather(x, "x", tiled=True),
    }
    return Collective(n, "all_gather", label, (((n * size // 2048, 1024), P("x")),), impls, (n - 1) * size,
                      headline=label == "64MB", targets=_like_xla(size))  # fmt: skip


def _scatter(n, label, size):
    """`size` bytes are what a GPU adds, n shards."""
    impls = {
        "cookbook": lambda x: cookbook.reduce_scatter(x, "x"),
        "xla": lambda x: jax.lax.psum_scatter(x, "x", tiled=True),
    }
    rows = math.ceil(size / 2048 / n) * n  # One GPU's.
    nbytes = (n - 1) * (rows // n) * 2048
    return Collective(n, "reduce_scatter", label, (((n * rows, 1024), P("x")),), impls, nbytes,
                      headline=label == "64MB", targets=_like_xla(size))  # fmt: skip


def routed(n: int, rows: int) -> np.ndarray:
    """Rows that each device sends to each: every row's device is drawn at random."""
    return np.random.default_rng(0).multinomial(rows, [1 / n] * n, size=n)


def _exchange(n, tokens, top_k, hidden):
    """`jax.lax.ragged_all_to_all` gets its offsets ready made."""
    rows = tokens * top_k
    sizes = routed(n, rows)
    before = lambda x, axis: np.cumsum(x, axis) - x
    capacity = math.ceil(sizes.sum(0).max() / 1024) * 1024
    others = sizes * (1 - np.eye(n, dtype=int))

    def xla(x, sizes, received, starts, targets):
        out = jnp.zeros((capacity, hidden), x.dtype)
        return jax.lax.ragged_all_to_all(x, out, starts, sizes, targets, received, axis_name="x")

    impls = {
        "cookbook": lambda x, sizes, *_: cookbook.all_to_all(x, "x", send_sizes=sizes, capacity=capacity)[0],
        "xla": xla,
    }
    return Collective(n, "all_to_all", f"{tokens}_top{top_k}_hidden{hidden}", (((n * rows, hidden), P("x")),), impls,
                      int(max(others.sum(0).max(), others.sum(1).max())) * hidden * 2,
                      integers=(sizes, sizes.T, before(sizes, 1), before(sizes, 0)),
                      headline=True, targets=dict(xla=1.0, rate=0.3))  # fmt: skip


def _equal_exchange(n, tokens, top_k, hidden):
    rows = tokens * top_k
    impls = {
        "cookbook": lambda x: cookbook.all_to_all(x, "x"),
        "xla": lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
    }
    return Collective(n, "all_to_all", f"{tokens}_top{top_k}_hidden{hidden}_equal", (((n * rows, hidden), P("x")),),
                      impls, (n - 1) * (rows // n) * hidden * 2, targets=dict(xla=1.0, rate=0.3))  # fmt: skip


def _gather_matmul(n, m, k, cols, targets):
    """M rows and `cols` columns per GPU. `matmul`: the product alone, of rows that are all there."""
    impls = {
        "cookbook": lambda lhs, rhs, whole: cookbook.all_gather_matmul(lhs, rhs, "x"),
        "xla": lambda lhs, rhs, whole: jnp.matmul(jax.lax.all_gather(lhs, "x", tiled=True), rhs),
        "jax_mgpu": [functools.partial(_gather_matmul_of_jax, *how) for how in itertools.product("MN", (8, 16), "MN")],
        "matmul": lambda lhs, rhs, whole: cookbook.matmul(whole, rhs),
    }
    arrays = ((n * m, k), P("x")), ((k, n * cols), P(None, "x"))
    return Collective(n, "all_gather_matmul", f"m{m}_n{cols}_k{k}", arrays, impls, (n - 1) * m * k * 2,
                      2 * n * m * k * cols, out=P(None, "x"), replicated=0, headline=True, targets=targets)  # fmt: skip


def _gather_matmul_of_jax(minor, width, by_wg, lhs, rhs, whole):
    """Tiles of 128 by 128 for each of two warpgroups and four stages."""
    jax_op = _of_jax("collective_matmul_mgpu")
    dimension = jax_op.MatmulDimension
    config = jax_op.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_minor_dim=dimension[minor],
        grid_tile_width=width, wg_dimension=dimension[by_wg],
    )  # fmt: skip
    return jax_op.all_gather_lhs_matmul(lhs, rhs, "x", config=config, dtype=lhs.dtype)


def _matmul_scatter(n, m, k, cols, targets):
    """The gradient of `_gather_matmul` by its rows: (n M, cols) times (cols, K), M rows of which stay on each GPU."""
    impls = {
        "cookbook": lambda lhs, rhs: cookbook.matmul_reduce_scatter(lhs, rhs, "x"),
        "xla": lambda lhs, rhs: jax.lax.psum_scatter(jnp.matmul(lhs, rhs), "x", tiled=True),
        "matmul": lambda lhs, rhs: cookbook.matmul(lhs, rhs),
    }
    arrays = ((n * m, n * cols), P(None, "x")), ((n * cols, k), P("x"))
    return Collective(n, "matmul_reduce_scatter", f"m{m}_n{k}_k{cols}", arrays, impls, (n - 1) * m * k * 2,
                      2 * n * m * k * cols, parts=("matmul",), headline=True, targets=targets)  # fmt: skip


# Running them ---------------------------------------------------------------------------------------------------------


def run(op: str | None, iterations: int) -> list[bool | None]:
    """Times and prints the problems of `op`, or all; on a host without several GPUs prints the recorded ones.

    Returns for each whether its targets are reached; None where nobody knows.
    """
    n = jax.device_count() if lab.on_gpu() else 1
    if n == 1:
        hosts = lab.results.hosts()
        found = "these are the recorded figures" if hosts else "none are recorded"
        print(f"Kernels across GPUs need a host with 2 to 8 Hopper or newer GPUs, and here is none: {found}.")
        return [verdict for n in hosts for verdict in _print_all(op, n, lambda case: recorded(case))]
    mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return _print_all(op, n, lambda case: _measure(case, mesh, iterations))


def _print_all(op, n, rows_of) -> list[bool | None]:
    copy = lab.results.value(PEER_COPY, _peer_copy, devices=n)
    if copy:
        print(f"{n} GPUs: copies to the next one, all at the same time, run at {copy['both_ways']:.0f} GB/s each")
    return [_print(case, rows_of(case), copy) for case in cases(n) if op in (None, case.op)]


def _peer_copy(nbytes: int = 2**30, copies: int = 8) -> dict[str, float]:
    """GB/s of XLA's copies from every GPU to the next one, which run at the same time: each GPU sends and receives.

    `jax.device_put` between GPUs may go through the host's memory; `jax.lax.ppermute` takes NVLink. Its first calls are
    far slower: memory is allocated, and NCCL connects the GPUs. So the second round counts.
    """
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.zeros((n, nbytes), jnp.int8, device=jax.NamedSharding(mesh, P("x")))

    shift = lambda x: jax.lax.ppermute(x, "x", [(d, (d + 1) % n) for d in range(n)])
    shift = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    jax.block_until_ready([shift(x) for _ in range(copies)])
    with lab.alone():
        start = time.perf_counter()
        jax.block_until_ready([shift(x) for _ in range(copies)])
        return dict(both_ways=copies * nbytes / (time.perf_counter() - start) / 1e9)


def recorded(case: Collective) -> dict[str, lab.Measurement]:
    """The figures in results/, on a machine with fewer GPUs."""
    figures = dict(problem=case.problem, flops=case.flops, nbytes=case.nbytes, devices=case.n)
    return {impl: lab.measure(None, impl=impl, **figures) for impl in case.impls}


def _measure(case: Collective, mesh, iterations: int) -> dict[str, lab.Measurement]:
    """Each implementation that runs and is right, timed."""
    inputs, rows, wanted = jax.block_until_ready(case.inputs(mesh)), {}, None
    for impl in sorted(case.impls, key=lambda impl: impl != "xla"):  # XLA's result comes first.
        try:
            fn = _fastest(case, impl, mesh, inputs)
            out = jax.block_until_ready(fn(*inputs))
        except Exception as error:  # Another's kernel may refuse a shape; the others are timed all the same.
            print(f"{case.problem}, {impl}: {type(error).__name__}: {str(error)[:300]}")
            continue
        wanted = out if wanted is None else wanted
        if impl not in case.parts and not (error := float(_error(out, wanted))) < ERROR_MAX:
            print(f"{case.problem}, {impl}: wrong by {error:.2g}, and so not timed")
            continue
        del out
        rows[impl] = lab.measure(fn, *inputs, problem=case.problem, impl=impl, iterations=iterations, flops=case.flops,
                                 nbytes=case.nbytes, devices=case.n)  # fmt: skip
    return rows


def _fastest(case, impl, mesh, inputs):
    """The implementation, compiled; of several the one of the least time."""
    candidates = case.impls[impl]
    if callable(candidates):
        return jax.jit(case.sharded(impl, candidates, mesh)).lower(*inputs).compile()
    compiled = []
    for fn in candidates:
        try:
            compiled.append(jax.jit(case.sharded(impl, fn, mesh)).lower(*inputs).compile())
        except ValueError as error:  # A configuration that does not fit these shapes.
            refused = error
    if not compiled:
        raise refused
    return min(compiled, key=lambda fn: lab.timing.median_ms(fn, inputs, 3, case.n))


@jax.jit
def _error(out, wanted):
    """Frobenius distance over the norm of `wanted`."""
    out, wanted = out.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(jnp.square(out - wanted))) / jnp.sqrt(jnp.sum(jnp.square(wanted)))


def _print(case: Collective, rows: dict[str, lab.Measurement], copy: dict | None) -> bool | None:
    """Prints one problem. Returns whether all its targets are reached; None if nobody knows."""
    ours = rows.get("cookbook")
    print(f"{case.problem}, {case.n} GPUs")
    for impl, row in rows.items():
        if not math.isnan(row.median_ms):
            rate = f"{row.tflops:8.0f} TFLOP/s per GPU" if case.flops else f"{1e3 * row.tbps:8.1f} GB/s"
            wall = row.provenance.get("wall_ms")
            wall = f"   wall {1e3 * wall:.1f} us" if wall else ""
            ratio = f"{row.median_ms / ours.median_ms:6.3f} x" if ours and impl != "cookbook" else " " * 8
            print(f"    {impl:12s}{1e3 * row.median_ms:10.1f} us{rate}{ratio}{wall}")
    reached = verdict(case, {impl: row.median_ms for impl, row in rows.items()}, copy)
    if reached is None:
        print("    not recorded" if ours is None or math.isnan(ours.median_ms) else "    a peer is not recorded")
    elif case.targets:
        print(f"    target {'reached' if reached else 'MISSED'}: {wanted(case)}")
    return reached


def verdict(case: Collective, ms: dict[str, float], copy: dict | None) -> bool | None:
    """Whether the times `ms` of all implementations reach all targets; None if one that counts is not known."""
    ours = ms.get("cookbook", math.nan)
    rate = (case.flops or case.nbytes) / ours / 1e9
    ratios = {peer: time / ours for peer, time in ms.items()}
    ratios["rate"] = rate
    ratios["peer_copy"] = 1e3 * rate / copy["both_ways"] if copy else math.nan
    reached = [ratios.get(name, math.nan) / least for name, least in case.targets.items()]
    if math.isnan(ours) or any(map(math.isnan, reached)):
        return None
    return all(share >= 1 for share in reached)


def wanted(case: Collective) -> str:
    """The targets in words."""
    unit = "TFLOP/s per GPU" if case.flops else "TB/s"
    return " and ".join(
        f"{least:g} {unit}" if name == "rate" else f"{least:.3g} × {name.replace('_', ' ')}"
        for name, least in case.targets.items()
    )
