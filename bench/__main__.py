"""Times every kernel and its peers on this GPU, in one process, and records them.

Without a GPU it prints what was recorded. Peers of one problem and the kernel run one after another on the same inputs;
each result is compared with the reference first.
"""

import argparse
import importlib.util
import math
import os
import subprocess
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import cookbook
import lab
from bench import collectives, hybrid, sample, serving, torch_peers, tune
from bench.peers import ERROR_MAX, note_left_out, reason
from bench.problems import CASES, LIBRARIES, Case, has_tensor_cores, mean_ratio, relative_error, runnable

OTHERS = ("serving", "hybrid", *collectives.OPS)  # Each is timed in a way of its own.


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "op", nargs="?", help="only this op: " + ", ".join([*dict.fromkeys(case.op for case in CASES), *OTHERS])
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time more configurations of each kernel, on a GPU; of attention only that: " + ", ".join(tune.SWEEPS),
    )
    parser.add_argument("--sample", type=int, metavar="N", help="time N random problems of the op instead")
    parser.add_argument("--seed", type=int, default=1, help="which random problems")
    parser.add_argument("--stale", action="store_true", help="time only what tools/stale.py found to have changed")
    args = parser.parse_args()
    os.environ.setdefault("COOKBOOK_RECORD", "1")
    if args.sample:
        return _sample(parser, args)
    cases = [case for case in CASES if args.op in (None, case.op)]
    if not cases and args.op not in OTHERS:
        parser.error(f"no problem of {args.op!r}")
    if args.stale:
        return _again(cases, args)
    if unable := [case for case in cases if not runnable(case)]:
        print(f"This GPU has not the tensor cores of {', '.join(dict.fromkeys(case.op for case in unable))}.")
        cases = [case for case in cases if runnable(case)]
    if args.tune and args.op in tune.SWEEPS and cases:
        return not tune.run(args.op)
    if args.op in collectives.OPS:
        return _say(collectives.run(args.op, args.iterations))
    if not lab.on_gpu():
        print("No Hopper or newer GPU: these are the recorded figures.")
    _ceilings(args.iterations)
    is_hopper = has_tensor_cores("h200")  # All below is built on WGMMA, or timed beside kernels that are.
    if lab.on_gpu() and is_hopper and torch_peers.cases(args.op):
        if importlib.util.find_spec("torch"):
            subprocess.run([sys.executable, "-m", "bench.torch_peers", *[args.op] * (args.op is not None)], check=False)
        else:
            print(f"PyTorch is not installed: {', '.join(torch_peers.IMPLS)} are left out")
    verdicts = [_run(case, args.iterations, args.tune) for case in cases]
    if any(case.op == "matmul" for case in cases) and not math.isnan(mean := mean_ratio("matmul")):
        print(f"matmul: geometric mean of its rate over cublas's, as recorded: {mean:.3f}")
    for op in ("paged_attention", "ragged_paged_attention"):
        if is_hopper and args.op in (None, op):
            _print_dispatch(op)
    if is_hopper and args.op in (None, "serving"):
        print("serving, Llama 3.2 1B's sizes")
        serving.run()
    if is_hopper and args.op in (None, "hybrid"):
        verdicts.append(hybrid.run(args.iterations))
    if is_hopper and args.op is None:
        verdicts += collectives.run(None, args.iterations)
    return _say(verdicts)


def _say(verdicts: list[bool | None]) -> int:
    missed, unknown = verdicts.count(False), verdicts.count(None)
    if len(verdicts) > unknown:
        print(f"{missed} target(s) missed" if missed else "every target reached" + " that is recorded" * (unknown > 0))
    return 0


def _sample(parser, args) -> int:
    if args.op not in sample.SAMPLES:
        parser.error(f"random problems are of one op: {', '.join(sample.SAMPLES)}")
    if not lab.on_gpu():
        print("No Hopper or newer GPU: these are the recorded figures.")
    rows = sample.run(args.op, args.sample, args.seed, args.iterations)
    print(sample.table(args.op, rows) if rows else f"no random problems of {args.op} are recorded")
    return 0


def _again(cases: list[Case], args) -> int:
    """Times the problems, named and random ones, that have a stale row; the notebooks' own are `make record`'s."""
    folders = {"h200"}  # With those of an H100 that it has not.
    if lab.on_gpu():
        folders |= {lab.results.this_gpu(), lab.results.host(lab.results.this_gpu(), jax.device_count())}
    stale = {problem for folder in folders for problem, _ in lab.results.stale_list(folder)}
    ops = {problem.split("/")[0] for problem in stale}
    verdicts = [_run(case, args.iterations, tune=False) for case in cases if case.problem in stale and runnable(case)]
    for op in collectives.OPS:
        if op in ops and args.op in (None, op):
            verdicts += collectives.run(op, args.iterations)
    for op in sample.SAMPLES:
        if f"sample_{op}" in ops and args.op in (None, op):
            sizes = sorted(row.sizes for row in sample.recorded(op))
            if sizes != sorted(sample.SAMPLES[op].problems(len(sizes), args.seed)):
                print(f"the {len(sizes)} random problems of {op} are not those of --seed {args.seed}: nothing is timed")
                continue
            print(sample.table(op, sample.run(op, len(sizes), args.seed, args.iterations)))
    return _say(verdicts)


def _ceilings(iterations: int):
    """Measure the roofline's roof: the rates of a plain stream and of a plain product."""
    n, size = 2**29, 8192
    x, y = (jax.random.normal(jax.random.key(i), (n,), jnp.bfloat16) if lab.on_gpu() else None for i in (0, 1))
    lab.measure(jnp.add, x, y, problem="ceiling/stream", impl="xla", nbytes=6 * n, iterations=iterations)
    a, b = (v if v is None else v[: size * size].reshape(size, size) for v in (x, y))
    flops, nbytes = 2 * size**3, 6 * size**2
    lab.measure(jnp.matmul, a, b, problem="ceiling/matmul/bf16", impl="cublas", flops=flops, nbytes=nbytes,
                iterations=iterations)  # fmt: skip


def _print_dispatch(op: str, calls: int = 1000):
    """Microseconds that the host takes for a call, beyond those of a plain XLA operation of the same arguments."""

    def microseconds(fn, *args) -> float:
        jax.block_until_ready(fn(*args))
        start = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
        seconds = time.perf_counter() - start  # The GPU, which may still be at work, is not waited for.
        jax.block_until_ready(out)
        return 1e6 * seconds / calls

    def compare() -> dict:
        q, pages = jnp.ones((1, 8, 128), jnp.bfloat16), jnp.ones((4, 16, 8, 128), jnp.bfloat16)
        args = [q, pages, pages, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)]
        args += [jnp.arange(2, dtype=jnp.int32)] if op.startswith("ragged") else []
        ours, xla = microseconds(getattr(cookbook, op), *args), microseconds(jax.jit(lambda *args: args[0] + 1), *args)
        return dict(ours=ours, xla=xla, more=ours - xla)

    if found := lab.results.value(f"dispatch/{op}", compare):
        print(f"{op}: a call takes the host {found['ours']:.0f} us, an XLA operation {found['xla']:.0f} us")


def _measure(*args, **kwargs):
    """`lab.measure` of each on a GPU that has had time to cool: long kernels reach the power it may draw."""
    if lab.on_gpu():
        time.sleep(0.5)
    return lab.measure(*args, **kwargs)


def _run(case: Case, iterations: int, tune: bool) -> bool | None:
    """Measures and prints one problem. Returns whether its target, if it has one, is reached; None if nobody knows."""
    if lab.on_gpu() and not case.headline and case.in_place is None:  # While other processes measure.
        jax.jit(case.kernel).lower(*case.kernel_avals).compile()
    return _timed(case, iterations, tune)


@lab.alone()
def _timed(case: Case, iterations: int, tune: bool) -> bool | None:
    inputs = jax.block_until_ready(case.inputs()) if lab.on_gpu() else [None] * len(case.avals)
    impls, gpu = {case.impl: case.kernel} | case.peers, case.gpu or "h200"
    if tune and case.tune and lab.on_gpu():
        print(case.tune(*inputs))
    first = {
        impl: lab.results.value(
            f"first_call/{case.problem}/{impl}", lambda fn=fn: lab.first_call_seconds(fn, *inputs), gpu=gpu
        )
        for impl, fn in impls.items()
        if impl not in LIBRARIES and case.headline  # It empties JAX's caches, so that all is compiled anew.
    }
    left_out = {}
    if lab.on_gpu():
        exact = jax.jit(case.reference)(*inputs)
        for impl, fn in impls.items():
            if impl not in case.parts and (why := _why_not(case, impl, fn, inputs, exact)):
                if impl not in LIBRARIES:
                    print(f"{case.problem}, {impl}: {why}")
                    return False
                left_out[impl] = why
        del exact
    left_out = note_left_out(f"{case.problem}/left_out/jax", left_out)
    rows = {}
    for impl, fn in impls.items():
        if lab.on_gpu() and impl in left_out:
            continue
        call, given = case.applied(fn, inputs) if lab.on_gpu() else (fn, inputs)
        of = case.program(impl) if impl in case.ours() else False
        rows[impl] = _measure(call, *given, problem=case.problem, impl=impl, iterations=iterations, flops=case.flops,
                              nbytes=case.nbytes, of=of, gpu=gpu)  # fmt: skip
    ours = rows[case.impl]
    if math.isnan(ours.median_ms):
        why = ": compiled for a B200, never run or timed on one" if case.gpu == "b200" else ""
        print(f"{case.problem}\n    not recorded{why}")
        return None
    print(case.problem)
    rows = {impl: row for impl, row in rows.items() if not math.isnan(row.median_ms)}
    for impl, row in rows.items():
        rate = f"{row.tflops:8.0f} TFLOP/s" if case.counts_flops else f"{row.tbps:8.2f} TB/s"
        ratio = f"{row.median_ms / ours.median_ms:6.3f} x" if impl != case.impl else " " * 8
        seconds = f"   first call {first[impl]:.2f} s" if first.get(impl) else ""
        print(f"    {impl:18s}{row.median_ms:10.4f} ms{rate}{ratio}{seconds}")
    for impl, why in left_out.items():
        print(f"    {impl:18s}left out: {why}")
    ms = {impl: row.median_ms for impl, row in rows.items()}
    for impl in torch_peers.IMPLS:  # Measured on the same GPU.
        if row := lab.results.read(case.problem, impl, lab.results.this_gpu() if lab.on_gpu() else gpu):
            ms[impl] = row["ms"]
            print(f"    {impl:18s}{ms[impl]:10.4f} ms{'':24s}{ms[impl] / ours.median_ms:6.3f} x   in another process")
    if case.target is None:
        return True
    rate = ours.tflops if case.counts_flops else ours.tbps
    if (peer := case.target.peer) not in (None, *ms):
        print(f"    {peer} is not recorded")
        return None
    reached = peer is None or ms[peer] / ours.median_ms >= case.target.ratio
    reached = reached and rate >= (case.target.rate or 0)
    print(f"    target {'reached' if reached else 'MISSED'}: {case.target}")
    return reached


def _why_not(case: Case, impl: str, fn, inputs, exact) -> str | None:
    """Why an implementation is not timed: its result is wrong, or a library's call fails."""
    call, given = case.applied(fn, inputs)
    try:
        out = jax.block_until_ready(jax.jit(call)(*given))
    except Exception as error:
        if impl not in LIBRARIES:
            raise
        return reason(error)
    error = relative_error(case.undo.get(impl, lambda out: out)(out), exact)
    return None if error < (case.error_max or ERROR_MAX) else f"wrong by {error:.2g}, and so not timed"


if __name__ == "__main__":
    sys.exit(main())
