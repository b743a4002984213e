"""Measurements in files: what was measured, where, and of which program.

`results/<gpu>/<topic>.json` has `rows[problem][impl]` (the topic is what precedes the problem's first slash) and
`values[name]`; `results/<gpu>/timelines/<problem>.json.gz` the traces of `lab.timeline`. Nothing else writes there.
Where several GPUs of a host work together, <gpu> says how many: `h200x2`.

Hoppers run the same code: whoever asks for figures of the "h200" gets those of the "h100" for problems that were
measured there alone, and on an H100 those of the "h100" first. Each row says in its provenance where it was measured.
"""

import contextlib
import datetime
import functools
import gzip
import json
import os
import pathlib
import re
import shutil
import subprocess

import jax
import jaxlib

from . import interpreter
from .toolchain import ToolchainMissing, tool
from .turns import alone

__all__ = ["measuring", "read", "recording", "rows", "stale", "stale_list", "topics", "value", "write"]

ROOT = pathlib.Path(os.environ.get("COOKBOOK_RESULTS") or pathlib.Path(__file__).parents[1] / "results")


def recording() -> bool:
    """Whether measurements are to be written: COOKBOOK_RECORD=1 is set."""
    return os.environ.get("COOKBOOK_RECORD") == "1"


def measuring(gpu: str = "h200", devices: int = 1) -> bool:
    """Whether figures are taken here: there are `devices` GPUs as new as `gpu`, and not COOKBOOK_MEASURE=0, which tests
    set: they share a GPU, so the times that they take are no figures."""
    return os.environ.get("COOKBOOK_MEASURE") != "0" and interpreter.on_gpu(gpu) and jax.device_count() >= devices


def read(problem: str, impl: str = "cookbook", gpu: str = "h200") -> dict | None:
    """The row of `impl` on `problem`: ms, min_ms, spread, flops, nbytes, provenance. None if there is none."""
    return rows(problem.split("/")[0], gpu).get(problem, {}).get(impl)


def rows(topic: str, gpu: str = "h200") -> dict[str, dict[str, dict]]:
    """Every row of a topic ("softmax", "05_wgmma"), by problem and implementation; empty if nothing was recorded."""
    return _found(topic, gpu, "rows")


def values(topic: str, gpu: str = "h200") -> dict[str, dict]:
    """Every value of a topic, by its name, with its provenance; empty if none was recorded."""
    return _found(topic, gpu, "values")


def topics(gpu: str = "h200") -> list[str]:
    return sorted({file.stem for folder in folders(gpu) for file in (ROOT / folder).glob("*.json")})


def folders(gpu: str) -> list[str]:
    """The folders of figures of this GPU, and after it of those that run the same code. The one at hand comes first."""
    if not gpu.startswith("h200"):
        return [gpu]
    found = [gpu, gpu.replace("h200", "h100")]
    here = os.environ.get("COOKBOOK_GPU") or (this_gpu() if interpreter.on_gpu() else "h200")
    return found[::-1] if here == "h100" else found


def _found(topic: str, gpu: str, kind: str) -> dict:
    """ "rows" or "values" of a topic, each of the first of `folders` that has it."""
    return {name: x for folder in folders(gpu)[::-1] for name, x in load(topic, folder).get(kind, {}).items()}


def host(gpu: str, devices: int) -> str:
    """The folder of figures of `devices` GPUs that work together."""
    return gpu if devices == 1 else f"{gpu}x{devices}"


def hosts(gpu: str = "h200") -> list[int]:
    """The numbers of GPUs of the hosts on which several worked together."""
    found = (folder for name in folders(gpu) for folder in ROOT.glob(f"{name}x[0-9]*"))
    return sorted({int(folder.name.rpartition("x")[2]) for folder in found})


def write(
    problem: str,
    impl: str,
    *,
    ms: float,
    min_ms: float,
    spread: float,
    flops=None,
    nbytes=None,
    program: str | None = None,
    devices: int = 1,
    **provenance,
) -> dict:
    """Records a measurement made on this machine's GPU and returns its row.

    Args:
      problem: "softmax/16384x8192/bf16": an op (or a notebook), a shape, a dtype.
      impl: "cookbook", or a peer's name.
      ms, min_ms, spread: median and least time, and interquartile range over median.
      flops, nbytes: of one call.
      program: `lab.program.digest` of what was measured; None for other people's.
      devices: how many GPUs of this host worked together.
      provenance: more of it, e.g. `inputs="random normal"`, `torch="2.11"`.
    """
    row = dict(ms=ms, min_ms=min_ms, spread=spread, flops=flops, nbytes=nbytes)
    row["provenance"] = machine() | dict(inputs="random normal") | provenance
    if program is not None:
        row["provenance"]["program"] = program
    topic, gpu = problem.split("/")[0], host(this_gpu(), devices)
    with alone(), _locked(gpu):
        data = load(topic, gpu)
        data.setdefault("rows", {}).setdefault(problem, {})[impl] = row
        save(topic, gpu, data)
    return row


def value(name: str, compute, gpu: str = "h200", devices: int = 1, program: str | None = None):
    """A JSON-able value that only a GPU can give, e.g. `value("02_memory/bank_conflicts", measure_conflicts)`.

    Where figures are taken (`measuring`): `compute()`, which is also stored under COOKBOOK_RECORD=1. Elsewhere the
    stored value, or None. `recorded(name)` says where a stored one comes from. A value of several `devices` needs as
    many GPUs. `program` is the `lab.program.digest` of what it is about, if `tools/stale.py` is to compare it.
    """
    topic = name.split("/")[0]
    if not measuring(gpu, devices):
        return stored(name, host(gpu, devices))
    result = json.loads(json.dumps(compute()))  # The same types and figures as will be read later.
    if recording():
        folder = host(this_gpu(), devices)
        provenance = machine() | (dict(gpus=devices) if devices > 1 else {})
        provenance |= {} if program is None else dict(program=program)
        with alone(), _locked(folder):
            data = load(topic, folder)
            data.setdefault("values", {})[name] = dict(value=result, provenance=provenance)
            save(topic, folder, data)
    return result


def stored(name: str, gpu: str = "h200"):
    """The stored value `name`, or None."""
    return values(name.split("/")[0], gpu).get(name, {}).get("value")


def recorded(name: str, gpu: str = "h200") -> str:
    """Where the value `name` was recorded, for a caption."""
    entry = values(name.split("/")[0], gpu).get(name)
    return where(entry["provenance"]) if entry else f"no recorded value for {name}"


def where(provenance: dict) -> str:
    """ "recorded on NVIDIA H200, 2026-11-20", or "on 2 NVIDIA H200"."""
    return f"recorded on {gpus(provenance)}, {provenance['date']}"


def gpus(provenance: dict) -> str:
    """ "NVIDIA H200", or "2 NVIDIA H200" where two worked together."""
    count = provenance.get("gpus", 1)
    return f"{count} {provenance['gpu']}" if count > 1 else provenance["gpu"]


def stale(problem: str, impl: str = "cookbook", gpu: str = "h200") -> bool:
    """Whether the row is of a program that has changed since, as `tools/stale.py` found when it last ran."""
    return (row := read(problem, impl, gpu)) is not None and row["provenance"].get("stale", False)


def stale_list(gpu: str = "h200") -> list[tuple[str, str]]:
    """(problem, impl) of every stale row."""
    return [
        (problem, impl)
        for topic in topics(gpu)
        for problem, impls in rows(topic, gpu).items()
        for impl, row in impls.items()
        if row["provenance"].get("stale")
    ]


def read_timeline(problem: str, gpu: str = "h200") -> dict | None:
    found = [file for folder in folders(gpu) if (file := _timeline_path(problem, folder)).exists()]
    return json.loads(gzip.decompress(found[0].read_bytes())) if found else None


def write_timeline(problem: str, data: dict, program: str) -> None:
    file = _timeline_path(problem, this_gpu())
    file.parent.mkdir(parents=True, exist_ok=True)
    save_timeline(file, data | dict(provenance=machine() | dict(program=program)))


def save_timeline(file: pathlib.Path, data: dict) -> None:
    file.write_bytes(gzip.compress(json.dumps(data, sort_keys=True).encode(), mtime=0))  # Same data, same file.


def this_gpu() -> str:
    """The folder of this machine's GPU."""
    return gpu_of(jax.devices()[0].device_kind)


# Cards of one chip differ in memory, clocks and SMs, so each has its folder. For the first of them the chip is enough.
_SHORT = {"h100-80gb-hbm3": "h100", "gh200-480gb": "gh200", "gh200-144g-hbm3e": "gh200-144g"}


def gpu_of(device_kind: str) -> str:
    """The folder of a GPU: "h200" for "NVIDIA H200", "h100-pcie" for "NVIDIA H100 PCIe"."""
    name = "-".join(device_kind.lower().removeprefix("nvidia ").split())
    return _SHORT.get(name, name)


@functools.cache
def machine() -> dict:
    """Where and with what this process measures."""
    return dict(
        gpu=jax.devices()[0].device_kind,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0") or "unknown",
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        ptxas=_ptxas_version(),
        date=datetime.date.today().isoformat(),
    )


def _ptxas_version() -> str:
    """Version of the ptxas that Mosaic takes: PATH's, then the wheel's."""
    try:
        ptxas = shutil.which("ptxas") or tool("ptxas")
    except ToolchainMissing:
        return "unknown"
    found = re.search(r"V([\d.]+)", _output(ptxas, "--version"))
    return found[1] if found else "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except OSError:
        return ""


def path(topic: str, gpu: str) -> pathlib.Path:
    """The file of a topic."""
    return ROOT / gpu / f"{topic}.json"


def load(topic: str, gpu: str) -> dict:
    file = path(topic, gpu)
    return json.loads(file.read_text()) if file.exists() else {}


@contextlib.contextmanager
def _locked(gpu: str):
    """One process at a time reads a file of this folder and writes it again, those on other GPUs included.

    Only inside `alone`: nobody stops a process that holds the folder.
    """
    import fcntl  # Not on Windows, where JAX has no GPU.

    (ROOT / gpu).mkdir(parents=True, exist_ok=True)
    folder = os.open(ROOT / gpu, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def save(topic: str, gpu: str, data: dict) -> None:
    file = path(topic, gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    unfinished.replace(file)


def _timeline_path(problem: str, gpu: str) -> pathlib.Path:
    return ROOT / gpu / "timelines" / f"{problem.replace('/', '__')}.json.gz"
