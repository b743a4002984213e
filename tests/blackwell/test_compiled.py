"""Every rung compiled for a B200, which nobody here has: spills, tensor memory, shared memory, and its instructions."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import lab
from cookbook import blackwell
from cookbook._device import SMEM_BYTES_MAX
from cookbook._host import Target
from cookbook.blackwell import cost
from cookbook.blackwell import plan as plans
from cookbook.blackwell.plan import TMEM_COLUMNS, Config
from cookbook.gemm.plan import identity
from tests.blackwell.grid import RUNGS, STRUCTURES, WIDTHS, of_rung

M, N, K = 2000, 5000, 4096  # More tiles than a B200 has SMs, with tails.
B200 = Target("NVIDIA B200", 148)
BF16, F32, E4M3, E8M0 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e8m0fnu
INSTRUCTIONS = {  # By what a configuration has: what must be in its PTX then, and not without it.
    "two_ctas": r"tcgen05\.mma\.cta_group::2",
    "is_dynamic": r"clusterlaunchcontrol\.try_cancel",
    "scaled": r"tcgen05\.mma\S*\.block_scale",
}


def aval(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def tmem_allocated(ptx) -> int:
    """Columns of tensor memory that a block allocates."""
    register = re.search(r"tcgen05\.alloc\S* \[%r\d+\], (%r\d+);", ptx)[1]
    return int(re.search(rf"mov\.b32 \t{register}, (\d+);", ptx)[1])


def verify(compiled, plan):
    """The compiled kernel is what the plan says, and uses the instructions of its rung and no other's."""
    assert compiled.spill_bytes == 0 and compiled.registers <= 65_536 // (128 * (2 + plan.config.epilogue_wgs))
    assert plan.tmem_columns <= tmem_allocated(compiled.ptx) <= TMEM_COLUMNS
    priced = plan.smem_bytes(plan.num_stages)
    assert priced - 1088 <= compiled.smem_bytes <= priced <= SMEM_BYTES_MAX
    assert "tcgen05.mma" in compiled.ptx and "wgmma" not in compiled.ptx and "tcgen05.ld" in compiled.ptx
    has = dict(two_ctas=plan.config.two_ctas, is_dynamic=plan.config.is_dynamic, scaled=plan.scaled)
    for name, instruction in INSTRUCTIONS.items():
        assert bool(re.search(instruction, compiled.ptx)) == has[name], name
    assert bool(re.search(r"tcgen05\.mma\.cta_group::1", compiled.ptx)) == (not plan.config.two_ctas)


GRID = [pytest.param(rung, width, marks=[pytest.mark.slow] * (width == 128)) for rung in RUNGS for width in WIDTHS]


@pytest.mark.parametrize("rung, width", GRID)
def test_every_rung(rung, width):
    config = of_rung(rung, width)
    fn = functools.partial(blackwell.matmul, config=config, transpose_b=True)
    compiled = lab.compile_for("b200", fn, aval(M, K), aval(N, K))
    verify(compiled, plans.plan_of(M, N, K, BF16, (False, False), identity, BF16, config, B200))


@pytest.mark.parametrize(
    "rung", ["one CTA", pytest.param("two CTAs", marks=pytest.mark.slow), "two CTAs, launch control"]
)
def test_plain_operands_with_everything_fused(rung):
    """A transposed a and a plain b, neither a multiple of the swizzle; a bias, an activation, 32-bit results."""
    config = of_rung(rung, 256)
    fn = lambda a, b, bias: blackwell.matmul(
        a, b, bias=bias, activation="gelu", out_dtype=F32, transpose_a=True, config=config
    )
    f16 = jnp.float16
    compiled = lab.compile_for("b200", fn, aval(K + 8, M, dtype=f16), aval(K + 8, N, dtype=f16), aval(N, dtype=F32))
    verify(compiled, plans.plan_of(M, N, K + 8, f16, (True, True), identity, F32, config, B200))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_interpreted_structure(name):
    (m, n, k), transpose_b, config = STRUCTURES[name]
    fn = functools.partial(blackwell.matmul, config=config, transpose_b=transpose_b)
    compiled = lab.compile_for("b200", fn, aval(m, k), aval(n, k) if transpose_b else aval(k, n))
    verify(compiled, plans.plan_of(m, n, k, BF16, (False, not transpose_b), identity, BF16, config, B200))


MX_GRID = [
    pytest.param(rung, width, marks=[pytest.mark.slow] * (width == 128 or "warpgroups" in rung))
    for rung in RUNGS for width in (64, 128, 192)
]  # fmt: skip


@pytest.mark.parametrize("rung, width", [*MX_GRID, ("one accumulator", 256)])
def test_every_rung_of_mxfp8(rung, width):
    config, k = of_rung(rung, width), K + 32
    fn = functools.partial(blackwell.matmul_mxfp8, config=config)
    scales = (aval(rows, k // 32, dtype=E8M0) for rows in (M, N))
    a_scales, b_scales = scales
    compiled = lab.compile_for("b200", fn, aval(M, k, dtype=E4M3), a_scales, aval(N, k, dtype=E4M3), b_scales)
    verify(compiled, plans.plan_of(M, N, k, E4M3, (False, False), identity, BF16, config, B200, scaled=True))


@pytest.mark.parametrize("two_ctas", [False, True])
def test_accumulators_and_scales_that_do_not_fit_are_refused(two_ctas):
    with pytest.raises(ValueError, match="need 5.. columns of tensor memory with the scales"):
        plans.plan_of(M, N, K, E4M3, (False, False), identity, BF16, Config(two_ctas=two_ctas), B200, scaled=True)


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (128, 4096, 14336), (1, 8, 32), (1000, 1000, 992)])
def test_the_default_of_every_kind_of_problem(shape):
    m, n, k = shape
    assert lab.compile_for("b200", blackwell.matmul, aval(m, k), aval(k, n)).spill_bytes == 0
    operands = [
        aval(*shape, dtype=dtype) for rows in (m, n) for shape, dtype in (((rows, k), E4M3), ((rows, k // 32), E8M0))
    ]
    assert lab.compile_for("b200", blackwell.matmul_mxfp8, *operands).spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("size, itemsize", [((4096, 4096, 4096), 2), ((4096, 4096, 4096), 1), ((130, 1000, 992), 2)])
def test_configurations_worth_timing_compile(size, itemsize):
    """Those that `lab.autotune` would be given on a B200, which only the compiler can try here."""
    m, n, k = size
    configs = cost.to_try(cost.Problem(m, n, k, itemsize == 2, itemsize, 2), 4)
    assert len(configs) == len(set(configs)) > 8
    dtypes = (E4M3, E8M0) if itemsize == 1 else (BF16,)
    op = blackwell.matmul_mxfp8 if itemsize == 1 else blackwell.matmul
    shapes = [((rows, width), dtype) for rows in (m, n) for dtype, width in zip(dtypes, (k, k // 32), strict=False)]
    if itemsize == 2:
        shapes[1] = ((k, n), BF16)
    for config in configs[::2]:
        compiled = lab.compile_for(
            "b200", functools.partial(op, config=config), *(aval(*s, dtype=d) for s, d in shapes)
        )
        assert compiled.spill_bytes == 0, config


@pytest.mark.parametrize("how", [dict(), dict(transpose_b=True)], ids=str)
def test_gradients_compile(how):
    """Forward, and the two products of the backward pass, as pairs of blocks."""
    b = aval(520, 1032) if not how else aval(1032, 520)
    loss = lambda a, b, bias: blackwell.matmul(a, b, bias=bias, activation="gelu", **how).astype(F32).sum()
    compiled = lab.compile_for("b200", jax.grad(loss, (0, 1, 2)), aval(520, 520), b, aval(1032, dtype=F32))
    assert compiled.spill_bytes == 0 and len(compiled.kernels) == 3 and "tcgen05.mma" in compiled.ptx


def test_two_gpus_compile():
    """In a shard_map over a host's GPUs."""
    fn = lambda a, b: jax.shard_map(blackwell.matmul, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x"))(a, b)
    assert lab.compile_for("b200", fn, aval(512, 256), aval(256, 512), devices=2).spill_bytes == 0


def test_batches_of_mxfp8_compile():
    operands = [aval(2, rows, width, dtype=dtype) for rows in (256, 384) for width, dtype in ((128, E4M3), (4, E8M0))]
    assert lab.compile_for("b200", jax.vmap(blackwell.matmul_mxfp8), *operands).spill_bytes == 0
