"""Which recorded figures are of programs that have changed since.

A row of results/ keeps the hash of the program that was timed (`lab.program`). This lowers the program of each
figure again, of the benchmark's problems and of every chapter, marks the rows where it differs as stale, and clears
the mark of those where it does not. It needs no GPU, the JAX of the recording, and some twenty minutes on two cores.

    python tools/stale.py           # all
    python tools/stale.py --bench   # without the chapters
    python tools/stale.py --stamp   # first gives a hash to rows that have none: only where nothing has changed
"""

import argparse
import collections
import gzip
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
HOPPERS = ("h100", "h200")  # They run the same programs.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", action="store_true", help="only the problems of bench/")
    parser.add_argument("--stamp", action="store_true", help="give rows without a hash that of today's program")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COOKBOOK_PROGRAMS"] = file = os.path.join(folder, "programs")
        os.environ["JAX_PLATFORMS"] = "cpu"
        if not args.bench:
            subprocess.run([sys.executable, ROOT / "tools/run_notebooks.py", "-j", str(os.cpu_count())], check=True)
        note_bench()
        programs = read(file)
    stale = update(programs, args.stamp)
    print("\n".join(stale) or f"none of {len(programs)} figures is stale")
    return 0


def note_bench() -> None:
    """Notes the program of each problem of the benchmark."""
    from bench import hybrid, sample, tune
    from bench.problems import CASES
    from lab import program

    for case in CASES:
        for impl in case.ours():
            program.note(case.problem, impl, *case.program(impl), case.gpu or "h200")
    for sweep in itertools.chain(*tune.SWEEPS.values()):
        program.note(sweep.name, "value", sweep.call(), sweep.case.avals, "h200")
    for op in sample.SAMPLES:
        for problem, (fn, avals) in sample.programs(op):
            program.note(problem, "cookbook", fn, avals, "h200")
    for impl, ops in hybrid.IMPLS.items():
        program.note(hybrid.name(hybrid.FULL), impl, *hybrid.program(ops, hybrid.FULL), "h200")


def read(file: str) -> dict[tuple[str, str], list[str]]:
    """The hashes of each figure; two cells of a chapter may show one figure."""
    programs, errors = collections.defaultdict(list), {}
    for line in pathlib.Path(file).read_text().splitlines():
        found = json.loads(line)
        key = found["problem"], found["impl"]
        if "program" in found:
            programs[key].append(found["program"])
        else:
            errors[key] = found["error"]
    for key in errors.keys() - programs.keys():
        print(*key, "cannot be lowered here:", errors[key])
    return programs


def update(programs, stamp: bool) -> list[str]:
    """Marks the rows that are stale, and says which these are."""
    import jax

    from lab import results

    stale = []

    def check(key, name, provenance):
        if stamp and "program" not in provenance and key in programs:
            provenance["program"] = programs[key][-1]
        if provenance["jax"] != jax.__version__ or key not in programs or "program" not in provenance:
            return
        provenance.pop("stale", None)
        if provenance["program"] not in programs[key]:
            provenance["stale"] = True
            stale.append(f"{name} {key[0]} {key[1]}")

    for folder in (*HOPPERS, "b200"):
        for topic in sorted(file.stem for file in (results.ROOT / folder).glob("*.json")):
            data = results.load(topic, folder)
            before = json.dumps(data)
            for problem, impls in data.get("rows", {}).items():
                for impl, row in impls.items():
                    check((problem, impl), folder, row["provenance"])
            for name, entry in data.get("values", {}).items():
                check((name, "value"), folder, entry["provenance"])
            if json.dumps(data) != before:
                results.save(topic, folder, data)
        for file in sorted((results.ROOT / folder).glob("timelines/*.json.gz")):
            data = json.loads(gzip.decompress(file.read_bytes()))
            before = json.dumps(data)
            check((file.name.removesuffix(".json.gz").replace("__", "/"), "timeline"), folder, data["provenance"])
            if json.dumps(data) != before:
                results.save_timeline(file, data)
    return stale


if __name__ == "__main__":
    sys.exit(main())
