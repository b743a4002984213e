"""Problems drawn at random, each timed beside the library that one would use instead, in one process.

The named problems of `bench.problems` are those that the kernels were shaped on; these are those that users have. No
kernel looks a searched configuration up: each chooses by shape.
"""

import concurrent.futures
import contextvars
import dataclasses
import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

import lab
from bench import problems

ERROR_MAX = 2e-2  # Relative error of a 16-bit result against the peer's. The tests look closer.
# At least: geometric mean, 10th percentile and worst of the peer's time over ours.
LIKE_CUBLAS, BEYOND_XLA = (1.0, 0.92, 0.85), (1.1, 1.0, 0.95)
LIKE_JAX = (1.05, 0.95, 0.95)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Random problems of one op."""

    draw: object  # Makes one problem's sizes of a random generator.
    accept: object  # Whether problems of these sizes are wanted.
    case: object  # Makes a `problems.Case` of sizes.
    target: tuple[float, float, float] | None

    def problems(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """The sizes of `count` problems, the same for a seed on every machine."""
        rng, found = np.random.default_rng(seed), []
        while len(found) < count:
            sizes = self.draw(rng)
            if self.accept(*sizes):
                found.append(sizes)
        return found


def _log_uniform(rng, low: int, high: int, size=None):
    return np.exp(rng.uniform(math.log(low), math.log(high), size))


def _multiple(x: float, of: int) -> int:
    return max(of, round(x / of) * of)


def _rows_and_cols(rng):
    return round(_log_uniform(rng, 1, 10**6)), round(_log_uniform(rng, 1, 65536))


def _rows_and_k(rng):
    return tuple(round(_log_uniform(rng, 1, most)) for most in (1024, 2**18, 2048))


def _product(rng, multiple: int):
    m, n, k = _log_uniform(rng, 1, 16384, 3)
    return max(1, round(m)), _multiple(n, multiple), _multiple(k, multiple)


def _weights(rng):
    return round(_log_uniform(rng, 1, 4096)), *(_multiple(x, 16) for x in _log_uniform(rng, 2048, 28672, 2))


def _groups_of_rows(rng):
    """Rows, N, K, groups, and how skewed they are: 0 for equal groups, 100 for one that has all rows.

    JAX's kernel needs a multiple of 8 rows; groups have any number of them.
    """
    m, g, (n, k) = _log_uniform(rng, 64, 131072), _log_uniform(rng, 1, 256), _log_uniform(rng, 512, 8192, 2)
    return _multiple(m, 8), _multiple(n, 128), _multiple(k, 64), max(1, round(g)), int(rng.integers(0, 101))


def _ragged(m, n, k, g, skew):
    sizes = problems.skewed(m, g, skew / (100 - skew) if skew < 100 else 99, seed=skew)
    return problems._ragged(m, n, k, sizes)


def _tokens(rng):
    """Sequences, tokens of each, and heads. XLA's form, the peer, wants whole chunks of 64 tokens."""
    seqs, tokens, heads = _log_uniform(rng, 1, 64), _log_uniform(rng, 64, 65536), _log_uniform(rng, 1, 64)
    return max(1, round(seqs)), _multiple(tokens, 64), max(1, round(heads))


def _tokens_and_vocabulary(rng):
    """Tokens, hidden values and labels; every third vocabulary is any number."""
    tokens, hidden, labels = (
        round(_log_uniform(rng, 256, 16384)),
        _log_uniform(rng, 512, 8192),
        _log_uniform(rng, 4096, 262144),
    )
    return tokens, _multiple(hidden, 64), round(labels) if rng.integers(3) == 0 else _multiple(labels, 128)


def _state_space(rng):
    seqs, tokens, heads = _tokens(rng)
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
    return seqs, tokens, heads, int(groups), int(rng.choice((64, 128))), int(rng.choice((64, 128, 256)))


def _channels(rng):
    """Sequences, tokens of each, channels and taps; every third number of channels is any."""
    seqs, tokens, channels = (max(1, round(_log_uniform(rng, *ends))) for ends in ((1, 64), (64, 65536), (128, 16384)))
    return seqs, tokens, channels if rng.integers(3) == 0 else _multiple(channels, 128), int(rng.integers(2, 6))


def _key_and_value_heads(rng):
    seqs, tokens, key_heads = _tokens(rng)
    return seqs, tokens, key_heads, key_heads * int(rng.choice((1, 2, 4))), int(rng.choice((64, 128)))


def _attention_heads(rng):
    """Sequences, tokens of each, heads, KV heads, their size, and whether each query sees only keys before it.

    cuDNN has gradients for an even number of tokens."""
    tokens, heads = _multiple(_log_uniform(rng, 256, 32768), 2), round(_log_uniform(rng, 1, 64))
    kv_heads = int(rng.choice([h for h in range(1, heads + 1) if heads % h == 0]))
    seqs = max(1, round(_log_uniform(rng, 1, 64)))
    return seqs, tokens, heads, kv_heads, int(rng.choice((64, 128))), int(rng.integers(2))


def _attention(seqs, tokens, heads, kv_heads, head_dim, is_causal, gradients: bool):
    sizes = seqs, tokens, heads
    return problems._attention_of(*sizes, kv_heads, head_dim, is_causal=bool(is_causal), gradients=gradients)


def _of_attention(gradients: bool, target):
    accept = lambda seqs, tokens, heads, *_: (
        1e10 <= 4 * seqs * heads * tokens**2 * 64 and seqs * tokens * heads <= 2**20
    )
    return Sample(_attention_heads, accept, functools.partial(_attention, gradients=gradients), target)


def _fits(seqs, tokens, heads):
    return 2**13 <= seqs * tokens * heads <= 2**22


def _of_rows(case):
    return Sample(_rows_and_cols, lambda rows, cols: 10**6 <= rows * cols <= 10**9, case, BEYOND_XLA)


def _of_products(multiple: int, case):
    draw = functools.partial(_product, multiple=multiple)
    return Sample(draw, lambda m, n, k: 1e8 <= 2 * m * n * k <= 2e12, case, LIKE_CUBLAS)


SAMPLES = {
    "softmax": _of_rows(lambda rows, cols: problems._rows("softmax", problems.softmax, rows, cols, 1)),
    "rms_norm": _of_rows(lambda rows, cols: problems._rows("rms_norm", problems.rms_norm, rows, cols, 2)),
    "layer_norm": _of_rows(lambda rows, cols: problems._rows("layer_norm", problems.layer_norm, rows, cols, 3)),
    "reduce_sum": _of_rows(functools.partial(problems._sum, axis=-1)),
    "reduce_sum_leading": _of_rows(functools.partial(problems._sum, axis=0)),
    "matmul": _of_products(8, problems._matmul),
    "matmul_fp8": _of_products(16, problems._matmul_fp8),
    "glu": dataclasses.replace(_of_products(8, problems._glu), target=LIKE_JAX),
    # The targets of narrow weights depend on the rows of `a`: see `_groups`.
    "matmul_int8_weights": Sample(
        _weights, lambda *_: True, functools.partial(problems._matmul_int8_weights, target=None), None
    ),
    "matmul_int4_weights": Sample(
        _weights, lambda *_: True, functools.partial(problems._matmul_int4_weights, target=None), None
    ),
    "ragged_dot": Sample(
        _groups_of_rows, lambda m, n, k, g, skew: 1e9 <= 2 * m * n * k <= 4e12 and g * n * k <= 4e9, _ragged, LIKE_JAX
    ),
    "attention": _of_attention(False, (1.05, 0.95, 0.95)),
    "attention_backward": _of_attention(True, (1.0, 0.93, 0.93)),
    "causal_conv1d": Sample(
        _channels,
        lambda seqs, tokens, channels, _: 10**6 <= seqs * tokens * channels <= 10**9,
        problems._conv,
        BEYOND_XLA,
    ),
    "linear_cross_entropy": Sample(
        _tokens_and_vocabulary, lambda *_: True, problems._linear_cross_entropy, (1.05, 0.95, 0.95)
    ),
    "top_k": Sample(_rows_and_k, lambda rows, cols, k: k <= cols and rows * cols <= 10**9, problems._top_k, BEYOND_XLA),
    "ssd": Sample(_state_space, lambda *sizes: _fits(*sizes[:3]), problems._ssd, BEYOND_XLA),
    "gated_delta_rule": Sample(
        _key_and_value_heads,
        lambda seqs, tokens, _, heads, dim: _fits(seqs, tokens, heads),
        lambda *sizes: problems._delta_rule(*sizes[:-1], dim=sizes[-1]),
        BEYOND_XLA,
    ),
    "kda": Sample(
        _key_and_value_heads,
        lambda seqs, tokens, _, heads, dim: _fits(seqs, tokens, heads),
        lambda *sizes: problems._kda(*sizes[:-1], dim=sizes[-1]),
        BEYOND_XLA,
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem's times in milliseconds; NaN where there is none."""

    sizes: tuple[int, ...]
    ours: float
    peers: dict[str, float]

    @property
    def peer(self) -> str:
        return min(self.peers, key=self.peers.get)

    @property
    def ratio(self) -> float:
        """The best peer's time over ours."""
        return self.peers[self.peer] / self.ours


def statistics(ratios) -> tuple[float, float, float]:
    """Geometric mean, 10th percentile and worst."""
    return float(np.exp(np.mean(np.log(ratios)))), float(np.percentile(ratios, 10)), float(np.min(ratios))


def _groups(op: str, rows: list[Row]):
    """(name, rows, target) of each set of problems with a target of its own."""
    if op not in ("matmul_int8_weights", "matmul_int4_weights"):
        return [("all", rows, SAMPLES[op].target)]
    few, some = (lambda row: row.sizes[0] <= 64), (lambda row: 64 < row.sizes[0] <= 128)
    many = lambda row: row.sizes[0] > 128
    groups = [("up to 64 rows", few, 1.25), ("up to 128 rows", some, 1.15), ("more rows", many, 1.0)]
    return [(name, [row for row in rows if which(row)], (least,) * 3) for name, which, least in groups]


def table(op: str, rows: list[Row]) -> str:
    """The problems by their ratio, worst first, and their statistics beside the targets."""
    lines = [f"{op}: time of the best peer over ours, worst first"]
    for row in sorted(rows, key=lambda row: row.ratio):
        sizes = "x".join(map(str, row.sizes))
        lines.append(f"{sizes:>20} {row.ours * 1e3:10.1f} us  {row.ratio:6.3f} of {row.peer}")
    for name, group, target in _groups(op, rows):
        if not group:
            continue
        figures = statistics([row.ratio for row in group])
        reached = all(figure >= least for figure, least in zip(figures, target, strict=True))
        said = ", ".join(
            f"{what} {figure:.3f} ({least:.2f})"
            for what, figure, least in zip(("geometric mean", "p10", "worst"), figures, target, strict=True)
        )
        lines.append(f"{op}, {name} ({len(group)}): {said}: target {'reached' if reached else 'MISSED'}")
    return "\n".join(lines)


def run(op: str, count: int, seed: int, iterations: int) -> list[Row]:
    """Times the problems on a GPU and records them as the topic `sample_<op>`, in place of those that it held.

    Without a GPU: those that it holds.
    """
    topic = f"sample_{op}"
    if not lab.on_gpu():
        return recorded(op)
    cases = [(sizes, SAMPLES[op].case(*sizes)) for sizes in SAMPLES[op].problems(count, seed)]
    rows = [_time(topic, sizes, case, compiled, iterations) for (sizes, case), compiled in _compile_ahead(cases)]
    if lab.results.recording():
        _keep(topic, {_name(topic, row.sizes): {"cookbook", *row.peers} for row in rows})
    return rows


def _keep(topic: str, measured: dict[str, set[str]]) -> None:
    """Drops the other rows of the topic, once all problems are measured: a run that is interrupted loses none."""
    gpu = lab.results.this_gpu()
    rows = lab.results.load(topic, gpu)["rows"]
    kept = {name: {impl: rows[name][impl] for impl in sorted(impls)} for name, impls in sorted(measured.items())}
    lab.results.save(topic, gpu, {"rows": kept})


def _name(topic: str, sizes: tuple[int, ...]) -> str:
    return f"{topic}/{'x'.join(map(str, sizes))}/bf16"


def recorded(op: str) -> list[Row]:
    """The rows in `results/` of the topic `sample_<op>`."""
    rows = []
    for problem, impls in lab.results.rows(f"sample_{op}").items():
        times = {impl: row["ms"] for impl, row in impls.items()}
        rows.append(Row(tuple(map(int, problem.split("/")[1].split("x"))), times.pop("cookbook"), times))
    return rows


def programs(op: str):
    """(problem, (function, its arguments)) of each recorded problem of `op`, as `problems.Case.program` has them."""
    for row in recorded(op):
        yield _name(f"sample_{op}", row.sizes), SAMPLES[op].case(*row.sizes).program()


def _compile_ahead(cases):
    """Compiles all programs on many threads; yields each case, in order, with its programs by name.

    Nothing is timed before all of them are compiled: to choose a library's kernel, XLA times some on the same GPU.
    """

    def programs(case):
        inputs = case.avals + ([] if case.derive is None else [jax.eval_shape(case.derive, *case.avals)])
        out = jax.eval_shape(case.kernel, *inputs)
        yield "inputs", case.inputs, ()
        yield "error", _error, (out, out)
        for impl, fn in ({"cookbook": case.kernel} | case.peers).items():
            if impl in problems.LIBRARIES or impl == "cookbook":
                yield impl, fn, inputs

    def submit(pool, fn, avals):
        job = lambda: jax.jit(lambda *args: fn(*args)).lower(*avals).compile()
        return pool.submit(contextvars.copy_context().run, job)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [{name: submit(pool, fn, avals) for name, fn, avals in programs(case)} for _, case in cases]
    for case, compiled in zip(cases, futures, strict=True):
        yield case, {name: future.result() for name, future in compiled.items()}


def _error(out, wanted):
    """Frobenius distance over the norm of `wanted`; the largest, if they are tuples of arrays."""

    def of_array(out, wanted):
        out, wanted = out.astype(jnp.float32), wanted.astype(jnp.float32)
        return jnp.linalg.norm((out - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())

    return jnp.stack(jax.tree.leaves(jax.tree.map(of_array, out, wanted))).max()


@lab.alone()
def _time(topic: str, sizes, case, compiled, iterations: int) -> Row:
    args = jax.block_until_ready(compiled["inputs"]())
    name, ours = _name(topic, sizes), compiled["cookbook"](*args)
    times = {}
    for impl in [impl for impl in compiled if impl not in ("inputs", "error")]:
        fn, of = compiled[impl], case.program() if impl == "cookbook" else False
        if not (error := float(compiled["error"](ours, fn(*args)))) < ERROR_MAX:
            raise ValueError(f"{name}: cookbook and {impl} differ by {error:.2g}")
        measured = lab.measure(fn, *args, problem=name, impl=impl, iterations=iterations, flops=case.flops,
                               nbytes=case.nbytes, of=of)  # fmt: skip
        times[impl] = measured.median_ms
    return Row(sizes, times.pop("cookbook"), times)
