"""Runs random cases of every op for some time, in several processes, and prints each that fails as a line to run again.

Case i of a seed is the same in every run and on every machine of a kind, whichever process runs it. A case that takes
too long, as a deadlock on a GPU does, ends its process, fails, and the others go on.

Without a GPU a case is small: it is interpreted, and lowered for an H200, or with `--compile` compiled. After each
comes one of a GPU's sizes that is lowered, or compiled, and not run.
"""

import argparse
import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from .sweep import again, sweep


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", help="""run one case again: 'softmax {"shape": [3, 5], ..., "seed": 7}'""")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes; on a GPU several share it")
    parser.add_argument("--ops", help="only these ops, with commas between them")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one case may take")
    parser.add_argument("--compile", action="store_true", help="without a GPU, compile each case for an H200")
    args = parser.parse_args()
    if args.case:
        fault = again(args.case, args.compile)
        print(fault or "right")
        return fault not in (None, "refused")
    return sweep(args)


if __name__ == "__main__":
    sys.exit(main())
