"""Chapter 8's exercises: the busy share of the SMs, a persistent kernel, a multicast, and a split of K."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn, normal, require_close, run_kernel, speed

import cookbook

# (m, n, tile, num_sms, cluster) of exercise 2.
SHARE_CASES = [
    (4096, 4096, (128, 256), 132, 1),
    (4096, 4352, (128, 256), 132, 1),
    (8192, 8192, (128, 128), 132, 2),
    (512, 512, (128, 256), 132, 1),
    (4100, 4096, (128, 256), 132, 1),
    (4224, 1000, (128, 256), 132, 2),
    (1000, 300, (128, 128), 10, 4),
    (2048, 2048, (128, 128), 133, 2),
    (129, 64, (128, 64), 6, 2),
    (640, 384, (128, 128), 6, 4),
]


@checker
def check_busy_share(answer) -> str:
    """Exercise 2: `answer(m, n, tile, num_sms, cluster)` is the share of the SMs' time in which they compute tiles."""
    given = {case: answer(*case) for case in (*SHARE_CASES, *drawn(_share_case))}
    for case, got in given.items():
        if got is None:
            raise NotYet("busy_share returns None: write its body.")
        if not isinstance(got, int | float | np.number) or isinstance(got, bool):
            raise NotYet(f"busy_share{case} is {got!r}; a share is a number.")
        if not math.isclose(got, want := _share(*case), rel_tol=1e-6):
            raise NotYet(f"busy_share{case} is {float(got):.4g}, and {want:.4g} is right. {_share_hint(given)}")
    return "You can tell from the shape alone what the last wave will cost."


@checker
def check_persistent(answer) -> str:
    """Exercise 1: `answer(a, b, blocks)` is a @ b, computed by a grid of that many blocks."""
    for shape, blocks in (((128, 192, 384), 4), ((192, 128, 128), 2)):
        a, b = normal(1, shape[:2], jnp.bfloat16), normal(2, shape[1:], jnp.bfloat16)
        fn = functools.partial(answer, blocks=blocks)
        if (grid := _grid(fn, a, b)) != blocks:
            raise NotYet(f"for blocks={blocks} the kernel launches {grid} blocks: it must be a grid of {blocks}")
        out = run_kernel(fn, a, b, in_flight=2)
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        require_close(out, exact, 0.02, f"{shape} on {blocks} blocks")
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    ours = functools.partial(answer, blocks=132)
    return "Each block takes every tile that is its own." + speed(ours, cookbook.matmul, large, large)


@checker
def check_multicast(answer) -> str:
    """Exercise 3: `answer(cluster, row, col, block)` lists the copies of one step: (operand, panel, shared)."""
    for cluster in ((2, 1), (1, 2)):
        for row, col in ((0, 0), (3, 5), *drawn(lambda rng: rng.integers(0, 50, 2).tolist())):
            places = [
                (row * cluster[0] + i, col * cluster[1] + j) for i in range(cluster[0]) for j in range(cluster[1])
            ]
            _require_multicast(cluster, places, [_copies(answer(cluster, row, col, block)) for block in (0, 1)])
    return "Both blocks name the same panel in the copy that they share, and only in that."


@checker
def check_split(answer) -> str:
    """Exercise 4: `answer(a, b, split)` holds the sums over parts of K: part p has every split-th step, from p on."""
    for (m, k, n), split in (((64, 576, 256), 3), ((64, 384, 128), 2)):  # Three steps: the ring of two goes round.
        a, b = normal(3, (m, k), jnp.bfloat16), normal(4, (k, n), jnp.bfloat16)
        out = run_kernel(functools.partial(answer, split=split), a, b, in_flight=2)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        exact = np.einsum("mtsk,tskn->smn", a.reshape(m, -1, split, 64), b.reshape(-1, split, 64, n))
        contiguous = np.einsum("msk,skn->smn", a.reshape(m, split, -1), b.reshape(split, -1, n))
        if out.shape == exact.shape and np.allclose(out, contiguous[:1], atol=0.1):
            raise NotYet("every part is the sum over the first steps of K: the slices of K must move with the part")
        if out.shape == exact.shape and np.allclose(out, contiguous, atol=0.1):
            raise NotYet("these parts are contiguous: part p takes every split-th step, from p on")
        if out.shape == exact.shape and np.allclose(out[0], a @ b, atol=0.1):
            raise NotYet("part 0 is the sum over all of K: each part has its own share of the steps")
        require_close(out, exact, 1e-3, f"({m}, {k}, {n}) in {split} parts")
    return "More blocks than tiles, and an order of the sum that is yours to fix."


def _grid(fn, *args) -> int | None:
    """Number of blocks of the kernel that `fn` launches, None if it launches none."""
    pending = [jax.make_jaxpr(lambda *args: fn(*args))(*args).jaxpr]
    while pending:
        for equation in pending.pop().eqns:
            if meshes := equation.params.get("meshes"):
                return math.prod(meshes[0].grid)
            pending += [j for v in equation.params.values() if hasattr(j := getattr(v, "jaxpr", v), "eqns")]
    return None


def _copies(given) -> dict:
    """Operand -> (panel, shared)."""
    if not isinstance(given, list | tuple) or any(not isinstance(c, list | tuple) or len(c) != 3 for c in given):
        raise NotYet(f"copies returns {given!r}; it must be a list of (operand, panel, shared)")
    if sorted(operand for operand, _, _ in given) != ["a", "b"]:
        raise NotYet("a step has two copies, one of each operand")
    return {operand: (int(panel), bool(shared)) for operand, panel, shared in given}


def _require_multicast(cluster, places, by_block) -> None:
    """Raises NotYet unless both blocks receive their own tiles, and share one copy."""
    for i, operand in enumerate("ab"):
        kinds = [copies[operand][1] for copies in by_block]
        if kinds[0] != kinds[1]:
            raise NotYet(f"cluster {cluster}: only one block calls the collective copy of {operand}: a deadlock")
        for block in (0, 1):
            senders = (0, 1) if kinds[0] else (block, block)  # One sends the panel's first half, one its second.
            received = tuple(by_block[sender][operand][0] for sender in senders)
            if received != (places[block][i],) * 2:
                got = "half of panel {} and half of panel {}".format(*received) if kinds[0] else f"panel {received[0]}"
                raise NotYet(
                    f"cluster {cluster}: block {block} computes tile {places[block]}, and receives {got} of "
                    f"{operand.upper()}; it needs panel {places[block][i]}"
                )
    if not any(shared for _, shared in by_block[0].values()):
        raise NotYet(f"cluster {cluster}: nothing is shared: L2 hands out as much as without a cluster")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _share_case(rng):
    m, n, tile_m, tile_n = (int(x) for x in rng.integers((1, 1, 64, 64), (5000, 5000, 257, 257)))
    return m, n, (tile_m, tile_n), int(rng.integers(8, 150)), int(rng.integers(1, 5))


def _share(m, n, tile, num_sms, cluster, *, tiles_up=True, waves_up=True, clusters_up=True, rest_idles=True) -> float:
    """The right answer of exercise 2, and with other keywords the likely wrong ones."""
    rows, columns = (_cdiv(size, t) if tiles_up else size / t for size, t in zip((m, n), tile, strict=True))
    clusters = (math.ceil(rows / cluster) if clusters_up else rows / cluster) * columns
    at_once = num_sms // cluster
    waves = math.ceil(clusters / at_once) if waves_up else clusters / at_once
    return rows * columns / (waves * (num_sms if rest_idles else at_once * cluster))


def _share_hint(given: dict) -> str:
    likely = (
        (lambda *case: 100 * _share(*case), "A share is at most 1: no percentages."),
        (lambda *case: 1 - _share(*case), "That is the share in which they idle."),
        (lambda *case: _share(*case[:4], 1), "The clusters are missing: a wave has num_sms // cluster of them."),
        (lambda *case: _share(*case, tiles_up=False), "A part of a tile at the edge is a tile."),
        (lambda *case: _share(*case, clusters_up=False), "Each column of tiles begins with a cluster of its own."),
        (lambda *case: _share(*case, rest_idles=False), "SMs that no cluster fits on idle, and count."),
        (lambda *case: _share(*case, waves_up=False), "The last wave takes as long as the others."),
    )
    texts = (
        text
        for wrong, text in likely
        if all(math.isclose(wrong(*case), got, rel_tol=1e-6) for case, got in given.items() if got is not None)
    )
    return next(texts, "Count the tiles, then the waves, then divide.")
