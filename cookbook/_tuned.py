"""The configurations that `cookbook.lab.autotune` found, for the kernels that ask: `results/<gpu>/configs.json`.

A kernel that is lifted out works without that file: it then chooses by shape. COOKBOOK_TUNED=0 in the environment makes
it do so here.
"""

import functools
import json
import os
import pathlib

ROOT = pathlib.Path(os.environ.get("COOKBOOK_RESULTS") or pathlib.Path(__file__).parents[1] / "results")


FILE = "configs.json"


def problem_name(*arrays, **flags) -> str:
    """The problem as the file names it: "bfloat16[64,512] bfloat16[32,512] transpose_b=True". False is left out."""
    shapes = (f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in arrays)
    return " ".join([*shapes, *(f"{name}={value}" for name, value in sorted(flags.items()) if value)])


def gpu_name(device_kind: str) -> str:
    """The folder of a GPU: "h200" for "NVIDIA H200"."""
    return device_kind.lower().removeprefix("nvidia ").split()[0]


def path(gpu: str) -> pathlib.Path:
    return ROOT / gpu / FILE


def tuned(op: str, device_kind: str, problem: str, config_type):
    """The best known `config_type` for a problem on this kind of GPU, or None."""
    file = path(gpu_name(device_kind))
    if os.environ.get("COOKBOOK_TUNED") == "0" or not file.exists():
        return None
    entry = _read(file, file.stat().st_mtime_ns).get(op, {}).get(problem)
    try:
        return entry and config_type(**entry["best"])
    except (TypeError, ValueError):  # Found for another version of the kernel, whose configurations were others.
        return None


@functools.lru_cache(8)
def _read(file: pathlib.Path, _modified: int) -> dict:
    return json.loads(file.read_text())
