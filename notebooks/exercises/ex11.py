"""Chapter 11's exercises: two heads that share keys, a schedule of turns, their barriers, and a kernel to fix."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, require_answers, wide

import cookbook

LAST_TURN = "is the last turn drained?"
WG_ROWS = 64  # Queries of a compute warpgroup.
TURNS = [  # Steps of a tile, and how many of them each warpgroup computes.
    (1, (1, 1)), (4, (4, 4)), (4, (3, 4)), (5, (2, 5)), (6, (6, 6, 6)), (6, (4, 5, 6)),
]  # fmt: skip
# Warpgroups, steps, cycles of a step's products, cycles of its softmax.
SCHEDULES = ((1, 3, 5, 2), (2, 4, 2, 3), (2, 5, 4, 3), (3, 4, 2, 1), (3, 3, 2, 7), (2, 6, 1024, 1280))


@checker
def check_heads(answer) -> str:
    """Exercise 1: `answer(q, k, v)` is out; a block's two compute warpgroups take two heads that share a KV head."""
    speed = _judge_attention(answer, queries=192, heads=4, kv_heads=2)
    q, k, v = _operands(192, 4, 2)
    for block in judge.play_kernel(answer, q, k, v)[0]:
        if len({event.wg for event in block.events if event.kind == "product"}) < 2:
            raise NotYet("one warpgroup multiplies: the two heads of a KV head must share what a block loads")
        if block.count("load") > 2 + 2 * k.shape[1] // 64:
            raise NotYet("keys or values are loaded twice: both warpgroups must read the same stages")
    return "Two heads for each byte of keys and values." + speed


@checker
def check_mended(answer) -> str:
    """Exercise 4: `answer(q, k, v)` is out, by two compute warpgroups that take turns."""
    speed = _judge_attention(answer)
    judge.require_turns(judge.play_kernel(answer, *_operands()), products=2, early=True)
    return "One turn, given once, taken by each in its time, and drained." + speed


def _operands(
    queries: int = 128, heads: int = 1, kv_heads: int = 1, keys: int = 256, head_dim: int = 64, batch: int = 1
) -> list[jax.Array]:
    cached = batch, keys, kv_heads, head_dim
    shapes = (batch, queries, heads, head_dim), cached, cached
    return [judge.normal(seed, shape, jnp.bfloat16) for seed, shape in enumerate(shapes, 1)]


def _judge_attention(answer, queries: int = 128, heads: int = 1, kv_heads: int = 1) -> str:
    """Raises NotYet unless `answer(q, k, v)` is a kernel of attention, for other lengths and heads too; returns what a
    GPU says of its speed."""
    said = "out (is each result of its own head, and do m_i, l_i and acc change in each step?)"
    q, k, v = _operands(queries, heads, kv_heads)
    out = judge.run_kernel(answer, q, k, v, undrained=LAST_TURN)
    for block in judge.play_kernel(answer, q, k, v)[0]:
        if any(ring.loads > 2 and len(ring.stages) < 2 for ring in block.rings):
            raise NotYet("keys or values have a single stage: keep two, so that one is loaded while the other is read")
    judge.require_close(out, _attention(q, k, v), 0.02, said)
    q, k, v = _operands(queries, heads, kv_heads, keys=320, head_dim=128, batch=2)
    said = "out for other numbers of keys, a head_dim of 128 and two batches (do steps, scale_log2 and b follow them?)"
    judge.require_close(judge.run_kernel(answer, q, k, v, undrained=LAST_TURN), _attention(q, k, v), 0.02, said)
    large = [jax.ShapeDtypeStruct((4, 4096, 16 * num // heads, 128), jnp.bfloat16) for num in (heads, kv_heads)]
    return judge.speed(answer, cookbook.attention, large[0], large[1], large[1])


def _attention(q, k, v) -> np.ndarray:
    """Attention in float64; query heads share the KV heads."""
    q_all, k_all, v_all = (x.swapaxes(1, 2) for x in wide(q, k, v))  # (batch, head, position, head_dim).
    k_all, v_all = (np.repeat(x, q.shape[2] // k.shape[2], axis=1) for x in (k_all, v_all))
    s = q_all @ k_all.swapaxes(2, 3) / np.sqrt(q.shape[3])
    p = np.exp(s - np.logaddexp.reduce(s, axis=3, keepdims=True))
    return (p @ v_all).swapaxes(1, 2)


@checker
def check_schedule(answer) -> str:
    """Exercise 2: `answer(wgs, steps, products, softmax)` lists for each warpgroup when the products of each of its
    steps start."""
    likely = (
        (dict(shared=False), "The tensor cores are free only when the products before have ended."),
        (dict(chain=False), "A warpgroup starts its next products after its own softmax."),
        (dict(pass_late=True), "The tensor cores do not wait for a softmax: the next warpgroup's products follow at "
         "once."),
    )  # fmt: skip
    said = "Two times must have passed: the end of the products before, and that of the warpgroup's own softmax."
    draw = lambda rng: (*map(int, rng.integers(1, 5, 2)), *map(int, rng.integers(1, 2000, 2)))
    require_answers(answer, SCHEDULES, _starts, likely, said, draw=draw)
    return (
        "In the end a step takes wgs * products or products + softmax, whichever is more: the tensor cores limit it, "
        "or a warpgroup's own chain."
    )


def _starts(wgs, steps, products, softmax, *, shared=True, chain=True, pass_late=False):
    free, ready = 0, [0] * wgs  # When the tensor cores are free, and when each warpgroup wants them.
    found = np.zeros((wgs, steps))
    for step, wg in itertools.product(range(steps), range(wgs)):
        found[wg, step] = at = max(free if shared else 0, ready[wg] if chain else 0)
        free = at + products + (softmax if pass_late else 0)
        ready[wg] = at + products + softmax
    return found.tolist()


@checker
def check_turns(answer) -> str:
    """Exercise 3: `answer(wg, wgs, own, total)` lists ("wait", i), ("arrive", i), ("products",) of a warpgroup."""
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
        for wg, program in enumerate(programs):
            turns = [program[:at].count(("wait", wg)) for at, line in enumerate(program) if line == ("products",)]
            if turns[0] != total - own[wg] + 1:
                raise NotYet(
                    f"{where}, warpgroup {wg} skips its first {total - own[wg]} steps, so its first products stand in "
                    f"its turn {total - own[wg] + 1}, not in turn {turns[0]}."
                )
            if turns != [*range(total - own[wg] + 1, total + 2)]:
                raise NotYet(
                    f"{where}, warpgroup {wg} has its products in turns {turns}; they must follow each other, and end "
                    f"in turn {total + 1}."
                )
    return "One turn goes round, every warpgroup gets it in its order, and in the end nobody holds it."


def _program(given, wg: int, wgs: int, where: str) -> list[tuple]:
    if given is None:
        raise NotYet("turns returns None: write its body.")
    program = [(line,) if isinstance(line, str) else tuple(line) for line in given]
    known = [("products",), ("wait", wg), *(("arrive", i) for i in range(wgs))]
    if unknown := [line for line in program if line not in known]:
        raise NotYet(f"{where}, {unknown[0]} of warpgroup {wg} is none of {known}: does the ring close?")
    return program


def _run(programs, order, where: str) -> None:
    """Runs the programs, each as far as it comes, those first in `order` first."""
    wgs = len(programs)
    at, turns, started = [0] * wgs, [0] * wgs, [None] * wgs  # Lines; turns given; products in this turn, None without.
    moved = True
    while moved:
        moved = False
        for wg in order:
            while at[wg] < len(programs[wg]) and (programs[wg][at[wg]][0] != "wait" or turns[wg]):
                kind, *who = programs[wg][at[wg]]
                if kind == "wait":
                    turns[wg], started[wg] = turns[wg] - 1, 0
                elif kind == "arrive":
                    turns[who[0]], started[wg] = turns[who[0]] + 1, None
                elif started[wg] is None:
                    raise NotYet(f"{where}, warpgroup {wg} starts products and has no turn: wait first.")
                else:
                    started[wg] += 1
                if started[wg] == 2:
                    raise NotYet(
                        f"{where}, warpgroup {wg} starts the products of two steps in one turn: pass the turn on after "
                        "each step, or the others never get the tensor cores during its softmax."
                    )
                if sum(turns) + sum(count is not None for count in started) > 1:
                    raise NotYet(f"{where}, there is more than one turn. Who gives the first, and how often?")
                at[wg] += 1
                moved = True
    for wg in range(wgs):
        if at[wg] < len(programs[wg]):
            raise NotYet(
                f"{where}, warpgroup {wg} waits for ever: somebody ends early, or nobody gives the first turn."
            )
        if turns[wg]:
            raise NotYet(f"{where}, in the end a turn is left at barrier {wg}, and nobody takes it: drain it.")
