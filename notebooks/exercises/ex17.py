"""Chapter 17's exercises: decays, a chunk added to the state, a state handed over, and parts combined."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, play_kernel, require_close, run_kernel, wide
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _device
from cookbook._device import ROWS, Ring

P = 64  # Exercise 3: rows and columns of the state.
SIZES = ((128, 64, 64), (64, 128, 64), (64, 64, 128))  # Exercise 2: (N, tokens of a chunk, P).
RINGS = ((5, 2), (4, 3), (3, 1))  # Exercise 3: (chunks, stages).


def chunks_at_once(q, k, v, log_decay, *, chunk: int = 64):
    """The peer of the chapter's ladder: y by XLA, all chunks at once. `between` is what is left of one chunk's state at
    the start of a later one. It stands here because it holds answers."""
    cut = lambda x: x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    q_c, k_c, v_c, cum = cut(q), cut(k), cut(v), jnp.cumsum(cut(log_decay), axis=-1)
    causal = lambda exponent, offset=0: jnp.exp(
        jnp.where(jnp.tri(exponent.shape[-1], k=offset) > 0, exponent, -jnp.inf)
    )
    weights = product("hctn,hcsn->hcts", q_c, k_c) * causal(cum[..., :, None] - cum[..., None, :])
    y = product("hcts,hcsp->hctp", weights.astype(q.dtype), v_c)
    scaled = v_c * jnp.exp(cum[..., -1:] - cum)[..., None].astype(q.dtype)
    local = product("hcsp,hcsn->hcpn", scaled, k_c)
    ends = jnp.cumsum(cum[..., -1], axis=-1)
    starts = ends - cum[..., -1]
    between = causal(starts[:, :, None] - ends[:, None], offset=-1)
    states = product("hcd,hdpn->hcpn", between.astype(q.dtype), local.astype(q.dtype))
    y = y + product("hctn,hcpn->hctp", q_c, states.astype(q.dtype)) * jnp.exp(cum)[..., None]
    return y.reshape(v.shape).astype(v.dtype)


@checker
def check_weights(answer) -> str:
    """Exercise 1: `answer(cum)` is exp(cum[t] - cum[s]) for s up to t, and 0 elsewhere, however strong the decay; and
    so is its gradient."""
    rng = np.random.default_rng(17)
    for strength, size in ((0.05, 16), (30.0, 16), (400.0, 16), (0.05, 7)):
        cum = -np.cumsum(strength * rng.uniform(size=size)).astype(np.float32)
        got = answer(jnp.asarray(cum))
        if got is None:
            raise NotYet("decays returns None: write its body.")
        exact = np.tril(np.exp(np.minimum(wide(cum)[:, None] - wide(cum), 0.0)))
        what = f"cum ends at {cum[-1]:.3g}, and the weight of t = row, s = column"
        if np.isnan(wide(got)).any():
            raise NotYet(f"{what} is NaN. Where does an exponential overflow, and what is infinity times zero?")
        if np.ndim(got) == 2 and np.triu(got, 1).any() and not np.tril(got, -1).any():
            raise NotYet(f"{what}: rows and columns are exchanged.")
        if np.ndim(got) == 2 and np.triu(got, 1).any():
            raise NotYet(f"{what}: a token sees tokens that come after it: mask them.")
        require_close(np.asarray(got), exact, 1e-3, what)
        share = rng.standard_normal(exact.shape)  # How much the loss changes with each weight.
        both = exact * share
        _require_gradient(answer, cum, share, both.sum(1) - both.sum(0))
    return "No exponent is positive, so no decay is too strong."


def _require_gradient(answer, cum, share, exact):
    """Raises NotYet unless `exact` is the gradient of the sum of `share` times the answer."""
    try:
        got = jax.grad(lambda cum: jnp.sum(answer(cum) * share.astype(np.float32)))(jnp.asarray(cum))
    except (jax.errors.JAXTypeError, TypeError):
        raise NotYet("the result is right, but JAX cannot differentiate NumPy's functions: use those of jnp.") from None
    if jnp.isnan(got).any():
        raise NotYet(
            f"cum ends at {cum[-1]:.0f}, and an exponential overflows before it is masked. The result is right, "
            "but its gradient is infinity times 0, NaN: mask the exponent, not the exponential."
        )
    wrong = np.abs(np.asarray(got) - exact) > 1e-3 * np.maximum(np.abs(exact), 1.0)  # The weights are at most 1.
    if wrong.any():
        at = np.argmax(wrong)
        raise NotYet(
            f"cum ends at {cum[-1]:.3g}, and the gradient with respect to cum: element {at} is {got[at]:.4g}; it must "
            f"be {exact[at]:.4g}"
        )


@checker
def check_add_chunk(answer) -> str:
    """Exercise 2: `answer(acc, k_smem, v_smem, w, scaled_smem)` adds a chunk to the state in `acc`."""
    for n, chunk, p in SIZES:
        k, v = normal(17, (2, chunk, n), jnp.bfloat16), normal(18, (2, chunk, p), jnp.bfloat16)
        w = jnp.asarray(np.random.default_rng(19).uniform(0.1, 1.0, (2, chunk)), jnp.float32)
        chunks = functools.partial(_chunks, answer)
        out, kept_k, kept_v = run_kernel(chunks, k, v, w)
        ((block,),) = play_kernel(chunks, k, v, w)
        if not block.count("product"):
            raise NotYet("nothing was multiplied yet: write the body of add_chunk.")
        added = [w[:, None] * v for w, v in zip(wide(w), wide(v), strict=True)]
        sums = lambda values, k=k: [np.einsum("tp,tn->pn", v, k) for v, k in zip(values, wide(k), strict=True)]
        likely = ((sum(sums(wide(v))), "the weights are missing."), (sums(added)[1], "the first chunk is lost."))
        what = f"with N = {n}, P = {p} and chunks of {chunk}, the state after two chunks"
        require_close(out, sum(sums(added)), 2e-2, what, likely)
        for name, kept, given in (("k", kept_k, k), ("v", kept_v, v)):
            if (np.asarray(kept) != np.asarray(given)).any():
                raise NotYet(
                    f"{name}_smem has changed, and the chunk's outputs need it: scaled_smem is for the products."
                )
    return "What a warpgroup stores, it commits before WGMMA may read it."


def _chunks(answer, k, v, w):
    """(the state after all chunks, each added by `answer`; keys and values of each chunk as `answer` leaves them)."""
    (num_chunks, chunk, n), p = k.shape, v.shape[2]

    def body(k_gmem, v_gmem, w_gmem, o_gmem, kept_k_gmem, kept_v_gmem, k_smem, v_smem, scaled_smem, loaded):
        def add_all(acc):
            for i in range(num_chunks):
                plgpu.copy_gmem_to_smem(k_gmem.at[i], k_smem, loaded)
                plgpu.copy_gmem_to_smem(v_gmem.at[i], v_smem, loaded)
                plgpu.barrier_wait(loaded)
                answer(acc, k_smem, v_smem, plgpu.load(w_gmem.at[i], layout=ROWS, optimized=False), scaled_smem)
                plgpu.wgmma_wait(0)
                _device.store(kept_k_gmem.at[i], _device.load(k_smem))
                _device.store(kept_v_gmem.at[i], _device.load(v_smem))
                plgpu.commit_smem()  # All have read what the next copies overwrite.
            return acc[...]

        o_gmem[...] = pl.run_scoped(add_all, plgpu.ACC((p, n), jnp.float32))

    tile = lambda width: plgpu.SMEM((chunk, width), k.dtype)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((p, n), jnp.float32),
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ],
        scratch_types=[tile(n), tile(p), tile(p), plgpu.Barrier(num_arrivals=2)],
    )(k, v, w)


@checker
def check_leave(answer) -> str:
    """Exercise 3: `answer(states, i, state, s_smem)` leaves the state before chunk `i` for the output warpgroup."""
    said = "nobody waits for the last release of each stage, which the checker's drain does: do not wait there twice"
    for chunks, stages in RINGS:
        x, q = normal(20, (chunks, P, P)), normal(21, (P, P), jnp.bfloat16)
        what = f"with {chunks} chunks and {stages} stage{'s' * (stages > 1)}"
        try:
            out = run_kernel(functools.partial(_hand_over, answer, stages), x, q, undrained=said)
        except NotYet as problem:
            if "never end" not in str(problem):
                raise NotYet(f"{what}: {problem}") from None
            raise NotYet(
                f"{what}: the kernel would never end: somebody waits where nobody arrives. Each chunk needs one "
                "arrival at filled. Wait at freed before you store, and only for a stage that was used before. The "
                "checker reads each state only when the next one is there, for the state can run ahead"
            ) from None
        state, exact, olds = np.zeros((P, P)), [], []
        for i in range(chunks):
            olds.append(wide(q) @ state.T)
            state = 0.5 * state + wide(x)[i]
            exact.append(wide(q) @ state.T)
        likely = ((np.stack(olds), "the state of the chunk before was left."),)
        require_close(out, np.stack(exact), 3e-2, f"{what}, the product with the state", likely)
    return "The threads' stores are committed, then announced, and a stage is overwritten only when it was given back."


def _hand_over(answer, stages: int, x, q):
    """q Sᵀ for each of the states S[i] = S[i - 1] / 2 + x[i]. Warpgroup 1 makes them and calls `answer`, warpgroup 0
    multiplies; where there are stages enough, it reads each state only when the next one is there."""
    chunks = len(x)

    def body(x_gmem, q_gmem, o_gmem, q_smem, s_smem, loaded, filled, freed):
        states = Ring(filled, freed, stages)

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            def chunk(i, state):
                state = 0.5 * state + plgpu.load(x_gmem.at[i], layout=plgpu.Layout.WGMMA, optimized=False)
                answer(states, i, state, s_smem)
                return state

            lax.fori_loop(0, chunks, chunk, plgpu.layout_cast(jnp.zeros((P, P), jnp.float32), plgpu.Layout.WGMMA))
            states.drain(chunks)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.copy_gmem_to_smem(q_gmem, q_smem, loaded)
            plgpu.barrier_wait(loaded)
            wait = lambda i: pl.when(i < chunks)(lambda: plgpu.barrier_wait(filled.at[states.slot(i)]))
            lag = int(stages > 1)
            pl.loop(0, lag)(wait)

            @pl.loop(0, chunks)
            def _(i):
                wait(i + lag)
                read = functools.partial(_multiply, q_smem, s_smem.at[states.slot(i)].T)
                o_gmem[i] = pl.run_scoped(read, plgpu.ACC((P, P), jnp.float32))
                states.release(i)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM(q.shape, q.dtype),
            plgpu.SMEM((stages, P, P), q.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
    )(x, q)


def _multiply(a_smem, b_smem, acc):
    plgpu.wgmma(acc, a_smem, b_smem)
    plgpu.wgmma_wait(0)
    return acc[...]


@checker
def check_combine(answer) -> str:
    """Exercise 4: `answer(first, second)`, of pairs (decay, state), is the pair of both parts one after the other."""
    rng = np.random.default_rng(17)
    parts = [(float(np.exp(-rng.exponential())), rng.standard_normal((3, 2))) for _ in range(4)]
    forgetful = [(decay, rng.standard_normal((2, 5))) for decay in (0.0, 0.5, 0.0)]  # The decay may be too strong.
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
    for first, second in zip(forgetful, forgetful[1:], strict=False):
        with np.errstate(all="ignore"):
            got = answer(first, second)
        if any(np.isnan(wide(x)).any() for x in got):
            raise NotYet("a part may forget all before it: its decay is then 0, and nothing may be divided by it.")
        _require_pair(got, _combine(first, second))
    return "Any neighbours may be combined first, so parts need not wait for each other."


def _combine(first, second):
    return second[0] * first[0], second[0] * first[1] + second[1]


def _require_pair(got, wanted, likely=()):
    said = "what becomes of a state that goes through both parts?"
    require_close(np.asarray(got[0]), wide(wanted[0]), 1e-5, f"the decay is wrong: {said}")
    require_close(np.asarray(got[1]), wanted[1], 1e-5, f"the state is wrong: {said}", likely)
