"""Which loops share a launch; what a joint kernel computes is tried in test_kernel.py, with all others."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dcompile.codegen.emit.host import batch_launches
from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import AllReduceKernel, Kernels, KernelSource
from dcompile.codegen.emit.triton import horizontal_fusion, one_shot_all_reduce
from dcompile.codegen.emit.triton import kernel as triton_kernel
from dcompile.codegen.emit.triton.horizontal_fusion import early_inputs, first_launch, fuse_launches, start_next_first
from dcompile.codegen.emit.triton.library import AFTER, START_NEXT_FIRST, WAIT_FIRST
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.order.dependences import group_updates
from dcompile.ir.nodes import Collective, Extern, Program, Wait
from dcompile.toolchain import triton_version
from tests.codegen.emit import loops
from tests.codegen.emit.all_kernels import of_loops
from tests.codegen.emit.loops import OPTIMIZED, on_a_gpu
from tests.codegen.emit.triton.test_kernel import compiled, dumped, resources


def launched(program: Program) -> list[tuple[int, int]]:
    """Of each loop: programs that are launched in its place, and arguments."""
    kernels = fuse_launches(of_loops(program), program).calls
    return [(kernel.launches[-1].grid, len(kernel.arguments)) for kernel in kernels]


def test_neighbours_run_side_by_side():
    """Softmax of 6 rows is 6 programs of 4 warps here, as RMSNorm of 5 is 5; the last loop needs the first."""
    program = loops.side_by_side()
    kernels = [triton_kernel.emit(step, program.table) for step in program.steps]
    assert len({kernel.launches[0].warps for kernel in kernels}) == 1, "else they could not be joined"
    grids = [kernel.launches[0].grid for kernel in kernels]
    assert launched(program) == [(0, 0), (0, 0), (sum(grids[:3]), 8), (grids[3], 2)]


def test_equal_loops_share_their_statements():
    program = loops.side_by_side()
    kernel = fuse_launches(of_loops(program), program).calls[2]
    assert kernel.text.count("def part") == 2 and kernel.text.count("part0(pid") == 3


def started(sizes: list[int]) -> list[KernelSource]:
    """What an optimizer of parameters of these sizes launches."""
    program = group_updates(on_a_gpu(loops.optimizer(sizes)))
    kernels = fuse_launches(of_loops(program), program).calls
    return [kernel for kernel in kernels if kernel.launches[0].grid]


def test_many_equal_loops_are_one_launch_of_one_text():
    """What sixteen counts will be, and thirteen updates of one size. Three others and five counts are branches."""
    kernels = started(OPTIMIZED)
    assert [len(kernel.arguments) for kernel in kernels] == [16 * 2, 1 + 13 * 3, 1 + 3 * 3 + 5, 11]
    assert ["ld.param" in kernel.text for kernel in kernels] == [True, True, False, True]
    assert all(kernel.text.count("part0(") == 2 for kernel in kernels[:2])
    assert kernels[1].text.count("ld.param.b64") == 3, "what all share is no part of the table"


def test_equal_loops_of_several_sizes_are_one_launch():
    """Sixteen large updates, of as many programs as their sizes make: each program finds out whose it is."""
    large = [1 << 22] * 9 + [1 << 20] * 7
    updates = started(large)[1]
    blocks = [size // 1024 for size in large]
    assert (updates.launches[0].grid, len(updates.arguments)) == (sum(blocks), 1 + 16 * 3)
    head = updates.text.split("def dcompile_joint")[1]
    found = [_row(head, pid) for pid in (0, blocks[0] - 1, blocks[0], sum(blocks[:9]), sum(blocks) - 1)]
    assert found == [(0, 0), (0, blocks[0] - 1), (1, 0), (9, 0), (15, blocks[-1] - 1)]


def _row(text: str, pid: int) -> tuple[int, int]:
    """The number of a program's kernel, and its own among that one's."""
    lines = [line.strip("\n")[4:] for line in text.split("\n") if line.startswith("    ")]
    names = {"pid": pid}
    exec("\n".join(line for line in lines if re.match(r"if|elif|else| |number|place", line)), names)
    return names["number"], names["place"]


def test_of_equal_loops_only_few_sizes_share_a_launch(monkeypatch):
    """A program asks for one after another."""
    monkeypatch.setattr(horizontal_fusion, "MAX_DIFFERENT_LOOPS", 2)
    updates = [k for k in started([1 << 20] * 3 + [1 << 21] * 3 + [1 << 22] * 3) if k.launches[0].warps > 1]
    assert [len(kernel.arguments) for kernel in updates] == [1 + 6 * 3, 1 + 3 * 3]


def test_a_launch_has_no_more_addresses_than_a_kernel_takes(monkeypatch):
    monkeypatch.setattr(horizontal_fusion, "MAX_ADDRESSES", 40)
    program = group_updates(on_a_gpu(loops.optimizer([300] * 30)))
    kernels = fuse_launches(of_loops(program), program).calls
    given = [len(kernel.arguments) for kernel in kernels if kernel.launches[0].grid]
    assert max(given) <= 40 and len(given) == 2 + 3 + 1, "20 of 30 next counts, 13 of 30 updates, 30 counts"


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
def test_addresses_from_the_table_are_known_to_be_aligned(tmp_path):
    """The table is in constant memory, at a place in a register; what it leads to is read 16 bytes at a time."""
    kernel = started([1 << 18] * 12)[1]
    ptx, _, cubin = compiled(kernel, 90, tmp_path)
    widths = re.findall(r"(?:ld|st)\.global[.\w]*?(v\d)?\.(?:b|u|f)(\d+)", ptx)
    assert sum(int(many[1:]) * int(bits) == 128 for many, bits in widths if many) >= 3, "two reads and a write"
    used = resources(cubin, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert ptx.count(f"mov.b64 p, {kernel.launches[0].function}_param_0;") == 3


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
def test_a_whole_table_is_in_order(tmp_path):
    """As the launch gives them: arguments lie one behind another, from where constant memory has arguments on."""
    kernel = started([1 << 18] * 150)[1]
    assert len(kernel.arguments) == 112 * 3 + 1
    _, _, cubin = compiled(kernel, 90, tmp_path)
    text = dumped("-sass", cubin, tmp_path)
    places = sorted(int(place, 16) for place in re.findall(r"LDC\.64 R\d+, c\[0x0\]\[R\d+\+(0x\w+)\]", text))
    assert places == [0x210, 0x218, 0x220]


def test_loops_that_take_turns_with_memory_run_in_turn():
    """What the second loop writes lies where the first one reads."""
    program = loops.side_by_side()
    shared = ("x0", "y1")
    buffers = tuple(replace(b, storage="arena", offset=0) if b.name in shared else b for b in program.buffers)
    assert launched(replace(program, buffers=buffers))[0][0] > 0


def test_loops_that_are_not_alike_are_joined_only_if_tiny(monkeypatch):
    """A kernel that does much more than the others would leave them few registers; the last loops are alike."""
    program = loops.side_by_side()
    kernels = [triton_kernel.emit(step, program.table) for step in program.steps]
    kernels[1] = replace(kernels[1], cost=100)
    assert [kernel.launches[0].grid > 0 for kernel in fuse_launches(Kernels(tuple(kernels)), program).calls] == [
        False,
        False,
        True,
        True,
    ]
    monkeypatch.setattr(horizontal_fusion, "TINY_BYTES", 1)
    assert [kernel.launches[0].grid > 0 for kernel in fuse_launches(Kernels(tuple(kernels)), program).calls] == [
        True,
        True,
        False,
        True,
    ]
    kernels[1] = replace(kernels[1], cost=kernels[0].cost)
    assert not fuse_launches(Kernels(tuple(kernels)), program).calls[0].launches[0].grid


@pytest.mark.parametrize(
    ("name", "joined"), [("MAX_DIFFERENT_LOOPS", 1), ("MAX_JOINED_BYTES", 0), ("MAX_ADDRESSES", 0)]
)
def test_limits(name, joined, monkeypatch):
    """Two neighbours are equal, and as many as one other loop may share their launch: none."""
    monkeypatch.setattr(horizontal_fusion, name, 1)
    assert sum(not grid for grid, _ in launched(loops.side_by_side())) == joined


def test_what_a_joint_kernel_needs_is_not_released_before_it_starts(monkeypatch):
    """Memory that a large result asks for is not that of a loop which waits to be part of a later kernel."""
    monkeypatch.setattr(batch_launches, "ROOM_BYTES", 1)
    program = loops.side_by_side()
    program = plan_memory(replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers)))
    lines = host_program.emit(program, fuse_launches(of_loops(program), program)).split("def call(")[1].splitlines()
    gone = {name: place for place, line in enumerate(lines) for name in re.findall(r"\bdel (\w+)", line)}
    assert gone
    for name, place in gone.items():
        assert not re.search(rf"\b(_p_)?{name}\b", "\n".join(lines[place + 1 :])), f"{name} is used behind line {place}"


def test_what_is_constant_is_read_before_a_kernel_waits():
    """What nothing writes, and only behind the first launch, before which anything may have run."""
    program = loops.side_by_side()
    assert early_inputs(Kernels(), program, "inference") == frozenset(program.inputs)
    assert early_inputs(Kernels(), replace(program, donated=program.inputs), "inference") == frozenset()
    kernels = of_loops(program)
    assert first_launch(kernels.calls) == 0 and first_launch(fuse_launches(kernels, program).calls) == 2
    (loop, *_), early = program.steps, re.compile(r"tl.load\(.*\n(.*\n)*    after_others_\(\)")
    assert not early.search(triton_kernel.emit(loop, program.table, frozenset()).text)
    assert early.search(triton_kernel.emit(loop, program.table, frozenset(loop.reads)).text)


@pytest.mark.parametrize(("rows", "waits"), [(64, True), (2048, True), (8192, False)])
def test_kernels_of_few_programs_start_while_others_end(rows, waits):
    """Each program of a large one would wait in its turn."""
    program = loops.rms_norm(rows, 4096, "bfloat16")
    (loop,) = program.steps
    assert (AFTER in triton_kernel.emit(loop, program.table, frozenset()).text) == waits
    assert AFTER not in triton_kernel.emit(loop, program.table).text


def test_kernels_that_wait_are_not_joined_with_others():
    """A joint kernel starts early as a whole."""
    program = loops.side_by_side()
    kernels = [
        triton_kernel.emit(step, program.table, frozenset() if n else None) for n, step in enumerate(program.steps)
    ]
    assert [kernel.launches[0].grid > 0 for kernel in fuse_launches(Kernels(tuple(kernels)), program).calls] == [
        True,
        False,
        False,
        True,
    ]


def test_beside_collectives_kernels_start_in_turn():
    program = loops.side_by_side()
    call = Extern("_c10d_functional.all_reduce.default", (), (), (None,), "alloc", effect=True)
    assert early_inputs(Kernels(), replace(program, steps=(*program.steps, call)), "inference") is None


def test_collectives_that_are_kernels_change_nothing():
    program = loops.side_by_side()
    steps = (*program.steps, Collective("all_reduce", "x", "own0", ("x",)), Wait("x", ("x",), ()))
    together = replace(program, steps=steps)
    for bucket, expected in (("x", early_inputs(Kernels(), program, "inference")), ("y", None)):
        kernels = Kernels(all_reduces={bucket: AllReduceKernel(one_shot_all_reduce.source("float32"), 1)})
        assert early_inputs(kernels, together, "inference") == expected


def test_all_kernels_but_the_first_let_the_next_one_start_at_once():
    """The previous program, which may write what this one reads early, has ended behind the first one's wait."""
    program = loops.side_by_side()
    kernels = of_loops(program, frozenset())
    first, *others = start_next_first(kernels, program, "inference").calls
    assert WAIT_FIRST in first.text and first == kernels.calls[0]
    for kernel, before in zip(others, kernels.calls[1:], strict=True):
        assert START_NEXT_FIRST in kernel.text and WAIT_FIRST not in kernel.text
        assert kernel.name != before.name and kernel.launches == before.launches
    in_turn = of_loops(program)
    assert start_next_first(in_turn, program, "inference") == in_turn
    assert start_next_first(kernels, program, "forward") == kernels
