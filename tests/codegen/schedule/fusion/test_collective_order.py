"""Collectives of sharded parameters belong to steps in one order, however loops are merged."""

from __future__ import annotations

import random

import pytest

from dcompile.codegen.schedule.fusion.fuse import (
    CollectiveEvent,
    collective_events,
    fuse,
    may_share_a_step,
    ordered_pairs,
)
from dcompile.ir.nodes import Extern, Loop, View
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

A, B, C = (0, "float32", "cpu"), (1, "float32", "cpu"), (2, "float32", "cpu")

BRANCHES = """
program p(x, norm, left, right)
  x: float32[64, 64]
  norm: float32[64]
  left: float32[64, 64]
  right: float32[64, 64]
  scaled: float32[64, 64]
  one: float32[64, 64]
  other: float32[64, 64]
  sum: float32[64, 64]
loop scales [64, 64]
  scaled[i0, i1] = mul(x[i0, i1], norm[i1])
one <- aten.mm.default(scaled, left) [out]
other <- aten.mm.default(x, right) [out]
loop adds [64, 64]
  sum[i0, i1] = add(other[i0, i1], x[i0, i1])
return (one, sum)
"""
"""Two products side by side: a loop behind the second one reads what a loop in front of the first one does."""


def in_order(program, reads, results):
    """Collectives in the order in which a program has them: gathers before a step, and reductions behind it."""
    first, last = {}, {}
    for number, step in enumerate(program.steps):
        for at, group in reads:
            if program.inputs[at] in step.reads:
                first.setdefault(group, number)
        for at, group in results:
            if isinstance(program.outputs[at], View) and program.outputs[at].buffer in step.writes:
                last[group] = number
    gathers = [(step, "gather", group[0]) for group, step in first.items()]
    reductions = [(step, "reduce", -group[0]) for group, step in last.items()]
    return [collective for _, *collective in sorted([*gathers, *reductions])]


def test_a_loop_does_not_take_another_gather_in_front_of_one():
    program = parse(BRANCHES)
    reads = [(1, A), (2, B), (3, C)]
    without = fuse(program)
    assert len(without.steps) == 3, "the loops share x, so they merge, behind the second product"
    found = fuse(program, reads)
    verify(found)
    assert [step.args[1].buffer for step in found.steps if isinstance(step, Extern)] == ["left", "right"]
    assert len(found.steps) == 4


def test_loops_merge_where_products_are_of_one_group():
    program = parse(BRANCHES)
    assert len(fuse(program, [(2, A), (3, A)]).steps) == 3


def test_a_gradient_may_move_within_its_groups_run():
    """The product of the same group keeps the place of the reduction, so the sum of columns may come earlier."""
    program = parse("""
        program p(grad, x, weight)
          grad: float32[64, 64]
          x: float32[64, 64]
          weight: float32[64, 64]
          wide: float32[64, 64]
          down: float32[64, 64]
          bias: float32[64]
          by_weight: float32[64, 64]
        loop scales [64, 64]
          wide[i0, i1] = mul(grad[i0, i1], 2.0)
        down <- aten.mm.default(wide, weight) [out]
        by_weight <- aten.mm.default(wide, x) [out]
        loop sums [64, 64]
          bias[i1] sum= wide[i0, i1]
        return (down, by_weight, bias)
    """)
    found = fuse(program, [(2, A)], [(1, A), (2, A)])
    assert sum(isinstance(step, Loop) for step in found.steps) == 1


@pytest.mark.parametrize(
    ("order", "is_one"),
    [
        ([("gather", A), ("gather", B), ("reduce", C), ("reduce", A)], True),
        ([("gather", B), ("gather", A)], False),
        ([("reduce", A), ("reduce", B)], False),
        ([("reduce", B), ("gather", A)], False),
        ([("reduce", B), ("reduce", A), ("reduce", B)], False),
    ],
    ids=str,
)
def test_one_step_starts_collectives_in_the_order_of_groups(order, is_one):
    assert may_share_a_step([CollectiveEvent(label, (at,), frozenset()) for at, label in enumerate(order)]) is is_one


def test_pairs_lead_forwards():
    program = parse(BRANCHES)
    events = collective_events(program, [(1, A), (2, B), (3, C)], [(0, B)])
    assert [event.label for event in events] == [("gather", A), ("gather", B), ("reduce", B), ("gather", C)]
    assert list(ordered_pairs(events)) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("symbolic", [False, True])
def test_random_programs_keep_the_order_of_their_collectives(symbolic):
    changed = 0
    for seed in range(150):
        program, _ = random_program(seed, 12, symbolic=symbolic)
        draw = random.Random(seed)
        groups = [A, B, C]
        reads = [(at, draw.choice(groups)) for at in range(len(program.inputs)) if draw.random() < 0.7]
        results = [(at, draw.choice(groups)) for at in range(len(program.outputs)) if draw.random() < 0.7]
        found = fuse(program, reads, results)
        verify(found)
        assert in_order(found, reads, results) == in_order(program, reads, results)
        changed += len(fuse(program).steps) < len(found.steps)
    assert changed >= 5
