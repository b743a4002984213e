"""Runs the course: every notebook through papermill into build/notebooks/, then a table of what ran where.

Each notebook has a process of its own. As many run at a time as there are cores; on a GPU host one on each GPU by
default. Where a GPU has more, one measures while the others are stopped, and all share its memory; one that fails so
runs once more with a GPU to itself, and after it those that quote it. The chapters across GPUs come last, each alone
with all of them.

`--record`, on a GPU, writes the executed notebooks back in place with the stamp that the site shows; a chapter that
shows figures of others starts after these. `make run` and `make record` call this script; neither stops at a notebook
that fails.
"""

import argparse
import ast
import concurrent.futures
import copy
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import time

import nbformat
import papermill
import papermill.execute
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.log import logger
from tqdm import tqdm

from tools.gpus import visible_gpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
OUTPUT = ROOT / "build" / "notebooks"
ACROSS_GPUS = "18"  # Chapters that measure all GPUs of the host together.

# Asked in a process of its own: this one must not hold GPU memory while the notebooks run.
PROBE = """
import json
import lab
print(json.dumps(lab.results.machine() | {"on_gpu": lab.on_gpu()}))
"""


def main() -> int:
    args = _parse_args()
    paths = _select(args.notebooks)
    if args.stale:
        paths = [path for path in paths if _is_stale(path)]
        if not paths:
            print("no recorded outputs are stale")
            return 0
    machine = _probe()
    where = machine["gpu"] if machine["on_gpu"] else "CPU, interpreted"
    gpus = (visible_gpus() or ["0"]) if machine["on_gpu"] else []
    jobs = min(len(paths), args.jobs or len(gpus or os.sched_getaffinity(0)))
    at_a_time = f", {jobs} at a time" if jobs > 1 else ""
    print(f"{len(paths)} notebook{'s' * (len(paths) > 1)} on {where}, JAX {machine['jax']}{at_a_time}", flush=True)
    if args.record:
        if not machine["on_gpu"]:
            sys.exit("make record: this needs a Hopper or newer GPU, and JAX sees none.")
        os.environ["COOKBOOK_RECORD"] = "1"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's warnings about its timers are no output of a chapter.
    free = _places(gpus, jobs)
    parameters = {path: _parameters(path, args.parameter) for path in paths}

    OUTPUT.mkdir(parents=True, exist_ok=True)
    os.chdir(NOTEBOOKS)  # Kernels start here. The whole process has one folder, so no thread may choose another.
    total = sum(len(nbformat.read(path, as_version=4).cells) for path in paths)
    with tqdm(total=total, unit="cell") as bar, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running, futures = [], {}
        quoted = _quoted(paths) if args.record else {path: [] for path in paths}

        def run(path: pathlib.Path) -> tuple[str, ...]:
            concurrent.futures.wait([futures[earlier] for earlier in quoted[path] if earlier in futures])
            number, place = path.stem.split("_")[0], free.get()
            running.append(number)
            bar.set_description(" ".join(running))
            started = time.monotonic()
            error = _execute(path, OUTPUT / path.name, parameters[path], args.timeout, bar.update, place)
            seconds = time.monotonic() - started
            free.put(place)
            running.remove(number)
            bar.set_description(" ".join(running))
            if error:
                tqdm.write(f"{path.stem}\n{error}", file=sys.stderr)
            elif args.record:
                _write_back(OUTPUT / path.name, path, machine)
            state = "FAILED" if error else "ok"
            tqdm.write(f"{path.stem}  {seconds:.0f} s  {state}")
            return path.stem, _cells(OUTPUT / path.name), f"{seconds:.1f}", where, state

        alone = [path for path in paths if len(gpus) > 1 and path.name.startswith(ACROSS_GPUS)]
        for path in _after_those_quoted(reversed(paths), quoted):  # The last are the longest.
            if path not in alone:
                futures[path] = pool.submit(run, path)
        rows = {path: future.result() for path, future in futures.items()}
        free = _places(gpus[:1], 1)
        again = []
        for path, row in rows.items() if jobs > len(gpus) > 0 else ():
            if row[-1] == "FAILED" or set(again) & set(quoted[path]):
                again.append(path)
        bar.total += sum(len(nbformat.read(path, as_version=4).cells) for path in again)
        rows |= {path: run(path) for path in again}
        free = _places([",".join(gpus)], 1)
        rows = sorted([*rows.values(), *map(run, alone)])
    _print_table(("notebook", "cells", "seconds", "where it ran", ""), rows)
    failed = [row[0] for row in rows if row[-1] == "FAILED"]
    if failed:
        print(f"\nFailed: {', '.join(failed)}. The failing cell is marked in build/notebooks/.")
    return bool(failed)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="which ones: 05, B (an appendix), or a name; default: all")
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("-j", "--jobs", type=int, help="how many at a time; default: one per core, or one per GPU")
    parser.add_argument("--stale", action="store_true", help="only those whose recorded outputs are of other code")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take")
    parser.add_argument("--record", action="store_true", help="write outputs and stamp into notebooks/; needs a GPU")
    args = parser.parse_args()
    if args.record and args.parameter:
        parser.error("--record takes no -p: what is recorded is the notebook as it stands")
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    return args


def _select(names: list[str]) -> list[pathlib.Path]:
    """The notebooks with these numbers, or whose file names start so, in the order of the course."""
    every = sorted(NOTEBOOKS.glob("*.ipynb"))
    chosen = set()
    for name in names:
        numbered = [path for path in every if path.stem.split("_")[0] == name]  # "16", and not "16b".
        found = numbered or [path for path in every if path.name.startswith(name)]
        if not found:
            sys.exit(f"make run: no notebook starts with {name!r}. There are: {', '.join(p.stem for p in every)}.")
        chosen.update(found)
    return [path for path in every if not names or path in chosen]


def _quoted(paths: list[pathlib.Path]) -> dict[pathlib.Path, list[pathlib.Path]]:
    """For each notebook the earlier ones that its code names, as it does to read a figure of "06_pipelining/load"."""
    cells = {path: nbformat.read(path, as_version=4).cells for path in paths}
    code = {path: "\n".join(c.source for c in cells[path] if c.cell_type == "code") for path in paths}
    return {path: [x for x in paths[:i] if x.stem in code[path]] for i, path in enumerate(paths)}


def _after_those_quoted(paths, quoted: dict[pathlib.Path, list[pathlib.Path]]) -> list[pathlib.Path]:
    """The notebooks in this order, but each after those that it quotes."""
    order = {}
    for path in paths:
        order |= dict.fromkeys([*_after_those_quoted(quoted[path], quoted), path])
    return list(order)


def _is_stale(path: pathlib.Path) -> bool:
    from lab.program import notebook_hash  # It takes JAX seconds to be imported.

    recorded = nbformat.read(path, as_version=4).metadata.get("recorded", {})
    return recorded.get("source") != notebook_hash(path)


def _places(gpus: list[str], jobs: int) -> queue.SimpleQueue:
    """For each of `jobs` notebooks at a time what its environment has beyond this process's: a GPU, and the folder in
    which those on that GPU take turns."""
    places = queue.SimpleQueue()
    shared = {gpu: {"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus} or {"": {}}
    given = os.environ.get("COOKBOOK_TURNS")  # It may take turns with other processes.
    if gpus and (given or jobs > len(gpus)):
        for gpu, place in shared.items():
            folder = given or tempfile.mkdtemp(prefix="cookbook-turns-")
            # Not the number alone: in a folder of turns, numbers are processes.
            place["COOKBOOK_TURNS"] = os.path.join(folder, f"gpu-{gpu}") if len(gpus) > 1 else folder
            # JAX doubles what it holds each time; the last time it would take all that is left.
            place["XLA_PYTHON_CLIENT_MEM_FRACTION"] = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    for i in range(jobs):
        places.put(list(shared.values())[i % len(shared)])
    return places


def _parameters(path: pathlib.Path, given: list[list[str]]) -> dict:
    """The parameters for one notebook, each of which its `parameters` cell must assign."""
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))
    assigned = [target for node in ast.parse(code).body if isinstance(node, ast.Assign) for target in node.targets]
    known = [node.id for target in assigned for node in ast.walk(target) if isinstance(node, ast.Name)]
    for name, _ in given:
        if name not in known:
            sys.exit(f"make run: {path.stem} has no parameter {name!r}; it has: {', '.join(known) or 'none'}.")
    return {name: _literal(value) for name, value in given}


def _literal(text: str):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _probe() -> dict:
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT)
    if answer.returncode:
        sys.exit(f"make run: JAX and the cookbook cannot be imported here:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])


class _Counted(NBClientEngine):
    """papermill's engine, for several notebooks at a time: each kernel has an environment of its own, and `tick` is
    called after each cell, for papermill's progress bar knows one notebook."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, tick, env, execution_timeout, extra_arguments, **_):
        complete, nb_man.cell_complete = nb_man.cell_complete, lambda *args, **kw: (complete(*args, **kw), tick())
        client = PapermillNotebookClient(
            nb_man, kernel_name=kernel_name, timeout=execution_timeout, extra_arguments=extra_arguments, log=logger
        )
        return client.execute(env=env)


papermill_engines.register("counted", _Counted)


def _execute(path: pathlib.Path, output: pathlib.Path, parameters: dict, timeout: int, tick, place: dict) -> str | None:
    """Returns what went wrong, or None."""
    for left in (2, 1, 0):
        try:
            papermill.execute_notebook(
                str(path),
                str(output),
                parameters=parameters,
                engine_name="counted",
                tick=tick,
                env=os.environ | place,
                progress_bar=False,
                execution_timeout=timeout,
                extra_arguments=["--IPKernelApp.log_level=40"],  # A warning about encryption would break the bar.
            )
        except Exception as error:  # Whatever it was, the other notebooks still run.
            # Two kernels that start at the same time may choose the same port; then one of them never answers.
            if "Kernel didn't respond" in str(error) and left:
                continue
            return str(error)
        return None


def _raise_for_unexpected_errors(
    notebook, output_path: str, raise_for_errors=papermill.execute.raise_for_execution_errors
):
    """papermill's own check, blind to the cells whose tag says that they are meant to raise."""
    seen = copy.deepcopy(notebook)
    for cell in seen.cells:
        if "raises-exception" in cell.metadata.get("tags", []):
            cell.outputs = []
    raise_for_errors(seen, output_path)


papermill.execute.raise_for_execution_errors = _raise_for_unexpected_errors


def _cells(path: pathlib.Path) -> str:
    """How many of the code cells ran, such as "12/12"."""
    if not path.exists():
        return "0"
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return f"{sum(cell.execution_count is not None for cell in cells)}/{len(cells)}"


def _write_back(executed: pathlib.Path, path: pathlib.Path, machine: dict) -> None:
    from lab.program import notebook_hash  # It takes JAX seconds to be imported.

    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":  # Libraries' logs are no output of a chapter.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    facts = {key: machine[key] for key in ("gpu", "driver", "jax", "date")}
    notebook.metadata["recorded"] = facts | {"source": notebook_hash(path)}
    nbformat.write(notebook, path)


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print()
    for row in (header, tuple("-" * width for width in widths), *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
