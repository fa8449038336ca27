"""Updates of one kind follow one another, and nothing else moves."""

import random
from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.order.dependences import group_updates
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Collective, Wait
from dcompile.ir.verify import verify
from tests.codegen.emit import cases, loops
from tests.codegen.emit.loops import on_a_gpu
from tests.codegen.schedule.order.test_dependences import respects
from tests.ir.fuzz import random_program


def names(program):
    return [step.name if hasattr(step, "name") else step.bucket for step in program.steps]


def test_counts_come_first_and_then_updates_size_by_size():
    before = on_a_gpu(loops.optimizer([30, 50, 30]))
    after = group_updates(before)
    verify(after)
    later = ["update0", "update2", "update1", "count0", "count1", "count2"]
    assert names(after) == ["next0", "next1", "next2", *later]
    assert respects(after.steps, before.steps)


def test_values_stay_bit_for_bit():
    before = on_a_gpu(loops.optimizer([30, 50, 30, 50]))
    inputs = cases.random_inputs(before)
    for one, two in zip(interpret(before, inputs), interpret(group_updates(before), inputs), strict=True):
        assert np.array_equal(one, two)


def test_a_later_step_waits_for_an_earlier_one():
    """Two steps of an optimizer: what follows from the second count may not come before the first update."""
    once = on_a_gpu(loops.optimizer([30, 30]))
    twice = replace(once, steps=once.steps * 2)
    assert names(group_updates(twice)) == ["next0", "next1", "update0", "update1", "count0", "count1"] * 2


def test_nothing_passes_a_collective_or_what_makes_new_memory():
    before = on_a_gpu(loops.optimizer([600, 600]))
    first, second = before.steps[:2], before.steps[2:]
    task = (Collective("all_reduce", "b", "ddp", ("g1",)), Wait("b", ("g1",)))
    apart = replace(before, steps=(*first, *task, *second))
    assert group_updates(apart).steps == apart.steps
    made = replace(before, inputs=tuple(name for name in before.inputs if not name.startswith("p")))
    assert group_updates(made).steps == made.steps
    there = loops.optimizer([30, 30])
    assert group_updates(there).steps == there.steps, "the CPU's kernels run in turn anyway"


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_keep_their_order_of_reads_and_writes(seed):
    program, _ = random_program(seed, 8)
    program = on_a_gpu(program)
    names = [buffer.name for buffer in program.buffers]
    some = tuple(dict.fromkeys((*program.inputs, *random.Random(seed).sample(names, len(names) // 2))))
    after = group_updates(replace(program, inputs=some))
    assert respects(after.steps, program.steps)
