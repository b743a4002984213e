"""Tables of figures, and what a rung changes."""

import functools
import math

import pytest

import lab


def figure(ms=1.0, gpu="NVIDIA H200", day="02", **how):
    return lab.Measurement("p/1x1/bf16", "cookbook", ms, provenance=dict(gpu=gpu, date=f"2026-01-{day}"), **how)


def before(x):
    y = x + 1
    return y


def after(x):
    y = x + 2
    return y


def test_columns_are_aligned_and_what_was_never_measured_is_a_dash(capsys):
    lab.table(("tile", "us"), ("64x64", 12.5), (128, math.nan))
    assert capsys.readouterr().out == " tile    us\n64x64  12.5\n  128     -\n"


@pytest.mark.parametrize(
    "figures, said",
    [
        ([figure()], "[measured on NVIDIA H200]"),
        ([figure(recorded=True)], "[recorded on NVIDIA H200, 2026-01-02]"),
        ([figure(recorded=True), figure(recorded=True, stale=True)], "02] (STALE: the code has changed since)"),
        ([figure(), figure(recorded=True)], "[measured on NVIDIA H200; recorded on NVIDIA H200, 2026-01-02]"),
        (
            [figure(recorded=True, day=day) for day in ("04", "03", "09")] + [figure(recorded=True, gpu="NVIDIA H100")],
            "[recorded on NVIDIA H100, 2026-01-02; recorded on NVIDIA H200, 2026-01-03 to 2026-01-09]",
        ),
        ([figure(math.nan, stale=True)], "[no recorded figures, and no GPU to measure them]"),
    ],
    ids=str,
)
def test_a_table_says_where_its_figures_come_from(capsys, figures, said):
    lab.table(("a",), (1,), measured=figures)
    assert capsys.readouterr().out.endswith(said + "\n")


def test_a_row_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="zip"):
        lab.table(("a", "b"), (1,))


def test_a_diff_has_the_lines_that_changed():
    diff = lab.show_diff(before, functools.partial(after, 1))
    changed = [line for line in repr(diff).splitlines() if line[0] in "+-"]
    assert changed == ["- def before(x):", "-     y = x + 1", "+ def after(x):", "+     y = x + 2"]
    assert "return y" in repr(diff)
    assert repr(lab.show_diff(before, before)) == ""


def test_a_diff_leaves_out_what_is_far_from_a_change_and_indentation():
    lines = [f"line {i}" for i in range(20)]
    changed = ["    " + line for line in lines]
    changed[3], changed[15] = "x", "y"
    shown = repr(lab.show_diff("\n".join(lines), "\n".join(changed), context=1)).splitlines()
    assert shown == [
        "      line 2",
        "- line 3",
        "+ x",
        "      line 4",
        "...",
        "      line 14",
        "- line 15",
        "+ y",
        "      line 16",
    ]


def test_a_diff_in_a_notebook_shows_code_as_it_stands():
    shown = lab.show_diff("a < b", "a > b")._repr_html_()
    assert "- a &lt; b" in shown and "+ a &gt; b" in shown and "<b" not in shown.replace("<br", "")


@pytest.mark.parametrize(
    "mine, found, said",
    [
        (2.1, 2.0, "your guess: 2.1 ms, within 10% of 2 ms"),
        (1, 2.0, "your guess: 1 ms, 2 times too low for 2 ms"),
        (6.0, 2.0, "your guess: 6 ms, 3 times too high for 2 ms"),
        (0, 0, "your guess: 0 ms, within 10% of 0 ms"),
        (0, 2.0, "your guess: 0 ms, too low for 2 ms"),
        (3, 0.0, "your guess: 3 ms, too high for 0 ms"),
        (6.0, math.nan, "your guess: 6 ms, there is no figure yet to compare it with"),
    ],
)
def test_a_guess_stands_beside_the_figure(capsys, mine, found, said):
    lab.guess(mine, found, "ms")
    assert capsys.readouterr().out == said + "\n"


def test_without_a_guess_nothing_is_said(capsys):
    lab.guess(None, 2.0, "ms")
    assert not capsys.readouterr().out


def test_a_paragraph_is_shown_as_text_once_its_figures_are_known():
    assert lab.say(f"It takes {2.0:.1f} ms.")._repr_markdown_() == "It takes 2.0 ms."
    for figure in (math.nan, None):
        assert "Not recorded yet" in lab.say(f"It takes {figure} ms.")._repr_markdown_()
    assert lab.say("No nanosecond, and Nonetheless.").text == "No nanosecond, and Nonetheless."


@pytest.mark.parametrize("mine", ["2 ms", -1.0, math.nan])
def test_a_guess_is_a_number(mine):
    with pytest.raises(ValueError, match="my_guess = .*; must be a number of ms"):
        lab.guess(mine, 2.0, "ms")
