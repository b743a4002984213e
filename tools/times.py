"""Runs a command; if it succeeds, writes how long it took into results/: `times.py "make run" COMMAND...`.

The README's table of times is rendered from there. `make run TIMES=1` calls this script.
"""

import json
import os
import subprocess
import sys
import time

# Asked in a process of its own, after the command: this one must hold no GPU memory.
WRITE = """
import json, sys
import jax
from lab import results
name, entry = json.loads(sys.argv[1])
gpus = jax.device_count()
where = results.host(results.this_gpu(), gpus)
entry |= {key: results.machine()[key] for key in ("gpu", "jax", "date")} | (dict(gpus=gpus) if gpus > 1 else {})
results.save("times", where, results.load("times", where) | {name: entry})
"""


def main() -> int:
    name, *command = sys.argv[1:]
    start = time.monotonic()
    code = subprocess.run(command).returncode
    seconds = round(time.monotonic() - start)
    if code == 0:
        entry = dict(seconds=seconds, cores=len(os.sched_getaffinity(0)))
        code = subprocess.run([sys.executable, "-c", WRITE, json.dumps([name, entry])]).returncode
    print(f"{name}: {seconds} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
