"""Chapter 24's exercises: ties at a threshold, reads and comparisons, a draw with min p, candidates judged."""

import math

import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    drawn,
    jaxpr_of,
    normal,
    require_answers,
    require_close,
    run_kernel,
    values_loaded,
    wide,
)

from cookbook.select import noise

COLUMNS = 1024  # Two groups of 512; second cases have one.


# Exercise 1: how many are equal to it ---------------------------------------------------------------------------------


@checker
def check_kth_and_ties(answer) -> str:
    """`answer(x, k)` is a kernel: for each row the key of the k-th largest value, and how many of the k are equal to
    it."""
    # About 20 different values; then one value alone, and rows without any tie.
    many = jnp.round(2 * normal(1, (2, COLUMNS), jnp.float32)).at[1].set(1.5)
    few = normal(2, (1, COLUMNS // 2))
    for x, k, where in ((many, 50, "with many ties"), (few, 9, "without ties")):
        key, ties = run_kernel(lambda x, k=k: answer(x, k), x)
        keys = _keys(x)
        kth = np.sort(keys, axis=1)[:, -k]
        above, equal = (keys > kth[:, None]).sum(1), (keys == kth[:, None]).sum(1)
        require_close(key, kth, 0, f"{where} and k = {k}, the key")
        likely = [
            (above, "this counts the keys above the threshold; the others of the k are equal to it"),
            (equal, "this counts all keys that are equal to it, also those for which there is no room among the k"),
            (above + equal, "this counts all keys that reach the threshold"),
            (above + equal - k, "these are the equal ones that are *not* among the k"),
        ]
        require_close(ties, k - above, 0, f"{where} and k = {k}, the number of ties", likely)
    loaded = values_loaded(jaxpr_of(lambda x: answer(x, 50), many))
    if loaded > 17 * COLUMNS:
        raise NotYet(
            f"it is right, but a block reads its row {loaded // COLUMNS} times; 16 times for the digits and once more "
            "are enough"
        )
    return "A selection needs both numbers: how many are above, and how many of the equal ones there is room for."


def _keys(x):
    bits = np.asarray(x, np.float32).view(np.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# Exercise 2: reads and comparisons ------------------------------------------------------------------------------------


def _cost(columns, bits, kept, bins=0):
    passes = 32 // bits
    return columns * (1 if kept else passes), columns * passes * (2**bits - 1 + bins)


@checker
def check_cost(answer) -> str:
    """`answer(columns, bits, kept)` is (values loaded, comparisons) of a row."""
    likely = [
        (dict(bins=1), "A digit of one bit is 0 or 1: one threshold decides. Of n digits all but the lowest have one."),
        (lambda columns, bits, kept: (_cost(columns, bits, kept)[0], columns * (2**bits - 1)),
         "These are the comparisons for one digit; a key has several."),
        (lambda columns, bits, kept: (_cost(columns, bits, False)[0], _cost(columns, bits, kept)[1]),
         "A row that is kept on the chip is loaded from global memory once."),
        (lambda columns, bits, kept: (_cost(columns, bits, kept)[0], 32 * columns),
         "A digit of several bits takes more comparisons than it has bits."),
    ]  # fmt: skip
    draw = lambda rng: (512 * int(rng.integers(1, 300)), int(rng.choice([1, 2, 4, 8])), bool(rng.integers(2)))
    cases = [(4096, 2, True), (131072, 1, False), (131072, 4, False)]
    require_answers(answer, cases, _cost, likely, draw=draw)
    return "Wider digits save reads and cost comparisons."


# Exercise 3: a draw with min p ----------------------------------------------------------------------------------------


def _draws(x, seeds, positions, floor):
    """The token with the highest sum of logit and noise among the logits from `floor` on."""
    key = noise.row_key(seeds[:, None], positions[:, None])
    scores = x + noise.gumbel(key, jnp.arange(x.shape[1], dtype=jnp.int32))
    return np.argmax(np.where(x >= floor, scores, -np.inf), axis=1)


def _new_seeds(num: int):
    return jnp.asarray(drawn(lambda rng: rng.integers(0, 1 << 29, num), 1)[0], jnp.int32)


@checker
def check_draw_min_p(answer) -> str:
    """`answer(logits, seeds, positions, min_p)` is a kernel, a draw among the tokens that are at least `min_p` times as
    probable as the most probable one."""
    # At first seeds for which the likely mistakes differ, then some that nobody knows.
    for min_p, shift, seeds, columns in (
        (0.2, -4.0, jnp.arange(8, dtype=jnp.int32), COLUMNS),
        (0.6, 200.0, _new_seeds(4), COLUMNS // 2),  # Too far from 0 for exp.
        (1.0, 0.0, _new_seeds(2), COLUMNS // 2),
    ):
        x, positions = normal(3, (len(seeds), columns)) * 2 + shift, 3 * seeds + 1
        tokens = run_kernel(lambda *args, p=min_p: answer(*args, p), x, seeds, positions)
        top, log_p = jnp.max(x, axis=1, keepdims=True), math.log(min_p)
        others = lambda floor, of=(x, seeds, positions): _draws(*of, floor)
        exact = others(top + log_p)
        likely = [
            (others(-jnp.inf), "this draws among all tokens, or nearly: is what you compare with one number for the "
             "row, and made of logits without noise?"),
            (others(min_p * top), "this compares logits with min_p times the largest logit; it is the probability, "
             "exp of the logit, of which min_p is a share"),
            (others(log_p), "this compares logits with log(min_p), without the largest logit"),
            (np.zeros(len(seeds)), "no token is kept; one that is exactly min_p times as probable as the most "
             "probable is to be kept"),
            (np.argmax(np.asarray(x), axis=1), "this takes the most probable token"),
        ]  # fmt: skip
        require_close(tokens, exact, 0, f"with min_p = {min_p}", likely)
    loaded = values_loaded(jaxpr_of(lambda *args: answer(*args, 0.2), x, seeds, positions))
    if loaded > 2 * columns + 8:
        raise NotYet(f"it is right, but a block reads its row {loaded / columns:.0f} times; two are enough")
    return "A rule about logits and noise that decides among what it keeps: no sum, and no sort."


# Exercise 4: candidates judged in a read ------------------------------------------------------------------------------


@checker
def check_mass_above(answer) -> str:
    """`answer(logits, candidates)` is a kernel: for each candidate, (R, n) logits, the probability of all tokens of its
    row that are more probable; it reads each row twice at most."""
    for num, scale, shift, columns in ((8, 2.0, 0.0, COLUMNS), (3, 60.0, 200.0, COLUMNS // 2)):
        x = normal(4, (2, columns)) * scale
        x = (jnp.round(x * 8) / 8 + shift).astype(jnp.float32)  # Candidates have equals.
        # From the first candidate the largest logit is too far for exp, from all those of a second row shifted.
        ends = jnp.stack([jnp.min(x, axis=1), jnp.max(x, axis=1)], axis=1)
        candidates = x[:, _columns(num, columns)].at[:, :2].set(ends)
        if shift:
            candidates = candidates.at[1].set(jnp.sort(x[1])[:num])
        out = run_kernel(answer, x, candidates)
        exact = _shares(x, candidates, np.greater)
        total = np.exp(wide(x) - wide(x).max(1, keepdims=True)).sum(1, keepdims=True)
        likely = [
            (_shares(x, candidates, np.greater_equal), "tokens with the candidate's own logit count; only those above "
             "it should"),
            (exact * total, "these are sums; a probability is a share of the row's total"),
            (1 - exact, "these are the probabilities of what is not above"),
            (_shares(x, candidates, np.less), "these are the probabilities of what is below"),
            (exact / np.maximum(exact.max(1, keepdims=True), 1e-9), "the total must be that of all tokens"),
        ]  # fmt: skip
        if np.isnan(wide(out)).any() and shift:
            raise NotYet(f"with logits around {shift:.0f} there are NaNs: subtract the row's largest logit before exp")
        require_close(out, exact, 1e-3, f"with {num} candidates and logits around {shift:.0f}", likely)
    loaded = values_loaded(jaxpr_of(answer, x, candidates))
    if loaded > 2 * columns + 4 * candidates.shape[1]:
        raise NotYet(
            f"it is right, but a block reads its row {loaded / columns:.0f} times; two are enough: one read can make "
            "all the sums"
        )
    return "Eight questions, one read."


def _columns(num: int, columns: int):
    return drawn(lambda rng: rng.choice(columns, num, replace=False), 1)[0]


def _shares(x, candidates, is_above):
    x, candidates = wide(x, candidates)
    share = np.exp(x - x.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    counted = is_above(x[:, None, :], candidates[:, :, None])
    return np.where(counted, share[:, None, :], 0).sum(2)
