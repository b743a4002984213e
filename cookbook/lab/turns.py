"""Turns of processes that share a GPU."""

import contextlib
import os
import pathlib
import tempfile

_held = False  # Whether this process is inside `alone`.


@contextlib.contextmanager
def alone():
    """Processes of one user enter it one at a time: each would slow the kernels that another times on the same GPU."""
    global _held
    if _held:
        yield
        return
    import fcntl  # Not on Windows, where JAX has no GPU.

    with open(pathlib.Path(tempfile.gettempdir(), f"pallas-cookbook-{os.getuid()}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # Until the file is closed.
        _held = True
        try:
            yield
        finally:
            _held = False
