"""The named problems that the tests and the benchmark share, and what each kernel must reach on them."""

import dataclasses
import functools
import importlib
import math

import jax
import jax.numpy as jnp

import cookbook
from cookbook import elementwise
from cookbook.matmul_blocked import matmul_blocked_reference

# `cookbook.softmax` is the function; its module goes by this name.
matmul_pipelined, reduce_sum, rms_norm, softmax = (
    importlib.import_module(f"cookbook.{op}") for op in ("matmul_pipelined", "reduce_sum", "rms_norm", "softmax")
)

LIBRARIES = ("xla", "cublas")  # The peers that are not this project's own.
NAMES = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16", jnp.dtype(jnp.float32): "f32"}


@dataclasses.dataclass(frozen=True)
class Target:
    """What a kernel must reach: a rate, a multiple of a peer's rate, or both."""

    peer: str
    ratio: float = 1.0  # To the peer's rate.
    rate: float | None = None  # In TB/s or TFLOP/s.


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: `kernel(*inputs)` against `peers`, on random normal arrays of `shapes`."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: object
    kernel: object
    reference: object
    peers: dict
    flops: int
    nbytes: int
    size: str  # The shape in the problem's name.
    impl: str = "cookbook"
    target: Target | None = None
    headline: bool = False  # Whether the README shows it.

    @property
    def problem(self) -> str:
        return f"{self.op}/{self.size}/{NAMES[jnp.dtype(self.dtype)]}"

    def inputs(self, seed: int = 0):
        """Random normal inputs, each its own."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        return [draw(key, shape, self.dtype) for key, shape in zip(keys, self.shapes, strict=True)]


def _add(n, dtype=jnp.bfloat16, **kwargs):
    flops, nbytes = elementwise.flops(n), elementwise.bytes_moved(n, jnp.dtype(dtype).itemsize)
    peers, shapes = {"xla": jnp.add}, ((n,), (n,))
    return Case("add", shapes, dtype, cookbook.add, elementwise.add_reference, peers, flops, nbytes, str(n), **kwargs)


def _rows(op, module, rows, cols, num_inputs, dtype=jnp.bfloat16, **kwargs):
    kernel, reference = getattr(cookbook, op), getattr(module, f"{op}_reference")
    peers = {"xla": lambda x, *scale: reference(x, *scale).astype(x.dtype)}
    shapes = ((rows, cols), (cols,))[:num_inputs]
    flops, nbytes = module.flops(rows, cols), module.bytes_moved(rows, cols, jnp.dtype(dtype).itemsize)
    return Case(op, shapes, dtype, kernel, reference, peers, flops, nbytes, f"{rows}x{cols}", **kwargs)


def _sum(rows, cols, axis, dtype=jnp.bfloat16, **kwargs):
    peers = {"xla": lambda x: jnp.sum(x, axis=axis)}
    nbytes = reduce_sum.bytes_moved(rows, cols, jnp.dtype(dtype).itemsize)
    return Case("reduce_sum", ((rows, cols),), dtype, lambda x: cookbook.reduce_sum(x, axis),
                lambda x: reduce_sum.reduce_sum_reference(x, axis), peers, reduce_sum.flops(rows, cols), nbytes,
                f"{rows}x{cols}_axis{axis}", **kwargs)  # fmt: skip


def _matmul(m, n, k, dtype=jnp.bfloat16, **kwargs):
    flops, nbytes = matmul_pipelined.flops(m, n, k), matmul_pipelined.bytes_moved(m, n, k)
    peers = {"cublas": jnp.matmul, "matmul_wgmma": cookbook.matmul_wgmma}
    return Case("matmul", ((m, k), (k, n)), dtype, cookbook.matmul_pipelined, matmul_pipelined.matmul_reference, peers,
                flops, nbytes, f"{m}x{n}x{k}", impl="matmul_pipelined", **kwargs)  # fmt: skip


def _matmul_f32(m, n, k, **kwargs):
    flops, nbytes = matmul_pipelined.flops(m, n, k), matmul_pipelined.bytes_moved(m, n, k, 4)
    peers = {"cublas": functools.partial(jnp.matmul, precision="highest")}
    return Case("matmul", ((m, k), (k, n)), jnp.float32, cookbook.matmul_blocked, matmul_blocked_reference, peers,
                flops, nbytes, f"{m}x{n}x{k}", impl="matmul_blocked", **kwargs)  # fmt: skip


ROW_SHAPES = ((1048576, 128), (131072, 1000), (32768, 4096), (4096, 32768))
ABOVE_XLA = Target("xla")
CASES = [
    _add(2**29, target=ABOVE_XLA, headline=True),
    _rows("softmax", softmax, 16384, 8192, 1, target=Target("xla", 1.2, 4.0), headline=True),
    *(_rows("softmax", softmax, *shape, 1, target=ABOVE_XLA) for shape in ROW_SHAPES),
    _rows("rms_norm", rms_norm, 16384, 8192, 2, target=Target("xla", rate=3.95), headline=True),
    *(_rows("rms_norm", rms_norm, *shape, 2, target=ABOVE_XLA) for shape in ROW_SHAPES),
    _sum(16384, 8192, -1),
    _sum(16384, 8192, 0),
    _matmul(4096, 4096, 4096, target=Target("cublas", 0.88), headline=True),
    _matmul(8192, 8192, 8192, target=Target("cublas", 0.88), headline=True),
    _matmul(4096, 8192, 4096),
    _matmul(2048, 2048, 2048),
    _matmul_f32(4096, 4096, 4096),
]


def relative_error(out, exact) -> float:
    """Frobenius distance over the norm of `exact`. NaN and infinities that agree count as zero, others as infinity."""
    out, exact = jnp.asarray(out, jnp.float32), jnp.asarray(exact, jnp.float32)
    same = (out == exact) | (jnp.isnan(out) & jnp.isnan(exact))
    difference = jnp.where(same, 0.0, out - exact)
    norm = jnp.linalg.norm(jnp.where(jnp.isfinite(exact), exact, 0.0).ravel())
    error = float(jnp.linalg.norm(difference.ravel())) / (float(norm) or 1.0)
    return math.inf if math.isnan(error) else error
