"""Chapter 17b's exercises: errors written token by token, a triangle to fix, one doubling, and a chunk's new state."""

import contextlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_close, run_kernel, wide
from jax.extend.core import Var, jaxprs_in_params

P, N, CHUNK = 64, 128, 64  # Sizes of the kernels' state, and of a chunk.
TOKENS = 9
LARGEST = math.log(np.finfo(np.float32).max)  # The exponential of any larger number is infinite in float32.


# Exercise 1: errors written token by token ----------------------------------------------------------------------------


@checker
def check_write_errors(answer) -> str:
    """`answer(q, k, v, beta)` is a kernel: the outputs of the delta rule, one token after the other."""
    q, k, v = normal(1, (TOKENS, N)), _unit(normal(2, (TOKENS, N))), normal(3, (TOKENS, P))
    k = k.at[3].set(k[1]).at[5].set(0.8 * k[0] + 0.6 * k[4])  # One key comes again, and one is alike two others.
    beta = jnp.asarray(np.random.default_rng(4).uniform(0.3, 0.9, TOKENS), jnp.float32)
    found, args = run_kernel(answer, q, k, v, beta), wide(q, k, v, beta)
    changes = (
        (lambda s, q, k, v, beta: beta * v, "the value is written as it is: read what the state has for the key first"),
        (lambda s, q, k, v, beta: v - s @ k, "the whole error is written; beta says which part of it"),
        (lambda s, q, k, v, beta: beta * v - s @ k, "beta is a factor of the error, not of the value alone"),
        (lambda s, q, k, v, beta: v - beta * (s @ k), "beta is a factor of the error, not of what was read alone"),
        (lambda s, q, k, v, beta: beta * (v + s @ k), "what was read must be subtracted; here it is added"),
        (lambda s, q, k, v, beta: -beta * (v - s @ k), "the sign of the error is the other one"),
        (lambda s, q, k, v, beta: beta * (v - s @ q), "the query was read for; the error is that of the key"),
    )  # fmt: skip
    likely = [(_delta(*args, change), f"{said}.") for change, said in changes]
    likely += [(_delta(*args, late=False), "the output reads the state before the token, not the one after it.")]
    _require_float32(found, "the outputs are")
    require_close(found, _delta(*args), 1e-4, "the outputs", likely)
    fewer = [x[:6] for x in (q, k, v, beta)]
    require_close(run_kernel(answer, *fewer), _delta(*wide(*fewer)), 1e-4, "the outputs of fewer tokens")
    return "A key that comes again finds its old value, and only the difference is written."


def _delta(q, k, v, beta, change=lambda s, q, k, v, beta: beta * (v - s @ k), late=True):
    """The outputs where a token writes `change`."""
    state, out = np.zeros((P, N)), []
    for row in zip(q, k, v, beta, strict=True):
        after = state + np.outer(change(state, *row), row[1])
        out.append((after if late else state) @ row[0])
        state = after
    return np.stack(out)


# Exercise 2: the triangle ---------------------------------------------------------------------------------------------


@checker
def check_lower(answer) -> str:
    """`answer(k, beta, cum)` is a kernel: beta[t] exp(cum[t] - cum[s]) k[t] . k[s] for s < t, and 0 elsewhere."""
    rng = np.random.default_rng(17)
    k = _unit(normal(5, (CHUNK, N)) + 0.1 * normal(6, (N,))).astype(jnp.bfloat16)
    beta = jnp.asarray(rng.uniform(0.1, 1.0, CHUNK), jnp.float32)
    mild = -0.05 * rng.uniform(size=CHUNK)
    forgets = np.where(np.arange(CHUNK) % 9 == 4, -200.0, mild)
    for name, g in (("mild decays", mild), ("tokens that forget everything", forgets)):
        cum = jnp.asarray(np.cumsum(g), jnp.float32)
        found = run_kernel(answer, k, beta, cum)
        _judge_lower(found, *wide(k, beta, cum), name)
    _require_finite(jax.make_jaxpr(lambda *args: answer(*args))(k, beta, cum).jaxpr)
    return "A token corrects what earlier ones have written, with its own beta, and no exponent is positive."


def _judge_lower(found, k, beta, cum, name):
    pairs = np.tril(k @ k.T * np.exp(np.minimum(cum[:, None] - cum, 0)))
    exact = np.tril(beta[:, None] * pairs, -1)
    if found.shape == exact.shape and np.isnan(wide(found)).any():
        raise NotYet(
            f"with {name}, {np.isnan(wide(found)).sum()} numbers are NaN: above the diagonal the exponent is positive, "
            "and infinity times 0 is NaN. Mask the exponent, not the exponential."
        )
    if found.shape == exact.shape and np.triu(found, 1).any():
        raise NotYet(f"with {name}, there are numbers above the diagonal: a token knows none that come later.")
    _require_float32(found, f"with {name}, the result is")
    wrongs = (
        (beta[None] * pairs, "beta is that of the column s. A token corrects with its own: that of the row t."),
        (pairs, "beta is missing."),
        (beta[:, None] * np.tril(k @ k.T), "the decay is missing."),
    )
    likely = [(np.tril(values, diagonal), said) for values, said in wrongs for diagonal in (-1, 0)]
    likely += [
        (-exact, "the sign is the other one. The inverse is that of 1 + L."),
        (beta[:, None] * pairs, "the diagonal is not zero: a token's own u is none of those that it subtracts."),
        (jnp.asarray(exact, jnp.bfloat16), "it is rounded to bfloat16, and float32 is asked for."),
    ]
    require_close(found, exact, 3e-4, name, likely)


def _require_finite(jaxpr) -> None:
    """Raises NotYet if an exponential without a bound is multiplied by a mask.

    Read off the program, because XLA makes a selection of such a product, which a GPU's kernel does not.
    """
    kinds = {}  # Variable: what is known of it.
    for equation in jaxpr.eqns:
        name, mine = equation.primitive.name, {_kind(x, kinds) for x in equation.invars}
        called = equation.params.get("name", "")
        if name in ("select_n", "min", "clamp") or "where" in called or "clip" in called:
            kind = None if "large" in mine else "bounded"
        elif name in ("broadcast_in_dim", "convert_element_type") and "large" in mine:
            kind = "large"
        elif name == "convert_element_type" and equation.invars[0].aval.dtype == bool:
            kind = "mask"
        elif name in ("exp", "exp2"):
            kind = "bounded" if "bounded" in mine else "unbounded"
        elif name == "mul" and {"mask", "unbounded"} <= mine:
            raise NotYet(
                "the result is right here, where XLA makes a selection of a product with a mask. On a GPU the "
                "exponential is infinite above the diagonal, and infinity times 0 is NaN: mask the exponent."
            )
        else:
            kind = next((kind for kind in ("unbounded", "bounded", "mask") if kind in mine), None)
        kinds |= dict.fromkeys(equation.outvars, kind)
        for inner in jaxprs_in_params(equation.params):
            _require_finite(inner)


def _kind(x, kinds):
    """A kind: that of a variable, or "large" for a number above `LARGEST`, which bounds no exponent."""
    if isinstance(x, Var):
        return kinds.get(x)
    return "large" if np.any(np.asarray(x.val) > LARGEST) else None


# Exercise 3: one doubling ---------------------------------------------------------------------------------------------


@checker
def check_double(answer) -> str:
    """`answer(d, lower, block)` is one step of doubling."""
    rng = np.random.default_rng(17)
    for size in (4, 64):
        lower, block = np.tril(rng.standard_normal((size, size)) / size**0.5, -1), 1
        blocks = np.kron(np.eye(size // 2), np.tril(rng.standard_normal((2, 2))))  # No inverse of blocks of `lower`.
        while block < size:
            index = np.arange(size) // block
            wide_e = np.where(index[:, None] == index + 1, lower, 0.0)
            e = np.where(index[:, None] % 2 == 1, wide_e, 0.0)
            for d in (_inverses(lower, block), blocks)[: 1 + (block == 2)]:
                got = np.asarray(answer(d.copy(), lower.copy(), block))
                # Newton's step is right too, for a d of inverses; the second d has none.
                newton = 2 * d - d @ (np.eye(size) + np.where(index[:, None] // 2 == index // 2, lower, 0.0)) @ d
                if got.shape == newton.shape and np.allclose(got, newton, 1e-6, 1e-6):
                    continue
                likely = (
                    (d, "nothing has changed."),
                    (d + d @ e @ d, "a sign is wrong."),
                    (d - e, "e is multiplied by the inverses on both sides."),
                    (d - d @ wide_e @ d, "e also has what lies between blocks that do not become one: mask it."),
                    (d - d @ lower @ d, "e is a part of lower alone: mask it."),
                    (_inverses(lower, 2 * block), "the inverses are computed anew, without d: a step makes them of d."),
                )
                what = f"size {size}, blocks of {block}: the inverses of twice the size, of d by two products"
                require_close(got, d - d @ e @ d, 1e-6, what, likely)
            block *= 2
    if not _multiplies_alone(answer, blocks, lower, 2):
        raise NotYet("a library inverts a matrix in it: a step needs two products alone, which tensor cores can do.")
    return "Two products per step, and each step doubles the blocks: from 1 to 64 in six steps."


def _multiplies_alone(answer, d, lower, block) -> bool:
    """Whether the answer gets along without a library's inverse: none takes arrays of objects. JAX's functions do not
    either, and their program tells."""
    with contextlib.suppress(Exception):
        answer(d.astype(object), lower.astype(object), block)
        return True
    with contextlib.suppress(Exception):
        program = str(jax.make_jaxpr(lambda d, lower: answer(d, lower, block))(d, lower))
        return not re.search(r"= (lu|triangular_solve|custom_linear_solve|qr|svd|eigh?|cholesky)\b", program)
    return False


def _inverses(lower, block):
    """The inverses of the blocks on the diagonal of 1 + lower."""
    index = np.arange(len(lower)) // block
    return np.linalg.inv(np.eye(len(lower)) + np.where(index[:, None] == index, lower, 0.0))


# Exercise 4: the state after a chunk ----------------------------------------------------------------------------------


@checker
def check_next_state(answer) -> str:
    """`answer(state, k, v, beta, inverse)` is a kernel: the state after a chunk."""
    rng = np.random.default_rng(17)
    state, v = 0.5 * normal(7, (P, N)), normal(8, (CHUNK, P), jnp.bfloat16)
    k = _unit(normal(9, (CHUNK, N)) + normal(10, (N,))).astype(jnp.bfloat16)  # Keys that are alike.
    beta = jnp.asarray(rng.uniform(0.2, 1.0, CHUNK), jnp.float32)
    lower = np.tril(wide(beta)[:, None] * (wide(k) @ wide(k).T), -1)
    inverse = jnp.asarray(np.linalg.inv(np.eye(CHUNK) + lower), jnp.bfloat16)
    args = state, k, v, beta, inverse
    out, exact = run_kernel(answer, *args), _next(*wide(*args))
    for wrong, said in _wrong_states(*wide(*args)):
        if out.shape == wrong.shape and _error(wide(out), wrong) < 0.02 < _error(exact, wrong):
            raise NotYet(f"{said}.")
    require_close(out, exact, 0.05, "the state after the chunk")
    if _error(wide(out), exact) > 0.004:  # The state, the errors and u are rounded to bfloat16, which costs 0.002.
        raise NotYet("the state after the chunk is near the right one, but not as near as roundings explain.")
    added = wide(out) - wide(state)
    if _error(wide(jnp.asarray(added, jnp.bfloat16)), added) < 1e-4:
        raise NotYet("what is added to the state has been rounded to bfloat16: only operands are rounded.")
    if np.any(run_kernel(answer, state, k, v, jnp.zeros_like(beta), inverse) != state):
        raise NotYet("where beta is 0 nothing is written, and the state must stay as it is: only operands are rounded.")
    return "Three products in a row, each of which needs the one before: this is the chain from chunk to chunk."


def _next(state, k, v, beta, inverse, sign=1.0):
    u = inverse @ (beta[:, None] * (v - sign * k @ state.T))
    return state + u.T @ k


def _wrong_states(state, k, v, beta, inverse):
    """(what comes of a likely mistake, what to say of it)."""
    one, column = np.eye(CHUNK), beta[:, None]
    return (
        (_next(state, k, v, beta, one, sign=0.0), "it is still a state that adds. Subtract what the old state has for "
         "each key, and then let the inverse settle what the tokens of the chunk do to each other"),
        (_next(state, k, v, beta, inverse, sign=0.0), "the old state is not read: subtract K Sᵀ from the values"),
        (_next(state, k, v, beta, one), "the inverse is missing: each token corrects the state before the chunk, and "
         "none sees what the others of its chunk write"),
        (_next(state, k, v, beta, inverse, sign=-1.0), "K Sᵀ is added to the values; it must be subtracted"),
        (_next(state, k, v, beta, inverse.T), "the inverse is transposed: rows are the tokens that correct"),
        (_next(state, k, v, np.ones(CHUNK), inverse), "beta is missing"),
        (state + (column * (inverse @ (v - k @ state.T))).T @ k, "beta comes before the inverse, which has the factors "
         "of all tokens but the last one in it already"),
        (state + (inverse @ (column * v - k @ state.T)).T @ k, "beta is a factor of the whole error, not of v alone"),
        (_next(state, k, v, beta, inverse) - state, "the old state is lost: the chunk adds to it"),
        (state, "nothing is added to the state"),
    )  # fmt: skip


def _require_float32(out, what: str):
    if out.dtype != jnp.float32:
        raise NotYet(f"{what} {out.dtype}; float32 is asked for.")


def _error(out, exact) -> float:
    return np.linalg.norm(out - exact) / np.linalg.norm(exact)


def _unit(x):
    """`x` with rows of norm 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
