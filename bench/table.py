"""One table of all ops: a small call of each, its named and random problems beside peers, and how it is fuzzed.

A new op gets its lines in `bench/ops.py`, `bench/problems.py` or `bench/collectives.py`, and `fuzz/`. Where it has
none, this file says why, and `tests/bench/test_table.py` finds an op that is missing.
"""

import dataclasses

from bench import collectives, ops, problems, sample
from fuzz.cases import Op as Fuzzed
from fuzz.ops import OPS as FUZZED

NOT_TIMED = {
    "fuse": "it is what `add` is made of",
    "linear_attention": "it is `ssd` without gates",
    "merge_attention": "XLA computes it",
    "ragged_dot_int4_weights": "there is no peer: no library has this product",
    "ragged_dot_int8_weights": "there is no peer: no library has this product",
    "rope_write_kv": "chapter 22 times it as a part of a step",
    "write_kv": "chapter 22 times it as a part of a step",
}
NOT_FUZZED = dict.fromkeys(
    ("blackwell.matmul", "blackwell.matmul_mxfp8", "blackwell.ragged_dot"),
    "a case may take two blocks, which the interpreter cannot pair",
)
TOPICS = {"reduce_sum_leading": "reduce_sum", "attention_backward": "attention"}  # Samples that are called otherwise.
COURSE = {"matmul_blocked", "matmul_wgmma", "matmul_pipelined"}  # Rungs, which are timed as peers of `matmul`.


@dataclasses.dataclass(frozen=True)
class Entry:
    """All that is known of an op outside the package."""

    small: ops.Op  # Small operands, for tests in JAX and where it was lifted.
    problems: tuple  # Named ones, `problems.Case`; of ops across GPUs `collectives.Collective`.
    samples: dict[str, sample.Sample]  # Random ones beside a peer, by their topic.
    fuzzed: Fuzzed | None  # Random ones beside NumPy.


def entry(name: str, num_gpus: int = 2) -> Entry:
    named = [case for case in problems.CASES if case.op == name or name in case.ours() and name in COURSE]
    if name in collectives.OPS:
        named = [case for case in collectives.cases(num_gpus) if case.op == name]
    samples = {topic: each for topic, each in sample.SAMPLES.items() if TOPICS.get(topic, topic) == name}
    return Entry(ops.OPS[name], tuple(named), samples, FUZZED.get(name))
