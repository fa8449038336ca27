"""Places of copies to and from host memory: early enough, late enough, and without a say in what ranks exchange."""

from dataclasses import replace

import pytest

from dcompile.codegen.schedule.memory.memory_summary import summarize_memory
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.order.overlap_collectives import overlap_collectives, summarize_overlap
from dcompile.ir.buffers import Buffer
from dcompile.ir.collective_kinds import HOST_LINK
from dcompile.ir.nodes import Collective, Loop, View, Wait
from dcompile.ir.verify import VerifyError, verify
from tests.codegen.schedule.order.test_overlap_collectives import GROUPS, Build, N, buffer, machine, starts, words
from tests.fuzz.host_copies import copy_steps

WHOLE = (N,), (1,)


def link(gbs):
    """A kernel takes a microsecond, and so does a copy of one buffer over a link of 1 (`gbs`)."""
    return replace(machine(), host_gbs=gbs * N * 4e-3, library_us=1e-6)


def offloaded(kernels=8):
    """A chain of kernels; what the second one makes is read by the third, and offloaded behind that."""
    build, last = Build(), "x"
    for n in range(kernels):
        build.kernel([last], f"a{n}")
        last = f"a{n}"
        if n == 2:
            build.buffers.append(buffer("host"))
            build.steps += copy_steps("offload", View("a1", *WHOLE), "host")
    build.outputs = ["host", last]
    return build.program()


def loaded(kernels=8):
    """A chain of kernels, the last of which reads what is loaded."""
    build, last = Build(), "x"
    for n in range(kernels - 1):
        build.kernel([last], f"a{n}")
        last = f"a{n}"
    build.buffers += [buffer("host"), buffer("device")]
    build.steps += copy_steps("load", View("host", *WHOLE), "device")
    build.kernel([last, "device"], "end")
    build.outputs = ["end"]
    return replace(build.program(), inputs=("x", "host"))


def test_an_offload_starts_as_its_value_is_final_and_is_waited_for_when_it_is_through():
    after = overlap_collectives(offloaded(), link(0.6), GROUPS)
    verify(after)
    assert words(after) == "a0 a1 +host a2 a3 a4 a5 -host a6 a7"


def test_without_room_it_is_waited_for_right_behind_the_last_reader():
    after = overlap_collectives(offloaded(), link(0.6), GROUPS, 0)
    verify(after)
    assert words(after) == "a0 a1 +host a2 -host a3 a4 a5 a6 a7"


def test_a_load_starts_twice_its_time_before_its_reader():
    after = overlap_collectives(loaded(), link(0.6), GROUPS)
    verify(after)
    assert words(after) == "a0 a1 a2 +device a3 a4 a5 a6 -device end"


def test_loads_queue_on_one_link_within_the_room_for_one():
    build, last = Build(), "x"
    build.kernel(["x"], "a0")
    for n in range(1, 4):
        build.buffers += [buffer(f"host{n}"), buffer(f"device{n}")]
        build.kernel([f"a{n - 1}"], f"b{n}")
        build.steps += copy_steps("load", View(f"host{n}", *WHOLE), f"device{n}")
        build.kernel([f"b{n}", f"device{n}"], f"a{n}")
        last = f"a{n}"
    build.outputs = [last]
    before = replace(build.program(), inputs=("x", "host1", "host2", "host3"))
    after = overlap_collectives(before, link(0.1), GROUPS)
    verify(after)
    live, most = set(), 0
    for step in after.steps:
        live |= {name for name in step.writes if name.startswith("device")}
        most = max(most, len(live))
        live -= step.reads if isinstance(step, Loop) else set()
    assert most == 2 and starts(after) == ["device1", "device2", "device3"]
    summary = summarize_overlap(after, link(0.1), GROUPS)
    assert all(found.group == HOST_LINK and found.exposed_seconds > 0 for found in summary)


def test_copies_do_not_change_the_order_in_which_ranks_start_collectives():
    def program(copies):
        build, last = Build(), "x"
        for unit in range(4):
            build.gather(unit, 1000)
            build.kernel([last, f"full{unit}"], f"a{unit}")
            last = f"a{unit}"
            if copies:
                build.buffers.append(buffer(f"host{unit}"))
                build.steps += copy_steps("offload", View(last, *WHOLE), f"host{unit}")
            build.buffers.append(buffer(f"grads{unit}", 1000))
            build.kernel([last], f"grad{unit}", storage=f"within:grads{unit}", offset=0)
            build.reduce("reduce_scatter", unit, 1000, [f"grad{unit}"])
        build.outputs = [last, *(f"host{unit}" for unit in range(4 if copies else 0))]
        return build.program()

    with_copies = overlap_collectives(program(True), link(0.2), GROUPS)
    verify(plan_memory(with_copies))
    between_ranks = [name for name in starts(with_copies) if not name.startswith("host")]
    assert between_ranks == starts(overlap_collectives(program(False), link(0.2), GROUPS))
    assert [bucket.name for bucket in with_copies.buckets] == between_ranks


def on_a_gpu(program):
    buffers = (replace(b, device="cpu" if b.name.startswith("host") else "cuda") for b in program.buffers)
    return replace(program, buffers=tuple(buffers))


def test_on_a_gpu_what_is_copied_may_have_an_allocation_of_its_own_until_the_wait():
    size = 1 << 20

    def large(program):
        wide = tuple(Buffer(b.name, b.dtype, (size,), (1,), b.device) for b in program.buffers)
        steps = (replace(s, outer=(size,)) if isinstance(s, Loop) else s for s in program.steps)
        outputs = tuple(View(view.buffer, (size,), (1,)) for view in program.outputs)
        return replace(program, buffers=wide, steps=tuple(steps), outputs=outputs)

    for program, name in ((offloaded(), "a1"), (loaded(), "device")):
        after = plan_memory(overlap_collectives(large(on_a_gpu(program)), link(0.6), GROUPS))
        verify(after)
        assert after.table[name].storage == "out" or after.table[name].donor
        assert after.table["host"].storage in ("out", "input")
        assert "host" not in {holder.name for holder in summarize_memory(after).holders}


@pytest.mark.parametrize(
    ("program", "move", "what"),
    [
        (loaded, ("-device", -1), "device is touched while device is in flight"),
        (offloaded, ("-host", None), "nothing waits for host"),
        (offloaded, ("+host", 0), "a1 is sent before it is written"),
    ],
)
def test_planted_faults_are_found(program, move, what):
    after = overlap_collectives(program(), link(0.6), GROUPS)
    word, to = move
    steps = [*after.steps]
    kind = Wait if word[0] == "-" else Collective
    (at,) = [n for n, step in enumerate(steps) if isinstance(step, kind)]
    step = steps.pop(at)
    if to is not None:
        steps.insert(to % (len(steps) + 1), step)
    with pytest.raises(VerifyError, match=what):
        verify(replace(after, steps=tuple(steps)))


def test_memory_that_a_copy_reads_is_not_reused_before_its_wait():
    after = plan_memory(overlap_collectives(offloaded(), link(0.6), GROUPS))
    verify(after)
    meanwhile = after.table["a4"]
    moved = tuple(
        replace(b, storage=meanwhile.storage, offset=meanwhile.offset) if b.name == "a1" else b for b in after.buffers
    )
    with pytest.raises(VerifyError, match="alive together and overlap"):
        verify(replace(after, buffers=moved))
