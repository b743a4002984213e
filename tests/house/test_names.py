"""A name leads where it says: what an error or a docstring tells the user to write works as it is written."""

import ast
import importlib
import inspect
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
import lab
from cookbook import _device, _host

PACKAGE = pathlib.Path(cookbook.__file__).parent
ROOTS = dict(cookbook=cookbook, lab=lab, _device=_device, _host=_host, jax=jax, jnp=jnp, lax=jax.lax, plgpu=plgpu)
NAME = re.compile(rf"(?<![\w.])(?:{'|'.join(ROOTS)})(?:\.(?!py\b)[A-Za-z_]\w*)+")


def part_of_string(part) -> str:
    if isinstance(part, ast.Constant):
        return part.value
    return "cookbook" if ast.unparse(part.value).endswith("PACKAGE") else "\0"


def texts(path: pathlib.Path):
    """Every string in a file, docstrings included. An f-string's values are left out, but for the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(part_of_string, node.values))
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


@pytest.mark.parametrize("name", cookbook.__all__)
def test_an_op_is_the_same_function_from_every_room(name):
    op = getattr(cookbook, name)
    *rooms, _ = op.__module__.split(".")
    for end in range(2, len(rooms) + 1):
        assert getattr(sys.modules[".".join(rooms[:end])], name) is op


def test_ops_are_called_as_their_files():
    others = {"add", "fuse"}  # Both stand in `elementwise.py`.
    assert {name for name in cookbook.__all__ if getattr(cookbook, name).__module__.split(".")[-1] != name} == others


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_that_may_be_lifted_names_its_licence(path):
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("name", cookbook.__all__)
def test_public_signatures_are_annotated(name):
    signature = inspect.signature(getattr(cookbook, name))
    plain = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    assert all(each.annotation is not each.empty for each in plain)
    assert signature.return_annotation is not signature.empty
