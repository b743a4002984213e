"""The exercises of chapter 11b: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import heapq
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook._device import Ring
from cookbook._host import _is_interpreted
from cookbook.attn.core import LOG2E, per_row
from cookbook.attn.steps import add_product, finish, nothing_seen, softmax_step
from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex11b, judge  # noqa: E402

# Deal out tiles


def deal(steps, blocks, *, longest_first=True):
    done, rows = [(0, block) for block in range(blocks)], [[] for _ in range(blocks)]
    for tile in sorted(range(len(steps)), key=lambda tile: -steps[tile] * longest_first):
        time, block = heapq.heappop(done)
        rows[block].append(tile)
        heapq.heappush(done, (time + steps[tile], block))
    return rows


def test_deal_solution():
    accepted(ex11b.check_deal(deal))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda steps, blocks: deal(steps, blocks, longest_first=False), "are possible"),
        (lambda steps, blocks: [list(range(b, len(steps), blocks)) for b in range(blocks)], "are possible"),
        (lambda steps, blocks: deal(steps[:-1], blocks), "0 times"),
        (lambda steps, blocks: [row + [0] for row in deal(steps, blocks)], "times; once"),
        (lambda steps, blocks: [row + [len(steps)] for row in deal(steps, blocks)], "there is no tile"),
        (lambda steps, blocks: [row for row in deal(steps, blocks) if row], "one without a tile"),
        (lambda steps, blocks: [0, 1], "a list of lists"),
        (lambda steps, blocks: None, "write its body"),
    ],
)
def test_deal_wrong(wrong, said):
    rejected(ex11b.check_deal(wrong), said)


# A ring that goes on


def smem(*shape):
    return plgpu.SMEM((*shape, 64), jnp.bfloat16)


def multiply(a, b):
    """a @ b.T, in registers."""

    def product(s_ref):
        plgpu.wgmma(s_ref, a, b.T)
        return s_ref[...]

    return pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))


def from_tile_to_tile(q, k, v):
    """Differs from the solution: a loop over all steps of all tiles, and the products one after the other."""
    num_q, heads = q.shape[1:3]
    steps, tiles, blocks = k.shape[1] // 64, num_q // 64 * heads, 3

    def body(
        q_gmem, k_gmem, v_gmem, o_gmem, lse_gmem, q_smem, k_smem, v_smem, o_smem, filled, freed, q_filled, q_freed
    ):
        role, block = lax.axis_index("role"), lax.axis_index("block")
        ring, mine = Ring(filled, freed, 2), tiles // blocks
        rows = lambda tile: pl.ds(lax.rem(tile, jnp.int32(num_q // 64)) * 64, 64)
        head_of = lambda tile: lax.div(tile, jnp.int32(num_q // 64))

        @pl.when(role == 1)
        def _():
            @pl.loop(0, mine * steps)
            def _(count):
                tile, step = block * mine + lax.div(count, jnp.int32(steps)), lax.rem(count, jnp.int32(steps))

                @pl.when(step == 0)
                def _():
                    pl.when(count > 0)(lambda: plgpu.barrier_wait(q_freed))
                    plgpu.copy_gmem_to_smem(q_gmem.at[0, rows(tile), head_of(tile)], q_smem, q_filled)

                slot = ring.fill(count)
                for source, target in ((k_gmem, k_smem), (v_gmem, v_smem)):
                    part = source.at[0, pl.ds(step * 64, 64), head_of(tile)]
                    plgpu.copy_gmem_to_smem(part, target.at[slot], filled.at[slot])

            ring.drain(mine * steps)
            plgpu.barrier_wait(q_freed)

        @pl.when(role == 0)
        def _():
            @pl.loop(0, mine)
            def _(i):
                tile = block * mine + i
                plgpu.barrier_wait(q_filled)

                def step(step, carry):
                    acc, m_i, l_i = carry
                    slot = ring.wait(i * steps + step)
                    s = multiply(q_smem, k_smem.at[slot])
                    p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, LOG2E / 8, masked=False)
                    acc = acc * per_row(alpha, acc.shape)
                    acc = add_product(acc, p.astype(v.dtype), v_smem.at[slot], _is_interpreted())
                    ring.free(i * steps + step)
                    return acc, m_i, l_i

                out, lse_log2 = finish(*lax.fori_loop(0, steps, step, nothing_seen(64)))
                plgpu.barrier_arrive(q_freed)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = out.astype(o_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[0, rows(tile), head_of(tile)])
                lse_gmem[0, head_of(tile), rows(tile)] = lse_log2 / LOG2E

            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(q, jax.ShapeDtypeStruct((1, heads, num_q), jnp.float32)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="role",
        scratch_types=[
            smem(64),
            smem(2, 64),
            smem(2, 64),
            smem(64),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
    )(q, k, v)


def test_count_solution():
    accepted(ex11b.check_count(from_tile_to_tile))


FIRST, BEFORE = "count = i * num_steps", "before = i * num_steps"
mend_wrongly = functools.partial(mistaken, "11b_attention_tiles")
GO_ON = "do the counts go on too, in both roles"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (FIRST, "count = jnp.int32(0)", GO_ON),
        (BEFORE, "before = jnp.int32(0)", GO_ON),
        (FIRST, "count = i", GO_ON),
        ("plgpu.barrier_arrive(q_freed.at[0])", "pass", "never end"),
        ("pl.when(i > 0)(lambda: plgpu.barrier_wait(q_freed.at[0]))", "pass", GO_ON),
        ("all_steps(work, 0, num_steps)", "all_steps(work, 1, num_steps)", GO_ON),
        (BEFORE, "before = tile", "NameError"),
    ],
)
def test_count_wrong(right, wrong, said):
    rejected(mend_wrongly("exercise-count", right, wrong), said)


@pytest.mark.parametrize("check", [ex11b.check_count, ex11b.check_mask])
def test_attention_by_xla(check):
    rejected(check(lambda q, k, v: (q, q[..., 0].swapaxes(1, 2))), "must be a kernel")


# The phases of a window


def seen(first, num, block_kv, left):
    return max(first - left, 0) // block_kv, -(-(first + num) // block_kv)


def phases(first_q, wg, wgs, block_kv, left, *, tile=True, whole_from=63, whole_to=1, clip=True):
    mine = first_q + 64 * wg
    start, end = seen(first_q, 64 * wgs, block_kv, left) if tile else seen(mine, 64, block_kv, left)
    first, last = seen(mine, 64, block_kv, left)
    whole_first = -(-max(mine + whole_from - left, 0) // block_kv)
    whole_end = (mine + whole_to) // block_kv
    if clip:
        whole_end = max(whole_end, first)
        whole_first = min(max(whole_first, first), whole_end)
    return end - last, last - whole_end, whole_end - whole_first, whole_first - first, first - start


def with_knobs(**wrong):
    return lambda *args: phases(*args, **wrong)


def test_phases_solution():
    accepted(ex11b.check_phases(phases))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (with_knobs(tile=False), "for all of its warpgroups"),
        (with_knobs(whole_from=0), "it must be masked"),
        (with_knobs(whole_to=64), "it must be masked"),
        (with_knobs(clip=False), "none below 0"),
        (lambda *args: phases(*args)[::-1], "counted from the last block"),
        (lambda *args: (0, 1, 2), "five numbers"),
        (lambda *args: 5, "five numbers"),
        (lambda *args: None, "write its body"),
    ],
)
def test_phases_wrong(wrong, said):
    rejected(ex11b.check_phases(wrong), said)


# Mask and heads


def every_block(q, k, v):
    """Differs from the solution: visits every block, the last one first, and masks what no query sees."""
    num_q, heads = q.shape[1:3]
    num_kv, kv_heads = k.shape[1:3]

    def body(q_gmem, k_gmem, v_gmem, o_gmem, lse_gmem, q_smem, k_smem, v_smem, filled):
        head, first = lax.axis_index("head"), lax.axis_index("q_block") * 64
        kv_head, rows = lax.div(head, jnp.int32(heads // kv_heads)), pl.ds(first, 64)
        plgpu.copy_gmem_to_smem(q_gmem.at[0, rows, head], q_smem, filled.at[0])
        plgpu.barrier_wait(filled.at[0])
        ids = lambda dim: plgpu.broadcasted_iota(jnp.int32, (64, 64), dim, layout=plgpu.Layout.WGMMA)

        def step(i, carry):
            acc, m_i, l_i = carry
            begin = num_kv - 64 * (i + 1)
            for at, source, target in ((1, k_gmem, k_smem), (2, v_gmem, v_smem)):
                plgpu.copy_gmem_to_smem(source.at[0, pl.ds(begin, 64), kv_head], target, filled.at[at])
                plgpu.barrier_wait(filled.at[at])
            from_the_end = num_kv - 1 - begin - ids(1) - (num_q - 1 - first - ids(0))
            s = jnp.where(from_the_end >= 0, multiply(q_smem, k_smem), -jnp.inf)
            p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, LOG2E / 8, masked=True)
            acc = acc * per_row(alpha, acc.shape)
            return add_product(acc, p.astype(v.dtype), v_smem, _is_interpreted()), m_i, l_i

        out, lse_log2 = finish(*lax.fori_loop(0, num_kv // 64, step, nothing_seen(64)))
        o_gmem[0, rows, head] = out.astype(o_gmem.dtype)
        lse_gmem[0, head, rows] = lse_log2 / LOG2E

    return plgpu.kernel(
        body,
        out_type=(q, jax.ShapeDtypeStruct((1, heads, num_q), jnp.float32)),
        grid=(heads, num_q // 64),
        grid_names=("head", "q_block"),
        scratch_types=[smem(64), smem(64), smem(64), plgpu.Barrier(num_barriers=3)],
    )(q, k, v)


def test_mask_solution():
    accepted(ex11b.check_mask(every_block))


HEAD = "kv_head = div(head, heads // k.shape[2])"
END = "end = div(first_q + more + WG_ROWS + block_kv - 1, block_kv)"
SEES = "sees = key <= query + more"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (HEAD, "kv_head = head", "query head 1 reads KV head 1; it must read KV head 0"),
        (HEAD, "kv_head = rem(head, k.shape[2])", "query head 2 reads KV head 0; it must read KV head 1"),
        (END, END.replace(" + more", ""), "never visited"),
        (SEES, "sees = key <= query", "the last query must see the last key"),
        (SEES, "sees = key < query + more", "at its own position too"),
        (SEES, "sees = key >= 0", "where is the mask?"),
        (SEES, "sees = key <= query - more", "64 queries, 192 keys"),
        (END, "end = 0 + num_steps", "NameError"),
    ],
)
def test_mask_wrong(right, wrong, said):
    rejected(mend_wrongly("exercise-mask", right, wrong), said)


def forever(*args):
    while True:
        pass


@pytest.mark.parametrize("check", [ex11b.check_deal, ex11b.check_count, ex11b.check_phases, ex11b.check_mask])
def test_an_answer_that_never_ends(check, monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 0.5)
    rejected(check(forever), "has not ended")
