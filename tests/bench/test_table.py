"""The table of ops: each op of the package is called, timed and fuzzed, or it says why not."""

import inspect

import pytest

import cookbook
from bench import table
from bench.ops import OPS, named

each_op = pytest.mark.parametrize("name", OPS)


def test_every_op_of_the_package_is_in_the_table():
    blackwell = {f"blackwell.{name}" for name in ("matmul", "matmul_mxfp8", "ragged_dot")}
    assert {*OPS} == {*cookbook.__all__} | blackwell


@each_op
def test_every_op_is_timed_and_fuzzed_or_says_why_not(name):
    entry = table.entry(name)
    assert bool(entry.problems) != (name in table.NOT_TIMED)
    assert bool(entry.fuzzed) != (name in table.NOT_FUZZED)


@each_op
def test_operands_have_the_names_of_the_signature(name):
    op, takes = OPS[name], inspect.signature(named(name)).parameters
    if name != "fuse":  # It takes any operands.
        assert [*op.operands] == [*takes][: len(op.operands)]
        assert {*op.options, *op.more, *op.choices, *op.static} <= takes.keys()
    assert {*op.gradients, *op.optional} <= {*op.operands}


@each_op
def test_gradients_that_are_fuzzed_are_those_of_the_table(name):
    """The random problems may also differentiate in operands that the small call does without."""
    fuzzed, op = table.entry(name).fuzzed, OPS[name]
    others = ("fuse", "ssd")  # `fuse` takes any operands, and `a` of SSD has one value per head.
    if fuzzed and fuzzed.gradients and name not in others:
        assert {*op.gradients} <= {*fuzzed.gradients} <= {*op.gradients, *op.more}


def test_every_sample_is_of_an_op():
    found = {topic for name in OPS for topic in table.entry(name).samples}
    assert found == {*table.sample.SAMPLES}
