import importlib
import pathlib
import shutil
import sys
import types

import pytest

import cookbook.attn
from cookbook.attn import checks


@pytest.fixture
def priced(monkeypatch):
    """The bytes of shared memory that ops price their blocks at, a number for each call."""
    found, check = [], checks.check_smem
    note = lambda op, config, need, head_dim: (found.append(need), check(op, config, need, head_dim))[1]
    monkeypatch.setattr(checks, "check_smem", note)
    return found


@pytest.fixture
def mutant_of(tmp_path):
    """`mutant_of(file, old, new)`: the family with one string of one file changed, as a function from names of its
    modules to these."""
    name = "cookbook.mutant_attn"

    def change(file: str, old: str, new: str):
        folder = tmp_path / "attn"
        shutil.copytree(pathlib.Path(cookbook.attn.__file__).parent, folder)
        source = (folder / f"{file}.py").read_text()
        assert old == new or source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {file}.py"
        (folder / f"{file}.py").write_text(source.replace(old, new))
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder)]
        return lambda module: importlib.import_module(f"{name}.{module}")

    yield change
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]
