"""Chapter 11's exercises: the compute warpgroup, its turns, how tiles are dealt out, the phases of a window."""

import collections
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.ex07 import report as report  # The notebook asks it about a kernel that does not drain its turns.
from exercises.judge import NotYet, checker

import cookbook

WG_ROWS = 64  # Queries of a compute warpgroup.
TURNS = [  # Steps of a tile, and how many of them each warpgroup computes.
    (1, (1, 1)),
    (4, (4, 4)),
    (4, (3, 4)),
    (5, (2, 5)),
    (6, (6, 6, 6)),
    (6, (4, 5, 6)),
]
WINDOWS = list(itertools.product((2, 3), (64, 128), (0, 1, 63, 64, 130, 200, 500, 5000)))  # wgs, block_kv, left.


@checker
def check_compute(answer) -> str:
    """Exercise 1: `answer(q, k, v)` is (out, lse), by a memory and two compute warpgroups."""
    return "Two readers for each byte that is loaded." + _judge_attention(answer)


@checker
def check_mended(answer) -> str:
    """Exercise 3: `answer(q, k, v)` is (out, lse), by two compute warpgroups that take turns."""
    return "One turn, given once, taken by each in its time, and drained." + _judge_attention(answer)


def _judge_attention(answer) -> str:
    """Raises NotYet unless `answer(q, k, v)` is a kernel of attention; returns what a GPU says of its speed."""
    q, k, v = (judge.normal(seed, (1, length, 1, 64), jnp.bfloat16) for seed, length in ((1, 128), (2, 256), (3, 256)))
    try:
        out, lse = judge.run_kernel(answer, q, k, v)
    except NotYet as problem:
        if "only observed barrier" in str(problem):
            raise NotYet("a barrier has a completion that nobody waits for: is the last turn drained?") from None
        raise
    if np.isnan(np.asarray(out)).any():
        raise NotYet("out has a NaN: do m_i, l_i and acc change in each step?")
    s = np.asarray(q, np.float64)[0, :, 0] @ np.asarray(k, np.float64)[0, :, 0].T / 8
    p = np.exp(s - s.max(axis=1, keepdims=True))
    exact_lse = s.max(axis=1) + np.log(p.sum(axis=1))
    judge.require_close(lse, exact_lse[None, None], 1e-3, "lse")
    exact_out = p / p.sum(axis=1, keepdims=True) @ np.asarray(v, np.float64)[0, :, 0]
    judge.require_close(out, exact_out[None, :, None], 0.02, "out")
    large = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    return judge.speed(answer, cookbook.attention, large, large, large)


@checker
def check_turns(answer) -> str:
    """Exercise 2: `answer(wg, wgs, own, total)` lists ("wait", i), ("arrive", i), ("products",) of a warpgroup."""
    for total, own in TURNS:
        wgs = len(own)
        where = f"with {total} steps, of which the warpgroups compute {own}"
        programs = [_program(answer(wg, wgs, own[wg], total), wg, wgs, where) for wg in range(wgs)]
        for wg, program in enumerate(programs):
            count = program.count(("products",))
            if count != own[wg] + 1:
                raise NotYet(
                    f"{where}, warpgroup {wg} has ('products',) {count} times; it must be {own[wg] + 1}: one for each "
                    "of its steps, and the last p v."
                )
        for order in itertools.permutations(range(wgs)):
            _run(programs, order, where)
    return "One turn goes round, every warpgroup gets it in its order, and in the end nobody holds it."


@checker
def check_phases(answer) -> str:
    """Exercise 5: `answer(first_q, wg, wgs, block_kv, left)` counts a warpgroup's steps: passed by, masked, whole,
    masked, passed by, when query i sees keys i - left to i."""
    for wgs, block_kv, left in WINDOWS:
        for first_q in range(0, 6 * WG_ROWS * wgs, WG_ROWS * wgs):
            for wg in range(wgs):
                where = f"for first_q = {first_q}, wg = {wg} of {wgs}, block_kv = {block_kv}, left = {left}"
                _judge_phases(answer(first_q, wg, wgs, block_kv, left), first_q, wg, wgs, block_kv, left, where)
    return "Each warpgroup goes through every block of the tile, and works for none of them in vain."


@checker
def check_deal(answer) -> str:
    """Exercise 4: `answer(steps, blocks)` lists for each block the tiles that it computes; `steps` of each tile."""
    causal = [i + 1 for _ in range(64) for i in range(32)]
    cases = {
        "equal tiles": ([32] * 500, 132),
        "causal tiles": (causal, 132),
        "one long tile": ([1] * 40 + [9], 6),
        "fewer tiles than blocks": ([3, 1, 2], 5),
    }
    for name, (steps, blocks) in cases.items():
        given = answer(list(steps), blocks)
        if given is None:
            raise NotYet("deal_out returns None: write its body.")
        try:
            rows = [[int(tile) for tile in row] for row in given]
        except TypeError as error:
            raise NotYet("deal_out must return a list of lists of tiles, one for each block.") from error
        if len(rows) != blocks:
            raise NotYet(f"{name}: there are {len(rows)} lists for {blocks} blocks; one without a tile is [].")
        times = collections.Counter(itertools.chain.from_iterable(rows))
        if wrong := [tile for tile in range(len(steps)) if times[tile] != 1]:
            raise NotYet(f"{name}: tile {wrong[0]} is computed {times[wrong[0]]} times; once is right.")
        if outside := [tile for tile in times if not 0 <= tile < len(steps)]:
            raise NotYet(f"{name}: there is no tile {outside[0]}.")
        longest, good = max(sum(steps[tile] for tile in row) for row in rows), _makespan(steps, blocks)
        if longest > 1.02 * good:
            raise NotYet(
                f"{name}: the last block is done after {longest} steps; {good} are possible. Which tiles should come "
                "first, and which block should get the next one?"
            )
    return "The block that is free takes the longest tile that is left: none ends much later than the others."


def _program(given, wg: int, wgs: int, where: str) -> list[tuple]:
    if given is None:
        raise NotYet("turns returns None: write its body.")
    program = [tuple(line) if not isinstance(line, str) else (line,) for line in given]
    for line in program:
        known = line == ("products",) or (
            len(line) == 2 and line[0] in ("wait", "arrive") and isinstance(line[1], (int, np.integer))
        )
        if not known or (len(line) == 2 and not 0 <= line[1] < wgs):
            raise NotYet(
                f'{where}, {line} is none of ("wait", i), ("arrive", i), ("products",) with i below {wgs}: '
                "does the ring close?"
            )
        if line[0] == "wait" and line[1] != wg:
            raise NotYet(f"{where}, warpgroup {wg} waits at barrier {line[1]}; its own is {wg}.")
    return program


def _run(programs, order, where: str) -> None:
    """Runs the programs, each as far as it comes, those first in `order` first."""
    wgs = len(programs)
    at, completed, observed, holds = [0] * wgs, [0] * wgs, [0] * wgs, [False] * wgs
    while True:
        moved = False
        for wg in order:
            while at[wg] < len(programs[wg]):
                line = programs[wg][at[wg]]
                if line[0] == "wait":
                    if observed[wg] == completed[wg]:
                        break
                    observed[wg] += 1
                    holds[wg] = True
                elif line[0] == "arrive":
                    completed[line[1]] += 1
                    holds[wg] = False
                    if completed[line[1]] - observed[line[1]] > 1:
                        raise NotYet(
                            f"{where}, barrier {line[1]} completes twice before its warpgroup has waited: there is "
                            "more than one turn. Who gives the first, and how often?"
                        )
                elif not holds[wg]:
                    raise NotYet(f"{where}, warpgroup {wg} starts products and has no turn: wait first.")
                at[wg] += 1
                moved = True
                if sum(holds) > 1:
                    raise NotYet(f"{where}, two warpgroups have a turn at once: who gives the first, and how often?")
        if not moved:
            break
    for wg in range(wgs):
        if at[wg] < len(programs[wg]):
            passed = completed[wg]
            raise NotYet(
                f"{where}, warpgroup {wg} waits for ever, for turn {passed + 1} of its own: somebody ends early, or "
                "nobody gives the first turn."
            )
    for wg in range(wgs):
        if completed[wg] != observed[wg]:
            raise NotYet(f"{where}, in the end a turn is left at barrier {wg}, and nobody takes it: drain it.")


def _judge_phases(given, first_q, wg, wgs, block_kv, left, where: str) -> None:
    if given is None:
        raise NotYet("phases returns None: write its body.")
    try:
        counts = [int(count) for count in given]
    except (TypeError, ValueError) as error:
        raise NotYet(f"{where}, the answer is {given!r}; it must be five numbers of steps.") from error
    if len(counts) != 5 or min(counts) < 0:
        raise NotYet(f"{where}, the answer is {tuple(counts)}; it must be five numbers of steps, none below 0.")
    queries = first_q + np.arange(WG_ROWS * wgs)[:, None]
    kinds = []
    for block in reversed(range((first_q + WG_ROWS * wgs + block_kv - 1) // block_kv)):
        keys = block * block_kv + np.arange(block_kv)
        sees = (keys <= queries) & (keys >= queries - left)
        if sees.any():
            mine = sees[wg * WG_ROWS : (wg + 1) * WG_ROWS]
            kinds.append("whole" if mine.all() else "masked" if mine.any() else "passed by")
    says = [
        kind
        for kind, n in zip(("passed by", "masked", "whole", "masked", "passed by"), counts, strict=True)
        for _ in range(n)
    ]
    if len(says) != len(kinds):
        raise NotYet(f"{where}, these are {len(says)} steps; the tile has {len(kinds)}, for all of its warpgroups.")
    for step, (said, is_so) in enumerate(zip(says, kinds, strict=True)):
        if said != is_so:
            raise NotYet(f"{where}, step {step}, counted from the last block, is {said}; it must be {is_so}.")


def _makespan(steps, blocks: int) -> int:
    """Steps until all blocks are done, if each block that is done takes the longest tile left."""
    done = [0] * blocks
    for n in sorted(steps, reverse=True):
        heapq.heapreplace(done, done[0] + n)
    return max(done)
