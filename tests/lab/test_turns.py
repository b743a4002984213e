"""Processes that share a GPU measure one at a time, and the others stand still."""

import os
import subprocess
import sys

import pytest

from cookbook import lab
from cookbook.lab import turns

WORK = """
import sys, time
from cookbook import lab

def note(what):
    with open(sys.argv[2], "a") as file:
        file.write(f"{sys.argv[1]} {what}\\n")

note("begins")
end = time.time() + 60
while open(sys.argv[2]).read().count("begins") < 2 and time.time() < end:
    time.sleep(0.01)
for _ in range(3):
    for _ in range(10):
        note("works")
        time.sleep(0.005)
    with lab.alone(), lab.alone():
        note("enters")
        time.sleep(0.1)
        note("leaves")
"""


def test_while_one_is_alone_the_others_do_nothing(tmp_path):
    notes, environment = tmp_path / "notes", os.environ | dict(COOKBOOK_TURNS=str(tmp_path / "turns"))
    command = [sys.executable, "-c", WORK]
    both = [subprocess.Popen([*command, name, str(notes)], env=environment) for name in ("a", "b")]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    inside = None
    for name, what in map(str.split, notes.read_text().splitlines()):
        assert inside in (None, name) and (what == "leaves") == (inside == name), (
            f"{name} {what} while {inside} is alone"
        )
        inside = {"enters": name, "leaves": None}.get(what, inside)
    assert notes.read_text().count("leaves") == 6


def test_without_the_variable_nobody_waits(monkeypatch):
    monkeypatch.delenv("COOKBOOK_TURNS", raising=False)
    with lab.alone():
        assert not turns._held


def test_a_process_that_has_ended_is_no_hindrance_and_an_error_ends_the_turn(monkeypatch, tmp_path):
    monkeypatch.setenv("COOKBOOK_TURNS", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / str(ended.pid)).touch()
    with pytest.raises(KeyError), lab.alone():
        assert turns._held
        raise KeyError
    assert not turns._held and {path.name for path in tmp_path.iterdir()} == {"lock", str(os.getpid())}
