"""Figures of the chapter ladder."""

import functools
import json
import pathlib

from figures._draw import Picture
from lab import plot, results, roofline
from lab.program import notebook_hash

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZE = 4096  # M = N = K.
RUNGS = (  # The problem, and what the rung adds, after the number of its chapter.
    ("06_pipelining/matmul_blocked", "4  CUDA cores"),
    ("06_pipelining/slots_1", "5  tensor cores: load, then multiply"),
    ("06_pipelining/slots_2", "6  load the next tile meanwhile"),
    ("06_pipelining/slots_4", "6  load three tiles ahead"),
    ("06_pipelining/slots_4_delay_1", "6  keep a product queued"),
    ("06_pipelining/matmul_pipelined", "6  two blocks on each SM"),
    ("07_warp_specialization/late_4", "7  a warpgroup loads, two multiply"),
    ("08_persistent_matmul/persistent_{size}", "8  blocks that stay, row by row"),
    ("08_persistent_matmul/two_slots_{size}", "8  store while multiplying"),
    ("08_persistent_matmul/snake_{size}", "8  tiles in a snake"),
    ("08_persistent_matmul/matmul_{size}", "8  cookbook.matmul"),
)
CUBLAS = "08_persistent_matmul/cublas_{size}", "cuBLAS (jnp.matmul)"


@Picture
def ladder():
    """The course's climb on one problem, a bfloat16 product of 4096 x 4096 matrices: from the CUDA cores to cuBLAS.

    Each bar is read from results/, where a chapter has recorded it; those of chapter 8 were timed in one process,
    cuBLAS too. A figure that is not there is drawn as not measured, one of code that has changed since as stale.
    """
    stale = set(results.stale_list())
    places, marked = set(), False

    def bar(problem, label, ours=True):
        nonlocal marked
        problem = problem.format(size=f"{SIZE}x{SIZE}x{SIZE}")
        row = results.read(problem)
        if row is None or row["flops"] != 2 * SIZE**3:  # Never timed, or at another size.
            return label, float("nan")
        places.add("{}, JAX {jax}".format(results.where(row["provenance"]), **row["provenance"]))
        chapter, known = problem.split("/")[0], row["provenance"].get("uses")
        # A chapter's own kernel that uses nothing of the package: the notebook's hash speaks for it.
        is_stale = (problem, "cookbook") in stale or (ours and not known and _chapter_changed(chapter))
        marked |= is_stale
        return label + " (stale)" * is_stale, row["flops"] / row["ms"] / 1e9

    rungs, peer = [bar(*rung) for rung in RUNGS], bar(*CUBLAS, ours=False)
    note = "\n".join(sorted(places)) or "not recorded yet"
    return plot.ladder(
        rungs,
        [peer],
        bound=roofline.peak("bf16").value / 1e12,
        title=f"{SIZE} x {SIZE} x {SIZE}, bfloat16, on one Hopper GPU",
        note=note
        + "\nchapter, then rung; percentages: of the bound, the datasheet's peak"
        + "\nstale: the code has changed since" * marked,
    )


@functools.cache
def _chapter_changed(chapter: str) -> bool:
    """Whether the chapter's code is other than what was recorded."""
    notebook = ROOT / "notebooks" / f"{chapter}.ipynb"
    recorded = json.loads(notebook.read_text())["metadata"].get("recorded", {})
    return recorded.get("source") != notebook_hash(notebook)
