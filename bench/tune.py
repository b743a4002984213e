"""Sweeps over the configurations of the attention ops on named problems: `python -m bench attention --tune`.

The grids are small: blocks of queries (64 for each compute warpgroup) and of keys, stages, and what else decides how a
tile is cut. Turns and sums by thread stay as the op chooses them for the size of heads. Configurations are compiled in
parallel, the times of a search that was interrupted are kept (`lab.autotune`), and the winner is compared with the
reference. A table of each sweep goes to `results/<gpu>/tune_<op>.json`: chapter 11b shows those of `attention`.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import cookbook
import lab
from bench.peers import ERROR_MAX
from bench.problems import CASES, Case, relative_error
from cookbook.attn.backward import gradients
from cookbook.attn.backward.plan import OneKernel, TwoKernels, two_kernels

ITERATIONS = 10


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The configurations of an op that are timed on a problem."""

    case: Case
    op: Callable  # Takes `config`.
    configs: tuple  # All of one kind.
    takes: int  # How many inputs of the problem the op takes.
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Under which name the table lies in results/."""
        return f"tune_{self.case.problem}/{self.op.__name__}"

    def call(self, config=None):
        """The op with this configuration, as a function of the problem's inputs; None for the op's own choice."""
        kernel = functools.partial(self.op, **self.options, config=config)
        return lambda *inputs: kernel(*inputs[: self.takes])

    def default(self):
        """The configuration that lowers to the program of the op's own choice; None if none does."""
        avals = self.case.avals
        chosen = lab.program.digest(self.call(), *avals)
        return next((c for c in self.configs if _digest(self.call(c), avals) == chosen), None)


def _digest(call, avals) -> str | None:
    """The program's hash; None if the plan refuses the configuration."""
    try:
        return lab.program.digest(call, *avals)
    except ValueError:
        return None


def attention_in_one_kernel(query, key, value, *, is_causal: bool, config: OneKernel | None = None):
    """(dq, dk, dv) of `attention`, forward and backward, by the one kernel with this configuration."""
    return _gradients(query, key, value, is_causal, config)


def attention_in_two_kernels(query, key, value, *, is_causal: bool, config: TwoKernels | None = None):
    """(dq, dk, dv) of `attention`, forward and backward, by the two kernels with this configuration."""
    return _gradients(query, key, value, is_causal, config, deterministic=True)


attention_in_one_kernel.Config, attention_in_two_kernels.Config = OneKernel, TwoKernels


def _gradients(query, key, value, is_causal, backward, **how):
    forward = inspect.getmodule(cookbook.attention).default_config(query.shape[3], is_causal)
    config = None if backward is None else dataclasses.replace(forward, backward=backward)
    fn = functools.partial(cookbook.attention, is_causal=is_causal, config=config, **how)
    loss = lambda *args: jnp.sum(jnp.square(fn(*args).astype(jnp.float32)))
    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)


def _made(first, kind: Callable, **values) -> tuple:
    """`first`, and the configurations of these values that there are."""
    found = list(first)
    for choice in itertools.product(*values.values()):
        try:
            found.append(kind(**dict(zip(values, choice, strict=True))))
        except ValueError:  # Registers hold no such tile.
            continue
    return tuple(dict.fromkeys(found))


def _blocks(default, stages=(2, 3, 4)) -> tuple:
    """Blocks of queries and keys, and stages, around the op's own choice."""
    kind = functools.partial(dataclasses.replace, default)
    return _made([default], kind, compute_wgs=(2, 3), block_kv=(64, 128, 192, 256), num_stages=stages)


def _case(problem: str) -> Case:
    return next(case for case in CASES if case.problem == problem)


def _sweeps() -> dict[str, tuple[Sweep, ...]]:
    """By op. `attention`: a problem for each size of heads; the gradients where there is a choice."""
    dense, packed = (inspect.getmodule(op) for op in (cookbook.attention, cookbook.varlen_attention))
    decode = inspect.getmodule(cookbook.paged_attention)
    causal, attention = dict(is_causal=True), []
    for head_dim in (64, 128, 256):
        size = f"hd{head_dim}_b4_s4096_h{2048 // head_dim}_causal"
        blocks = _blocks(dense.default_config(head_dim))
        attention.append(Sweep(_case(f"attention/{size}/bf16"), cookbook.attention, blocks, 3, causal))
        if head_dim > 128:  # Two kernels, whose blocks registers and shared memory leave no choice.
            continue
        case, default = _case(f"attention/{size}_grad/bf16"), gradients.default_config(head_dim)
        # With heads of 64 there is room for two stages, and no registers to run ahead.
        ahead = dict(num_stages=(2, 3), runs_ahead=(False, True)) if head_dim > 64 else {}
        one = _made([default], OneKernel, **ahead)
        block_q, stages = ((64, 128), (4,)) if head_dim <= 64 else ((64,), (2, 4))
        two = _made([two_kernels(head_dim)], TwoKernels, block_q=block_q, block_kv=(64, 128), dq_wgs=(2, 3),
                    num_stages=stages)  # fmt: skip
        attention += [Sweep(case, attention_in_one_kernel, one, 3, causal),
                      Sweep(case, attention_in_two_kernels, two, 3, causal)]  # fmt: skip
    ragged = Sweep(_case("ragged_paged_attention/b16_s512to4096_page16/bf16"), cookbook.ragged_paged_attention,
                   _blocks(packed.default_config(128)), 6)  # fmt: skip
    pairs = _made([decode.default_config(128)], decode.Config, block_kv=(64, 128), num_stages=(2, 3, 4, 6),
                  num_pairs=(1, 2))  # fmt: skip
    return dict(
        attention=tuple(attention),
        varlen_attention=(Sweep(_case("varlen_attention/b16_s512to4096/bf16"), varlen_causal,
                                _blocks(packed.default_config(128)), 4),),
        ragged_paged_attention=(ragged,),
        paged_attention=tuple(
            Sweep(_case(f"paged_attention/{size}_page16/bf16"), cookbook.paged_attention, pairs, 5)
            for size in ("b64_s8192", "b8_s8192", "b1_s32768")
        ),
    )  # fmt: skip


def varlen_causal(q, k, v, cu_seqlens, *, config=None):
    """`varlen_attention` of sequences that have as many queries as keys."""
    return cookbook.varlen_attention(q, k, v, cu_seqlens, cu_seqlens, is_causal=True, config=config)


varlen_causal.Config = cookbook.varlen_attention.Config
SWEEPS = _sweeps()
# Functions whose configurations `lab.autotune` keeps times of, beside the package's ops.
OPS = {op.__name__: op for op in (attention_in_one_kernel, attention_in_two_kernels, varlen_causal)}


def run(op: str) -> bool:
    """Sweeps an op's problems, on a GPU, and prints a table of each; elsewhere the recorded ones. Returns whether every
    winner's result is right."""
    return all([_run(sweep) for sweep in SWEEPS[op]])


def _run(sweep: Sweep) -> bool:
    inputs = jax.block_until_ready(sweep.case.inputs()) if lab.on_gpu() else None
    stamp = lab.program.digest(sweep.call(), *sweep.case.avals, gpu=lab.results.this_gpu()) if inputs else None
    found = lab.results.value(sweep.name, lambda: _sweep(sweep, inputs), program=stamp)
    print("\n".join(table(sweep.case, sweep.op.__name__, found)))
    return found is None or "wrong" not in found


def _sweep(sweep: Sweep, inputs) -> dict:
    """The table of a sweep: `rows`, the fastest first, how many configurations the plan `refused`, those that `failed`,
    and by how much the winner is `wrong`, if it is."""
    tuning = lab.autotune(
        sweep.op, *inputs[: sweep.takes], configs=sweep.configs, iterations=ITERATIONS, **sweep.options
    )
    default = sweep.default()
    rows = [
        dict(config=dataclasses.asdict(c), ms=ms, default=c == default)
        for c, ms in sorted(tuning.trials.items(), key=lambda item: item[1])
        if c not in tuning.failures and c in sweep.configs
    ]
    failed = [text for text in tuning.failures.values() if not text.startswith("ValueError")]
    table = dict(rows=rows, refused=len(tuning.failures) - len(failed), failed=failed)
    right = jax.jit(sweep.case.reference)(*inputs)
    error = relative_error(jax.jit(sweep.call(tuning.best))(*inputs), right)
    return table if error < ERROR_MAX else table | dict(wrong=error)


def described(config: dict) -> str:
    """A configuration in a table: "128 x 64, 2 stages" for blocks of 128 queries and 64 keys."""
    rest = {name: value for name, value in config.items() if name not in ("backward", "in_turns", "sums_by_thread")}
    blocks = []
    if "compute_wgs" in rest:
        blocks = [f"{64 * rest.pop('compute_wgs')} x {rest.pop('block_kv')}"]
    stages = f"{rest.pop('num_stages')} stages"
    return ", ".join([*blocks, stages, *(f"{name}={value}" for name, value in rest.items())])


def table(case: Case, op: str, found: dict | None, most: int = 8) -> list[str]:
    """Lines with the fastest configurations of a sweep, and the op's own choice with its place."""
    if found is None:
        return [f"{case.problem}, {op}", "    not recorded"]
    rows, work = found["rows"], case.flops if case.counts_flops else case.nbytes
    unit, digits = ("TFLOP/s", 0) if case.counts_flops else ("TB/s", 2)
    lines = [f"{case.problem}, {op}: {len(rows)} configurations, {found['refused']} more do not fit"]
    for place, row in enumerate(rows, 1):
        if place <= most or row["default"]:
            mark = f"  <- the op's own choice, {row['ms'] / rows[0]['ms']:.3f} x" if row["default"] else ""
            rate = f"{work / row['ms'] / 1e9:8.{digits}f} {unit}"
            lines.append(f"    {place:2d}. {row['ms']:9.4f} ms {rate}   {described(row['config'])}{mark}")
    lines += [f"    failed: {text}" for text in found["failed"]]
    return lines + ([f"    the winner is WRONG by {found['wrong']:.2g}"] if "wrong" in found else [])


BLOCKS_KV = (64, 128, 192, 256)


def blocks_table(gpu: str = "h200") -> str:
    """In Markdown, the rates of causal attention by blocks of queries and of keys, for each size of heads: chapter
    11b's table. A note, where nothing was recorded."""
    lines = [f"| heads of | queries | {' | '.join(f'{n} keys' for n in BLOCKS_KV)} |\n|{'---|' * (2 + len(BLOCKS_KV))}"]
    verdicts, origins = [], []
    for sweep in (sweep for sweep in SWEEPS["attention"] if sweep.op is cookbook.attention):
        if (entry := lab.results.values("tune_attention", gpu).get(sweep.name)) is None:
            return "*Not recorded yet: `make bench OP=attention ARGS=--tune` on a GPU fills this table.*"
        rows, head_dim = entry["value"]["rows"], sweep.case.shapes[0][3]
        origins.append(entry["provenance"])
        for wgs in (2, 3):
            cells = (_cell(rows, sweep.case, wgs, block_kv) for block_kv in BLOCKS_KV)
            lines.append(f"| {head_dim} | {64 * wgs} | {' | '.join(cells)} |")
        verdicts.append(f"With heads of {head_dim}, {_verdict(rows)}.")
    where = lab.results.where(origins[-1]).removeprefix("recorded ")
    stale = "; STALE: the code has changed since" if any(origin.get("stale") for origin in origins) else ""
    return "\n".join([*lines, "", f"{' '.join(verdicts)} (Recorded {where}{stale}.)"])


def _cell(rows: list[dict], case: Case, wgs: int, block_kv: int) -> str:
    """The fastest of these blocks, "650 (3)" for TFLOP/s and stages, and the op's own choice, in bold."""
    here = [row for row in rows if (row["config"]["compute_wgs"], row["config"]["block_kv"]) == (wgs, block_kv)]
    shown = here[:1] + [row for row in here[1:] if row["default"]]
    text = [f"{case.flops / row['ms'] / 1e9:.0f} ({row['config']['num_stages']})" for row in shown]
    return ", ".join(f"**{x}**" if row["default"] else x for x, row in zip(text, shown, strict=True)) or "-"


def _verdict(rows: list[dict]) -> str:
    default = next((row for row in rows if row["default"]), None)
    if default is None:
        return f"the fastest is {described(rows[0]['config'])}; the package's choice was not among them"
    slower = default["ms"] / rows[0]["ms"] - 1
    if slower < 0.005:
        return "the package's choice is the fastest, to half a percent"
    share = slower / (1 + slower)
    return f"the fastest ({described(rows[0]['config'])}) takes {share:.1%} less time than the package's choice"
