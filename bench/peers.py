"""Libraries that kernels are timed beside or compared with, and that need not be installed."""

import functools
import importlib


@functools.cache
def imports(name: str) -> bool:
    """Whether a module can be imported. One that is installed and fails at that counts as missing."""
    try:
        importlib.import_module(name)
    except Exception:  # A module or a shared library that it needs may be missing, or be of another version.
        return False
    return True
