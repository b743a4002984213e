"""The plans and blocks that the losses choose by themselves: lowered for an H200, and the memory of their programs."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host, cross_entropy, linear_cross_entropy
from cookbook._device import WARPGROUP
from cookbook.gemm import cost
from cookbook.loss import blocks, kernel, products
from cookbook.loss.plan import GROUP
from lab.toolchain import claim_architecture, device, gpu_facts
from tests.lowering import H200, lowered

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
ALL = dict(label_smoothing=0.1, z_loss=1e-3, logits_soft_cap=30.0)
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def aval(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def of_logits(**options):
    return lambda logits, labels: jax.value_and_grad(lambda x: cross_entropy(x, labels, **options))(logits)


def of_products(**options):
    loss = lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **options)
    return jax.value_and_grad(loss, (0, 1))


def operands(rows, hidden, vocabulary, transposed=False, dtype=BF16):
    weight = (hidden, vocabulary) if transposed else (vocabulary, hidden)
    return aval(dtype, rows, hidden), aval(dtype, *weight), aval(jnp.int32, rows)


@pytest.mark.parametrize("dtype, options", [(BF16, {}), (F32, ALL)])
def test_rows_of_every_length(dtype, options):
    """One plan of each kind: the values that a thread loads at once, pieces in groups and beyond, a shared last one."""
    seen, rng = set(), np.random.default_rng(0)
    for cols in [*range(1, 600), *map(int, rng.integers(600, 2**20, 300)), 2**20]:
        plan = kernel.Plan(3, cols, max(cols, 128), jnp.dtype(dtype).itemsize, None)
        groups, rest = divmod(plan.num_body, GROUP)
        traits = plan.vec, groups > 0, rest > 0, plan.shared > 0, plan.has_ends
        if traits not in seen:
            seen.add(traits)
            lowered(of_logits(**options), aval(dtype, 3, cols), aval(jnp.int32, 3))
    assert len(seen) >= 9


def test_every_column_is_in_one_piece():
    for pitch in [*range(128, 3000), 32000, 128256, 128320, 2**20]:
        for itemsize in (2, 4):
            plan = kernel.Plan(1, pitch, pitch, itemsize, None)
            assert plan.in_pieces % plan.vec == plan.last % plan.vec == 0
            assert 0 <= plan.shared < plan.width and plan.num_body * plan.width - plan.shared == plan.last
            if plan.has_ends:
                for row in range(plan.aligned):
                    begin = -row * pitch % plan.aligned
                    assert begin < WARPGROUP and 0 <= pitch - begin - plan.covered < WARPGROUP
    for vocabulary in range(1, 3000):  # All columns that do not count are in the last piece.
        for transposed in (False, True):
            plan = kernel.Plan(1, vocabulary, products.pitch_of(vocabulary, transposed), 2, None)
            assert plan.num_body * plan.width < max(vocabulary, 1) and plan.pitch >= vocabulary


@pytest.mark.parametrize("memory", [None, "low"])
def test_products_of_many_sizes(memory):
    """Rows from one to many, vocabularies of any size, both ways a weight may lie."""
    rng = np.random.default_rng(memory == "low")
    for _ in range(2):
        rows, vocabulary = (int(np.exp(rng.uniform(0, np.log(most)))) for most in (20000, 200000))
        hidden, transposed = 8 * int(rng.integers(1, 300)), bool(rng.integers(2))
        sizes, how = operands(rows, hidden, vocabulary, transposed), dict(transpose_weight=transposed, memory=memory)
        lowered(of_products(**how), *sizes)
        lowered(lambda *args, how=how: linear_cross_entropy(*args, **how), *sizes)  # The loss alone.


def test_parts_of_few_rows_have_room():
    """d_hidden of few rows is computed in parts of the vocabulary; their sums and the logits take 2 GB at most."""
    rng, in_parts = np.random.default_rng(0), 0
    for rows in (332, 4096, *np.exp(rng.uniform(0, np.log(20000), 30)).astype(int)):
        hidden, vocabulary = (3008, 142080) if rows == 332 else (8 * int(rng.integers(1, 600)), 220_032)
        pitch = products.pitch_of(vocabulary, False)
        found = blocks.blocks_of(int(rows), hidden, vocabulary, pitch, None, H200.num_sms)
        room = found.room(int(rows), pitch) if found.cols is None else 0
        size = cost.Problem(found.rows, hidden, vocabulary, (False, True))
        config = products._config(size, room=room)
        sums = 4 * config.split_k * size.m * size.n if config.second_kernel else 0
        assert sums <= room and (not room or 2 * found.rows * pitch + room <= blocks.BYTES_MAX)
        assert not products._config(size).second_kernel and (rows != 332 or config.second_kernel)
        in_parts += config.second_kernel
    assert 1 < in_parts < 30


def compiled_whole(fn, *avals, donate_argnums=()):
    """`fn`, compiled by XLA for an H200."""
    facts, target = gpu_facts("h200"), device("h200")
    if claim_architecture() != facts["major"]:
        pytest.skip("this process compiles whole programs for another GPU")
    where = jax.sharding.SingleDeviceSharding(target)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in avals]
    with _host.building_for(H200), jax.default_device(target):
        return jax.jit(lambda *args: fn(*args), donate_argnums=donate_argnums).lower(*avals).compile()


@pytest.mark.parametrize(
    "size, memory",
    [
        ((8192, 2048, 32000), None),
        ((8192, 2048, 32000), "low"),
        slow((3656, 4800, 225384), None),  # Not a multiple of 64: no rows of the weight's gradient are cut off.
        slow((16384, 2048, 151936), None),
        slow((4096, 4096, 128256), "low"),
    ],
)
def test_memory(size, memory):
    """Beside operands and results: half of the float32 logits, at most 2 GB; or a twentieth."""
    rows, _, vocabulary = size
    compiled = compiled_whole(of_products(memory=memory), *operands(*size))
    logits = 4 * rows * -(-vocabulary // 64) * 64  # Each row begins at a multiple of 128 bytes.
    allowed = logits / 20 if memory else min(logits / 2, blocks.BYTES_MAX)
    # Numbers per row, which come on top of logits that take half of it.
    assert compiled.memory_analysis().temp_size_in_bytes <= allowed + 32 * rows


def test_the_gradient_takes_the_place_of_donated_logits():
    rows, vocabulary = 4096, 32000
    compiled = compiled_whole(of_logits(), aval(BF16, rows, vocabulary), aval(jnp.int32, rows), donate_argnums=0)
    found = compiled.memory_analysis()
    assert found.alias_size_in_bytes == 2 * rows * vocabulary and found.temp_size_in_bytes < 100 * rows


def test_no_registers_are_spilled():
    for shape, dtype, options in (((4096, 128256), BF16, {}), ((4096, 32000), BF16, ALL)):
        compiled = lab.compile_for("h200", of_logits(**options), aval(dtype, *shape), aval(jnp.int32, shape[0]))
        assert compiled.spill_bytes == 0 and min(each.blocks_per_sm for each in compiled.kernels) >= 3


@pytest.mark.parametrize("size", [(16384, 2048, 151936), slow((1000, 136, 12345))])
@pytest.mark.parametrize("options", [{}, ALL])
def test_the_epilogue_of_the_loss_alone_spills_no_registers(size, options):
    compiled = lab.compile_for("h200", lambda *args: linear_cross_entropy(*args, **options), *operands(*size))
    assert len(compiled.kernels) == 1 and compiled.spill_bytes == 0


@pytest.mark.parametrize("size, options", [((8192, 2048, 32000), ALL), slow((16384, 2048, 151936), {})])
def test_low_memory_spills_no_registers_and_copies_no_part(size, options):
    """The kernels find a block's columns where they lie, in the weight and in its gradient."""
    fn = of_products(memory="low", **options)
    compiled = lab.compile_for("h200", fn, *operands(*size))
    assert len(compiled.kernels) == 4 and compiled.spill_bytes == 0


@pytest.mark.parametrize("rows, rounded", [(16384, True), slow(32768, False)])
def test_sums_of_the_weights_gradient_spill_no_registers(rows, rounded):
    assert blocks.blocks_of(rows, 2048, 151936, 151936, None, 132).rounded == rounded
    compiled = lab.compile_for("h200", of_products(), *operands(rows, 2048, 151936))
    assert len(compiled.kernels) == 6 and compiled.spill_bytes == 0  # Two per row, and of products one that adds.


@pytest.mark.parametrize("cols, end", [(32064, []), (32065, ["mb"])])
def test_all_threads_have_loaded_a_row_before_its_last_piece_is_stored(cols, end):
    """The interpreter has one thread per warpgroup, and so no warp that is ahead of another: read off the PTX. After
    one more barrier come the ends of a row, one value per thread."""
    compiled = lab.compile_for("h200", of_logits(), aval(BF16, 8, cols), aval(jnp.int32, 8))
    assert compiled.spill_bytes == 0
    kernel_ptx = compiled.ptx[compiled.ptx.index(".entry loss_gradient") :]
    steps = re.findall(r"ld\.global\.v4|st\.global\.v4\.b32 \t?\[%rd\d+[+\d-]*\], \{%r|mbarrier\.try_wait", kernel_ptx)
    order = [kind for kind, _ in itertools.groupby(step[:2] for step in steps)]
    assert order[:3] == ["ld", "mb", "ld"] and order[-3 - len(end) :] == ["st", "mb", "st", *end]


@pytest.mark.parametrize("cols", [151_936, 151_937])
def test_offsets_beyond_32_bits(cols):
    """No sum or product of 32 bits becomes an address, in 20,000 rows of so many logits."""
    shape = 20_000, cols
    compiled = lab.compile_for("h200", of_logits(), aval(BF16, *shape), aval(jnp.int32, shape[0]))
    assert np.prod(shape) > 2**31 and "mul.wide.s32" not in compiled.ptx


def test_blocks_keep_to_their_bytes():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows, hidden, vocabulary = (int(np.exp(rng.uniform(*map(np.log, ends)))) for ends in
                                    ((1, 200_000), (8, 16384), (1, 300_000)))  # fmt: skip
        pitch = products.pitch_of(vocabulary, False)
        for memory in (None, "low"):
            found = blocks.blocks_of(rows, hidden, vocabulary, pitch, memory, 132)
            assert found.rows % 8 == 0 and 0 < found.rows < rows + blocks.UNIT
            if found.cols is not None:
                assert found.cols % products.COLUMNS == 0 and found.num(rows) <= blocks.ROUNDED_MAX
                allowed = rows * vocabulary / 5 if memory else blocks.BYTES_MAX
                nbytes = found.rows * (2 * found.cols + 4 * hidden) + 2 * rows * hidden * (rows % 8 > 0)
                assert nbytes <= allowed or found.cols <= 8 * blocks.UNIT
            if memory is None and found.cols is None:
                sums = 4 * vocabulary * hidden * (found.num(rows) > 1 and not found.rounded)
                assert found.rows <= blocks.UNIT or 2 * min(found.rows, rows) * pitch + sums <= blocks.BYTES_MAX
            assert not found.rounded or 1 < found.num(rows) <= blocks.ROUNDED_FEW
