"""softmax, rms_norm and reduce_sum: the kernels over rows.

Row lengths around what decides how a row is laid out: 1 and 2 (padded), powers of two and not, multiples of 16 bytes
(8 or 4 values) and not, the switch from one warp a row to four (256 * vec), and rows that do not fit the registers.
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook import _host, reduce_sum, rms_norm, softmax
from cookbook.rows import core, leading, leading_plan, norm
from cookbook.rows.rms_norm import rms_norm_reference
from cookbook.rows.softmax import softmax_reference
from tests.arrays import array

reduce_sum_module, softmax_module = (inspect.getmodule(getattr(cookbook, name)) for name in ("reduce_sum", "softmax"))
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# The first of each is compiled too; the other shapes are of kernels that compile for one of these.
CASES = [
    ((37, 1000), BF16), ((37, 999), BF16), ((9, 5000), F16), ((1, 1), F32), ((131, 2), BF16), ((3, 3), F32),
    ((133, 15), BF16), ((33, 33), F16), ((21, 600), F32), ((2, 3, 2048), BF16), ((2, 6001), BF16),
]  # fmt: skip
MORE_CASES = [
    ((5, 1), BF16), ((300, 8), F16), ((2, 100), BF16), ((37, 128), F32), ((21, 257), BF16), ((37, 1000), F32),
    ((5, 1301), F16), ((9, 5000), F32), ((3, 16384), BF16), ((2, 6001), F32), ((1, 20003), BF16),
]  # fmt: skip
H200 = _host.Target("h200", 132)
IDS = lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "__name__", None)


cases = pytest.mark.parametrize(
    "shape, dtype", CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES], ids=IDS
)


def gpu_of(shape):
    return "h200" if shape in ((37, 999), (9, 5000), (301, 1001), (1000, 44)) else None


def normal(seed, shape, dtype=jnp.float32, scale=1.0, shift=0.0):
    return array(np.random.default_rng(seed).normal(size=shape) * scale + shift, dtype)


@cases
def test_softmax(shape, dtype):
    lab.check(softmax, softmax_reference, normal(0, shape, dtype, 3), gpu=gpu_of(shape))


@cases
def test_rms_norm(shape, dtype):
    x, scale = normal(0, shape, dtype, 2, 0.5), normal(1, shape[-1:], jnp.float32, 1, 1)
    lab.check(rms_norm, rms_norm_reference, x, scale, gpu=gpu_of(shape))


RESIDUAL_CASES = [  # Shape, dtypes of x, of the residual and of the result.
    ((64, 2048), F32, F32, BF16), ((37, 999), BF16, F32, BF16), ((9, 5000), F32, F16, F16), ((3, 2), F16, F32, F32),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ((2, 6001), BF16, F32, BF16), ((2, 6001), F32, BF16, F32), ((1, 1), BF16, BF16, BF16),
        ((2, 3, 300), F32, F32, F32), ((1, 20003), BF16, F32, F32), ((131, 128), F16, F16, F32),
    )),
]  # fmt: skip


def with_residual(x, residual, scale, *, out_dtype=None):
    return rms_norm(x, scale, residual=residual, out_dtype=out_dtype)


@pytest.mark.parametrize("shape, dtype, residual_dtype, out_dtype", RESIDUAL_CASES, ids=IDS)
def test_rms_norm_of_a_sum(shape, dtype, residual_dtype, out_dtype):
    x, residual = normal(0, shape, dtype, 2, 0.5), normal(1, shape, residual_dtype, 3)
    reference = lambda x, residual, scale: rms_norm_reference(x, scale, residual=residual)
    lab.check(
        functools.partial(with_residual, out_dtype=out_dtype), reference, x, residual, normal(2, shape[-1:], F32, 1, 1),
        gpu="h200" if shape[0] in (9, 64) else None,
    )  # fmt: skip
    y, total = jax.eval_shape(lambda *args: reference(*args), x, residual, normal(2, shape[-1:]))
    assert y.shape == total.shape == shape


def test_rms_norm_of_a_sum_adds_as_jax_does():
    """The next residual is the sum to the bit; and a row's NaN stays in its row."""
    x, residual, scale = normal(0, (5, 300), F32), normal(1, (5, 300), F32), normal(2, 300)
    x = x.at[3, 7].set(jnp.nan)
    y, total = lab.run(with_residual, x, residual, scale)
    np.testing.assert_array_equal(total, residual + x)
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()


def test_mutants_of_the_sum_are_caught(mutant, monkeypatch):
    args = normal(0, (8, 999), BF16), normal(1, (8, 999), F32), normal(2, 999)
    reference = lambda x, residual, scale: rms_norm_reference(x, scale, residual=residual)
    only = lambda which: lambda self, plan, arrays, row, g: (plan.load(arrays[which], row, g), None)
    for mutation in (only(0), only(1), lambda self, plan, arrays, row, g: (plan.load(arrays[0], 0, g), None)):
        monkeypatch.setattr(norm.Norm, "inputs", mutation)
        jax.clear_caches()
        with pytest.raises(lab.CheckError, match="error"):
            lab.check(with_residual, reference, *args, gpu=None)


def test_rms_norm_with_16_bit_scale_and_eps():
    x, scale = normal(0, (9, 300), jnp.bfloat16, 1e-3), normal(1, 300, jnp.float16)
    lab.check(lambda x, s: rms_norm(x, s, eps=1e-2), lambda x, s: rms_norm_reference(x, s, 1e-2), x, scale)


def sums(axis):
    return lambda x: reduce_sum(x, axis), lambda x: reduce_sum_module.reduce_sum_reference(x, axis)


@cases
def test_reduce_sum_last(shape, dtype):
    lab.check(*sums(-1), normal(0, shape, dtype, 1, 0.1), gpu=gpu_of(shape))


@pytest.mark.parametrize(
    "shape, dtype",
    # Long rows that begin anywhere: one group of pieces, and several. Short ones: one row a thread, and more.
    [((9, 12801), BF16), ((300, 23), F16), ((2200, 15), BF16), ((3, 16387), F32), ((70, 136), F16),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ((17, 37835), F16), ((2, 65535), F32), ((1100, 3), F32), ((6, 12795), BF16), ((150, 101), BF16)))],
    ids=IDS,
)  # fmt: skip
def test_every_value_is_added_once(shape, dtype, config=None):
    """Rows of zeros with up to 200 ones, at both ends among them: their sums are exact in every dtype."""
    x = np.random.default_rng(0).random(shape) < min(0.5, 100 / shape[1])
    x[:, 0], x[:, -1] = True, True
    got = lab.run(lambda x: reduce_sum(x, -1, config=config), array(x, dtype))
    np.testing.assert_array_equal(np.asarray(got, np.int64), x.sum(axis=1))


def test_sums_of_several_rows_a_thread(monkeypatch):
    """As where rows are too many for all blocks to run at once: tens of thousands, too many to interpret."""
    several = lambda plan, num_sms: 3 * core.WARPGROUP // plan.lanes
    monkeypatch.setattr(reduce_sum_module.ShortPlan, "rows_per_block", several)
    test_every_value_is_added_once((1001, 15), BF16)


@pytest.mark.parametrize(
    "shape, config",
    [
        ((13, 520), core.Config(1)),
        ((13, 520), core.Config(8)),
        ((3, 1025), core.Config(1, 8)),
        ((70, 7), core.Config(64)),
    ],
    ids=str,
)  # fmt: skip
def test_sums_by_a_configuration_of_the_caller(shape, config):
    test_every_value_is_added_once(shape, BF16, config)


def test_plans_of_sums_of_every_length():
    """Pieces lie in their row, tiles have whole warps, and all blocks run at once or a thread has enough to load."""
    m = reduce_sum_module
    for rows, cols in itertools.product((1, 40, 5000, 10**6), [*range(2, 3000), 12801, 65535]):
        plan = m.plan_of(rows, cols, 2, None, 132)
        if isinstance(plan, m.LongPlan):
            assert plan.inner >= plan.shape[0] and cols - plan.inner < 2 * plan.vec
        elif isinstance(plan, m.ShortPlan):
            at_once = core.WARPGROUP // plan.lanes
            turns = plan.config.block_rows // at_once
            assert plan.shape[1] <= cols and plan.config.block_rows == turns * at_once <= rows
            full = turns == 8 or (turns + 1) * cols > m.VALUES_IN_FLIGHT * plan.lanes
            assert full or rows <= plan.config.block_rows * m.BLOCKS_PER_SM * 132
    assert isinstance(m.plan_of(10, 37835, 2, None, 132), m.LongPlan)
    assert isinstance(m.plan_of(5000, 23, 2, None, 132), m.ShortPlan)


@pytest.mark.parametrize(
    "changes",
    [
        dict(where=lambda condition, value, other: value),  # Columns that two pieces share are added twice.
        dict(minimum=lambda turn, last: jnp.minimum(turn, last - 64)),  # The last piece ends too early.
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_mutants_of_long_sums_are_caught(mutant, changes):
    mutant(reduce_sum_module, "jnp", **changes)
    with pytest.raises(AssertionError):
        test_every_value_is_added_once((9, 12801), BF16)


@pytest.mark.parametrize(
    # Fewer rows than a tile has, one stretch and several; rows and columns left over; columns too few for a tile.
    "shape, dtype",
    [((301, 1001), BF16), ((40, 3783), BF16), ((1, 1), F32), ((600, 7), BF16), ((5, 2, 130), F16), ((1100, 15), F32),
     ((3, 3000), BF16), ((1000, 44), BF16), ((9,), F32), ((3, 7), BF16)],
    ids=IDS,
)  # fmt: skip
def test_reduce_sum_leading(shape, dtype):
    lab.check(*sums(0), normal(0, shape, dtype, 1, 0.1), gpu=gpu_of(shape))


@pytest.mark.parametrize("cols", [200, 6001, *[pytest.param(cols, marks=pytest.mark.slow) for cols in (3, 4096)]])
def test_softmax_of_special_rows(cols):
    """-inf alone, a stretch of -inf, +inf, NaN, large logits of either sign: as `jax.nn.softmax`."""
    x = np.random.default_rng(0).normal(size=(7, cols)).astype(np.float32)
    x[0] = -np.inf
    x[1, : cols // 2] = -np.inf
    x[2, cols // 2 :] = -np.inf
    x[3, 1] = np.inf
    x[4, 2] = np.nan
    x[5] += 3e4
    x[6] -= 3e38
    out, wanted = lab.run(softmax, jnp.asarray(x)), jax.nn.softmax(x, axis=-1)
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=1e-7)


def softmax_of_a_late_row():
    """Softmax of a row that begins with a group of registers of -inf alone."""
    plan = core.plan_rows(1, 17000, 4, None, softmax_module.REGISTER_VALUES)
    assert plan.num_groups > 1
    x = np.random.default_rng(0).normal(size=(1, plan.cols)).astype(np.float32)
    x[0, : plan.group * plan.shape[0]] = -np.inf
    return lab.run(softmax, x), jax.nn.softmax(x, axis=-1)


def test_softmax_of_a_row_that_begins_with_a_group_of_minus_infinity():
    np.testing.assert_allclose(*softmax_of_a_late_row(), rtol=2e-5, atol=1e-9)


def test_mutant_without_the_guard_of_such_groups(mutant):
    mutant(softmax_module, "jnp", maximum=lambda a, b: a if isinstance(b, float) else jnp.maximum(a, b))
    assert np.isnan(softmax_of_a_late_row()[0]).any()


@pytest.mark.parametrize("cols", [8, 4096])
def test_huge_and_tiny_rows(cols):
    """Squares that overflow, and a row of zeros, which `eps` alone keeps finite."""
    x = jnp.stack([jnp.full(cols, 1e25), jnp.zeros(cols), jnp.full(cols, 1e-25)])
    scale = normal(0, cols)
    np.testing.assert_array_equal(lab.run(rms_norm, x, scale), rms_norm_reference(x, scale))


def test_more_rows_than_tiles_and_a_given_config():
    x = normal(0, (8 * 2 + 1, 520), jnp.bfloat16)
    for block_rows in (1, 8):
        lab.check(functools.partial(softmax, config=core.Config(block_rows)), softmax_reference, x, gpu=None)


def test_row_plans_of_every_length():
    """Each column is covered, by pieces in bounds; a thread reads aligned words. Cheap, so every length up to 3000."""
    for itemsize in (2, 4):
        for rows, cols in itertools.product((4096, 9), [*range(2, 3000), 8191, 8192, 32768, 65535, 65536]):
            plan = core.Plan(rows, cols, itemsize, core.default_config(rows, cols, itemsize))
            covered = np.zeros(cols, bool)
            for g in range(plan.num_groups):
                for turn, start in plan.starts(g):
                    assert 0 <= start <= turn and start + plan.shape[-1] <= cols and start % plan.vec == 0
                    covered[start : start + plan.shape[-1]] = True
            assert covered.all() and cols % plan.vec == 0


@pytest.mark.parametrize("cols", [2051, 5507, 8191, 12785])
def test_ragged_rows_are_covered_once(cols, monkeypatch):
    """Wherever a row begins: no column is missed, counted twice or outside the row, and long loads are aligned."""
    plan = core.RaggedPlan(9, cols, 2, core.Config(1, 128))
    assert plan.fits
    for row in range(9):
        monkeypatch.setattr(jax.lax, "axis_index", lambda name, row=row: row)
        counted = np.zeros(9 * cols, int)
        for where, layout, low, high in plan._parts():
            assert row * cols <= where.start and where.start + where.size <= (row + 1) * cols
            assert where.start % (8 if layout == plan.layout else 1) == 0
            counted[where.start + low : where.start + high] += 1
        assert (counted[row * cols : (row + 1) * cols] == 1).all() and counted.sum() == cols
        # Values that all rows share are loaded from the same columns, in words as long.
        shifted = np.asarray(plan.shift(jnp.arange(cols)))
        for (where, layout, *_), (late, *_) in zip(plan._parts(), plan._parts(late=True), strict=True):
            np.testing.assert_array_equal(
                shifted[late.start :][: late.size], np.arange(late.size) + where.start - row * cols
            )
            assert late.start % (8 if layout == plan.layout else 1) == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: rms_norm(x, x[0]),
        sums(0)[0],
        *[pytest.param(fn, marks=pytest.mark.slow) for fn in (softmax, sums(-1)[0])],
    ],
)
def test_jit_vmap_and_determinism(fn):
    x = normal(0, (2, 5, 300), jnp.bfloat16)
    runs = [lab.run(jax.jit(jax.vmap(fn)), x), lab.run(jax.vmap(fn), x), jnp.stack([lab.run(fn, one) for one in x])]
    assert all((run == runs[0]).all() for run in runs)


def test_empty():
    assert softmax(jnp.zeros((0, 5))).shape == (0, 5)
    assert rms_norm(jnp.zeros((3, 0)), jnp.zeros(0)).shape == (3, 0)
    np.testing.assert_array_equal(reduce_sum(jnp.zeros((3, 0)), -1), jnp.zeros(3))
    np.testing.assert_array_equal(reduce_sum(jnp.zeros((0, 4)), 0), jnp.zeros(4))


def test_names_of_other_libraries():
    x = normal(0, (5, 40), BF16)
    ones = np.ones(40, np.float32)
    fns = [
        (lambda x: softmax(x, axis=-1), softmax),
        (lambda x: softmax(x, 1), softmax),
        (lambda x: rms_norm(x, epsilon=1e-2), lambda x: rms_norm(x, ones, eps=1e-2)),
        (lambda x: rms_norm(x, ones, residual=np.asarray(x, np.float32).tolist())[1], lambda x: 2 * x),
        (lambda x: rms_norm(x, ones, out_dtype="float32"), lambda x: rms_norm(x, ones, out_dtype=F32)),
    ]
    for got, wanted in lab.run(lambda x: [(ours(x), theirs(x)) for ours, theirs in fns], x):
        np.testing.assert_array_equal(got, wanted)


def configured(op, cols: int, block_rows: int, *args):
    return lab.run(functools.partial(op, config=core.Config(block_rows)), jnp.ones((64, cols), jnp.bfloat16), *args)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: softmax(jnp.ones(3, jnp.int32)), "int32"),
        (lambda: softmax(jnp.float32(1)), "scalar"),
        (lambda: softmax(jnp.zeros((1, 65537))), "65537"),
        (lambda: rms_norm(jnp.ones((3, 4)), jnp.ones(3)), r"\(4,\)"),
        (lambda: rms_norm(jnp.ones((3, 4)), jnp.ones(4, jnp.int8)), "int8"),
        (lambda: rms_norm(jnp.ones((3, 4)), jnp.ones(4), residual=jnp.ones(4)), r"residual.shape=\(4,\)"),
        (lambda: rms_norm(jnp.ones((3, 4)), jnp.ones(4), out_dtype=jnp.int16), "out_dtype"),
        (lambda: reduce_sum(jnp.ones((3, 4, 5)), 1), "axis=1"),
        (lambda: core.Config(block_rows=6), "block_rows=6"),
        (lambda: configured(softmax, 23, 4), "block_rows=4; must be a multiple of 16 for rows of 23 values: pass 16"),
        (lambda: configured(rms_norm, 23, 1, jnp.ones(23)), "block_rows=1; 1 is for rows of 128 .*these have 23: pass"),
        (lambda: configured(reduce_sum, 23, 4, -1), "cookbook.reduce_sum: config.block_rows=4"),
        (lambda: configured(softmax, 200, 96), "cookbook.softmax: config.block_rows=96; must be at most 64 for 64"),
        (lambda: softmax(jnp.ones((8, 40)), config=core.Config(64)), "block_rows=64; must be at most 16 for 8 rows"),
        (lambda: softmax(jnp.ones((8, 40)), config=4), "config=4; must be a cookbook.softmax.Config"),
        (lambda: rms_norm(jnp.ones((8, 40)), config=dict(block_rows=4)), "must be a cookbook.rms_norm.Config"),
        (lambda: reduce_sum(jnp.ones((8, 40)), 0, config=core.Config(8)), "must be None for axis=0: leave it out"),
        (lambda: softmax(jnp.ones((8, 40)), axis=0), r"axis=0 of 2; must be -1: move the axis \(jnp.moveaxis\)"),
        (lambda: softmax(jnp.ones((8, 40)), axis=(0, 1)), r"axis=\(0, 1\); must be one int"),
        (lambda: rms_norm(jnp.ones((8, 40)), residual=[1.0, 2.0]), r"residual.shape=\(2,\); must be \(8, 40\)"),
        (lambda: rms_norm(jnp.ones((8, 40)), residual=[[1.0], [1.0, 2.0]]), "residual=.*lists of equal lengths"),
        (lambda: rms_norm(jnp.ones((8, 40)), eps=-1), "eps=-1.0; must be 0 or more"),
        (lambda: rms_norm(jnp.ones((8, 40)), epsilon="small"), "eps='small'"),
        (lambda: jax.eval_shape(softmax, jax.ShapeDtypeStruct((2**31, 2), BF16)), "rows=2147483648; must be below"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


ROW_KERNELS = {
    "softmax": (softmax, softmax_reference),
    "rms_norm": (lambda x: rms_norm(x, x[0]), lambda x: rms_norm_reference(x, x[0])),
    "reduce_sum": sums(-1),
}


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_mutant_that_sums_the_shared_columns_twice(name, mutant, monkeypatch):
    monkeypatch.setattr(core.Plan, "fresh", lambda self, pieces, g: pieces)
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(*ROW_KERNELS[name], normal(0, (8, 999), jnp.bfloat16, 1, 1), gpu=None)


def test_mutant_that_sums_the_ends_twice(mutant, monkeypatch):
    monkeypatch.setattr(core.RaggedPlan, "fresh", lambda self, pieces, g: pieces)
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(softmax, softmax_reference, normal(0, (2, 3001)), gpu=None)


@pytest.mark.parametrize("name", ROW_KERNELS)
def test_mutant_that_leaves_the_last_rows(name, mutant, monkeypatch):
    one_tile = lambda self, visit: visit(jax.lax.axis_index("block") * self.config.block_rows)
    monkeypatch.setattr(core.Plan, "for_each_tile", one_tile)
    with pytest.raises(lab.CheckError):
        lab.check(*ROW_KERNELS[name], normal(0, (9, 300), jnp.bfloat16), gpu=None)


def test_mutant_without_the_rescale_of_online_softmax(mutant, monkeypatch):
    monkeypatch.setattr(softmax_module, "_merge", lambda a, b: (b[0], a[1] + b[1]))
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(softmax, softmax_reference, normal(0, (2, 16411), scale=3), gpu=None)


@pytest.mark.parametrize("cols", [15, 44, 80, 391, 2048, 4236, 8191, 8192, 65535])
@pytest.mark.parametrize("rows", [257, 1162, 94805])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_leading_plans_cover_all_values(rows, cols, itemsize):
    """Windows are aligned, inside the matrix, and cover their tile of a line; the rest is left over."""
    for plan in {leading.choose(rows, cols, itemsize, H200, once=once) for once in (True, False)}:
        columns = np.array([int(plan.column(tile)) for tile in range(plan.num_tiles)])
        assert columns[0] == 0 and columns[-1] + plan.width == plan.line_size
        assert all(0 < b - a <= plan.width for a, b in itertools.pairwise(columns))
        begins = np.arange(plan.num_lines)[:, None] * plan.line_size + columns
        starts = begins // plan.vec * plan.vec
        assert (starts + plan.span_size <= rows * cols).all() and (begins + plan.width <= starts + plan.span_size).all()
        assert plan.lines_per_step * plan.line_size % plan.vec == 0 and plan.vec * itemsize <= 16
        left = plan.num_lines * plan.line_size + columns
        start = np.minimum(left, rows * cols - plan.leftover_span)
        end = rows * cols if plan.num_tiles == 1 else left + plan.width
        assert plan.leftover == 0 or ((start >= 0) & (end <= start + plan.leftover_span)).all()
        assert plan.num_tiles == 1 or plan.leftover <= plan.line_size


@pytest.mark.parametrize("way", ["once", "twice"])
@pytest.mark.parametrize(
    "shape, dtype", [((301, 90), BF16), ((1100, 15), F32), ((530, 24), F16), ((47, 2050), BF16)], ids=IDS
)
def test_sums_over_the_leading_axis_by_each_way(shape, dtype, way, monkeypatch):
    """By one kernel and by two: each whatever the shape, with rows and columns left over."""
    monkeypatch.setattr(leading_plan, "LAUNCH_US", dict(once=1e6, twice=-1e6)[way])
    plans, launch = [], leading._launch
    monkeypatch.setattr(leading, "_launch", lambda plan, *args: plans.append(plan) or launch(plan, *args))
    leading.choose.cache_clear()  # It and JAX may hold plans made by other costs.
    jax.clear_caches()
    fns, x = sums(0), normal(0, shape, dtype, 1, 0.1)
    lab.check(*fns, x, gpu=None)
    assert len(plans) == 1 + (way == "twice")
    if shape[1] == 15:
        lab.compile_for("h200", fns[0], x)
    leading.choose.cache_clear()


@pytest.mark.parametrize(
    "shape, us", [((81, 28280), 2.1), ((16282, 158), 4.0), ((7487, 2934), 9.8), ((147096, 3368), 232)]
)
def test_predicted_times_of_sums_over_the_leading_axis(shape, us):
    """Near those measured on an H200, in bfloat16."""
    plan = leading.choose(*shape, 2, H200)
    assert 0.85 < leading_plan.cost(plan, H200) / us < 1.2
    assert (plan.rows_of_sums == 1) == (shape[0] == 81)


def test_mutant_that_leaves_rows_of_the_leading_axis(run_only, mutant):
    mutant(leading, "lax", fori_loop=lambda low, high, body, init: init)
    with pytest.raises(lab.CheckError):
        lab.check(*sums(0), normal(0, (900, 256)), gpu=None)


def test_mutant_that_leaves_values_after_the_last_window(mutant, monkeypatch):
    monkeypatch.setattr(leading.LeadingPlan, "leftover_places", 0)
    with pytest.raises(lab.CheckError):
        lab.check(*sums(0), normal(0, (30, 257), BF16), gpu=None)


def test_mutant_that_begins_each_line_at_its_window(mutant, monkeypatch):
    monkeypatch.setattr(leading.LeadingPlan, "gap", 0)
    with pytest.raises(lab.CheckError):
        lab.check(*sums(0), normal(0, (40, 3783), BF16), gpu=None)
