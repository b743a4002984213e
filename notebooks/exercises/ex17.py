"""Chapter 17's exercises: a chunk added to the state, decays, one token, and parts combined."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, play_kernel, require_close, run_kernel, wide
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = plgpu.Layout.WGMMA.reduce(1)
P, N, CHUNK = 64, 128, 64  # Sizes of the kernels' state, and of a chunk.


@checker
def check_combine(answer) -> str:
    """`answer(first, second)`, of pairs (decay, state), is the pair of both parts one after the other."""
    rng = np.random.default_rng(17)
    parts = [(float(np.exp(-rng.exponential())), rng.standard_normal((3, 2))) for _ in range(4)]
    given = [(decay, state.copy()) for decay, state in parts]
    got = answer(*given[:2])
    if not isinstance(got, tuple) or len(got) != 2:
        raise NotYet(f"combine returns {got!r}; it must be a pair: the decay and the state of both parts.")
    if any((state != kept).any() for (_, state), (_, kept) in zip(given, parts, strict=True)):
        raise NotYet("combine has changed a state that it was given: return a new one.")
    (d0, s0), (d1, s1) = parts[:2]
    likely = (
        (s0 + s1, "the state of the first part goes through the second one, and decays there."),
        (d0 * s1 + s0, "the parts are exchanged: the first one comes before the second one."),
    )
    _require_pair(got, _combine(*parts[:2]), likely)
    whole = answer(answer(parts[0], parts[1]), answer(parts[2], parts[3]))
    _require_pair(whole, _combine(_combine(_combine(*parts[:2]), parts[2]), parts[3]))
    return "Any neighbours may be combined first, so parts need not wait for each other."


@checker
def check_weights(answer) -> str:
    """`answer(cum)` is exp(cum[t] - cum[s]) for s up to t, and 0 elsewhere, however strong the decay."""
    rng = np.random.default_rng(17)
    for strength, dtype in ((0.05, np.float32), (30.0, np.float32), (400.0, np.float32)):
        cum = -np.cumsum(strength * rng.uniform(size=16)).astype(dtype)
        got, overflows = _with_overflows(answer, cum)
        with np.errstate(under="ignore"):
            exact = np.tril(np.exp(np.minimum(wide(cum)[:, None] - wide(cum), 0.0)))
        what = f"cum ends at {cum[-1]:.3g}, and the weight of t = row, s = column"
        if np.isnan(wide(got)).any():
            raise NotYet(f"{what} is NaN. Where does an exponential overflow, and what is infinity times zero?")
        if np.ndim(got) == 2 and np.triu(got, 1).any() and not np.tril(got, -1).any():
            raise NotYet(f"{what}: rows and columns are exchanged.")
        if np.ndim(got) == 2 and np.triu(got, 1).any():
            raise NotYet(f"{what}: a token sees tokens that come after it: mask them.")
        require_close(np.asarray(got), exact, 1e-3, what)
        if overflows or _has_no_gradient(answer, cum):
            raise NotYet(
                f"cum ends at {cum[-1]:.0f}, and an exponential overflows before it is masked. The result is right, "
                "but its gradient is infinity times 0, NaN: mask the exponent, not the exponential."
            )
    return "No exponent is positive, so no decay is too strong."


def _with_overflows(answer, cum):
    """(the answer, whether NumPy has overflowed on the way)."""
    overflows: list = []
    with np.errstate(over="call", invalid="ignore", under="ignore", call=lambda *what: overflows.append(what)):
        got = answer(cum.copy())
    return got, bool(overflows)


def _has_no_gradient(answer, cum) -> bool:
    """Whether the gradient of an answer in JAX is NaN."""
    try:
        return bool(jnp.isnan(jax.grad(lambda cum: jnp.sum(answer(cum)))(jnp.asarray(cum))).any())
    except jax.errors.JAXTypeError:  # NumPy's functions take no traced array.
        return False


@checker
def check_add_chunk(answer) -> str:
    """`answer(acc, k_smem, v_smem, w, scaled_smem)` adds a chunk to the state in `acc`."""
    k, v = normal(17, (2, CHUNK, N), jnp.bfloat16), normal(18, (2, CHUNK, P), jnp.bfloat16)
    w = jnp.asarray(np.random.default_rng(19).uniform(0.1, 1.0, (2, CHUNK)), jnp.float32)
    chunks = functools.partial(_chunks, answer)
    out = run_kernel(chunks, k, v, w)
    ((block,),) = play_kernel(chunks, k, v, w)
    if not block.count("product"):
        raise NotYet("nothing was multiplied yet: write the body of add_chunk.")
    added = [w[:, None] * v for w, v in zip(wide(w), wide(v), strict=True)]
    sums = lambda values: [np.einsum("tp,tn->pn", v, k) for v, k in zip(values, wide(k), strict=True)]
    likely = ((sum(sums(wide(v))), "the weights are missing."), (sums(added)[1], "the first chunk is lost."))
    require_close(out, sum(sums(added)), 2e-2, "the state after two chunks", likely)
    return "What a warpgroup stores, it commits before WGMMA may read it."


def _chunks(answer, k, v, w):
    """The state after all chunks, each added by `answer`."""

    def body(k_gmem, v_gmem, w_gmem, o_gmem, k_smem, v_smem, scaled_smem, loaded):
        def add_all(acc):
            for i in range(k.shape[0]):
                plgpu.copy_gmem_to_smem(k_gmem.at[i], k_smem, loaded)
                plgpu.copy_gmem_to_smem(v_gmem.at[i], v_smem, loaded)
                plgpu.barrier_wait(loaded)
                answer(acc, k_smem, v_smem, plgpu.load(w_gmem.at[i], layout=ROWS, optimized=False), scaled_smem)
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # All have read what the next copies overwrite.
            return acc[...]

        o_gmem[...] = pl.run_scoped(add_all, plgpu.ACC((P, N), jnp.float32))

    tile = lambda width: plgpu.SMEM((CHUNK, width), k.dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((P, N), jnp.float32),
        scratch_types=[tile(N), tile(P), tile(P), plgpu.Barrier(num_arrivals=2)],
    )(k, v, w)


@checker
def check_token_step(answer) -> str:
    """`answer(state, q, k, v, decay)` is a kernel: the state after one token, and its output."""
    state, q, k, v = (normal(seed, shape) for seed, shape in enumerate(((P, N), N, N, P)))
    decay = jnp.asarray([0.25], jnp.float32)
    found = run_kernel(answer, state, q, k, v, decay)
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise NotYet("the kernel must return a pair: the state after the token, and the output")
    before, q, k, v = wide(state, q, k, v)
    after = 0.25 * before + np.outer(v, k)
    states = (
        (before + np.outer(v, k), "it does not decay."),
        (0.25 * (before + np.outer(v, k)), "it decays after the token instead of before it."),
        (before + v[:, None], "it is made without the key."),
    )
    require_close(found[0], after, 1e-4, "the state", states)
    reads_before = [(before @ q, "it reads the state before the token; it must read the state after it.")]
    require_close(found[1], after @ q, 1e-3, "the output", reads_before)
    return "One token: every number of the state is read once and written once, which is all that its time consists of."


def _combine(first, second):
    return second[0] * first[0], second[0] * first[1] + second[1]


def _require_pair(got, wanted, likely=()):
    said = "what becomes of a state that goes through both parts?"
    require_close(np.asarray(got[0]), wide(wanted[0]), 1e-5, f"the decay is wrong: {said}")
    require_close(np.asarray(got[1]), wanted[1], 1e-5, f"the state is wrong: {said}", likely)
