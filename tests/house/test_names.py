"""A name leads where it says: what an error or a docstring tells the user to write works as it is written."""

import ast
import importlib
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
import lab
from cookbook import _device, _host

PACKAGE = pathlib.Path(cookbook.__file__).parent
ROOTS = dict(cookbook=cookbook, lab=lab, _device=_device, _host=_host, jax=jax, jnp=jnp, lax=jax.lax, plgpu=plgpu)
NAME = re.compile(rf"(?<![\w.])(?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+")


def texts(path: pathlib.Path):
    """Every string in a file, docstrings included; what an f-string computes is left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def advice() -> list[str]:
    return sorted({name for path in PACKAGE.rglob("*.py") for text in texts(path) for name in NAME.findall(text)})


def resolve(name: str):
    first, *rest = name.split(".")
    value = ROOTS[first]
    for part in rest:
        if not hasattr(value, part) and inspect.ismodule(value):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


def test_advice_is_found():
    assert {"cookbook.write_kv.check_slots", "lab.interpret", "jnp.pad"} <= {*advice()}


@pytest.mark.parametrize("name", advice())
def test_advice_works_as_it_is_written(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("name", cookbook.__all__)
def test_a_kernel_has_its_configuration_at_hand(name):
    kernel = getattr(cookbook, name)
    assert inspect.isfunction(kernel)
    if "config" in inspect.signature(kernel).parameters:
        assert kernel.Config is inspect.getmodule(kernel).Config


def test_a_module_goes_by_its_path():
    from cookbook.gemm.dense import matmul
    from cookbook.gemm.dense.matmul import Config

    assert (
        cookbook.gemm.dense.matmul is matmul and cookbook.matmul is matmul.matmul and cookbook.matmul.Config is Config
    )
