"""The house around the kernels: set-up, commands, locks, notebooks' form and what is rendered from results/."""

import contextlib
import importlib
import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest
import yaml

from lab import results

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TARGETS = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.M)
for folder in ("tools", "site"):
    sys.path.append(str(ROOT / folder))


def pinned(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / lock).read_text(), re.M))


def make(*args: str) -> str:
    """Output of a user's `make *args`, even if these tests run under a `make test PYTHON=python3`."""
    outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "VENV", "ARGS", "ALL", "TIMES"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", *args], cwd=ROOT, check=True, capture_output=True, text=True, env=env).stdout


# Commands and locks --------------------------------------------------------------------------------------------------


def test_bare_make_lists_every_command():
    listed = re.findall(r"^  make (\S+)", make(), re.M)
    assert listed == TARGETS
    assert {"run", "test", "lab", "site", "bench", "record", "figures", "wheelhouse", "help", "clean"} <= set(listed)
    phony = re.findall(r"^\.PHONY: (\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert set(phony) - {"setup", "_pytest"} == set(TARGETS)  # Parts of others.


@pytest.mark.parametrize("target", [target for target in TARGETS if target not in ("help", "clean")])
def test_every_command_takes_a_python_as_it_is(target):
    assert "tools/setup.sh" in make("-n", target)
    plan = make("-n", target, "PYTHON=python3")
    assert "tools/setup.sh" not in plan and ".venv/bin" not in plan and "python3 " in plan


def test_locks_agree_and_carry_hashes_but_no_address():
    cpu, gpu = pinned("requirements.lock"), pinned("requirements-cuda13.lock")
    assert {name: cpu[name] for name in cpu.keys() & gpu.keys()} == {
        name: gpu[name] for name in cpu.keys() & gpu.keys()
    }
    for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "tools/pins.txt").read_text(), re.M):
        assert cpu[name] == gpu[name] == version
    for lock in ("requirements.lock", "requirements-cuda13.lock"):
        text = (ROOT / lock).read_text()
        assert "https://" not in text
        assert all("--hash=sha256:" in block for block in re.split(r"(?m)^(?=[a-z0-9])", text)[1:])


def test_conda_users_get_the_versions_of_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (from_pip,) = [entry["pip"] for entry in environment if isinstance(entry, dict)]
    assert from_pip == ["-r requirements.lock"], "pip must install the lock itself, nothing beside it"
    assert [entry for entry in environment if isinstance(entry, str)] == ["python=3.12", "pip"]
    assert 'requires-python = ">=3.12"' in (ROOT / "pyproject.toml").read_text()


def test_workflows_call_commands_that_exist():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            made, tool = re.match(r"make (\w+)", command), re.match(r"\.venv/bin/python (\S+)", command)
            assert (
                command in ("nvidia-smi", ".ci/run")
                or command.startswith("git ")
                or (made and made[1] in TARGETS)
                or (tool and (ROOT / tool[1]).exists())
            ), path.name


# Set-up --------------------------------------------------------------------------------------------------------------

FAKE_UV = """#!/bin/bash
echo "$*" >>"$(dirname "$0")/uv.log"
for last; do :; done
for ((i = 1; i <= $#; i++)); do [ "${!i}" = --python ] && j=$((i + 1)) && python=${!j}; done
if [ "$1" = venv ]; then
  "$python" -m venv --without-pip "$last"
  dist=$(echo "$last"/lib/python*/site-packages)/jax-9.9.dist-info
  mkdir -p "$dist"
  printf 'Metadata-Version: 2.1\\nName: jax\\nVersion: 9.9\\n' >"$dist/METADATA"
fi
"""
DEAD_SHIM = '#!/bin/bash\necho "pyenv: $0: command not found" >&2\nexit 127\n'
TOO_OLD = "#!/bin/bash\nexit 1\n"  # It stands for a Python 3.11, which the version test rejects.
WORKS = f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'


@pytest.fixture
def machine(tmp_path):
    """A machine whose programs are those given: `machine(python3=WORKS)` runs the set-up there."""

    def run(pyenv: str | None = None, COOKBOOK_PYTHON: str = "", **programs: str):
        programs = dict.fromkeys(("python3.12", "python3.13", "python3", "python", "nvidia-smi"), DEAD_SHIM) | {
            name.replace("_", "."): text for name, text in programs.items()
        }
        binaries = tmp_path / "bin"
        binaries.mkdir(exist_ok=True)
        for name, text in (programs | {"uv": FAKE_UV}).items():
            (binaries / name).write_text(text)
            (binaries / name).chmod(0o755)
        if pyenv:
            inside = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin"
            inside.mkdir(parents=True, exist_ok=True)
            (inside / "python3").write_text(pyenv)
            (inside / "python3").chmod(0o755)
        env = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(tmp_path), "VENV": str(tmp_path / "venv")}
        env |= {"PYENV_ROOT": str(tmp_path / "pyenv"), "COOKBOOK_PYTHON": COOKBOOK_PYTHON}
        result = subprocess.run([ROOT / "tools/setup.sh"], env=env, capture_output=True, text=True)
        log = binaries / "uv.log"
        result.uv = log.read_text() if log.exists() else ""
        return result

    return run


def test_set_up_tries_interpreters_by_running_them(machine, tmp_path):
    result = machine(python3_13=WORKS, python3=TOO_OLD)
    assert result.returncode == 0, result.stderr
    assert f"--python {tmp_path}/bin/python3.13 " in result.uv
    assert "Ready: Python 3." in result.stdout and "JAX 9.9" in result.stdout
    assert str(ROOT) in next((tmp_path / "venv").rglob("cookbook-checkout.pth")).read_text()


def test_set_up_finds_pyenvs_versions_behind_dead_shims(machine, tmp_path):
    result = machine(pyenv=WORKS, python3=TOO_OLD)
    assert result.returncode == 0, result.stderr
    assert f"--python {tmp_path}/pyenv/versions/3.12.1/bin/python3 " in result.uv


def test_set_up_without_any_python_says_what_to_do(machine):
    result = machine(python3=TOO_OLD)
    assert result.returncode == 1
    assert "no Python 3.12 or newer was found" in result.stderr and "COOKBOOK_PYTHON=" in result.stderr
    assert "venv" not in result.uv


def test_set_up_refuses_a_named_python_that_does_not_fit(machine, tmp_path):
    result = machine(python3_12=WORKS, COOKBOOK_PYTHON=f"{tmp_path}/bin/python3.13")
    assert result.returncode == 1 and "is not a working Python 3.12 or newer" in result.stderr


def test_set_up_installs_cuda_when_it_finds_a_driver(machine):
    result = machine(python3_12=WORKS, **{"nvidia-smi": "#!/bin/bash\n"})
    assert "NVIDIA driver found" in result.stdout and "requirements-cuda13.lock" in result.uv


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="this machine has a driver")
def test_set_up_installs_the_compile_only_wheels_without_a_driver(machine):
    result = machine(python3_12=WORKS)
    assert "No NVIDIA driver found" in result.stdout and "-r requirements.lock" in result.uv


def test_second_set_up_does_nothing_and_says_nothing(machine):
    first, second = machine(python3_12=WORKS), machine(python3_12=WORKS)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert second.uv == first.uv


# Notebooks -----------------------------------------------------------------------------------------------------------


KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def code_cells(path: pathlib.Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_whole(path):
    """Its form: a title, one cell of parameters, every code cell executed, and nothing left of papermill or of logs."""
    notebook = nbformat.read(path, as_version=4)
    number = path.stem.split("_")[0].removeprefix("0")  # An appendix has a letter.
    assert re.match(rf"# .*\b{number}\b", notebook.cells[0].source), "its title names its number"
    cells = code_cells(path)
    assert ["parameters" in cell.metadata.get("tags", []) for cell in cells].count(True) == 1
    unexecuted = [cell.source for cell in cells if cell.execution_count is None]
    assert not unexecuted, "nbval passes a cell that was never executed"
    assert "papermill" not in notebook.metadata
    assert not any({"papermill", "execution"} & cell.metadata.keys() for cell in notebook.cells)
    assert not [cell.source for cell in cells if any(output.get("name") == "stderr" for output in cell.outputs)]
    assert ":::" not in "".join(cell.source for cell in notebook.cells), "JupyterLab shows ::: admonitions raw"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_to_files(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert not [link for link in links if not (path.parent / link).exists()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_recorded_on_a_gpu(path):
    recorded = nbformat.read(path, as_version=4).metadata.get("recorded", {})
    assert {"gpu", "driver", "jax", "date", "source"} <= recorded.keys()


def test_warpgroups_find_the_registers_that_they_ask_for():
    """A block starts with as many for each thread, in eights, as 65,536 allow. A warpgroup that asks for more than
    the others gave up waits forever, on a GPU alone: no interpreter counts registers, and the compiler says nothing."""
    attn, gemm = (importlib.import_module(f"cookbook.{module}") for module in ("attn.core", "gemm.plan"))
    shares = []
    for name, table in (("gemm", gemm.REGISTERS), ("attn", attn.REGISTERS), ("attn", attn.REGISTERS_MEMORY)):
        shares += [(name, count, *registers) for count, registers in table.items()]
    for module, count, memory, compute in shares:
        at_start = 65_536 // (128 * (count + 1)) // 8 * 8
        assert memory + count * compute <= at_start * (count + 1), (module, count)


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """tools/run_notebooks.py on notebooks of this test's own: `runner({"00_a": [cells]}, "-p", ...)`."""
    import run_notebooks

    def run(notebooks: dict[str, list[str]], *args: str) -> int:
        for stem, sources in notebooks.items():
            cells = [nbformat.v4.new_code_cell(source) for source in sources]
            cells[0].metadata["tags"] = ["parameters"]
            for cell in cells:
                if "1 / 0" in cell.source:
                    cell.metadata["tags"] = ["raises-exception"]
            notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
            nbformat.write(notebook, tmp_path / f"{stem}.ipynb")
        monkeypatch.setattr(sys, "argv", ["run_notebooks.py", *args])
        return run_notebooks.main()

    monkeypatch.chdir(ROOT)  # And back again: the runner changes to the notebooks' folder.
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(run_notebooks, "OUTPUT", tmp_path / "build")
    monkeypatch.setattr(run_notebooks, "_probe", lambda: {"gpu": "cpu", "jax": "0", "on_gpu": False})
    return run


def test_run_goes_on_after_a_failure_and_ends_in_a_table(runner, capfd):
    notebooks = {"00_fails": ["n = 1", "assert n == 2", "n"], "01_raises_as_told": ["n = 1", "1 / 0", "n"]}
    assert runner(notebooks) == 1
    output = capfd.readouterr().out
    assert re.search(r"00_fails +2/3 +[\d.]+ +CPU, interpreted +FAILED", output)
    assert re.search(r"01_raises_as_told +3/3 +[\d.]+ +CPU, interpreted +ok", output)


def test_run_takes_as_many_notebooks_at_a_time_as_asked(runner, tmp_path, capfd):
    """Each waits for the other to have begun, in the folder of the notebooks; one bar counts the cells of both."""
    wait = "import pathlib, time\npathlib.Path({mine!r}).touch()\n"
    wait += "while not pathlib.Path({other!r}).exists(): time.sleep(0.1)"
    pair = {f"0{i}": ["n = 1", wait.format(mine=f"{i}.txt", other=f"{1 - i}.txt")] for i in (0, 1)}
    assert runner(pair, "--jobs", "2", "--timeout", "60") == 0
    captured = capfd.readouterr()
    assert "2 notebooks on CPU, interpreted, JAX 0, 2 at a time" in captured.out and " 4/4 " in captured.err
    with pytest.raises(SystemExit):
        runner({}, "--record", "--jobs", "2")


def test_run_gives_each_notebook_a_gpu_and_chapters_across_gpus_all(runner, tmp_path, monkeypatch):
    import run_notebooks

    monkeypatch.setattr(run_notebooks, "_probe", lambda: {"gpu": "NVIDIA H200", "jax": "0", "on_gpu": True})
    monkeypatch.setattr(run_notebooks, "visible_gpus", lambda: ["2", "5"])
    monkeypatch.delenv("COOKBOOK_TURNS", raising=False)
    say = "import os, pathlib\n"
    say += "line = ' '.join(os.environ.get(x, '') for x in ('CUDA_VISIBLE_DEVICES', 'COOKBOOK_TURNS'))\n"
    say += "pathlib.Path({me!r}).write_text(line)\n"
    say += "import time\nwhile not pathlib.Path({other!r}).exists(): time.sleep(0.1)"
    notebooks = {f"0{i}": ["n = 1", say.format(me=f"{i}.txt", other=f"{1 - i}.txt")] for i in (0, 1)}
    notebooks["18_across"] = ["n = 1", say.format(me="18.txt", other="0.txt")]
    said = lambda: [(tmp_path / f"{name}.txt").read_text() for name in ("0", "1", "18")]
    assert runner(notebooks, "--timeout", "60") == 0
    assert said() in (["2 ", "5 ", "2,5 "], ["5 ", "2 ", "2,5 "])
    places = run_notebooks._places(["2", "5"], 3)
    first, second, third = (places.get() for _ in range(3))
    assert first == third and first["COOKBOOK_TURNS"] != second["COOKBOOK_TURNS"]
    monkeypatch.setenv("COOKBOOK_TURNS", str(tmp_path))
    assert run_notebooks._places(["2", "5"], 2).get()["COOKBOOK_TURNS"] == str(tmp_path / "gpu-2")
    assert run_notebooks._places(["2"], 1).get()["COOKBOOK_TURNS"] == str(tmp_path)
    assert run_notebooks._places([], 2).get() == {}


def test_a_notebook_that_fails_beside_others_has_a_gpu_to_itself_in_the_end(runner, tmp_path, monkeypatch, capfd):
    import run_notebooks

    monkeypatch.setattr(run_notebooks, "_probe", lambda: {"gpu": "NVIDIA H200", "jax": "0", "on_gpu": True})
    monkeypatch.setattr(run_notebooks, "visible_gpus", lambda: ["2"])
    for variable in ("COOKBOOK_TURNS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    alone = "import os\nassert 'XLA_PYTHON_CLIENT_MEM_FRACTION' not in os.environ"
    notebooks = {"00_a": ["n = 1"], "01_large": ["n = 1", alone], "02_wrong": ["n = 1", "assert n == 2"]}
    assert runner(notebooks, "--jobs", "3") == 1
    output = capfd.readouterr().out
    table = output.partition("notebook  ")[2]
    assert re.search(r"01_large +2/2 .*ok", table) and re.search(r"02_wrong +2/2 .*FAILED", table)
    assert [output.count(f"{stem}  ") for stem in notebooks] == [2, 3, 3]  # Once in the table.


@pytest.mark.parametrize("needs, order", [("True", "abc"), ("'XLA_PYTHON_CLIENT_MEM_FRACTION' not in E", "bcabc")])
def test_a_recorded_chapter_comes_after_those_whose_figures_it_shows(runner, tmp_path, monkeypatch, needs, order):
    """Also where the first fails beside others and succeeds alone."""
    import run_notebooks

    machine = dict(gpu="NVIDIA H200", driver="0", jax="0", date="2026-01-01", on_gpu=True)
    monkeypatch.setattr(run_notebooks, "_probe", lambda: machine)
    monkeypatch.setattr(run_notebooks, "visible_gpus", lambda: ["0"])
    monkeypatch.setenv("COOKBOOK_RECORD", "1")  # The runner sets it: this takes it away again.
    for variable in ("COOKBOOK_TURNS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    say = "import time\ntime.sleep({0})\nwith open('order.txt', 'a') as file: file.write({1!r})"
    notebooks = {"00_a": [f"from os import environ as E\nassert {needs}", say.format(1, "a")]}
    notebooks |= {"01_b": ["'00_a/one'", say.format(0, "b")], "02_c": ["'01_b/one'", say.format(0, "c")]}
    assert runner(notebooks, "--record", "--jobs", "3") == 0
    assert (tmp_path / "order.txt").read_text() == order


@pytest.mark.parametrize("given, gpus", [("3,1", ["3", "1"]), ("0", ["0"]), ("", [])])
def test_visible_gpus_are_those_of_the_environment(monkeypatch, given, gpus):
    from tools.gpus import in_turn, one_of, visible_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus() == gpus
    turned = [{"CUDA_VISIBLE_DEVICES": order} for order in ("3,1", "1,3", "3,1")]
    assert [in_turn(number) for number in range(3)] == (turned if len(gpus) > 1 else [{}] * 3)
    one = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("3", "1", "3")]
    assert [one_of(number) for number in range(3)] == (one if len(gpus) > 1 else [{}] * 3)


def test_a_failure_is_named_when_it_happens(tmp_path):
    """A run that is cut off has said by then what failed."""
    (tmp_path / "test_two.py").write_text("def test_a():\n    assert 1 == 2\n\n\ndef test_b():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:nbval", "-n", "1", "test_two.py"]
    environ = os.environ | dict(PYTHONPATH=str(ROOT))
    said = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True).stdout
    at_once, _, later = said.partition("= FAILURES =")
    assert "test_two.py::test_a: assert 1 == 2" in at_once and "1 failed, 1 passed" in later


def test_run_takes_those_whose_recording_is_stale(runner, tmp_path, capfd):
    from lab.program import notebook_hash

    assert runner({"00_a": ["n = 1"], "01_b": ["n = 2"]}) == 0
    for stem, source in (("00_a", "n = 1"), ("01_b", "n = 3")):
        notebook = nbformat.read(tmp_path / f"{stem}.ipynb", as_version=4)
        notebook.metadata["recorded"] = {"source": notebook_hash(tmp_path / f"{stem}.ipynb")}
        notebook.cells[0].source = source
        nbformat.write(notebook, tmp_path / f"{stem}.ipynb")
    capfd.readouterr()
    assert runner({}, "--stale") == 0 and runner({}, "--stale", "00") == 0
    output = capfd.readouterr().out
    assert output.count("01_b") == 2 and "00_a" not in output and "no recorded outputs are stale" in output


@pytest.mark.parametrize("name, stems", [("16", ["16_a"]), ("16b", ["16b_b"]), ("1", ["16_a", "16b_b", "17_c"])])
def test_run_takes_a_chapter_by_its_number(monkeypatch, tmp_path, name, stems):
    import run_notebooks

    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", tmp_path)
    for stem in ("16_a", "16b_b", "17_c"):
        (tmp_path / f"{stem}.ipynb").touch()
    assert [path.stem for path in run_notebooks._select([name])] == stems


def test_run_passes_parameters_and_refuses_unknown_ones(runner):
    assert runner({"00_a": ["n = 1", "assert n == 2"]}, "00", "-p", "n", "2") == 0
    with pytest.raises(SystemExit, match="no parameter 'k'; it has: n"):
        runner({}, "00", "-p", "k", "2")
    with pytest.raises(SystemExit, match="no notebook starts with '07'"):
        runner({}, "07")
    with pytest.raises(SystemExit, match="needs a Hopper"):
        runner({}, "00", "--record")


class NoAnswer:
    """Stands in for a function that starts a kernel, which does not answer the first `times` times."""

    def __init__(self, start, times: int):
        self.start, self.left = start, times

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("Kernel didn't respond in 60 seconds")
        return self.start(*args, **kwargs)


@pytest.mark.parametrize("times, answers", [(0, True), (2, True), (3, False)])
def test_a_kernel_that_does_not_answer_is_started_again(runner, monkeypatch, times, answers):
    """Where notebooks are tested, and where they are run."""
    import papermill

    from tests.starting import started_again

    monkeypatch.setattr(papermill, "execute_notebook", NoAnswer(papermill.execute_notebook, times))
    assert runner({"00_a": ["n = 1"]}) == (not answers)
    outcome = contextlib.nullcontext() if answers else pytest.raises(RuntimeError, match="didn't respond")
    with outcome:
        assert started_again(NoAnswer(lambda name: name, times))("kernel") == "kernel"


# Rendered from results/ and routes.toml ------------------------------------------------------------------------------


def test_routes_know_every_chapter_and_how_long_it_takes():
    from figures import _course, start_here

    chapters = _course.chapters()
    assert [chapter.stem for chapter in chapters.values()] == [
        path.stem for path in NOTEBOOKS if path.stem[0].isdigit()
    ]
    assert chapters.keys() == start_here.COLUMNS.keys(), "every chapter has its place on the map"
    for number, chapter in chapters.items():
        first = nbformat.read(ROOT / "notebooks" / f"{chapter.stem}.ipynb", as_version=4).cells[0].source
        minutes = re.search(r"^\*(?:About )?(\d+) minutes\b", first, re.M)
        assert minutes and int(minutes[1]) == chapter.minutes, f"{chapter.stem}: its head line and routes.toml differ"
        assert set(chapter.needs) <= set(list(chapters)[: list(chapters).index(number)]), f"{number} needs a later one"


def test_a_route_has_all_that_its_goals_need_and_the_sum_of_their_minutes():
    from figures import _course

    for route in _course.routes():
        numbers = [chapter.number for chapter in route.chapters]
        assert numbers[0] == "00" and all(set(chapter.needs) <= set(numbers) for chapter in route.chapters)
        assert f"| {_course.time(sum(chapter.minutes for chapter in route.chapters))} |" in _course.table()
    numbers = [path.stem.split("_")[0] for path in NOTEBOOKS]
    assert sum((part for *_, part in _course.parts(numbers)), []) == numbers
    assert [_course.time(minutes) for minutes in (45, 60, 450)] == ["45 min", "1 h", "7 h 30 min"]


def test_readme_shows_how_long_commands_take(results_folder):
    import render_readme

    assert render_readme._times() == ""
    entry = dict(seconds=371, cores=2, gpu="cpu", jax="0.11.2", date="2026-11-22")
    results.save("times", "cpu", {"make run": entry})
    on_gpus = entry | dict(gpu="NVIDIA H200", cores=16, seconds=480)
    results.save("times", "h200", {"make test ALL=1": on_gpus})
    results.save("times", "h200x2", {"make test ALL=1": on_gpus | dict(gpus=2, seconds=418)})
    assert render_readme._times() == (
        "\nOnce set up, the commands take:\n\n"
        "| | CPU, 2 cores | NVIDIA H200, 16 cores | 2 NVIDIA H200, 16 cores |\n|---|---|---|---|\n"
        "| `make run` | 7 min |  |  |\n| `make test ALL=1` |  | 8 min | 7 min |\n\n"
    )


def test_targets_are_judged():
    import measured

    from bench.problems import CASES

    def rows(ours, xla):
        return {impl: dict(ms=ms, flops=None, nbytes=4e9) for impl, ms in (("cookbook", ours), ("xla", xla)) if ms}

    case = next(case for case in CASES if case.target and case.target.rate == 4.0 and case.target.ratio == 1.2)
    assert "met" in measured.judge(case, rows(1.0, 1.2))[1]
    assert "missed" in measured.judge(case, rows(1.0, 1.1))[1]
    assert "missed" in measured.judge(case, rows(1.1, 2.0))[1]
    assert measured.judge(case, rows(1.0, None)) == ("not measured", "")


def test_the_page_of_results_says_what_peers_are_and_why_one_is_left_out(results_folder):
    import measured

    from bench.problems import PEERS
    from lab import results

    origin = dict(gpu="NVIDIA H200", date="2026-11-29", driver="1", jax="0.11.2", ptxas="13", inputs="random normal")
    row = dict(ms=1.0, min_ms=1.0, spread=0.0, flops=1e9, nbytes=1e6, provenance=origin)
    problem = "varlen_attention/small/bf16"
    why = {"cudnn": "wrong by 0.3 <and so> not timed"}
    values = {f"{problem}/left_out/jax": dict(value=why, provenance=origin)}
    results.save("varlen_attention", "h200", dict(rows={problem: dict(cookbook=row)}, values=values))
    page = measured.results_page()
    assert "- `small/bf16/left_out" not in page
    assert "- `small/bf16`: cudnn is left out: wrong by 0.3 &lt;and so&gt; not timed" in page
    assert all(f"`{name}`, {what}" in page for name, what in PEERS.items())
