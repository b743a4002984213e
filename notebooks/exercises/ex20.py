"""Chapter 20's exercises: three kernels to be fixed, and one wrong result to be read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, play_kernel, require_close, require_staged, run_kernel

EVIDENCE = dict(tile=(64, 64), tile_k=32, wrong=(2, 1), missing=5, twice=3)  # The case of exercise 2.
_SIZES = (256, 192, 256)  # M, N and K of the evidence.


def _require_mended(answer, reference, shapes, in_flight: int | None = None) -> None:
    """Raises NotYet if `answer(x)` is not `reference(x)` for arrays of these shapes, or does no longer use TMA; the
    first is long enough for a ring to go round."""
    for seed, shape in enumerate(shapes):
        x = normal(seed, shape)
        out = run_kernel(answer, x, in_flight=None if seed else in_flight, report_first=True)
        if out is None:
            raise NotYet("the function returns None: it must return the kernel's result")
        require_close(out, reference(np.asarray(x, np.float64)), 1e-6, f"float32{list(shape)}")
    require_staged(answer, x, loads=1)
    if "copy_smem_to_gmem" not in str(jax.make_jaxpr(lambda x: answer(x))(x)):
        raise NotYet("TMA must still store the tiles: keep the copies, and fix what orders them")


@checker
def check_squared(answer) -> str:
    """Exercise 1: `answer(x)` is x * x, tile by tile through one buffer of shared memory, without a race."""
    _require_mended(answer, lambda x: x * x, ((256, 128), (128, 128), (64, 128)))
    for block in play_kernel(answer, normal(0, (256, 128)))[0]:
        loads = stores = last = 0
        for event in block.events:
            if event.kind == "load":
                if loads == stores and last & event.known:
                    raise NotYet(
                        "it is right, but nothing runs beside the store: each load starts only when the last store has "
                        "been waited for. Wait later, before the write that the store must not see"
                    )
                loads += 1
            elif event.kind == "store":
                stores, last = stores + 1, event.end
    return "The next tile waits until TMA has read the last one."


@checker
def check_two_readers(answer) -> str:
    """Exercise 3: `answer(x)` is 2 x + 1: two compute warpgroups read each slot, and the kernel ends."""
    _require_mended(answer, lambda x: 2 * x + 1, ((384, 128), (128, 128)))
    for block in play_kernel(answer, normal(0, (384, 128)))[0]:
        wgs = {kind: {event.wg for event in block.events if event.kind == kind} for kind in ("load", "arrive")}
        if wgs["load"] & wgs["arrive"]:
            raise NotYet(
                "the kernel ends, but the loader arrives at a barrier, too: the loader has not read the slot, so it "
                "must not count"
            )
    return "Both readers free a slot, and nobody else is counted."


@checker
def check_off_by_one(answer) -> str:
    """Exercise 4: `answer(x)` is x / 2, through a ring that is refilled only when it has been read."""
    _require_mended(answer, lambda x: x / 2, ((384, 128), (128, 128), (64, 128)), in_flight=2)
    _require_mended(functools.partial(answer, slots=3), lambda x: x / 2, ((384, 128),))
    return "Fill number `slots` is the first that has to wait."


@functools.cache
def evidence():
    """(a, b, out): a product of which one tile is wrong, as a GPU might have returned it."""
    m, n, k = _SIZES
    a, b = (np.asarray(normal(seed, shape), np.float64) for seed, shape in ((50, (m, k)), (51, (k, n))))
    out, (i, j), tile, step = a @ b, EVIDENCE["wrong"], EVIDENCE["tile"], EVIDENCE["tile_k"]
    rows, columns = slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1])
    term = lambda s: a[rows, s * step : (s + 1) * step] @ b[s * step : (s + 1) * step, columns]
    out[rows, columns] += term(EVIDENCE["twice"]) - term(EVIDENCE["missing"])
    return tuple(jnp.asarray(x, jnp.float32) for x in (a, b, out))


@checker
def check_evidence(answer) -> str:
    """Exercise 2: `answer` is (the wrong tile, the step that is missing in it, the step that it has twice)."""
    if not isinstance(answer, tuple) or len(answer) != 3 or None in answer:
        raise NotYet("answer with three things: the wrong tile, such as (0, 2), the missing step and the double one.")
    tile, missing, twice = answer
    if not isinstance(tile, tuple | list) or tuple(tile) != EVIDENCE["wrong"]:
        raise NotYet(f"tile {tile!r} is right; lab.plot.error_map(out, x @ y, tile={EVIDENCE['tile']}) shows another.")
    if (missing, twice) == (EVIDENCE["twice"], EVIDENCE["missing"]):
        raise NotYet("the other way round: a coefficient of 0 is a step that is missing, one of 2 a step taken twice.")
    if missing != EVIDENCE["missing"] or twice != EVIDENCE["twice"]:
        raise NotYet(
            f"step {missing!r} missing and step {twice!r} twice would give another tile: ask for coefficients."
        )
    return "Two steps apart: in a ring of two slots they share one, and a refill came too late."
