"""Kernels, of Jupyter or of several GPUs, that are started again where they do not answer."""

import contextlib


def started_again(start, tries: int = 3):
    """`start`, tried again: of two kernels that start at the same time and choose the same port, one never answers."""

    def start_again(*args, **kwargs):
        for _ in range(tries - 1):
            with contextlib.suppress(RuntimeError):
                return start(*args, **kwargs)
        return start(*args, **kwargs)

    return start_again
