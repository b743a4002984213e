"""The exercises of chapter 13: other right answers are accepted, and each wrong one is told its mistake."""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import _device
from cookbook._host import _is_interpreted as interpreted
from cookbook.attn import steps
from cookbook.attn.core import per_row
from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex13, judge  # noqa: E402

# Exercise 1


def slots(tables, seqs, positions, page_size):
    found = tables[seqs, positions // page_size] * page_size + positions % page_size
    return np.where(positions < 0, -1, found)


def slots_one_by_one(tables, seqs, positions, page_size):
    found = []
    for seq, position in zip(seqs, positions, strict=True):
        page, offset = divmod(int(position), page_size)
        found.append(-1 if position < 0 else int(tables[seq][page]) * page_size + offset)
    return found


def slots_as_int32(*args):
    return slots(*args).astype(np.int32)


@pytest.mark.parametrize("right", [slots, slots_one_by_one, slots_as_int32])
def test_slots_solutions(right):
    accepted(ex13.check_slots(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda t, s, p, n: t[s, p // n] * n + p % n, "is padding"),
        (lambda t, s, p, n: np.where(p < 0, 0, t[s, p // n] * n + p % n), "must be -1, and is 0"),
        (lambda t, s, p, n: np.where(p < 0, -1, p), "the table is not used"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n]), "that is the page"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] * n), "the page's first slot"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] + p % n), "multiply"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[0, p // n] * n + p % n), "its row of the table"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p % n % t.shape[1]] * n + p // n), "exchanged"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] * 16 + p % 16), "with page_size = 4"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] * n + p / n), "must be integers"),
        (lambda t, s, p, n: slots(t, s, p, n)[p >= 0], "one slot for each token"),
        (lambda *args: None, "write its body"),
        (lambda t: None, "raised TypeError"),
    ],
)
def test_slots_wrong(wrong, said):
    rejected(ex13.check_slots(wrong), said)


# Exercise 2


def times(kv_lens, num_heads, num_kv_heads, head_dim, *, of_bytes=1.0, of_flops=1.0, rows=64, total=sum, unit=1e6):
    tokens = total(kv_lens) * num_kv_heads * head_dim
    return unit * of_bytes * 4 * tokens / 4.8e12, unit * of_flops * 4 * rows * tokens / 989e12


def test_times_solution():
    accepted(ex13.check_times(times))


def knob(**wrong):
    return lambda *args: times(*args, **wrong)


def with_all_heads(lens, heads, kv_heads, head_dim):
    return times(lens, heads, heads, head_dim)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (knob(of_bytes=0.5), "there are keys and there are values"),
        (knob(of_flops=0.5), "are two operations"),
        (knob(of_flops=0.25), "4 operations"),
        (knob(total=lambda lens: max(lens) * len(lens)), "its own tokens"),
        (knob(unit=1.0), "in seconds"),
        (knob(unit=1e3), "in ms"),
        (with_all_heads, "a group of query heads reads its KV head once"),
        (lambda lens, n, k, h: (times(lens, n, k, h)[0], times(lens, n, n, h)[1]), "one unit"),
        (lambda lens, n, k, h: times(lens, n, k, h, rows=n // k), "multiply all 64"),
        (knob(rows=128), "the tensor cores take"),
        (lambda lens, n, k, h: times(lens, n, k, 128), "memory takes"),
        (lambda lens, n, k, h: times(lens, n, k, h)[0], "two numbers"),
        (lambda *args: None, "write its body"),
    ],
)
def test_times_wrong(wrong, said):
    rejected(ex13.check_times(wrong), said)


# Exercise 3


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("block * block_kv + i * tokens", "block * block_kv", "a page is copied twice"),
        ("pl.ds(lax.rem(position, jnp.int32(page_size)), tokens)", "pl.ds(0, tokens)", "the page's first rows"),
        ("tables_gmem[seq, lax", "tables_gmem[0, lax", "it must be"),
        ("num_arrivals=copies", "num_arrivals=1", ""),
        ("num_arrivals=copies", "num_arrivals=2 * copies", "never end"),
        ("        plgpu.barrier_wait(loaded)\n", "", "reads the slot before its tiles have arrived"),
        ("    )(block_tables, pages)", "    )(block_tables, pages) * 1", "outside of the kernel"),
        ("    _, page_size", "    while True: pass\n    _, page_size", "has not ended"),
    ],
)
def test_in_order_wrong(right, wrong, said, monkeypatch):
    """Where nothing is said: the interpreter names the barrier that completes more often than it is waited for."""
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("13_paged_decode", "exercise-pages", right, wrong), said)


# Exercise 4


def one_unit(q, k_pages, v_pages, pages, kv_len):
    """Differs from the solution: from the last block to the first, and each product is masked by its position."""
    head_dim = q.shape[1]
    unit = math.log2(math.e) / math.sqrt(head_dim)

    def body(q_gmem, k_gmem, v_gmem, pages_gmem, len_gmem, o_gmem, lse_gmem, q_smem, k_smem, v_smem, q_filled, filled):
        plgpu.copy_gmem_to_smem(q_gmem, q_smem, q_filled)
        plgpu.barrier_wait(q_filled)
        kv_len = len_gmem[0]
        blocks = lax.div(kv_len + 63, jnp.int32(64))

        def step(i, state):
            first = (blocks - 1 - i) * 64
            for row in range(0, 64, 16):
                page = pages_gmem[lax.div(first + row, jnp.int32(16))]
                for gmem, smem in ((k_gmem, k_smem), (v_gmem, v_smem)):
                    plgpu.copy_gmem_to_smem(gmem.at[page], smem.at[pl.ds(row, 16)], filled)
            plgpu.barrier_wait(filled)

            def multiply(s):
                plgpu.wgmma(s, q_smem, k_smem.T)
                return s[...]

            s = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))
            position = first + plgpu.broadcasted_iota(jnp.int32, (64, 64), 1, layout=plgpu.Layout.WGMMA)
            s = jnp.where(position >= kv_len, -jnp.inf, s)
            acc, m_i, l_i = state
            p, alpha, m_i, l_i = steps.softmax_step(s, m_i, l_i, unit, masked=True)
            acc = steps.add_product(acc * per_row(alpha, acc.shape), p.astype(q.dtype), v_smem, interpreted())
            return acc, m_i, l_i

        out, lse_log2 = steps.finish(*lax.fori_loop(0, blocks, step, steps.nothing_seen(head_dim)))
        _device.store(o_gmem, out)
        _device.store(lse_gmem, lse_log2 * math.log(2))

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(q.shape[:1], jnp.float32)),
        scratch_types=[
            *[plgpu.SMEM((64, head_dim), q.dtype)] * 3,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=8),
        ],
        compiler_params=lab.compiler_params(approx_math=True),
    )(q, k_pages, v_pages, pages, kv_len)


def test_tail_solution():
    accepted(ex13.check_tail(one_unit))


def by_xla(q, k_pages, v_pages, pages, kv_len):
    k, v = (x[pages].reshape(-1, q.shape[1]).astype(jnp.float32) for x in (k_pages, v_pages))
    s = jnp.where(jnp.arange(len(k)) < kv_len, q.astype(jnp.float32) @ k.T / 8, -jnp.inf)
    return jax.nn.softmax(s) @ v, jax.nn.logsumexp(s, axis=1)


def test_tail_by_xla():
    rejected(ex13.check_tail(by_xla), "must be a kernel")


MASK, STEPS = "jnp.where(block * block_kv + token < kv_len, s, -jnp.inf)", "lax.div(kv_len + (block_kv - 1), "


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (STEPS, "lax.div(kv_len, ", "round the number of blocks up"),
        (STEPS + "jnp.int32(block_kv))", "3", "40 tokens: 3 blocks are loaded, and 1 have a token"),
        (MASK, "jnp.where(token < kv_len, s, -jnp.inf)", "column i of a block is token block * block_kv + i"),
        (MASK, "s", "tokens after the end count"),
        (MASK, MASK.replace("-jnp.inf", "0.0"), "exp(0) = 1"),
        (MASK, MASK.replace("<", "<="), "one token too many"),
        (MASK, MASK.replace("kv_len", "kv_len - 1"), "one token too few"),
        (MASK, "jnp.where(token < lax.rem(kv_len, jnp.int32(block_kv)), s, -jnp.inf)", "cut like the last one"),
        (STEPS, "lax.div(kv_len + block_kv, ", "reaches beyond the end"),
        ("    )(q, k_pages, v_pages, pages, kv_len)", "    )(q * 1, k_pages, v_pages, pages, kv_len)", "outside"),
        ("            plgpu.barrier_wait(filled)\n", "", "reads the slot before its tiles have arrived"),
        ("    copies = block_kv", "    while True: pass\n    copies = block_kv", "has not ended"),
    ],
)
def test_tail_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("13_paged_decode", "exercise-tail", right, wrong), said)
