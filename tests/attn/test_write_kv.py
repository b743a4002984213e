"""write_kv: what is written, bit for bit, and that nothing else is.

The caches are full of random bits, NaNs of every kind among them, and the expected ones are made by a loop over bytes.
"""

import functools
import importlib
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import write_kv
from tests.arrays import array

module = importlib.import_module("cookbook.attn.cache.write_kv")
ROOT = pathlib.Path(__file__).parents[2]
Config, reference = module.Config, module.write_kv_reference
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # Signalling NaNs cause it.
NO_SLOTS = (-1, np.iinfo(np.int32).min, np.iinfo(np.int32).max, -2)  # Beside the first one beyond the cache.


def operands(tokens, pages, page_size, heads, head_dim, dtype=BF16, no_slots=NO_SLOTS):
    """With at least 2 tokens, every second slot is none, one after the other of `no_slots`."""
    rng = np.random.default_rng(tokens * page_size + head_dim)
    bits = lambda *shape: rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
    slots = rng.permutation(max(pages * page_size, tokens))[:tokens].astype(np.int32)
    slots[1::2] = np.resize((pages * page_size, *no_slots), len(slots[1::2]))
    new, cache = (tokens, heads, head_dim), (pages, page_size, heads, head_dim)
    return [jnp.asarray(x) for x in (bits(*new), bits(*new), bits(*cache), bits(*cache), slots)]


def as_bytes(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(np.uint8).reshape(*x.shape, x.itemsize)


def expected(k_new, v_new, k_pages, v_pages, slots):
    """Both caches as bytes, (slots, heads, head_dim, itemsize)."""
    flat = [as_bytes(pages).reshape(-1, *as_bytes(new).shape[1:]).copy()
            for new, pages in ((k_new, k_pages), (v_new, v_pages))]  # fmt: skip
    for token, slot in enumerate(np.asarray(slots)):
        if 0 <= slot < len(flat[0]):
            flat[0][slot], flat[1][slot] = as_bytes(k_new)[token], as_bytes(v_new)[token]
    return flat


def assert_written(out, args):
    for found, wanted, before in zip(out, expected(*args), args[2:4], strict=True):
        assert found.shape == before.shape and found.dtype == before.dtype
        np.testing.assert_array_equal(as_bytes(found).reshape(wanted.shape), wanted)


def check(*args, fn=write_kv):
    report = lab.check(fn, reference, *args)
    assert_written(report.output, args)
    return report


@pytest.mark.parametrize(
    # Rows of one piece of 16 bytes a thread, of several, of less than that, of less than a value a thread, and more of
    # them than registers hold; pages of 1 to 256 slots, one token and more.
    "shape",
    [
        (1, 3, 16, 8, 128), (1, 1, 1, 8, 128), (7, 9, 4, 3, 72), (6, 7, 3, 12, 128), (4, 9, 2, 1, 576),
        (9, 5, 5, 2, 64), (5, 2, 256, 1, 16), (5, 9, 16, 1, 8), (6, 7, 3, 1, 32), (5, 9, 3, 1, 72),
        (3, 2, 2, 33, 256), (40, 25, 1, 4, 64),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(shape):
    check(*operands(*shape))


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("shape", [(3, 3, 2, 8, 128), (7, 9, 4, 3, 72), (5, 9, 3, 1, 40), (3, 3, 2, 1, 8)], ids=str)
def test_dtypes(shape, dtype):
    check(*operands(*shape, dtype))


@pytest.mark.parametrize("block_tokens", [1, 3, 4, 8])
@pytest.mark.parametrize("heads", [8, 12])
def test_configs(block_tokens, heads):
    fn = functools.partial(write_kv, config=Config(block_tokens))
    report = check(*operands(10, 7, 3, heads, 128), fn=fn)
    assert report.compiled is None or report.compiled.spill_bytes == 0


@pytest.mark.parametrize("slot", [*NO_SLOTS, 12, 13, 2**30, -(2**30), -12])
def test_no_slot_no_write(slot):
    """A cache of 12 slots. Alone, and beside tokens that are written."""
    for tokens in (1, 5):
        args = operands(tokens, 4, 3, 2, 64, no_slots=(slot,))
        args[4] = args[4].at[0].set(slot)
        assert_written(lab.run(write_kv, *args), args)


def test_all_tokens_are_padding():
    args = operands(6, 2, 3, 2, 64)
    args[4] = jnp.full(6, -1, jnp.int32)
    for before, after in zip(args[2:4], lab.run(write_kv, *args), strict=True):
        np.testing.assert_array_equal(as_bytes(after), as_bytes(before))


def test_reference_does_not_count_from_the_end():
    args = operands(9, 4, 3, 2, 8, F32)
    assert_written(reference(*args), args)


# In place -------------------------------------------------------------------------------------------------------------


def test_arrays_that_are_not_donated_stay():
    args = operands(7, 9, 4, 3, 72)
    before = [as_bytes(x).copy() for x in args]
    for fn in (write_kv, jax.jit(write_kv)):
        assert_written(lab.run(fn, *args), args)
    for x, bits in zip(args, before, strict=True):
        np.testing.assert_array_equal(as_bytes(x), bits)


def test_donated():
    args = operands(7, 9, 4, 3, 72)
    donated = [*args[:2], *(jnp.array(x) for x in args[2:4]), args[4]]
    assert_written(lab.run(jax.jit(write_kv, donate_argnums=(2, 3)), *donated), args)


COPIES = """
import jax, jax.numpy as jnp
import lab
from cookbook import _host, write_kv
from lab.toolchain import device
h200 = device("h200")
where = jax.sharding.SingleDeviceSharding(h200)
aval = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
new, pages = aval(jnp.bfloat16, 7, 3, 72), aval(jnp.bfloat16, 11, 16, 3, 72)
layers = lambda k, v, *caches: jax.lax.fori_loop(0, 4, lambda i, kv: write_kv(k + i, v, *kv, caches[2]), caches[:2])
for fn in (write_kv, layers):
    for donated in ((2, 3), ()):
        with _host.building_for(_host.Target("h200", 132)), jax.default_device(h200):
            jitted = jax.jit(lambda *args: fn(*args), donate_argnums=donated)
            compiled = jitted.lower(new, new, pages, pages, aval(jnp.int32, 7)).compile()
        copied = sum("bf16[11,16,3,72]" in line or "bf16[176,216]" in line for line in compiled.as_text().splitlines()
                     if " copy(" in line or " copy-start(" in line)
        print(copied, compiled.memory_analysis().alias_size_in_bytes // (11 * 16 * 3 * 72 * 2))
"""


def test_donated_caches_are_not_copied():
    """XLA's own report for an H200, in a process of its own, as one can compile for one architecture alone: copies of
    caches and caches that lie in their argument's memory, of one call and of a loop, each donated and not."""
    try:
        lab.compile_for("h200", write_kv, *operands(1, 1, 1, 1, 8))
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))
    result = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert [line.split() for line in result.stdout.splitlines()] == [["0", "2"], ["2", "0"]] * 2


def refs(args):
    return [*args[:2], *(jax.new_ref(x) for x in args[2:4]), args[4]]


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_refs(wrap):
    args = operands(7, 9, 4, 3, 72)
    by_ref = refs(args)
    assert lab.run(wrap(lambda *args: write_kv(*args)), *by_ref) is None
    assert_written([ref[...] for ref in by_ref[2:4]], args)


def test_refs_made_inside_a_jit_and_written_in_a_loop():
    """A token a turn: each turn sees what those before it wrote."""
    args = operands(6, 9, 4, 3, 72)

    @jax.jit
    def fn(k_new, v_new, k_pages, v_pages, slots):
        k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)

        def turn(i, _):
            one = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1)
            write_kv(one(k_new), one(v_new), k_ref, v_ref, one(slots))

        jax.lax.fori_loop(0, len(slots), turn, None)
        return jax.freeze(k_ref), jax.freeze(v_ref)

    assert_written(lab.run(fn, *args), args)


def test_refs_stay_where_they_are():
    """In the program that `jit` hands to XLA, a Ref's first and last values have one buffer, and only reshapes and the
    kernel come between."""
    args = operands(7, 9, 4, 3, 72)
    with module._host.building_for(module._host.Target("a GPU", 132)):
        traced = jax.jit(lambda *args: write_kv(*args)).trace(*refs(args))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (main,) = (line for line in text.splitlines() if "func.func public @main" in line)
    assert [f"tf.aliasing_output = {i}" in main.split("%arg")[3 + i] for i in (0, 1)] == [True, True]
    operations = {word for word in text.split() if word.startswith("stablehlo.") and word[10:].isalpha()}
    assert operations <= {"stablehlo.reshape"}, operations


def test_shard_map():
    """Over the heads, as tensor parallelism does it."""
    mesh = jax.make_mesh((1,), ("model",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    args, new, cache = operands(5, 4, 3, 2, 64), jax.P(None, "model"), jax.P(None, None, "model")
    specs = dict(in_specs=(new, new, cache, cache, jax.P()), out_specs=(cache, cache))
    assert_written(lab.run(jax.shard_map(write_kv, mesh=mesh, check_vma=False, **specs), *args), args)
    with pytest.raises(ValueError, match="no Ref that varies over .* model: call jax.shard_map with check_vma=False"):
        lab.run(jax.shard_map(write_kv, mesh=mesh, **specs), *args)


# Plan and machine code -----------------------------------------------------------------------------------------------


def test_pieces_cover_rows_of_every_length():
    """Each in bounds, in words that are aligned; at most one of them shifted back."""
    for itemsize in (2, 4):
        for cols in [*range(8, 5000, 8), 65536]:
            found = module.pieces(cols, itemsize)
            ends = [start + length for start, length in found]
            starts = [0, *ends[:-1]]
            assert ends[-1] == cols and all(length & (length - 1) == 0 for _, length in found)
            assert all(start == turn for (start, _), turn in zip(found[:-1], starts[:-1], strict=True))
            assert 0 <= found[-1][0] <= starts[-1]
            for start, length in found:
                word = max(length // 128, length // min(length, 32) if length < 128 else 1)
                assert start % word == 0 and cols % word == 0 and word * itemsize <= 16


def test_default_config():
    assert module.default_config(2048, 1024, 2) == module.default_config(10000, 4096, 2) == Config(1)
    assert module.default_config(2049, 1024, 2) == module.default_config(2049, 128, 2) == Config(4)
    for cols in (8, 128, 1024, 4096, 65536):
        config = module.default_config(1 << 20, cols, 4)
        plan = module.Plan(1 << 20, 1, cols, 4, config.block_tokens)
        assert sum(plan.groups, []) == module.pieces(cols, 4)
        assert max(map(len, plan.groups)) * config.block_tokens <= module.LOADS


def order_of_loads(tokens) -> str:
    """L for each load of a row, ? for each comparison of slots, in the order of the machine code."""
    aval = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    try:
        compiled = lab.compile_for("h200", write_kv, *[aval(tokens, 8, 128)] * 2, *[aval(40, 16, 8, 128)] * 2, slots)
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))
    assert compiled.spill_bytes == compiled.smem_bytes == 0
    lines = compiled.sass.splitlines()
    first_row = next(i for i, line in enumerate(lines) if "LDG" in line) + 1  # The first load is of slots.
    return "".join(
        "L" if "LDG.E.128" in line else "?" for line in lines[first_row:] if "LDG" in line or "ISETP" in line
    )


@pytest.mark.parametrize("tokens, rows", [(64, 2), (10000, 8)])
def test_rows_are_loaded_before_slots_are_looked_at(tokens, rows):
    assert order_of_loads(tokens) == "L" * rows + "?" * (rows // 2)


def test_mutant_that_loads_rows_late(mutant, monkeypatch):
    monkeypatch.setattr(module, "_loads_first", lambda: None)
    assert order_of_loads(64) == "?LL"


# Errors --------------------------------------------------------------------------------------------------------------


def wrong(**changes):
    args = dict(zip(("k_new", "v_new", "k_pages", "v_pages", "slot_mapping"), operands(3, 4, 2, 2, 16), strict=True))
    return lambda: write_kv(**{name: changes.get(name, lambda x: x)(x) for name, x in args.items()})


EVERY = ("k_new", "v_new", "k_pages", "v_pages")
ERRORS = [
    (wrong(k_new=lambda x: x[0]), r"k_new has shape \(2, 16\); must be \(T, H, D\): reshape"),
    (wrong(v_pages=lambda x: x.reshape(8, 2, 16)), r"v_pages .*\(P, page_size, H, D\): reshape"),
    (wrong(slot_mapping=lambda x: x[:, None]), r"slot_mapping has shape \(3, 1\); must be \(T\)"),
    (wrong(v_new=lambda x: x[:2]), r"v_new has shape \(2, 2, 16\); must be \(3, 2, 16\)"),
    (wrong(k_pages=lambda x: x[..., :8]), r"k_pages has shape \(4, 2, 2, 8\); must be \(4, 2, 2, 16\)"),
    (wrong(v_pages=lambda x: x[:3]), r"v_pages has shape \(3, 2, 2, 16\); must be \(4, 2, 2, 16\)"),
    (wrong(slot_mapping=lambda x: x[:2]), r"slot_mapping has shape \(2,\); must be \(3,\)"),
    (wrong(**dict.fromkeys(EVERY, lambda x: x.astype(jnp.int8))), "k_new.dtype is int8; must be bfloat16, float16 or"),
    (wrong(v_new=lambda x: x.astype(F32)), "v_new.dtype is float32 and .*bfloat16.*; must be the same: cast v_new"),
    (wrong(slot_mapping=lambda x: x.astype(jnp.int16)), "slot_mapping.dtype=.*int16.*; must be int32: cast"),
    (wrong(**dict.fromkeys(EVERY, lambda x: x[..., :12])), "head_dim=12; must be a multiple of 8: pad"),
    (wrong(**dict.fromkeys(EVERY, lambda x: jnp.zeros((*x.shape[:-1], 40000), BF16))), "80000; must be at most 65536"),
    (wrong(v_pages=jax.new_ref), "one of k_pages and v_pages is a Ref; make both Refs"),
    (lambda: Config(9), "block_tokens=9: must be from 1 to 8"),
    (lambda: module.check_slots([0, 4, -1, 8], 8), r"slot_mapping\[3\] is 8; must be below num_slots=8, or negative"),
    (
        lambda: module.check_slots(np.array([5, -1, 2, -1, 2, 5]), 8),
        r"\[4\] is 2, as is slot_mapping\[2\]; .* distinct",
    ),
    (lambda: module.check_slots([0.0], 8), "float64.*; must be a vector of integers"),
]


@pytest.mark.parametrize("fn, message", ERRORS, ids=[message for _, message in ERRORS])
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_too_many_slots_for_int32():
    page = jax.ShapeDtypeStruct((2**20, 2**11, 1, 8), BF16)
    new, slots = jax.ShapeDtypeStruct((1, 1, 8), BF16), jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match=r"beyond int32: use fewer pages"):
        jax.eval_shape(write_kv, new, new, page, page, slots)


def test_slots_that_are_right():
    module.check_slots(array([-1, 7, 0, -1, -5, 3], jnp.int32), 8)
    module.check_slots(np.array([], np.int64), 8)


def test_no_tokens_or_no_pages():
    for shape in ((0, 4, 2), (3, 0, 2)):
        args = operands(*shape, 2, 16)
        assert_written(write_kv(*args), args)
        assert write_kv(*refs(args)) is None


def test_without_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has one")
    with pytest.raises(RuntimeError, match="cookbook.write_kv is a GPU kernel"):
        write_kv(*operands(3, 4, 2, 2, 16))


def test_bytes_moved():
    assert module.bytes_moved(16384, 8, 128, 2) == 2 * 2 * 16384 * 2048 + 16384 * 4


# Mutants -------------------------------------------------------------------------------------------------------------


def finite(*shape, **kwargs):
    """Operands without NaN, as people have them: what is wrong with them must show as well."""
    args = operands(*shape, **kwargs)
    rng = np.random.default_rng(0)
    return [*(array(rng.normal(size=x.shape), x.dtype) for x in args[:4]), args[4]]


def change_store(monkeypatch, change):
    """`change(slot, num_slots)` is where rows are stored."""
    store = module._store
    at = lambda pages, slot, *rest: store(pages, change(slot, pages.shape[0]), *rest)
    monkeypatch.setattr(module, "_store", at)


def test_mutant_off_by_a_page(mutant, monkeypatch):
    change_store(monkeypatch, lambda slot, num_slots: jnp.where(slot + 3 < num_slots, slot + 3, slot + 3 - num_slots))
    with pytest.raises(lab.CheckError, match="result"):
        lab.check(write_kv, reference, *finite(7, 4, 3, 2, 64))


@pytest.mark.parametrize("no_slot", [-1, 12])
def test_mutant_that_does_not_skip(no_slot, mutant, monkeypatch):
    """It writes a token without a slot to the last slot: outside the cache no test would see it."""
    monkeypatch.setattr(module, "_is_slot", lambda slot, num_slots: (slot >= no_slot) & (slot <= max(no_slot, 11)))
    change_store(monkeypatch, lambda slot, num_slots: jnp.where((slot < 0) | (slot >= num_slots), num_slots - 1, slot))
    args = finite(1, 4, 3, 2, 64)
    args[4] = array([no_slot], jnp.int32)
    with pytest.raises(lab.CheckError, match="result"):
        lab.check(write_kv, reference, *args)


def test_mutant_that_swaps_k_and_v(mutant, monkeypatch):
    kernel = module._kernel
    swapped = lambda k, v, slots, *caches, plan: kernel(v, k, slots, *caches, plan=plan)
    monkeypatch.setattr(module, "_kernel", swapped)
    with pytest.raises(lab.CheckError, match="result"):
        lab.check(write_kv, reference, *finite(7, 4, 3, 2, 64))


def test_mutant_that_leaves_the_end_of_a_row(mutant, monkeypatch):
    pieces = module.pieces
    monkeypatch.setattr(module, "pieces", lambda cols, itemsize: pieces(cols, itemsize)[:-1])
    with pytest.raises(lab.CheckError, match="result"):
        lab.check(write_kv, reference, *finite(7, 4, 3, 3, 72))


def test_mutant_that_leaves_the_last_tokens(mutant, monkeypatch):
    monkeypatch.setattr(module.Plan, "num_blocks", property(lambda plan: plan.num_tokens // plan.block_tokens))
    args = finite(5, 4, 3, 2, 64)
    args[4] = jnp.arange(5, dtype=jnp.int32)
    with pytest.raises(lab.CheckError, match="result"):
        lab.check(functools.partial(write_kv, config=Config(4)), reference, *args)
