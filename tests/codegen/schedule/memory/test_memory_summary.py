"""What is reported about a memory plan agrees with the plan, on hand-built programs."""

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.memory.memory_summary import memory_headline, memory_lines, summarize_memory
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.memory.reorder_for_peak import peak_bytes
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.nodes import Apply, Load, Loop, Program, Store, View

N = 1 << 14
"""Elements of each buffer: 64 KiB."""


def loop(target, *sources):
    """Adds up the sources, element by element, read backwards: no buffer is taken over in place."""
    loads = tuple(Load(name, var("i0") * -1 + (N - 1), "float32") for name in sources)
    refs = (0, len(loads) - 1)
    return Loop(
        f"k_{target}", (N,), (), (*loads, Apply("add", refs, "float32")), (Store(target, var("i0"), len(loads)),)
    )


def program(steps, outputs, donated=()):
    names = dict.fromkeys(["x", *(name for step in steps for name in (*step.reads, *step.writes))])
    buffers = tuple(Buffer(name, "float32", (N,), contiguous_strides((N,))) for name in names)
    views = tuple(View(name, (N,), (1,)) for name in outputs)
    return replace(Program("p", ("x",), views, buffers, tuple(steps)), donated=tuple(donated))


def test_the_peak_is_the_arena_with_all_results_that_are_there():
    planned = plan_memory(program([loop("a", "x"), loop("b", "a"), loop("y", "b", "a"), loop("z", "y")], ["y", "z"]))
    found = summarize_memory(planned)
    assert found.arena_bytes == planned.arena_bytes and found.peak_bytes == peak_bytes(planned)
    assert sum(holder.nbytes for holder in found.holders) == found.peak_bytes
    kinds = {holder.name: holder.kind for holder in found.holders}
    assert kinds["z"] == kinds["y"] == "result" and found.donated == ()
    assert memory_headline(planned).startswith(f"arena {found.arena_bytes // 1024}.0 KiB with {found.in_arena} buffers")


def test_a_buffer_in_a_result_that_is_not_written_yet_is_named_with_its_donor():
    planned = plan_memory(program([loop("a", "x"), loop("b", "a"), loop("y", "b")], ["y"]))
    placed = {buffer.name: buffer.storage for buffer in planned.buffers if (buffer.storage or "").startswith("in:")}
    found = summarize_memory(planned)
    assert placed and {place.name: f"in:{place.donor}" for place in found.placed} == placed
    name, donor = next(iter(placed.items()))
    assert f"{name} (64.0 KiB) is placed in {donor.removeprefix('in:')}" in list(memory_lines(planned))


@pytest.mark.parametrize("donated", [(), ("x",)])
def test_a_donated_input_counts_until_it_was_read(donated):
    planned = plan_memory(program([loop("y", "x"), loop("z", "y"), loop("w", "z")], ["y", "z", "w"], donated))
    found = summarize_memory(planned)
    assert found.donated == donated and found.peak_bytes == peak_bytes(planned)
    assert ("donated inputs: x" in list(memory_lines(planned))) == bool(donated)


def test_an_empty_program_holds_nothing():
    planned = plan_memory(program([], []))
    assert summarize_memory(planned).peak_bytes == 0 and list(memory_lines(planned)) == []
    assert memory_headline(planned).startswith("arena 0 B")


def test_the_largest_holders_are_listed_and_the_others_counted():
    steps = [loop(f"y{n}", "x") for n in range(10)]
    shown = list(memory_lines(plan_memory(program(steps, [f"y{n}" for n in range(10)]))))
    assert shown[0] == "at the peak: 64.0 KiB of y0 (result)" and shown[-1] == "at the peak: 128.0 KiB of 2 more"
    assert len(shown) == 9 and np.unique(shown).size == 9
