"""Processes that share a GPU measure one at a time, and the others stand still."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

import lab
from lab import turns

WORK = """
import sys, time
import lab

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


KILLED = """
import sys, time
import lab

with lab.alone():
    print("alone", flush=True)
    time.sleep(600)
"""


def test_one_that_is_killed_while_it_measures_stops_nobody(tmp_path):
    environment = os.environ | dict(COOKBOOK_TURNS=str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"])
    (tmp_path / str(other.pid)).touch()
    try:
        killed = subprocess.Popen([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE)
        assert killed.stdout.readline() == b"alone\n" and _state(other.pid) == "T"
        killed.kill()
        killed.wait()
        end = time.monotonic() + 60
        while _state(other.pid) == "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert _state(other.pid) != "T"
    finally:
        other.kill()
        other.wait()


def _state(pid: int) -> str:
    """A letter: T of a process that is stopped."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


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
