"""Chapter 4's exercises: right answers pass, and wrong ones are turned down with what is wrong."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path[:0] = [str(NOTEBOOKS), str(NOTEBOOKS.parent / "tools")]

from exercises import ex04, judge  # noqa: E402
from skeletons import exercises  # noqa: E402


def up(x, unit):
    return -(-x // unit)


def traffic(m, n, k, tile_m, tile_n, itemsize, *, tiles=up):
    return itemsize * (m * k * tiles(n, tile_n) + k * n * tiles(m, tile_m))


def test_right_traffic_passes():
    assert ex04.check_traffic(traffic)
    by_blocks = lambda m, n, k, tm, tn, size: sum(
        size * k * (min(tm, m - i) + min(tn, n - j)) for i in range(0, m, tm) for j in range(0, n, tn)
    )
    assert ex04.check_traffic(lambda *args: by_blocks(*args) if args[0] < 4096 else traffic(*args))


@pytest.mark.parametrize(
    "answer",
    [
        lambda m, n, k, tm, tn, size: None,
        lambda m, n, k, tm, tn, size: size * (m * k + k * n),  # Each read once.
        lambda m, n, k, tm, tn, size: size * (m * k + k * n + m * n),
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tm, tn, 4),
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tm, tn, 1),
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tn, tm, size),  # The sides exchanged.
        lambda m, n, k, tm, tn, size: traffic(n, m, k, tm, tn, size),
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tm, tn, size) + size * m * n,  # With the result.
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tm, tn, size, tiles=lambda x, t: x // t),
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tm, tn, size, tiles=lambda x, t: x / t),  # No whole tiles.
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tm, tn, size, tiles=lambda x, t: x // t + 1),
        lambda m, n, k, tm, tn, size: size * k * (tm + tn) * up(m, tm) * up(n, tn),  # Edges as whole tiles.
        lambda m, n, k, tm, tn, size: size * m * n * k * (1 / tm + 1 / tn),
        lambda m, n, k, tm, tn, size: traffic(m, n, k, tm, tn, size) / 0,
        lambda m, n, k: 0,
    ],
)
def test_wrong_traffic_is_turned_down(answer):
    _turned_down(ex04.check_traffic(answer))


def tile_of(block, tiles_m, tiles_n, width, *, narrow=True, transpose=False, snake=False):
    band, inside = divmod(block, tiles_m * width)
    across = min(width, tiles_n - band * width) if narrow else width
    row, col = divmod(inside, across) if not transpose else divmod(inside, tiles_m)[::-1]
    row = tiles_m - 1 - row if snake and band % 2 else row
    return row, band * width + col


def test_right_order_passes():
    assert ex04.check_tile_of(tile_of)


@pytest.mark.parametrize(
    "answer",
    [
        lambda block, tiles_m, tiles_n, width: None,
        lambda block, tiles_m, tiles_n, width: divmod(block, tiles_n),  # Row after row.
        lambda block, tiles_m, tiles_n, width: divmod(block, tiles_m)[::-1],  # Column after column.
        lambda *args: tile_of(*args, narrow=False),
        lambda *args: tile_of(*args, transpose=True),
        lambda *args: tile_of(*args, snake=True),
        lambda *args: tile_of(*args)[::-1],
        lambda *args: list(tile_of(*args)),
        lambda block, tiles_m, tiles_n, width: tile_of(block, tiles_n, tiles_m, width)[::-1],
        lambda block, tiles_m, tiles_n, width: (0, 0),
        lambda block: (0, 0),
    ],
)
def test_wrong_orders_are_turned_down(answer):
    _turned_down(ex04.check_tile_of(answer))


def add_bias(acc, bias_gmem, cols, layout):
    bias = plgpu.load(bias_gmem.at[cols], layout=layout.reduce(0), optimized=False)
    return acc + lax.broadcast_in_dim(bias, acc.shape, [1])


def epilogue(acc, bias_gmem, cols, layout):
    return jnp.maximum(add_bias(acc, bias_gmem, cols, layout), 0.0)


def test_right_epilogue_passes():
    verdict = ex04.check_epilogue(epilogue)
    assert verdict, verdict
    assert ex04.check_epilogue(lambda *args: jnp.where(add_bias(*args) > 0.0, add_bias(*args), 0.0))


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda acc, bias, cols, layout: add_bias(acc, bias, cols, layout), "not zero yet"),
        (lambda acc, bias, cols, layout: jnp.maximum(acc, 0.0), "bias is not added"),
        (lambda acc, bias, cols, layout: add_bias(jnp.maximum(acc, 0.0), bias, cols, layout), "belongs before"),
        (lambda acc, bias, cols, layout: epilogue(acc, bias, pl.ds(0, cols.size), layout), "use cols"),
        (lambda acc, bias, cols, layout: epilogue(2.0 * acc, bias, cols, layout), "must be"),
        (lambda acc, bias, cols, layout: jnp.minimum(add_bias(acc, bias, cols, layout), 0.0), "must be"),
        (lambda acc, bias, cols, layout: jnp.abs(add_bias(acc, bias, cols, layout)), "must be"),
        (lambda acc, bias, cols, layout: jax.nn.sigmoid(add_bias(acc, bias, cols, layout)), "must be"),
        # The next four do not compile or run; what they lack is named, and nobody sees a traceback.
        (lambda acc, bias, cols, layout: epilogue(acc, bias, cols, layout)[:16], ""),
        (lambda acc, bias, cols, layout: jnp.maximum(acc + bias, 0.0), ""),
        (lambda acc, bias, cols, layout: None, ""),
        (lambda acc, bias, cols: acc, ""),
    ],
)
def test_wrong_epilogues_are_turned_down(answer, said):
    _turned_down(ex04.check_epilogue(answer), said)


@pytest.fixture(scope="module")
def ring() -> dict:
    """Names of the cells that exercise 2 needs, and its solution as text."""
    path = NOTEBOOKS / "04_blocked_matmul.ipynb"
    sources = {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]}
    names: dict = {}
    for cell in ("setup", "parameters", "arrays", "layout"):
        exec(sources[cell], names)
    found = {exercise.id: exercise for exercise in exercises(NOTEBOOKS / "solutions" / "04_blocked_matmul.py")}
    return names | {"solution": found["exercise-ring"].solution.rpartition("\n")[0]}


MULTIPLY = "acc = multiply(acc, a_smem.at[slot], b_smem.at[slot], layout)"
REFILL = "pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages))"
COMMIT = "plgpu.commit_smem()"


@pytest.mark.parametrize(
    "lines, said",
    [
        ((COMMIT, REFILL, MULTIPLY), "race"),
        ((COMMIT, MULTIPLY, REFILL), "race"),
        ((MULTIPLY, REFILL, COMMIT), "race"),
        ((MULTIPLY, COMMIT), "never end"),
        ((COMMIT, REFILL), "element"),
    ],
)
def test_wrong_rings_are_turned_down(ring, lines, said):
    right = f"{MULTIPLY}\n            {COMMIT}\n            {REFILL}"
    assert right in ring["solution"]
    exec(ring["solution"].replace(right, "\n            ".join(lines)), ring)
    _turned_down(ex04.check_ring(ring["mended_ring"]), said)


WAIT = "plgpu.barrier_wait(arrived.at[slot])"
FILL = "pl.loop(0, min(num_stages, num_steps))(fetch)"
LAST = f"{COMMIT}\n            {REFILL}"


@pytest.mark.parametrize(
    "changes, said",
    [
        ([(FILL, "pass"), (WAIT, f"fetch(i)\n            {WAIT}"), (LAST, COMMIT)], "2 slots is used as if it had 1"),
        ([("num_stages=2", "num_stages=1")], "this is no ring"),
    ],
)
def test_a_ring_that_is_none_is_turned_down(ring, monkeypatch, changes, said):
    """Right results, and no copy in flight while a step is multiplied."""
    monkeypatch.setattr(judge, "_interpreted", lambda *args: pytest.fail("it was run"))
    solution = ring["solution"]
    for right, wrong in changes:
        assert right in solution
        solution = solution.replace(right, wrong)
    exec(solution, ring)
    _turned_down(ex04.check_ring(ring["mended_ring"]), said)


def test_a_ring_that_loads_before_it_multiplies_passes(ring):
    """The slot of the step before is loaded again while this step is multiplied."""
    solution = ring["solution"].replace(FILL, "fetch(0)").replace(LAST, "")
    early = "pl.when(i + 1 < num_steps)(lambda: fetch(i + 1))"
    solution = solution.replace(MULTIPLY, f"{COMMIT}\n            {early}\n            {MULTIPLY}")
    exec(solution, ring)
    verdict = ex04.check_ring(ring["mended_ring"])
    assert verdict, verdict


def test_a_product_computed_outside_of_the_kernel_is_turned_down(ring):
    exec(ring["solution"], ring)
    _turned_down(ex04.check_ring(lambda a, b: ring["mended_ring"](a, b) * 0 + a @ b), "outside of the kernel")


def forever(*args):
    while True:
        pass


@pytest.mark.parametrize("check", [ex04.check_traffic, ex04.check_ring, ex04.check_tile_of, ex04.check_epilogue])
def test_an_answer_that_never_ends_is_turned_down(monkeypatch, check):
    monkeypatch.setattr(judge, "SECONDS", 0.5)
    _turned_down(check(forever), "has not ended")


def _turned_down(verdict, said: str = ""):
    assert not verdict
    assert said in verdict.text and "\n" not in verdict.text
