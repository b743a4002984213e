"""The GPUs of this host, without JAX: it reads which ones it may see as it starts."""

import os
import pathlib


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that a process of this one would see; none on a machine without."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(i) for i, _ in enumerate(pathlib.Path("/dev").glob("nvidia[0-9]*"))]


def one_of(number: int) -> dict[str, str]:
    """Variables for the `number`-th of several processes that share the GPUs, if it is to see one alone: JAX takes
    memory on every GPU that it sees. None on a host with one GPU at most."""
    gpus = visible_gpus()
    return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {}


def in_turn(number: int) -> dict[str, str]:
    """Variables for the `number`-th of several processes that share the GPUs: each sees all, in an order of its
    own, because most code takes the first. None on a host with one GPU at most."""
    if len(gpus := visible_gpus()) < 2:
        return {}
    first = number % len(gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])}
