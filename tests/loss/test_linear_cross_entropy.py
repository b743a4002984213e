"""`linear_cross_entropy`: loss and gradients against NumPy in float64, by blocks of every kind, and inside JAX."""

import functools
import inspect
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook import linear_cross_entropy
from cookbook.gemm import cost
from cookbook.loss import losses, products
from cookbook.loss.blocks import Blocks
from tests.arrays import array
from tests.loss import exact

BF16, F16 = jnp.bfloat16, jnp.float16
op = inspect.getmodule(linear_cross_entropy)
add_d_weight_of_part = products.add_d_weight_of_part
ALL = dict(label_smoothing=0.1, z_loss=1e-2, logits_soft_cap=3.0)
# Logits, their gradient and the result are rounded. XLA's gradients of the same, in bfloat16, are off by 3.5e-3.
GRADIENT = {BF16: 4e-3, F16: 6e-4}
LOSS = {BF16: 1e-3, F16: 1e-4}
ONE, ROWS, BOTH = None, Blocks(8), Blocks(16, 128)  # Several blocks of rows; also of columns, the last ones shared.
ROUNDED = Blocks(8, rounded=True)  # Four blocks at most by default.
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture
def blocks_are(monkeypatch):
    """`blocks_are(blocks)`: calls have these blocks, or those that they choose."""

    def put(blocks):
        if blocks is not None:
            monkeypatch.setattr(op, "blocks_of", lambda *_: blocks)

    return put


def problem(rows, hidden, vocabulary, dtype=BF16, transposed=False, seed=0):
    """Operands and labels; of more than two rows one is ignored, and holds NaN."""
    rng = np.random.default_rng(seed)
    x, labels = rng.normal(size=(rows, hidden)), rng.integers(0, vocabulary, rows)
    w = rng.normal(size=(hidden, vocabulary) if transposed else (vocabulary, hidden)) * 2 * hidden**-0.5
    if rows > 2:
        x[1], labels[1] = np.nan, -100
    return array(x, dtype), array(w, dtype), array(labels, np.int32)


def pull(fn):
    """Results and gradients of `fn(hidden, weight, labels)` along cotangents, its last argument."""

    def both(hidden, weight, labels, cotangents):
        out, pull = jax.vjp(lambda *args: fn(*args, labels), hidden, weight)
        return out, pull(cotangents)

    return both


def check(operands, cotangents=1.0, **options):
    """`cotangents`: of the loss, or of loss and lse."""
    has_lse = isinstance(cotangents, tuple)
    fn = functools.partial(linear_cross_entropy, return_lse=has_lse, **options)
    out, gradients = lab.run(jax.jit(pull(fn)), *operands, jax.tree.map(jnp.float32, cotangents))
    options.pop("memory", None)
    loss, lse, *wanted = exact.linear_cross_entropy(*operands, *(cotangents if has_lse else [cotangents]), **options)
    dtype = operands[0].dtype.type
    loss_out, lse_out = out if has_lse else (out, lse)
    assert exact.distance(loss_out, loss) < LOSS[dtype] and exact.distance(lse_out, lse) < LOSS[dtype]
    for got, want, operand in zip(gradients, wanted, operands, strict=False):
        assert got.dtype == operand.dtype and exact.distance(got, want) < GRADIENT[dtype]
    ignored = np.asarray(operands[2]) == -100
    assert not np.any(np.asarray(gradients[0])[ignored])


@pytest.mark.parametrize(
    "sizes, dtype, transposed, blocks, options",
    [
        ((21, 64, 300), BF16, False, ONE, ALL),
        ((21, 72, 301), BF16, False, ROWS, {}),
        ((20, 128, 300), BF16, False, BOTH, ALL),
        ((21, 64, 303), BF16, True, ROUNDED, ALL),
        ((21, 64, 303), BF16, True, BOTH, {}),
        ((3, 8, 1), BF16, False, ONE, {}),
        ((1, 64, 63), BF16, False, ONE, dict(reduction="sum")),
        slow((21, 64, 303), BF16, True, ONE, ALL),
        slow((21, 72, 301), BF16, False, ROUNDED, {}),
        slow((21, 64, 300), BF16, True, ROWS, ALL),
        slow((8, 72, 301), BF16, False, BOTH, {}),
    ],
    ids=str,
)
def test_against_numpy(sizes, dtype, transposed, blocks, options, blocks_are):
    blocks_are(blocks)
    check(problem(*sizes, dtype, transposed), transpose_weight=transposed, **options)


@pytest.mark.parametrize("blocks", [BOTH, slow(ROWS), slow(ONE)], ids=str)
def test_cotangents_of_each_row_and_of_lse(blocks, blocks_are):
    """They are not known when the loss is computed: the logits are computed again."""
    blocks_are(blocks)
    rng = np.random.default_rng(1)
    check(problem(20, 64, 300), tuple(rng.normal(size=(2, 20))), reduction="none", **ALL)


@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_in_parts_of_the_vocabulary(transposed, monkeypatch):
    """As the cost model cuts up d_hidden's product of vocabularies that are too large to interpret."""
    config, taken = products._config, []

    def cut(problem, whole_tiles=False, room=0):
        if not room:
            return config(problem, whole_tiles)
        sums = lambda c: 4 * c.split_k * problem.m * problem.n
        taken.append(next(c for c in cost.candidates(problem) if c.second_kernel and sums(c) <= room))
        return taken[-1]

    monkeypatch.setattr(products, "_config", cut)
    check(problem(5, 24, 643, transposed=transposed), 3.0, transpose_weight=transposed, reduction="sum")
    assert taken and taken[-1].split_k > 1


def test_float16_under_a_loss_scale():
    """Without the scale float16 would keep few digits of these gradients, or none."""
    hidden, weight, labels = problem(21, 64, 300, F16)
    check((hidden / 256, weight / 256, labels), 2.0**14)


def test_logits_of_ten_thousand():
    hidden, weight, labels = problem(8, 64, 300)
    check((hidden * 4096, weight, labels))


def test_all_rows_ignored():
    hidden, weight, labels = problem(3, 64, 130)
    fn = functools.partial(linear_cross_entropy, ignore_index=5)
    loss, gradients = lab.run(pull(fn), hidden * jnp.nan, weight, labels * 0 + 5, jnp.float32(1))
    assert loss == 0 and not any(np.any(x) for x in gradients)


@pytest.mark.parametrize("blocks", [ROWS, Blocks(24, rounded=True), Blocks(8, 128)], ids=str)
def test_sums_over_blocks(blocks, blocks_are):
    """In float32; or rounded after each of four blocks, or of twelve, which leaves them within the same error."""
    blocks_are(blocks)
    hidden, weight, labels = problem(96, 8, 40)
    hidden, labels = jnp.abs(jnp.nan_to_num(hidden)), labels * 0 + 3
    check((hidden, weight, labels))


def test_vmap_and_scan_of_remat():
    """A batch of vocabularies, and of rows; blocks of rows of its own for each."""
    hidden, weight, labels = problem(8, 64, 130)
    hidden = jnp.nan_to_num(hidden)
    both = jnp.stack([weight, -weight])
    fn = lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)

    def scanned(hidden, both):
        step = jax.checkpoint(lambda total, weight: (total + fn(hidden, weight), None))
        return jax.lax.scan(step, 0.0, both)[0]

    mapped = lambda hidden, both: jnp.sum(jax.vmap(fn, (None, 0))(hidden, both))
    wanted = [exact.linear_cross_entropy(hidden, w, labels) for w in both]
    for total in (scanned, mapped):
        loss, (d_hidden, d_weight) = lab.run(jax.jit(jax.value_and_grad(total, (0, 1))), hidden, both)
        assert exact.distance(loss, sum(x[0] for x in wanted)) < LOSS[BF16]
        assert exact.distance(d_hidden, sum(x[2] for x in wanted)) < 2 * GRADIENT[BF16]  # Two rounded ones are added.
        assert exact.distance(d_weight, np.stack([x[3] for x in wanted])) < GRADIENT[BF16]


# The vocabulary over two devices; or rows. With XLA in the place of kernels: the interpreter, whose devices take turns,
# waits for ever where a collective begins before a kernel's last call of Python.
SHARDED = """
import jax, jax.numpy as jnp, numpy as np
import cookbook
from cookbook import _host
from cookbook.loss import kernel, kernel_forward, products
from tests.loss import exact
from tests.loss.test_linear_cross_entropy import problem

F32 = jnp.float32

def statistics(logits, label, cols, soft_cap, with_sum):
    z = logits[:, :cols].astype(F32)
    top = z.max(1)
    at_label = jnp.take_along_axis(z, jnp.maximum(label, 0)[:, None], 1)[:, 0]
    return top, jnp.exp(z - top[:, None]).sum(1), jnp.where(label >= 0, at_label, 0), z.sum(1) if with_sum else None

def gradient(logits, label, lse, a, b, cols, soft_cap, label_smoothing, vocabulary):
    target = (1 - label_smoothing) * (jnp.arange(cols) == label[:, None]) + label_smoothing / vocabulary
    g = a[:, None] * jnp.exp(logits[:, :cols].astype(F32) - lse[:, None]) - b[:, None] * target
    return jnp.pad(g, ((0, 0), (0, logits.shape[1] - cols))).astype(logits.dtype)

def logits(target, hidden, weight, pitch, transposed):
    return jnp.pad(hidden @ weight.T, ((0, 0), (0, pitch - len(weight))))

def d_hidden(target, g, weight, transposed, scale, room):
    return (scale * (g[:, :len(weight)] @ weight)).astype(g.dtype)

def d_weight(target, g, hidden, vocabulary, transposed, scale, out_dtype):
    return (scale * (g[:, :vocabulary].T @ hidden)).astype(out_dtype)

def statistics_alone(target, hidden, weight, label, cols, pitch, transposed, soft_cap, with_sum):
    return statistics(logits(target, hidden, weight, pitch, transposed), label, cols, soft_cap, with_sum)

def gradient_of_part(target, hidden, row, weight, first, sizes, transposed, vectors, *, vocabulary, soft_cap, on, off):
    rows, cols = sizes
    part = jax.lax.dynamic_slice_in_dim(jnp.pad(weight, ((0, cols), (0, 0))), first, cols)
    label, lse, a, b = (vectors[name][:, None] for name in ("label", "lse", "a", "b"))
    column = first + jnp.arange(cols)
    x = jax.lax.dynamic_slice_in_dim(hidden, row, rows)
    g = a * jnp.exp((x @ part.T).astype(F32) - lse) - b * (on * (column == label) + off)
    return jnp.where((column < vocabulary) & (label != kernel.IGNORED), g, 0).astype(hidden.dtype)

def add_d_weight_of_part(target, d_weight, g, hidden, row, first, transposed, scale, adds):
    new = (scale * (g.T @ jax.lax.dynamic_slice_in_dim(hidden, row, len(g)))).astype(d_weight.dtype)
    full = jnp.pad(d_weight, ((0, len(new)), (0, 0)))
    old = jax.lax.dynamic_slice_in_dim(full, first, len(new))
    return jax.lax.dynamic_update_slice_in_dim(full, jnp.where(adds, old, 0) + new, first, 0)[: len(d_weight)]

def add_d_hidden_of_part(target, sums, g, weight, first, transposed, scale):
    part = jax.lax.dynamic_slice_in_dim(jnp.pad(weight, ((0, g.shape[1]), (0, 0))), first, g.shape[1])
    return jnp.where(first > 0, sums, 0) + scale * (g.astype(F32) @ part.astype(F32))

kernel.statistics, kernel.gradient, kernel_forward.statistics = statistics, gradient, statistics_alone
products.logits, products.d_hidden, products.d_weight = logits, d_hidden, d_weight

def put_low():
    products.gradient_of_part = gradient_of_part
    products.add_d_weight_of_part, products.add_d_hidden_of_part = add_d_weight_of_part, add_d_hidden_of_part

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
P, ALL = jax.P, dict(label_smoothing=0.1, z_loss=1e-2)
hidden, weight, labels = problem(8, 64, 300)
x = (jnp.nan_to_num(hidden) @ weight.T).astype(F32)

def linear(hidden, weight, labels, **options):
    return cookbook.linear_cross_entropy(hidden, weight, labels, axis_name="d", **ALL, **options)

def each(hidden, weight, labels):
    memory = None if checked else "low"
    losses, lse = linear(hidden, weight, labels, reduction="none", return_lse=True, memory=memory)
    return jnp.sum(losses) + 0 * jnp.sum(lse)

def of_logits(logits, labels):
    return cookbook.cross_entropy(logits, labels, axis_name="d", **ALL)

def by_rows(hidden, weight, labels):
    losses = cookbook.linear_cross_entropy(hidden, weight, labels, reduction="none", **ALL)
    return jax.lax.psum(jnp.sum(losses), "d")

wanted = exact.linear_cross_entropy(hidden, weight, labels, **ALL)
of_sum = exact.linear_cross_entropy(hidden, weight, labels, reduction="sum", **ALL)
over = P(), P("d"), P()
for checked in (True, False):
    shard = lambda fn, *specs: jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)
    if checked:  # JAX is told that arrays which kernels change in place vary over no axis: these are the kernels.
        with _host.building_for(_host.Target("H200", 132)):
            both = shard(lambda *args: linear(*args, memory="low"), *over)
            jax.jit(jax.grad(both, (0, 1))).trace(hidden, weight, labels)
    else:
        put_low()
    for fn, args, specs, exact_ones, several in (
        (linear, (hidden, weight, labels), over, wanted, (0, 1)),
        (each, (hidden, weight, labels), over, of_sum, (0, 1)),
        (of_logits, (x, labels), (P(None, "d"), P()), exact.cross_entropy(x, labels, **ALL), (0,)),
        (by_rows, (hidden, weight, labels), (P("d"), P(), P("d")), of_sum, (0, 1)),
    ):
        with _host.building_for(_host.Target("XLA", 1)):
            loss, gradients = jax.jit(jax.value_and_grad(shard(fn, *specs), several))(*args)
        found = [exact.distance(loss, exact_ones[0]), *map(exact.distance, gradients, exact_ones[2:])]
        assert max(found) < 6e-3, (fn.__name__, checked, found)
print("passed")
"""


def test_on_a_mesh():
    """In a process of its own, which has two devices."""
    root = pathlib.Path(cookbook.__file__).parents[1]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    env = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=str(root))
    ran = subprocess.run([sys.executable, "-c", SHARDED], env=env, timeout=240, capture_output=True, text=True)
    assert ran.stdout.endswith("passed\n"), ran.stderr[-3000:]


@pytest.mark.parametrize("checked", [True, slow(False)])
def test_compiles_for_a_mesh(checked):
    """The kernels themselves, the gradient in the place of the logits."""
    hidden, weight, labels = problem(256, 64, 1024)
    fn = lambda *args: linear_cross_entropy(*args, axis_name="x")
    specs = jax.P(), jax.P("x"), jax.P()
    shard = lambda *args: jax.shard_map(fn, in_specs=specs, out_specs=jax.P(), check_vma=checked)(*args)
    both = jax.grad(lambda hidden, weight: shard(hidden, weight, jnp.abs(labels)), (0, 1))
    compiled = lab.compile_for("h200", both, hidden, weight, devices=2)
    assert len(compiled.kernels) == 5 and compiled.spill_bytes == 0


# Calls that are refused -----------------------------------------------------------------------------------------------

SHAPES = dict(hidden=np.zeros((3, 64), BF16), weight=np.zeros((40, 64), BF16), labels=np.array([1, 2, -100]))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(labels=np.array([1, 40, 2])), r"labels\[1\]=40; must be from 0 to 39, or ignore_index=-100 for"),
        (dict(labels=np.array([1.0, 2, 3])), r"labels.dtype=.*must be \(3,\) integers, one for each row"),
        (dict(labels=np.array([1, 2])), r"labels.shape=\(2,\).*must be \(3,\) integers"),
        (dict(weight=np.zeros((64, 40), BF16)), "share no H: 64 is not 40; is transpose_weight=False meant"),
        (dict(weight=np.zeros((40, 64), F16)), "must both be bfloat16 or both float16: cast one"),
        (dict(weight=np.zeros((0, 64), BF16)), "the vocabulary has no labels"),
        (dict(hidden=np.zeros((3, 60), BF16), weight=np.zeros((40, 60), BF16)), "H is 60; must be a multiple of 8"),
        (dict(reduction="max"), "reduction='max'; must be one of 'mean', 'sum', 'none'"),
        (dict(label_smoothing=1.5), "label_smoothing=1.5; must be from 0 to 1"),
        (dict(z_loss=-1.0), "z_loss=-1.0; must be 0 or more"),
        (dict(logits_soft_cap=0.0), "logits_soft_cap=0.0; must be above 0: None stands for no cap"),
        (dict(memory="high"), "memory='high'; must be None or 'low'"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=f"^cookbook.linear_cross_entropy: .*{message}"):
        linear_cross_entropy(**SHAPES | changes)


def test_check_labels():
    losses.check_labels(np.array([[0, 39], [-1, 5]]), 40, ignore_index=-1)
    with pytest.raises(ValueError, match=r"^cookbook.cross_entropy: labels\[1, 0\]=-1; must be from 0 to 39"):
        cookbook.cross_entropy.check_labels(np.array([[0, 39], [-1, 5]]), 40)


# Mutants --------------------------------------------------------------------------------------------------------------


def begin_without(lost: str):
    return lambda **begin: {name: jnp.int32(x).reshape(1) * (name != lost) for name, x in begin.items()}


@pytest.mark.parametrize(
    "name, wrong, blocks",
    [
        ("_without_ignored", lambda hidden, rows: hidden, ROWS),
        ("add_d_weight", lambda target, sums, *others: sums, ROWS),
        ("_kept_scale", lambda dtype, rows: jnp.float32(1), ROWS),
        ("_begin", begin_without("column"), BOTH),
        ("_begin", begin_without("row"), BOTH),
        ("add_d_hidden_of_part", lambda target, sums, *others: sums, BOTH),
        ("add_d_weight_of_part", lambda *args: add_d_weight_of_part(*args[:-1], False), BOTH),
        ("none", None, ROWS),
        ("none", None, BOTH),
    ],
)
def test_a_mutant_is_caught(name, wrong, blocks, run_only, monkeypatch, blocks_are):
    """NaN of rows that are ignored; the first block's sums alone; a mean that is a sum; the first columns instead of
    others; the first rows; the last block's sums alone."""
    blocks_are(blocks)
    jax.clear_caches()
    hidden, weight, labels = problem(93, 8, 40) if blocks is ROWS else problem(20, 8, 200)
    operands = (jnp.abs(hidden), weight, jnp.where(labels < 0, labels, 3))
    if wrong is None:
        check(operands)
        return
    monkeypatch.setattr(op if hasattr(op, name) else products, name, wrong)
    with pytest.raises(AssertionError):
        check(operands)
    jax.clear_caches()
