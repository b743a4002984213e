"""Copies of the recurrent family with a line changed, for tests of the tests."""

import importlib
import itertools
import pathlib
import shutil
import sys

import cookbook
from cookbook import _device, _host

FAMILY = pathlib.Path(cookbook.__file__).parent / "recurrent"
numbers = itertools.count()


def copy_of(op: str, monkeypatch, tmp_path, file: str, old: str, new: str):
    """The module `op`, such as "ssd.ssd", of a copy of the family, with `old`, which stands once in `file`, replaced.

    The copy has the shared files themselves, not copies: what runs kernels is the same for all.
    """
    package = f"mutant_{next(numbers)}"
    source = (FAMILY / f"{file}.py").read_text()
    assert old == new or source.count(old) == 1, (file, source.count(old))
    copy = tmp_path / package / "recurrent"
    shutil.copytree(FAMILY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / f"{file}.py").write_text(source.replace(old, new))
    (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for shared in (_device, _host):
        monkeypatch.setitem(sys.modules, f"{package}.{shared.__name__.split('.')[-1]}", shared)
    return importlib.import_module(f"{package}.recurrent.{op}")
