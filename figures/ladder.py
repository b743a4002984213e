"""The course's climb on one problem, a bfloat16 product of 4096 x 4096 matrices: from the CUDA cores towards cuBLAS.

Every bar was timed in one run of chapter 6. A figure that is not in results/ is drawn as not measured, one measured of
code that has changed since is marked as stale.
"""

import json
import pathlib

from cookbook.lab import plot, results, roofline
from cookbook.lab.source import notebook_hash
from figures._draw import save

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHAPTER, SIZE = "06_pipelining", 4096  # M = N = K.
RUNGS = (
    ("matmul_blocked", "CUDA cores: cookbook.matmul_blocked"),
    ("slots_1", "tensor cores: load, then multiply"),
    ("slots_2", "load the next tile meanwhile"),
    ("slots_4", "load three tiles ahead"),
    ("slots_4_delay_1", "keep a product queued"),
    ("slots_3_delay_1_shared", "two blocks on each SM"),
    ("matmul_wgmma", "by hand: cookbook.matmul_wgmma"),
    ("matmul_pipelined", "cookbook.matmul_pipelined"),
)
PEERS = (("cublas", "cuBLAS (jnp.matmul)"),)


def draw():
    stale, changed = {problem for problem, _ in results.stale_list()}, _chapter_changed()
    places, marked = set(), False

    def bar(name, label, ours=True):
        nonlocal marked
        problem = f"{CHAPTER}/{name}"
        row = results.read(problem)
        if row is None or row["flops"] != 2 * SIZE**3:  # Never timed, or at another size.
            return label, float("nan")
        places.add("{}, JAX {jax}".format(results.where(row["provenance"]), **row["provenance"]))
        # The chapter's own kernels use no module of the package: the notebook's hash speaks for them.
        is_stale = problem in stale or (ours and changed and not row["provenance"].get("modules"))
        marked |= is_stale
        return label + " (stale)" * is_stale, row["flops"] / row["ms"] / 1e9

    rungs, peers = [bar(*rung) for rung in RUNGS], [bar(*peer, ours=False) for peer in PEERS]
    note = "; ".join(sorted(places)) or "not recorded yet"
    return plot.ladder(
        rungs,
        peers,
        bound=roofline.peak("bf16").value / 1e12,
        title=f"{SIZE} x {SIZE} x {SIZE}, bfloat16, on one NVIDIA H200",
        note=note
        + "\nbound: the datasheet's peak; the percentages are of it"
        + "; stale: the code has changed since" * marked,
    )


def _chapter_changed() -> bool:
    """Whether the chapter's code is other than what was recorded."""
    notebook = ROOT / "notebooks" / f"{CHAPTER}.ipynb"
    recorded = json.loads(notebook.read_text())["metadata"].get("recorded", {})
    return recorded.get("source") != notebook_hash(notebook)


if __name__ == "__main__":
    save(__file__, draw())
