"""Chapter 17c's exercises: where tokens part, one token back, the gradient of a triangle, and of the gates."""

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    equations,
    jaxpr_of,
    normal,
    repeated,
    require_answers,
    require_close,
    run_kernel,
    values_loaded,
    wide,
)

SIZE, CHUNK = 64, 64  # Values and channels of a state; tokens of a chunk.
FLOAT32 = 1e-4  # An answer that rounds anything to 16 bits is further off.


# Exercise 1: where two tokens part ------------------------------------------------------------------------------------


def _parting(t, j, first=False, end=False, own=False, both=False):
    block = 1 << ((t ^ j).bit_length() - 1)
    middle = t & -block
    token = t if own else middle - block if first else middle - 1 if end else middle
    return (2 * block if both else block), token


@checker
def check_parting(answer) -> str:
    """`answer(t, j)` is (the power of two at which tokens j < t part, the first token of the second half)."""
    power = lambda x: 1 << (x.bit_length() - 1)
    likely = [
        (dict(both=True), "The power is that of one half; this is both halves together."),
        (dict(both=True, first=True), "The power is that of one half; this is both halves together."),
        (dict(first=True), "This is the first token of the first half; the middle is where the second half begins."),
        (dict(end=True), "This is the last token of the first half; the first of the second one is wanted."),
        (dict(own=True), "This is the token itself, and not where its half begins."),
    ]
    cases = [(63, 0), (6, 5), (8, 7), (40, 33), (13, 3), (1, 0)]
    found = [answer(t, j) for t, j in cases]
    if all(isinstance(pair, tuple) and len(pair) == 2 for pair in found):
        if all(b == power(t) for (b, _), (t, _) in zip(found, cases, strict=True)):
            raise NotYet("for t = 6, j = 5: the highest bit counts where they differ, not where t ends.")
        if all(b == power(t - j) for (b, _), (t, j) in zip(found, cases, strict=True)):
            raise NotYet("for t = 8, j = 7: this is their distance. They are neighbours, and part at 8.")
    draw = lambda rng: tuple(sorted((int(x) for x in rng.choice(CHUNK, 2, replace=False)), reverse=True))
    require_answers(answer, cases, _parting, likely, draw=draw)
    return "Every pair has one such power: six products, one for each, have the whole triangle."


# Exercise 2: one token back -------------------------------------------------------------------------------------------


@checker
def check_token_gradients(answer) -> str:
    """`answer(q, k, w, g, do, decayed)` is a kernel: dk and dg, from the last token to the first."""
    for tokens in (7, 3):
        args = _tokens(tokens)
        found = run_kernel(answer, *args)
        exact, wrongs = _back(*wide(*args)), _wrong_ways(*wide(*args))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise NotYet("two results are asked for: dk and dg")
        for i, name in ((1, "dg"), (0, "dk")):
            likely = [(wrong[i], said) for wrong, said in wrongs]
            require_close(found[i], exact[i], FLOAT32, f"{name} of {tokens} tokens", likely)
    return "The error reads the faded state, so the gradient that goes on is smaller by an outer product."


def _tokens(tokens):
    """(q, k, w, g, do, decayed): of a run of the recurrence, from a state that is not zero."""
    q, k, v, do = (normal(i, (tokens, SIZE)) for i in range(1, 5))
    k = k / jnp.linalg.norm(k, axis=1, keepdims=True)
    rng = np.random.default_rng(17)
    w = jnp.asarray(rng.uniform(0.3, 0.9, (tokens, 1)), jnp.float32) * k
    g = jnp.asarray(-rng.uniform(0.1, 0.8, (tokens, SIZE)), jnp.float32)
    s, decayed = wide(normal(5, (SIZE, SIZE))), []
    for row in zip(*wide(k, w, g, v), strict=True):
        key, write, gate, value = row
        d = s * np.exp(gate)
        s = d + np.outer(value - d @ key, write)
        decayed.append(d)
    return q, k, w, g, do, jnp.asarray(np.stack(decayed), jnp.float32)


def _back(
    q, k, w, g, do, decayed, of_state=lambda ds, de, k, w: ds - np.outer(de, k), of_key=lambda d, ds, de: -d.T @ de
):
    """(dk, dg), where the gradients of D and of k are these."""
    ds, dk, dg = np.zeros((SIZE, SIZE)), np.zeros_like(k), np.zeros_like(k)
    for t in reversed(range(len(q))):
        d, ds = decayed[t], ds + np.outer(do[t], q[t])
        de = ds @ w[t]
        dk[t] = of_key(d, ds, de)
        d_decayed = of_state(ds, de, k[t], w[t])
        dg[t] = (d * d_decayed).sum(axis=0)
        ds = d_decayed * np.exp(g[t])
    return dk, dg


def _wrong_ways(*args):
    """((dk, dg) of a likely mistake, what to say of it)."""
    states = (
        (lambda ds, de, k, w: ds, "D has another reader than the new state: the error."),
        (lambda ds, de, k, w: ds + np.outer(de, k), "the sign of the error's share is the other one: e = v - D k."),
        (lambda ds, de, k, w: -np.outer(de, k), "the state after the token reads D, too: what comes from there is "
         "missing."),
        (lambda ds, de, k, w: ds - np.outer(de, w), "the error reads D with the key, not with the row that writes."),
    )  # fmt: skip
    keys = (
        (lambda d, ds, de: d.T @ de, "the sign of dk is the other one: e = v - D k."),
        (lambda d, ds, de: -ds.T @ de, "the key meets the state, not its gradient."),
        (lambda d, ds, de: ds.T @ de, "the key meets the state, not its gradient."),
    )
    wrong = [(_back(*args, of_state=way), said) for way, said in states]
    wrong += [(_back(*args, of_key=way), said) for way, said in keys]
    q, k, w, g, *rest = args
    return [*wrong, (_back(q, k, w, 0 * g, *rest), "the decay is missing on the way to the token before.")]


# Exercise 3: the gradient of a triangle -------------------------------------------------------------------------------


@checker
def check_gradient_of_m(answer) -> str:
    """`answer(x, r, e, de, dr)` is the gradient of m, by one product of the errors and of the gradient of R."""
    for size in (64, 128):
        m = np.tril(np.random.default_rng(size).standard_normal((CHUNK, CHUNK)) / 16, -1)
        x, (r, de) = np.linalg.inv(np.eye(CHUNK) + m), wide(*(normal(i, (CHUNK, size)) for i in (6, 7)))
        args = [jnp.asarray(y, jnp.float32) for y in (x, r, x @ r, de, x.T @ de)]
        exact = -np.tril(x.T @ (de @ r.T) @ x.T, -1)
        whole = -(x.T @ de) @ (x @ r).T
        likely = [
            (-exact, "the sign is the other one: where m grows, its inverse shrinks."),
            (whole, "m is zero on its diagonal and above it: only what is below counts."),
            (np.tril(whole), "m is zero on the diagonal, too."),
            (np.tril(-whole), "the sign is the other one, and m is zero on the diagonal, too."),
            (-np.tril(whole.T, -1), "it is transposed: a row is a token that reads."),
            (np.tril(whole.T, -1), "it is transposed: a row is a token that reads."),
            (-np.tril(de @ r.T, -1), "this is the gradient of x, and m is inside the inverse."),
        ]  # fmt: skip
        with jax.default_matmul_precision("highest"):  # A GPU would multiply float32 in TF32.
            run = jax.jit(lambda *args: answer(*args))  # Traced, as the program that is judged below.
            found = np.asarray(run(*args))
        require_close(found, exact, FLOAT32, f"dm, for values of {size}", likely)
    products = [
        equation for equation in equations(jax.make_jaxpr(lambda *args: answer(*args))(*args).jaxpr)
        if equation.primitive.name in ("dot_general", "triangular_solve", "reduce_sum")
    ]  # fmt: skip
    if len(products) > 1:
        raise NotYet(f"it is right, with {len(products)} products; one is enough: look at what the chain has computed")
    x, r, e, de, dr = args
    nothing = [jnp.full_like(y, jnp.nan) for y in (x, r, de)]
    if np.isnan(run(*nothing[:2], e, nothing[2], dr)).any():  # Products in a loop, or written as other operations.
        raise NotYet("it is right, but it uses x, R or dE, and needs none: look at what the chain has computed")
    return "The inverse costs the backward pass one product, of two things that the chain leaves behind."


# Exercise 4: from sums to gates ---------------------------------------------------------------------------------------


@checker
def check_gate_gradients(answer) -> str:
    """`answer(q, dq, k, dk, w, dw, last)` is a kernel: the gates' gradients of a chunk."""
    for tokens in (9, 6):
        rows = [normal(i, (tokens, 128)) for i in range(8, 14)]
        args = *rows, normal(14, (128,))
        found = run_kernel(answer, *args)
        q, dq, k, dk, w, dw, last = wide(*args)
        shares = q * dq + k * dk - w * dw
        from_end = lambda x: np.cumsum(x[::-1], axis=0)[::-1]
        exact = from_end(shares) + last
        likely = [
            (from_end(q * dq + k * dk + w * dw) + last, "rows that write have the other sign."),
            (from_end(q * dq + k * dk) + last, "rows that write are missing."),
            (from_end(q * dq - w * dw) + last, "keys that read are missing."),
            (from_end(q * dq) + last, "rows that write and keys that read are missing."),
            (from_end(shares), "the share of the state after the chunk is missing: begin with `last`."),
            (last - from_end(shares), "the sign of all shares is the other one."),
            (np.cumsum(shares, axis=0) + last, "it sums from the start; a gate is in the sums of later tokens."),
            (np.cumsum(shares, axis=0), "it sums from the start; a gate is in the sums of later tokens."),
            (np.cumsum(q * dq, axis=0), "it sums from the start, and only the queries' share, from zero."),
            (shares + last, "a gate gets the share of only its own token; it is in the sums of later ones, too."),
            (exact - shares, "a gate is in the sum of its own token, too."),
        ]
        require_close(found, exact, FLOAT32, f"dg of {tokens} tokens", likely)
        if (loaded := _rows_loaded(jaxpr_of(answer, *args))) > 6 * tokens + 1:
            raise NotYet(
                f"it is right, but it loads {loaded:.0f} rows for {tokens} tokens, which have 6 each: "
                "go through the tokens once, and load each row once"
            )
    return "One running sum from the end, and no product: the rows and their gradients have it all."


def _rows_loaded(jaxpr):
    """Rows of 128 that the kernel loads, those of a result too; but for `last`, which may be loaded again."""
    of_last = sum(
        times for equation, times in repeated(jaxpr)
        if equation.primitive.name in ("get", "load") and equation.invars[0].aval.shape == (128,)
        and "gmem" in str(equation.invars[0].aval)
    )  # fmt: skip
    return values_loaded(jaxpr) // 128 - of_last
