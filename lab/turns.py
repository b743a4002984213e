"""Turns of processes that share a GPU, such as notebooks that are recorded at the same time.

COOKBOOK_TURNS names a folder for them: each process has a file there, named by its number. One that measures locks the
folder, stops the others, and lets them go on afterwards; if it is killed before that, its guard does. Without the
variable a process has nobody to wait for.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

IDLE_SECONDS = 1e-3  # Within which an idle GPU answers; one that computes for others takes a time slice or more.
_held = False  # Whether this process is inside `alone`.
_guard = None  # A process that outlives this one.
GUARD = """
import fcntl, os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
sys.stdin.read()  # It ends with the process at the other end of the pipe.
with open(folder / "lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)  # Nobody measures.
    for path in folder.glob("[0-9]*"):
        try:
            os.kill(int(path.name), signal.SIGCONT)
        except ProcessLookupError:
            pass
"""


def _folder() -> pathlib.Path | None:
    return pathlib.Path(os.environ["COOKBOOK_TURNS"]) if os.environ.get("COOKBOOK_TURNS") else None


def register() -> None:
    """Makes this process one of those that are stopped while another measures."""
    global _guard
    if folder := _folder():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(os.getpid())).touch()
        if _guard is None:
            command = [sys.executable, "-c", GUARD, str(folder)]
            _guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


@contextlib.contextmanager
def alone():
    """One process at a time is in here, and the others that take turns stand still: for whatever is timed."""
    global _held
    if _held or _folder() is None:
        yield
        return
    import fcntl  # Not on Windows, where JAX has no GPU.

    register()
    with open(_folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # Until the file is closed.
        _held = True
        try:
            _signal_others(signal.SIGSTOP)
            _wait_until_idle()
            yield
        finally:
            _held = False
            _signal_others(signal.SIGCONT)


def _signal_others(number: int) -> None:
    for path in _folder().iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                os.kill(int(path.name), number)
            except ProcessLookupError:  # It has ended.
                path.unlink(missing_ok=True)


def _wait_until_idle(seconds: float = 2.0) -> None:
    """Waits for the kernels that others had launched: until the GPU answers at once several times in a row, at most for
    `seconds`. The spread of a measurement shows if that was too short."""
    x, times, deadline = jnp.zeros(()), [1.0], time.perf_counter() + seconds
    while max(times[-5:]) > IDLE_SECONDS and time.perf_counter() < deadline:
        start = time.perf_counter()
        jax.block_until_ready(x + 1)
        times.append(time.perf_counter() - start)


register()
