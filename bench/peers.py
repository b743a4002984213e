"""Libraries that kernels are timed beside or compared with, and that need not be installed."""

import functools
import importlib

from lab import results

ERROR_MAX = 1e-2  # Largest error of a 16-bit result against float32: a rounding is 2e-3. Tests look closer.
LAUNCH_AHEAD = 40_000_000  # Clocks of a GPU, about 20 ms.


@functools.cache
def imports(name: str) -> bool:
    """Whether a module can be imported. One that is installed and fails at that counts as missing."""
    try:
        importlib.import_module(name)
    except Exception:  # A module or a shared library that it needs may be missing, or be of another version.
        return False
    return True


def reason(error: Exception) -> str:
    """An exception in one line, not too long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def torch_milliseconds(torch, fn, iterations: int) -> list[float]:
    """Times of calls of `fn`, which launches kernels through PyTorch, between two CUDA events."""
    for _ in range(5):
        fn()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
    torch.cuda.synchronize()
    torch.cuda._sleep(LAUNCH_AHEAD)  # Meanwhile all calls are launched: a short kernel would wait for its launch.
    for start, end in events:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def note_left_out(name: str, left_out: dict[str, str]) -> dict[str, str]:
    """Records under a name which peers of a problem were not timed, and why. Where nothing is timed: what is
    recorded."""
    before = results.stored(name) or {}
    if not results.measuring():
        return before
    return results.value(name, lambda: left_out) if left_out or before else left_out
