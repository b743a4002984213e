"""The recurrences, token by token in float64, and the convolution before them."""

import math

import numpy as np

import cookbook

from .cases import Draw, Op, Values
from .elementwise import FLOATS
from .gemm import HALVES

RESETS = -30.0, -100.0, -1e3, -1e6, -1e9, -math.inf  # Logarithms of what a token lets stay.
SHARE = {"bfloat16": 0.03, "float16": 0.006}  # States are rounded for each chunk, and summed over tokens.


def sequences(draw: Draw, rows: int) -> dict:
    """A batch, or packed sequences, some of which are empty and after which rows may be left over."""
    if draw.sometimes():
        return dict(batch=draw.number(1, 2), cu=None)
    cuts = np.sort(draw.rng.integers(0, rows + 1, draw.number(1, 4)))
    if draw.sometimes(0.4):
        cuts[-1] = rows
    return dict(batch=1, cu=[0, *cuts.tolist()], unowned=draw.choice("normal", "nan"))


def with_gradient(draw: Draw, case: dict) -> dict:
    """NaN in rows of no sequence would be in the differences of the reference too, as would infinite decays."""
    has_one = case.get("unowned") != "nan" and case["decay"] != "resets" and case["rows"] > 0
    return case | dict(grad=has_one and draw.sometimes(0.1))


def ends(case) -> list[tuple[int, int, int]]:
    """(batch, first row, end) of each sequence."""
    if case["cu"] is None:
        return [(i, 0, case["rows"]) for i in range(case["batch"])]
    return [(0, *pair) for pair in zip(case["cu"], case["cu"][1:], strict=False)]


def finish(case, values, given, state_shape) -> dict:
    """With rows of no sequence, where a case has them, an initial state, and the starts."""
    if case["cu"] is not None:
        given["cu_seqlens"] = np.asarray(case["cu"], np.int32)
        if case["unowned"] == "nan":
            for name in case["rowwise"]:
                given[name][:, case["cu"][-1] :] = math.nan
    if case["initial"]:
        given["initial_state"] = values((len(ends(case)), *state_shape))
    return given


def scan(case, step, given, heads, initial_state, size_p, size_n, size_of=np.abs):
    """(o, states) of `step(S, size, batch, row, head) -> S, size, o, size of o`, from token to token. `size_of` is the
    size of the first state."""
    o, o_slack = np.zeros((case["batch"], case["rows"], heads, size_p)), 0.0
    o_slack = np.zeros_like(o)
    shape = (len(ends(case)), heads, size_p, size_n)
    states, slacks = np.zeros(shape), np.zeros(shape)
    for i, (batch, begin, end) in enumerate(ends(case)):
        for head in range(heads):
            state = np.zeros(shape[2:]) if initial_state is None else initial_state[i, head]
            size = size_of(state)
            for row in range(begin, end):
                state, size, o[batch, row, head], o_slack[batch, row, head] = step(state, size, batch, row, head)
            states[i, head], slacks[i, head] = state, size
    share, least = SHARE[case["dtype"]], 1e-6 if case["dtype"] == "float16" else 0.0  # Its small numbers have few bits.
    return [(o, share * o_slack + least), (states, share * slacks + least)][: 1 + case["final"]]


# SSD and linear attention ---------------------------------------------------------------------------------------------


def fits(case) -> str | None:
    """The rule of `chunk_size`: 128 rows of 256 values are too many for a block's shared memory."""
    return "bytes of shared memory" if case["chunk_size"] == 128 and case["n"] == 256 else None


def draw_ssd(draw: Draw) -> dict:
    rows, groups = draw.size(150, large=4), draw.number(1, 2)
    case = sequences(draw, rows) | dict(
        rows=rows, groups=groups, heads=groups * draw.number(1, 2), p=draw.choice(64, 64, 128),
        n=draw.choice(64, 128, 256), dtype=draw.choice(*HALVES), initial=draw.sometimes(), final=draw.sometimes(),
        d=draw.sometimes(), decay=draw.choice("none", "weak", "strong", "resets"),
        chunk_size=draw.choice(None, 64, 128), rowwise=["x", "dt", "b", "c"], numbers=draw.choice(*FLOATS),
    )  # fmt: skip
    return with_gradient(draw, case)


def ssd_arrays(case: dict, values: Values) -> dict:
    b, t, h, g, p, n = (case[name] for name in ("batch", "rows", "heads", "groups", "p", "n"))
    strength = {"none": 0.0, "weak": 0.1, "strong": 30.0, "resets": 1.0}[case["decay"]]
    given = dict(
        x=values((b, t, h, p), case["dtype"]), dt=np.abs(values((b, t, h), case["numbers"])),
        a=-np.abs(values((h,), case["numbers"], scale=strength)), b=values((b, t, g, n), case["dtype"], scale=n**-0.5),
        c=values((b, t, g, n), case["dtype"]),
    )  # fmt: skip
    if case["decay"] == "resets":
        given["a"][0] = RESETS[case["rows"] % len(RESETS)]
    if case["d"]:
        given["d"] = values((h,), case["numbers"])
    return finish(case, values, given, (h, p, n))


def call_ssd(case, x, dt, a, b, c, **how):
    out = cookbook.ssd(x, dt, a, b, c, chunk_size=case["chunk_size"], return_final_state=case["final"], **how)
    return out if case["final"] else (out,)


def ssd_reference(case, x, dt, a, b, c, d=None, initial_state=None, cu_seqlens=None):
    share = case["heads"] // case["groups"]

    def step(state, size, i, t, h):
        this, key, query = x[i, t, h], b[i, t, h // share], c[i, t, h // share]
        decay, move = math.exp(dt[i, t, h] * a[h]), dt[i, t, h]
        state = decay * state + move * np.outer(this, key)
        size = np.sqrt(decay**2 * size**2 + move**2 * np.outer(this, key) ** 2)
        more = 0.0 if d is None else d[h] * this
        return state, size, state @ query + more, np.sqrt(size**2 @ query**2) + np.abs(more)

    return scan(case, step, x, case["heads"], initial_state, case["p"], case["n"])


def draw_linear(draw: Draw) -> dict:
    case = draw_ssd(draw) | dict(rowwise=["query", "key", "value"], scale=draw.choice(None, 1.0, 0.2))
    return {name: value for name, value in case.items() if name not in ("d", "decay", "numbers")}


def linear_arrays(case: dict, values: Values) -> dict:
    b, t, h, g, p, n = (case[name] for name in ("batch", "rows", "heads", "groups", "p", "n"))
    query, key = (values((b, t, g, n), case["dtype"], scale=n**-0.5) for _ in "qk")
    return finish(case, values, dict(query=query, key=key, value=values((b, t, h, p), case["dtype"])), (h, p, n))


def call_linear(case, query, key, value, **how):
    how |= {name: case[name] for name in ("scale", "chunk_size")}
    out = cookbook.linear_attention(query, key, value, return_final_state=case["final"], **how)
    return out if case["final"] else (out,)


def linear_reference(case, query, key, value, **how):
    ones = np.ones(value.shape[:3])
    scale = case["n"] ** -0.5 if case["scale"] is None else case["scale"]
    return ssd_reference(case, value, ones, np.zeros(value.shape[2]), key, scale * query, **how)


def draw_ssd_step(draw: Draw) -> dict:
    groups = draw.number(1, 2)
    return dict(
        batch=draw.number(1, 4), groups=groups, heads=groups * draw.number(1, 3), p=draw.size(128, 8, 0, 1),
        n=draw.choice(64, 128, 256, 384, 1024), dtypes=[draw.choice(*FLOATS) for _ in range(3)], d=draw.sometimes(),
    )  # fmt: skip


def ssd_step_arrays(case: dict, values: Values) -> dict:
    (b, h, g, p, n), (x, k, number) = (case[name] for name in ("batch", "heads", "groups", "p", "n")), case["dtypes"]
    given = dict(x=values((b, h, p), x), dt=np.abs(values((b, h), number)), a=-np.abs(values((h,), number)))
    given |= dict(b=values((b, g, n), k), c=values((b, g, n), k), state=values((b, h, p, n)))
    return given | (dict(d=values((h,), number)) if case["d"] else {})


def ssd_step_reference(case, x, dt, a, b, c, state, d=None):
    share = case["heads"] // case["groups"]
    b, c = b.repeat(share, 1), c.repeat(share, 1)
    added = (dt[..., None] * x)[..., None] * b[:, :, None]
    decayed = np.exp(dt * a)[..., None, None] * state
    state, size = decayed + added, np.abs(decayed) + np.abs(added)
    more = 0.0 if d is None else d[:, None] * x
    y_size = np.einsum("bhpn,bhn->bhp", size, np.abs(c)) + np.abs(more)
    return [(np.einsum("bhpn,bhn->bhp", state, c) + more, 1e-5 * y_size), (state, 1e-5 * size)]


# The gated delta rule -------------------------------------------------------------------------------------------------


def draw_delta(draw: Draw) -> dict:
    rows, keys = draw.size(140, large=4), draw.number(1, 2)
    case = sequences(draw, rows) | dict(
        rows=rows, groups=keys, heads=keys * draw.number(1, 2), p=draw.choice(64, 128), n=draw.choice(64, 128),
        dtype=draw.choice(*HALVES), initial=draw.sometimes(), final=draw.sometimes(), scale=draw.choice(None, 1.0),
        decay=draw.choice("none", "weak", "strong", "resets"), rowwise=["q", "k", "v", "g", "beta"],
    )  # fmt: skip
    return with_gradient(draw, case) | dict(norm=draw.sometimes(0.3))


def delta_inputs(case: dict, values: Values, rows: tuple) -> dict:
    h, g, p, n = (case[name] for name in ("heads", "groups", "p", "n"))
    q, k = (values((*rows, g, n)) for _ in "qk")
    length, dtype = 3.0 if case.get("norm") else 1.0, values((1,), case["dtype"]).dtype
    q, k = ((length * x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype) for x in (q, k))
    strength = {"none": 0.0, "weak": 0.1, "strong": 20.0, "resets": 0.1}[case["decay"]]
    decays = -np.abs(values((*rows, h), scale=strength))
    if case["decay"] == "resets":
        places = values.rng.random(decays.shape) < 0.2
        decays[places] = values.rng.choice(RESETS, places.sum())
    beta = 1 / (1 + np.exp(values((*rows, h))))
    return dict(q=q, k=k, v=values((*rows, h, p), case["dtype"]), g=decays, beta=beta)


def delta_arrays(case: dict, values: Values) -> dict:
    given = delta_inputs(case, values, (case["batch"], case["rows"]))
    return finish(case, values, given, (case["heads"], case["p"], case["n"]))


def call_delta(case, q, k, v, g, beta, **how):
    how |= dict(scale=case["scale"], return_final_state=case["final"], use_qk_l2norm=case["norm"])
    out = cookbook.gated_delta_rule(q, k, v, g, beta, **how)
    return out if case["final"] else (out,)


def norms(state):
    """The norm of each row, in all its columns."""
    return np.broadcast_to(np.linalg.norm(state, axis=1, keepdims=True), state.shape)


def delta_step(case, state, size, q, k, v, g, beta):
    """(state, size, o, size of o): sizes are norms of rows, since corrections depend on all of a row."""
    if case.get("norm"):
        q, k = (x / math.sqrt(x @ x + 1e-6) for x in (q, k))
    scale = case["n"] ** -0.5 if case["scale"] is None else case["scale"]
    decayed = math.exp(g) * state
    state = decayed + beta * np.outer(v - decayed @ k, k)
    row = (
        np.maximum(math.exp(g) * size[:, :1], np.linalg.norm(state, axis=1, keepdims=True))
        + 0.05 * beta * np.abs(v)[:, None]
    )
    size = np.broadcast_to(row, state.shape)
    return state, size, scale * (state @ q), abs(scale) * row[:, 0] * np.linalg.norm(q)


def delta_reference(case, q, k, v, g, beta, initial_state=None, cu_seqlens=None):
    share = case["heads"] // case["groups"]

    def step(state, size, i, t, h):
        numbers = q[i, t, h // share], k[i, t, h // share], v[i, t, h], g[i, t, h], beta[i, t, h]
        return delta_step(case, state, size, *numbers)

    return scan(case, step, v, case["heads"], initial_state, case["p"], case["n"], norms)


def draw_delta_step(draw: Draw) -> dict:
    names = ("groups", "heads", "p", "n", "dtype", "scale", "decay")
    case = draw_delta(draw)
    return dict(batch=draw.number(1, 5)) | {name: case[name] for name in names}


def delta_step_arrays(case: dict, values: Values) -> dict:
    state = values((case["batch"], case["heads"], case["p"], case["n"]))
    return delta_inputs(case, values, (case["batch"],)) | dict(state=state)


def call_delta_step(case, **arrays):
    return cookbook.gated_delta_rule_step(**arrays, scale=case["scale"])


def delta_step_reference(case, q, k, v, g, beta, state):
    share, results = case["heads"] // case["groups"], []
    for i, h in np.ndindex(*v.shape[:2]):
        numbers = q[i, h // share], k[i, h // share], v[i, h], g[i, h], beta[i, h]
        results.append(delta_step(case, state[i, h], norms(state[i, h]), *numbers))
    new, size, o, o_size = (np.stack(x).reshape(*v.shape[:2], *x[0].shape) for x in zip(*results, strict=True))
    return [(o, 1e-4 * o_size), (new, 1e-4 * size)]


# The causal convolution -----------------------------------------------------------------------------------------------


def draw_conv(draw: Draw) -> dict:
    rows = draw.size(70, large=30)
    case = sequences(draw, rows) | dict(
        rows=rows, columns=draw.size(300), taps=draw.number(2, 8), dtype=draw.choice(*FLOATS), bias=draw.sometimes(),
        weights=draw.choice(*FLOATS), activation=draw.choice(None, "silu", "swish"), initial=draw.sometimes(),
        final=draw.sometimes(), rowwise=["x"],
    )  # fmt: skip
    has_one = case.get("unowned") != "nan" and case["rows"] * case["columns"] > 0
    return case | dict(grad=has_one and draw.sometimes(0.2))


def conv_weights(case: dict, values: Values) -> dict:
    given = dict(weight=values((case["columns"], case["taps"]), case["weights"]))
    return given | (dict(bias=values((case["columns"],), case["weights"])) if case["bias"] else {})


def conv_arrays(case: dict, values: Values) -> dict:
    given = dict(x=values((case["batch"], case["rows"], case["columns"]), case["dtype"])) | conv_weights(case, values)
    return finish(case, values, given, (case["columns"], case["taps"] - 1))


def call_conv(case, x, weight, bias=None, **how):
    how |= dict(activation=case["activation"], return_final_state=case["final"])
    out = cookbook.causal_conv1d(x, weight, bias, **how)
    return out if case["final"] else (out,)


def conv_reference(case, x, weight, bias=None, initial_state=None, cu_seqlens=None):
    taps = case["taps"]
    states = np.zeros((len(ends(case)), case["columns"], taps - 1)) if initial_state is None else initial_state
    y, size, final = np.zeros_like(x), np.zeros_like(x), np.zeros_like(states)
    for i, (b, first, end) in enumerate(ends(case)):
        rows = np.concatenate([states[i].T, x[b, first:end]])
        final[i] = rows[len(rows) - (taps - 1) :].T
        for j in range(taps):
            terms = weight[:, j] * rows[j : j + end - first]
            y[b, first:end], size[b, first:end] = y[b, first:end] + terms, size[b, first:end] + np.abs(terms)
        if bias is not None:
            y[b, first:end], size[b, first:end] = y[b, first:end] + bias, size[b, first:end] + np.abs(bias)
        if case["activation"]:
            y[b, first:end] /= 1 + np.exp(-y[b, first:end])
    return [(y, 1e-5 * size), (final, 0.0)][: 1 + case["final"]]


def draw_conv_step(draw: Draw) -> dict:
    case = draw_conv(draw) | dict(batch=draw.number(1, 4), rows=draw.number(1, 5), cu=None, final=True, grad=False)
    return case | dict(flat=case["rows"] == 1 and draw.sometimes(), state=draw.choice(*FLOATS))


def conv_step_arrays(case: dict, values: Values) -> dict:
    shape = (case["batch"], *[case["rows"]] * (not case["flat"]), case["columns"])
    given = dict(x=values(shape, case["dtype"])) | conv_weights(case, values)
    return given | dict(state=values((case["batch"], case["columns"], case["taps"] - 1), case["state"]))


def call_conv_step(case, x, state, **weights):
    return cookbook.causal_conv1d_step(x, state, **weights, activation=case["activation"])


def conv_step_reference(case, x, state, **weights):
    rows = x[:, None] if case["flat"] else x
    (y, slack), final = conv_reference(case, rows, initial_state=state, **weights)
    return [(y.reshape(x.shape), slack.reshape(x.shape)), final]


# Kimi Delta Attention -------------------------------------------------------------------------------------------------


def kda_inputs(case: dict, values: Values, rows: tuple) -> dict:
    given = delta_inputs(case, values, rows)
    strength = {"none": 0.0, "weak": 0.1, "strong": 20.0, "resets": 0.1}[case["decay"]]
    decays = -np.abs(values((*rows, case["heads"], case["n"]), scale=strength))
    if case["decay"] == "resets":
        places = values.rng.random(decays.shape) < 0.2
        decays[places] = values.rng.choice(RESETS, places.sum())
    return given | dict(g=decays)


def kda_arrays(case: dict, values: Values) -> dict:
    given = kda_inputs(case, values, (case["batch"], case["rows"]))
    return finish(case, values, given, (case["heads"], case["p"], case["n"]))


def call_kda(case, q, k, v, g, beta, **how):
    how |= dict(scale=case["scale"], return_final_state=case["final"], use_qk_l2norm=case["norm"])
    out = cookbook.kda(q, k, v, g, beta, **how)
    return out if case["final"] else (out,)


def kda_token(case, state, size, q, k, v, g, beta):
    """As `delta_step`: the columns are decayed first, and then there is no decay."""
    return delta_step(case, state * np.exp(g), size, q, k, v, 0.0, beta)


def kda_reference(case, q, k, v, g, beta, initial_state=None, cu_seqlens=None):
    share = case["heads"] // case["groups"]

    def step(state, size, i, t, h):
        numbers = q[i, t, h // share], k[i, t, h // share], v[i, t, h], g[i, t, h], beta[i, t, h]
        return kda_token(case, state, size, *numbers)

    return scan(case, step, v, case["heads"], initial_state, case["p"], case["n"], norms)


def draw_kda_step(draw: Draw) -> dict:
    return draw_delta_step(draw) | dict(norm=draw.sometimes(0.3))


def kda_step_arrays(case: dict, values: Values) -> dict:
    state = values((case["batch"], case["heads"], case["p"], case["n"]))
    return kda_inputs(case, values, (case["batch"],)) | dict(state=state)


def call_kda_step(case, **arrays):
    return cookbook.kda_step(**arrays, scale=case["scale"], use_qk_l2norm=case["norm"])


def kda_step_reference(case, q, k, v, g, beta, state):
    share, results = case["heads"] // case["groups"], []
    for i, h in np.ndindex(*v.shape[:2]):
        numbers = q[i, h // share], k[i, h // share], v[i, h], g[i, h], beta[i, h]
        results.append(kda_token(case, state[i, h], norms(state[i, h]), *numbers))
    new, size, o, o_size = (np.stack(x).reshape(*v.shape[:2], *x[0].shape) for x in zip(*results, strict=True))
    slack = SHARE[case["dtype"]] if case["norm"] else 1e-4  # XLA divides by norms, and rounds to 16 bits.
    return [(o, slack * o_size), (new, slack * size)]


OPS = {
    "causal_conv1d": Op(
        draw_conv, conv_arrays, call_conv, conv_reference, gradients=("x", "weight", "bias", "initial_state")
    ),
    "causal_conv1d_step": Op(draw_conv_step, conv_step_arrays, call_conv_step, conv_step_reference),
    "ssd": Op(draw_ssd, ssd_arrays, call_ssd, ssd_reference, fits, ("x", "dt", "b", "c")),
    "linear_attention": Op(
        draw_linear, linear_arrays, call_linear, linear_reference, fits, ("query", "key", "value")
    ),
    "ssd_step": Op(
        draw_ssd_step, ssd_step_arrays, lambda case, **arrays: cookbook.ssd_step(**arrays), ssd_step_reference
    ),
    "gated_delta_rule": Op(
        draw_delta, delta_arrays, call_delta, delta_reference, gradients=("q", "k", "v", "g", "beta")
    ),
    "gated_delta_rule_step": Op(draw_delta_step, delta_step_arrays, call_delta_step, delta_step_reference),
    "kda": Op(draw_delta, kda_arrays, call_kda, kda_reference, gradients=("q", "k", "v", "g", "beta")),
    "kda_step": Op(draw_kda_step, kda_step_arrays, call_kda_step, kda_step_reference),
}  # fmt: skip
