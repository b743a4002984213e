"""Cases of a seed in several processes, and the report. A case that does not end in time costs its process."""

import collections
import json
import multiprocessing
import multiprocessing.connection
import os
import time

import numpy as np

import lab
from tools.gpus import in_turn, one_of

from . import nvlink
from .cases import Draw, run, text
from .ops import OPS

# Cases of a process. Code that JAX compiles stays in memory, in maps of its own, of which Linux gives a process 65,530.
CASES_EACH = 200


def again(line: str, compiles: bool = False) -> str | None:
    op, _, case = line.partition(" ")
    return run(OPS[op], json.loads(case), compiles)


def drawn(ops: list[str], seed: int, index: int, share: float = 1.0, lowered_only: bool = False) -> tuple[str, dict]:
    """Case `index` of a seed: its op, and the case, with sizes up to this share of the usual ones. One that is
    `lowered_only` has a GPU's sizes."""
    draw = Draw(np.random.default_rng([seed, index]), lowered_only or lab.on_gpu(), share)
    op = ops[index % len(ops)]
    case = OPS[op].draw(draw) | dict(view=draw.choice(None, None, "slice", "transpose"))
    return op, case | dict(seed=draw.number(0, 10**6)) | (dict(lowered_only=True) if lowered_only else {})


def work(connection, ops: list[str], seed: int, indices: range, compiles: bool = False):
    """A process: runs the cases of these indices, and sends each before it starts and its fault after it. Without a GPU
    a large case after each is lowered for one."""
    # Before its first array: JAX looks for GPUs then. Only ops across GPUs alone are given all of them.
    os.environ |= (in_turn if nvlink.OPS.keys() >= {*ops} else one_of)(indices.start)
    for index in indices:
        for lowered_only in (False,) if lab.on_gpu() else (False, True):
            op, case = drawn(ops, seed, index, lowered_only=lowered_only)
            connection.send(("starts", index, op, text(op, case)))
            connection.send(("lowered" if lowered_only else "ended", index, op, run(OPS[op], case, compiles)))


class Worker:
    """A process and what it does now. Another takes its place after `CASES_EACH`, or a case that it did not survive."""

    def __init__(self, number: int, args, ops):
        self.number, self.args, self.ops, self.process = number, args, ops, None
        self.start(number)

    def start(self, index: int):
        self.connection, theirs = multiprocessing.Pipe(duplex=False)
        end = min(self.args.cases, index + CASES_EACH * self.args.workers)
        indices = range(index, end, self.args.workers)
        self.process = multiprocessing.get_context("spawn").Process(
            target=work, args=(theirs, self.ops, self.args.seed, indices, self.args.compile), daemon=True
        )
        self.process.start()
        theirs.close()
        self.index, self.op, self.line, self.since = index, None, None, time.monotonic()

    def stop(self):
        self.process.kill()
        self.process.join()


def sweep(args) -> int:
    ops = args.ops.split(",") if args.ops else list(OPS)
    counts, failed, until = collections.Counter(), [], time.monotonic() + args.seconds
    workers = [Worker(number, args, ops) for number in range(args.workers)]

    def ended(worker, fault: str | None, is_lowered: bool = False):
        has_failed = fault not in (None, "refused")
        counts[worker.op, "failed" if has_failed else "lowered" if is_lowered else fault or "right"] += 1
        if has_failed:
            failed.append(worker.line)
            print(f"{fault}\n  make fuzz CASE='{worker.line}'", flush=True)

    while workers and time.monotonic() < until:
        ready = multiprocessing.connection.wait(
            [worker.connection for worker in workers], timeout=min(1, max(0.05, args.limit / 10))
        )
        for worker in list(workers):
            if worker.connection in ready:
                try:
                    event, worker.index, worker.op, said = worker.connection.recv()
                except EOFError:
                    worker.process.join()
                    if worker.line is None and worker.index < args.cases:
                        raise SystemExit("a process ended before its first case") from None
                    if worker.process.exitcode != 0:
                        ended(worker, f"its process ended with {worker.process.exitcode}")
                    if worker.index + args.workers < args.cases:
                        worker.start(worker.index + args.workers)
                    else:
                        workers.remove(worker)
                    continue
                if event == "starts":
                    worker.line, worker.since = said, time.monotonic()
                else:
                    ended(worker, said, event == "lowered")
            elif worker.line is not None and time.monotonic() - worker.since > args.limit:  # A case has started.
                worker.stop()
                ended(worker, f"no end after {args.limit:.0f} s")
                worker.start(worker.index + args.workers)
    for worker in workers:
        worker.stop()
    return report(ops, counts, failed, args)


def report(ops, counts, failed, args) -> int:
    width = max(map(len, ops))
    kinds = ("right", "refused", "failed", *([] if lab.on_gpu() else ["lowered"]))
    print(f"{'op':{width}}", *kinds, sep="  ")
    for op in ops:
        print(f"{op:{width}}", *(f"{counts[op, kind]:{len(kind)}}" for kind in kinds), sep="  ")
    total = sum(count for (_, kind), count in counts.items() if kind != "lowered")
    print(f"{total} cases of seed {args.seed}, {len(failed)} failed")
    return bool(failed)
