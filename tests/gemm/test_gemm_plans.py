"""The compiler takes what is chosen by default: programs of products of random sizes, lowered for their GPU.

A program is lowered if its plans have something that none before had, of what the compiler may refuse: tiles, pieces,
swizzles, layouts of operands, ways out. Sizes alone change numbers in it, and numbers of blocks.
"""

import functools
import random

import jax
import jax.numpy as jnp
import pytest

import cookbook
from cookbook import _host, blackwell
from cookbook.gemm.dense.pack import shape_of
from tests.lowering import H200, lowered

B200 = _host.Target("b200", num_sms=148)
HALVES, FLOATS = ("bfloat16", "float16"), ("bfloat16", "float16", "float32")
FP8, INT8, E8M0 = "float8_e4m3fn", "int8", "float8_e8m0fnu"


class Draw(random.Random):
    """Random problems."""

    def size(self, unit: int = 1, most: int = 16384) -> int:
        """As often small as large; odd, or next to a power of two."""
        size = self.choice([round(2 ** self.uniform(0, 14)), 2 ** self.randrange(15) + self.randrange(-1, 2)])
        return max(1, min(size, most) // unit) * unit

    def flag(self) -> bool:
        return self.random() < 0.5

    def groups(self) -> int:
        return self.choice([1, 12, 13, 128, self.randrange(1, 40)])


def aval(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def gradient(draw: Draw, fn, count: int):
    """`fn`, or its gradients in the first `count` operands."""
    loss = lambda *args: fn(*args).astype(jnp.float32).sum()
    return fn if draw.random() < 0.7 else jax.grad(loss, tuple(range(count)))


def plain(draw: Draw, op, dtypes=HALVES, unit: int = 8, **how):
    """A product of two matrices: dtype, orientation, sizes; and how the op is called."""
    dtype, ta, tb = draw.choice(dtypes), draw.flag(), draw.flag()
    ta, tb = (ta, tb) if how.pop("transposes", True) else (False, False)
    m, n = draw.size(unit if ta else 1), draw.size(1 if tb else unit)
    k = draw.size(1 if ta and not tb else unit)
    how |= dict(transpose_a=ta, transpose_b=tb) if ta or tb else {}
    a, b = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    return functools.partial(op, **how), [aval(dtype, *a), aval(dtype, *b)], n


def matmul(draw: Draw, op=cookbook.matmul):
    activation, out = draw.choice([None, "relu", "gelu"]), draw.choice(FLOATS)
    fn, avals, n = plain(draw, op, activation=activation, out_dtype=out)
    if draw.flag():
        return gradient(draw, lambda a, b, bias: fn(a, b, bias=bias), 3), [*avals, aval("float32", n)]
    return gradient(draw, fn, 2), avals


def glu(draw: Draw):
    m, k, flipped, dtype = draw.size(), draw.size(8), draw.flag(), draw.choice(HALVES)
    n = draw.size(1 if flipped else 8)
    how = dict(transpose_weights=flipped, activation=draw.choice([None, "silu", "gelu", "relu", "sigmoid"]))
    weights = [aval(dtype, *((n, k) if flipped else (k, n)))] * 2
    return gradient(draw, functools.partial(cookbook.glu, **how), 3), [aval(dtype, m, k), *weights]


def rung(op, **how):
    return lambda draw: plain(draw, op, out_dtype=draw.choice(FLOATS), **how)[:2]


def blocked(draw: Draw):
    return plain(draw, cookbook.matmul_blocked, FLOATS, transposes=False)[:2]


def fp8(draw: Draw):
    m, n, k, flipped = draw.size(), draw.size(), draw.size(16), draw.flag()
    scales = aval("float32", draw.choice([1, m])), aval("float32", draw.choice([1, n]))
    how = dict(transpose_b=flipped, out_dtype=draw.choice(FLOATS))
    fn = lambda a, b, scale_a, scale_b: cookbook.matmul_fp8(a, b, scale_a=scale_a, scale_b=scale_b, **how)
    return fn, [aval(FP8, m, k), aval(draw.choice([FP8, "float8_e5m2"]), *((n, k) if flipped else (k, n))), *scales]


def int8_weights(draw: Draw):
    m, n, k, flipped = draw.size(), draw.size(16), draw.size(16), draw.flag()
    how = dict(transpose_w=flipped, out_dtype=draw.choice(FLOATS))
    avals = [aval(draw.choice(HALVES), m, k), aval(INT8, *((n, k) if flipped else (k, n))), aval("float32", n)]
    return functools.partial(cookbook.matmul_int8_weights, **how), avals


def int4_weights(draw: Draw):
    m, n, k, size, dtype = draw.size(), draw.size(), draw.size(8), draw.choice([32, 64, 128]), draw.choice(HALVES)
    numbers = [aval(draw.choice(FLOATS), -(-k // size), n), aval(draw.choice(["uint8", dtype]), -(-k // size), n)]
    how = dict(group_size=size, out_dtype=draw.choice(FLOATS))
    fn = lambda x, w, scales, zeros=None: cookbook.matmul_int4_weights(x, w, scales, zeros=zeros, **how)
    return fn, [aval(dtype, m, k), aval("uint32", *shape_of(n, k)), *numbers[: draw.choice([1, 2])]]


def mxfp4_weights(draw: Draw):
    m, n, k = draw.size(), draw.size(), draw.size(8)
    units, how = -(-k // 64), dict(out_dtype=draw.choice(FLOATS))
    avals = [aval("bfloat16", m, k), aval("uint32", *shape_of(n, k)), aval("uint16", units, n)]
    return functools.partial(cookbook.matmul_mxfp4_weights, **how), avals


def ragged(draw: Draw, op=cookbook.ragged_dot):
    m, k, groups, flipped = draw.size(), draw.size(8, 8192), draw.groups(), draw.flag()
    n, activation = draw.size(1 if flipped else 8, 8192), draw.choice([None, "swiglu", "silu"])
    cols, dtype, offset = n * (2 if activation == "swiglu" else 1), draw.choice(HALVES), draw.choice([None, 0])
    how = dict(transpose_rhs=flipped, activation=activation, preferred_element_type=draw.choice(FLOATS))
    rhs = aval(dtype, groups, *((cols, k) if flipped else (k, cols)))
    fn = functools.partial(op, group_offset=offset, **how)
    return gradient(draw, fn, 2), [aval(dtype, m, k), rhs, aval("int32", groups)]


def transposed(draw: Draw):
    m, dtype = draw.size(), draw.choice(HALVES)
    rows = [aval(dtype, m, draw.size(8, 8192)) for _ in range(2)]
    how = dict(preferred_element_type=draw.choice(FLOATS))
    return functools.partial(cookbook.ragged_dot_transposed, **how), [*rows, aval("int32", draw.groups())]


def ragged_fp8(draw: Draw):
    m, n, k, groups, flipped = draw.size(), draw.size(1, 8192), draw.size(16, 8192), draw.groups(), draw.flag()
    across = lambda n, k: (n, k) if flipped else (k, n)
    scales = [(m,), (groups, n)]
    if draw.flag():
        scales = [(m, -(-k // 128)), (groups, *across(-(-n // 128), -(-k // 128)))]
    fn = functools.partial(cookbook.ragged_dot_fp8, transpose_rhs=flipped, out_dtype=draw.choice(FLOATS))
    scales = [aval("float32", *shape) for shape in scales]
    return fn, [aval(FP8, m, k), aval(FP8, groups, *across(n, k)), *scales, aval("int32", groups)]


def ragged_int8(draw: Draw):
    m, n, k, groups, flipped = draw.size(), draw.size(1, 8192), draw.size(16, 8192), draw.groups(), draw.flag()
    fn = functools.partial(cookbook.ragged_dot_int8_weights, transpose_rhs=flipped, out_dtype=draw.choice(HALVES))
    rhs = aval(INT8, groups, *((n, k) if flipped else (k, n)))
    return fn, [aval(draw.choice(HALVES), m, k), rhs, aval("float32", groups, n), aval("int32", groups)]


def ragged_four_bits(draw: Draw, op, size: int):
    m, n, k, groups = draw.size(), draw.size(1, 8192), draw.size(8, 8192), draw.groups()
    of_groups = aval("bfloat16" if size == 128 else "uint16", groups, -(-k // size), n)
    avals = [aval("bfloat16", m, k), aval("uint32", groups, *shape_of(n, k)), of_groups, aval("int32", groups)]
    return functools.partial(op, out_dtype=draw.choice(HALVES)), avals


def moe(draw: Draw):
    tokens, hidden, inner, experts = draw.size(1, 4096), draw.size(8, 4096), draw.size(8, 2048), draw.groups()
    fn = functools.partial(cookbook.moe, top_k=draw.randrange(1, min(experts, 8) + 1))
    weights = aval("bfloat16", experts, hidden, 2 * inner), aval("bfloat16", experts, inner, hidden)
    return fn, [aval("bfloat16", tokens, hidden), aval("float32", tokens, experts), *weights]


def mxfp8(draw: Draw):
    m, n, k = draw.size(), draw.size(), draw.size(32)
    avals = [aval(FP8, m, k), aval(E8M0, m, k // 32), aval(FP8, n, k), aval(E8M0, n, k // 32)]
    return functools.partial(blackwell.matmul_mxfp8, out_dtype=draw.choice(FLOATS)), avals


# The problems, and how many are drawn: some hundreds of each were, all of them lowered, when this was written.
OPS = {
    "matmul": (matmul, 9), "glu": (glu, 6), "ragged_dot": (ragged, 4), "ragged_dot_transposed": (transposed, 5),
    "matmul_fp8": (fp8, 4), "matmul_int8_weights": (int8_weights, 4),
    "matmul_int4_weights": (int4_weights, 3), "matmul_mxfp4_weights": (mxfp4_weights, 2),
    "ragged_dot_fp8": (ragged_fp8, 4),
    "ragged_dot_int8_weights": (ragged_int8, 4),
    "ragged_dot_int4_weights": (functools.partial(ragged_four_bits, op=cookbook.ragged_dot_int4_weights, size=128), 1),
    "ragged_dot_mxfp4_weights": (functools.partial(ragged_four_bits, op=cookbook.ragged_dot_mxfp4_weights, size=64), 2),
     "moe": (moe, 2), "matmul_wgmma": (rung(cookbook.matmul_wgmma), 6),
    "matmul_pipelined": (rung(cookbook.matmul_pipelined, activation="relu"), 6), "matmul_blocked": (blocked, 4),
    "blackwell.matmul": (functools.partial(matmul, op=blackwell.matmul), 5), "blackwell.matmul_mxfp8": (mxfp8, 4),
    "blackwell.ragged_dot": (functools.partial(ragged, op=blackwell.ragged_dot), 4),
}  # fmt: skip


class Traced:
    """Stands in for `_host.kernel`: nothing is launched, and what the compiler may refuse of it is written down."""

    def __init__(self):
        self.facts = set()

    def __call__(self, body, *, out_type, scratch_types=None, cluster=(), **_):
        self.facts |= set(_facts(body, jax.tree.leaves(out_type), scratch_types or {}, tuple(cluster)))
        zeros = lambda aval: jnp.zeros(aval.shape, aval.dtype)
        return lambda *operands: jax.tree.map(zeros, out_type)


def _facts(body, outs, scratch: dict, cluster: tuple):
    how, dtypes = getattr(body, "keywords", {}), tuple(str(out.dtype) for out in outs)
    plan = how.get("plan")
    of_plan = lambda *names: tuple(getattr(plan, name, None) for name in names)
    of_config = lambda *names: tuple(getattr(getattr(plan, "config", None), name, None) for name in names)
    yield getattr(body, "func", body).__module__
    yield of_config("tile_m", "tile_n", "tile_k", "split_dim", "swapped", "two_ctas"), dtypes
    yield of_config("second_kernel", "tail_split", "swapped"), of_plan("slice_tile", "transpose_a", "transpose_b")
    yield cluster, of_config("swapped")
    for name, ref in scratch.items():
        ref = getattr(ref, "refs", [ref])[0]
        if hasattr(ref, "dtype"):
            yield name, ref.shape[1:], str(ref.dtype)


def worth_lowering(monkeypatch, problems, target):
    """Those of `problems` of whose kernels something is new."""
    seen, found, traced = set(), [], Traced()
    with monkeypatch.context() as patch:
        patch.setattr(_host, "kernel", traced)
        jax.clear_caches()
        for fn, avals in problems:
            traced.facts = set()
            with _host.building_for(target):
                jax.eval_shape(fn, *avals)
            if traced.facts - seen:
                found.append((fn, avals))
                seen |= traced.facts
    jax.clear_caches()
    return found


@pytest.mark.parametrize("name", OPS)
def test_what_is_chosen_can_be_lowered(monkeypatch, name):
    draw, count = OPS[name]
    rng, target = Draw(name), B200 if name.startswith("blackwell") else H200
    problems = worth_lowering(monkeypatch, [draw(rng) for _ in range(count)], target)
    for fn, avals in problems:
        lowered(fn, *avals, target=target)
