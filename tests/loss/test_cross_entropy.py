"""`cross_entropy`: rows of any length against NumPy in float64; what is ignored, refused, and done inside JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import cross_entropy
from cookbook.loss import kernel
from tests.arrays import array
from tests.loss import exact

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
ALL = dict(label_smoothing=0.1, z_loss=1e-2, logits_soft_cap=3.0)
# Half the distance of a dtype's numbers, as a share, with some room: the gradient is rounded once.
ROUNDED = {BF16: 3e-3, F16: 5e-4, F32: 2e-6}
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def problem(rows, cols, dtype=BF16, scale=2.0, seed=0):
    """Logits and labels; of more than two rows one is ignored, and holds NaN."""
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(rows, cols)) * scale, rng.integers(0, cols, rows)
    if rows > 2:
        logits[1], labels[1] = np.nan, -100
    return array(logits, dtype), array(labels, np.int32)


def with_gradient(logits, labels, **options):
    fn = lambda logits: cross_entropy(logits, labels, **options)
    out, pull = jax.vjp(fn, logits)
    return out, pull(jax.tree.map(jnp.ones_like, out))[0]


def check(logits, labels, **options):
    out, dx = lab.run(jax.jit(functools.partial(with_gradient, **options)), logits, labels)
    has_lse = options.pop("return_lse", False)
    loss, lse, wanted = exact.cross_entropy(logits, labels, 1.0, float(has_lse), **options)
    loss_out, lse_out = out if has_lse else (out, lse)
    # Logits are exact here, and 16 bits leave exp2 22 bits of its result.
    assert exact.distance(loss_out, loss) < 2e-6 and exact.distance(lse_out, lse) < 2e-6
    assert dx.dtype == logits.dtype and exact.distance(dx, wanted) < ROUNDED[logits.dtype.type]
    assert not np.any(np.asarray(dx)[np.asarray(labels) == -100])


@pytest.mark.parametrize(
    "rows, cols, dtype, options",
    [
        (3, 9 * 1024 + 72, BF16, ALL),  # A group, a piece more, and the last one, which the piece before overlaps.
        (4, 300, BF16, dict(reduction="none", return_lse=True)),
        (3, 1, BF16, {}),
        (3, 63, F32, dict(reduction="sum", **ALL)),
        (5, 257, F16, {}),
        (1, 128257, BF16, {}),
        (9, 1043, BF16, ALL),  # Rows that begin at every place within 16 bytes; not one whole piece before the last.
        (5, 1031, F32, dict(reduction="none", return_lse=True, **ALL)),
        slow(9, 9 * 1024 + 73, F16, ALL),
        slow(5, 2048, F32, dict(return_lse=True)),
        slow(3, 32000, BF16, ALL),
    ],
    ids=str,
)
def test_against_numpy(rows, cols, dtype, options):
    check(*problem(rows, cols, dtype), **options)


def test_logits_of_ten_thousand():
    logits, labels = problem(4, 300, F32, scale=1e4)
    check(logits, labels)
    check(logits.at[0, 5].set(-jnp.inf), labels.at[0].set(3))


def test_all_rows_ignored():
    logits, _ = problem(3, 300)
    ignored = functools.partial(with_gradient, ignore_index=7)
    loss, dx = lab.run(ignored, logits * jnp.nan, np.full(3, 7))
    assert loss == 0 and not np.any(dx)


def test_a_traced_label_out_of_range():
    """Nothing is read there: the row's loss and gradient are NaN, and no other's."""
    logits, labels = problem(4, 300)
    labels = labels.at[0].set(300).at[3].set(-1)
    out, dx = lab.run(jax.jit(functools.partial(with_gradient, reduction="none")), logits, labels)
    np.testing.assert_array_equal(np.isnan(out), [True, False, False, True])
    np.testing.assert_array_equal(np.isnan(np.float32(dx)).any(1), [True, False, False, True])


def test_vmap_scan_remat_and_donation():
    logits, labels = problem(4, 200)
    fn = lambda x, y: cross_entropy(x, y, reduction="none")
    stacked = jnp.stack([logits, -logits]), jnp.stack([labels, labels])

    def scanned(x, y):
        step = jax.checkpoint(lambda total, xy: (total + jnp.sum(fn(*xy)), None))
        return jax.lax.scan(step, 0.0, (x, y))[0]

    mapped = lambda x, y: jnp.sum(jax.vmap(fn)(x, y))
    wanted = [exact.cross_entropy(x, labels, reduction="sum")[2] for x in stacked[0]]
    for total in (scanned, mapped):
        dx = lab.run(jax.jit(jax.grad(total), donate_argnums=0), jnp.copy(stacked[0]), stacked[1])
        assert exact.distance(dx, np.stack(wanted)) < ROUNDED[jnp.bfloat16]


@pytest.mark.parametrize(
    "cols, changes",
    [
        (300, {}),
        (300, dict(shared=0)),
        (300, dict(num_body=0)),
        (300, dict(last=property(lambda plan: plan.num_body * plan.width))),
        (1043, dict(alone=lambda ends, values, other: values)),
        (1043, dict(load=lambda ends, *_: [plgpu.layout_cast(jnp.zeros(128), ends.layout)] * 2)),
    ],
    ids=lambda x: next(iter(x), "none") if isinstance(x, dict) else "",
)
def test_a_mutant_is_caught(cols, changes, run_only, monkeypatch):
    """Columns counted twice; pieces left out; a last piece beyond the row; ends counted twice, or left out."""
    jax.clear_caches()
    for name, value in changes.items():
        monkeypatch.setattr(kernel.Plan if cols == 300 else kernel.Ends, name, value)
    if not changes:
        check(*problem(3, cols))
    else:
        with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
            check(*problem(3, cols))
    jax.clear_caches()
