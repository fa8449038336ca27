"""Horizontal fusion and early launches: what a GPU does while kernels begin and end.

Several independent small loops become one launch and run at the same time. A launch in a CUDA graph costs a microsecond
or two, and the end of one kernel leaves most of a GPU idle. A program of a fused kernel finds its loop by its number.
Each loop keeps its own statements, so values do not depend on fusion.

Some kernels let their successor start before they have waited for their predecessor. Kernels that decode a token take 2
to 30 us. One that reads weights can hold 33 MB of them in registers when its turn comes, if it has started early
enough: beside a norm and the all-reduce before it, not beside the norm alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from dcompile.codegen.emit.target import EmitRequest, Kernels, KernelSource, Launch
from dcompile.codegen.emit.triton.kernel import finished, function_text
from dcompile.codegen.emit.triton.library import AFTER, START_NEXT_FIRST, WAIT_FIRST
from dcompile.codegen.emit.triton.one_shot_all_reduce import end_with_loops
from dcompile.codegen.emit.triton.ops import ALIGNED, POINTERS, TYPES
from dcompile.codegen.emit.triton.printer import overlap
from dcompile.codegen.emit.triton.target import emit
from dcompile.device_traits import loop_traits
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Wait

MAX_DIFFERENT_LOOPS = 8
"""Loops in one launch, unless they are equal; of equal loops, the number of different sizes."""
MAX_ADDRESSES = 448
"""Buffers in one launch: a kernel takes 4 KiB of arguments. For equal loops this is the only limit."""
MAX_JOINED_BYTES = 1 << 28
"""Bytes of a loop's buffers: longer kernels lose nothing by running in turn, and may lose by sharing registers."""
TINY_BYTES = 1 << 22
"""Bytes of a loop's buffers below which it takes no longer than a launch, whatever it computes."""
PID = "tl.program_id(0)"
TABLE = "kernel_param_0"
"""LLVM's name of a kernel's first argument."""


def fuse_launches(kernels: Kernels, program: Program) -> Kernels:
    """Fuse the kernels of concurrent neighbours into one launch, but those that all-reduces may end with.

    A fused kernel takes the place of its last loop; each other place gets a launch of no programs. Relies on: memory is
    planned, since independent loops may still share memory at different times.
    """
    table, calls, found = program.table, kernels.calls, list(kernels.calls)
    group: list[int] = []
    loops: dict[int, Loop] = {}
    for step in program.steps:
        if not isinstance(step, Loop):
            _close(group, loops, found)
            continue
        number = len(loops)
        loops[number] = step
        if number in kernels.epilogues or not _is_small(step, calls[number], table):
            _close(group, loops, found)
        elif _is_room([*group, number], calls) and all(
            _may_join(loops[n], calls[n], step, calls[number], table) for n in group
        ):
            group.append(number)
        else:
            _close(group, loops, found)
            group.append(number)
    _close(group, loops, found)
    return replace(kernels, calls=tuple(found))


def early_inputs(kernels: Kernels, program: Program, kind: str) -> frozenset[str] | None:
    """Return the inputs that no step of the program writes, so that kernels may read them while others still run.

    None where kernels must start in turn: beside NCCL's streams, and in training, whose kernels run longer than their
    launch.
    """
    buckets = {step.bucket for step in program.steps if isinstance(step, (Collective, Wait))}
    if kind != "inference" or not buckets <= kernels.all_reduces.keys():
        return None
    if any(isinstance(step, Extern) and step.op.startswith("_c10d_functional.") for step in program.steps):
        return None
    written = frozenset[str]().union(*(step.writes for step in program.steps))
    return frozenset(program.inputs) - written - frozenset(program.donated)


def first_launch(calls: Sequence[KernelSource]) -> int:
    """Return the first kernel that starts for all sizes; when a later one starts, no earlier program runs any more.

    See `library.AFTER`.
    """
    grids = ([launch.grid for launch in kernel.launches] for kernel in calls)
    return next((n for n, found in enumerate(grids) if any(isinstance(g, int) and g > 0 for g in found)), len(calls))


def _close(group: list[int], loops: Mapping[int, Loop], found: list[KernelSource]) -> None:
    """Fuse the collected group, and start a new one."""
    if len(group) > 1:
        kernel = _joint([found[n] for n in group])
        (launch,) = kernel.launches
        for n in group[:-1]:
            nothing = replace(launch, grid=0, arguments=())
            found[n] = replace(kernel, arguments=(), origin=loops[n].origin, launches=(nothing,))
        found[group[-1]] = kernel
    group.clear()


def _is_room(group: Sequence[int], calls: Sequence[KernelSource]) -> bool:
    """May all of these share a launch?"""
    kernels = [calls[n] for n in group]
    if sum(len(kernel.arguments) for kernel in kernels) > MAX_ADDRESSES:
        return False
    return len(group) <= MAX_DIFFERENT_LOOPS or (_are_equal(kernels) and len(_runs(kernels)) <= MAX_DIFFERENT_LOOPS)


def _are_equal(kernels: Sequence[KernelSource]) -> bool:
    """Do these differ only in their buffers and numbers of programs?"""
    first, *others = ((kernel.text, replace(kernel.launches[0], grid=0)) for kernel in kernels)
    return all(other == first for other in others)


def _runs(kernels: Sequence[KernelSource]) -> list[tuple[int, int]]:
    """Return (programs of each, number of kernels) for runs of neighbours with equally many programs."""
    return [(grid, sum(1 for _ in run)) for grid, run in groupby(map(_grid, kernels))]


def _is_small(loop: Loop, kernel: KernelSource, table: Mapping[str, Buffer]) -> bool:
    """Is it one launch with addresses as its only arguments, and are its buffers not large?"""
    if len(kernel.launches) != 1 or kernel.numbers or kernel.sizes or loop.product is not None:
        return False
    known = [kernel.launches[0].grid, *(table[name].extent for name in loop.reads | loop.writes)]
    if not known[0] or not all(isinstance(size, int) for size in known):
        return False
    return _nbytes(loop, table) <= MAX_JOINED_BYTES


def _nbytes(loop: Loop, table: Mapping[str, Buffer]) -> int:
    return sum(table[name].nbytes for name in loop.reads | loop.writes)


def _are_alike(first: KernelSource, second: KernelSource) -> bool:
    """Are both of one kind and of similar work? Otherwise the larger one's registers would limit programs of both."""
    costs = sorted(kernel.cost for kernel in (first, second))
    return first.kind == second.kind and costs[1] <= 2 * costs[0]


def _may_join(a: Loop, first: KernelSource, b: Loop, second: KernelSource, table: Mapping[str, Buffer]) -> bool:
    """Do both have as many threads a program and wait alike, and does neither write memory that the other touches?"""
    if first.launches[0].warps != second.launches[0].warps or (AFTER in first.text) != (AFTER in second.text):
        return False
    if not _are_alike(first, second) and not all(_nbytes(loop, table) <= TINY_BYTES for loop in (a, b)):
        return False
    touched = [(a.writes, b.reads | b.writes), (b.writes, a.reads)]
    return not any(overlap(table[x], table[y]) for written, others in touched for x in written for y in others)


def _joint(kernels: Sequence[KernelSource]) -> KernelSource:
    """Return one kernel whose programs are those of all `kernels`, one after another."""
    types: dict[str, str] = {}
    for kernel in kernels:
        (launch,) = kernel.launches
        types |= {kernel.arguments[n]: kind for n, kind in zip(launch.arguments, launch.types, strict=True)}
    functions, buffers, lines = (_equal_kernels if _are_equal(kernels) else _branches)(kernels)
    parts = [f"@triton.jit\ndef {name}{text}" for text, name in functions.items()]
    parts.append(function_text("kernel", (f"a{n}" for n in range(len(buffers))), lines))
    grid, warps = sum(_grid(kernel) for kernel in kernels), kernels[0].launches[0].warps
    launch = Launch("kernel", grid, warps, tuple(range(len(buffers))), tuple(types[name] for name in buffers))
    origin = tuple(dict.fromkeys(line for kernel in kernels for line in kernel.origin))
    cost = sum(kernel.cost for kernel in kernels)
    made = finished("joint", parts, [launch], buffers, cost, {"kernel": "joint"}, origin)
    return replace(made, text=made.text.replace(TABLE, f"{made.launches[0].function}_param_0"))


def _grid(kernel: KernelSource) -> int:
    grid = kernel.launches[0].grid
    assert isinstance(grid, int), "only kernels of known size are joined"
    return grid


def _statements(kernel: KernelSource) -> str:
    """Return a kernel as a function of a program's number and the addresses, from its parenthesis on."""
    body = kernel.text[kernel.text.index(f"def {kernel.launches[0].function}(") :].split("):\n", 1)[1]
    head = ", ".join(("pid", *(f"a{n}" for n in range(len(kernel.arguments)))))
    return f"({head}):\n{body.replace(PID, 'pid')}"


Parts = tuple[dict[str, str], tuple[str, ...], list[str]]
"""Functions by their text, the buffers of a fused kernel, and its statements."""


def _branches(kernels: Sequence[KernelSource]) -> Parts:
    """Fuse different kernels: each program takes the branch of its kernel."""
    buffers = tuple(dict.fromkeys(name for kernel in kernels for name in kernel.arguments))
    names = {buffer: f"a{n}" for n, buffer in enumerate(buffers)}
    functions: dict[str, str] = {}
    lines, first = [f"    pid = {PID}"], 0
    for place, kernel in enumerate(kernels):
        part = functions.setdefault(_statements(kernel), f"part{len(functions)}")
        test = f"{'elif' if place else 'if'} pid < {first + _grid(kernel)}"
        lines.append(f"    {'else' if place == len(kernels) - 1 else test}:")
        given = ", ".join((f"pid - {first}" if first else "pid", *(names[name] for name in kernel.arguments)))
        lines.append(f"        {part}({given})")
        first += _grid(kernel)
    return functions, buffers, lines


def _equal_kernels(kernels: Sequence[KernelSource]) -> Parts:
    """Fuse equal kernels: one copy of their statements takes the addresses of a program's own kernel.

    These addresses are a table, kernel by kernel, in the kernel's arguments themselves. A GPU holds these in constant
    memory, where an instruction reads one at a computed offset. The table comes first, shared arguments follow.
    """
    rows = list(zip(*(kernel.arguments for kernel in kernels), strict=True))
    own = [n for n, row in enumerate(rows) if len(set(row)) > 1]
    shared = [n for n, row in enumerate(rows) if len(set(row)) == 1]
    buffers = tuple(kernel.arguments[n] for kernel in kernels for n in own) + tuple(rows[n][0] for n in shared)
    (launch,) = kernels[0].launches
    lines = [f"    pid = {PID}", *_dispatch_statements(_runs(kernels)), f"    row = number * {8 * len(own)}"]
    for at, n in enumerate(own):
        pointer, _, aligned = launch.types[launch.arguments.index(n)].partition(ALIGNED[0])
        kind = next(TYPES[dtype] for dtype, spelled in POINTERS.items() if spelled == pointer)
        address = f"{_argument(at)}.to(tl.pointer_type(tl.{kind}))"
        lines.append(f"    b{n} = {f'tl.multiple_of({address}, {aligned})' if aligned else address}")
    given = {n: f"b{n}" for n in own} | {n: f"a{len(own) * len(kernels) + at}" for at, n in enumerate(shared)}
    lines.append(f"    part0(place, {', '.join(given[n] for n in range(len(rows)))})")
    return {_statements(kernels[0]): "part0"}, buffers, lines


def _dispatch_statements(runs: Sequence[tuple[int, int]]) -> list[str]:
    """Return statements that compute the number of a program's kernel, and the program's number in it."""
    if len(runs) == 1:
        return [f"    number = pid // {runs[0][0]}", f"    place = pid % {runs[0][0]}"]
    lines: list[str] = []
    first = before = 0
    for turn, (grid, count) in enumerate(runs):
        test = f"{'elif' if turn else 'if'} pid < {first + grid * count}"
        lines.append(f"    {'else' if turn == len(runs) - 1 else test}:")
        lines += [f"        number = (pid - {first}) // {grid} + {before}", f"        place = (pid - {first}) % {grid}"]
        first, before = first + grid * count, before + count
    return lines


def _argument(place: int) -> str:
    """Return an expression for the argument at `place` of a program's row of the table, as a number."""
    text = f"{{ .reg .b64 p, o; mov.b64 p, {TABLE}; cvt.u64.u32 o, $1; add.s64 p, p, o; "
    text += f"ld.param.b64 $0, [p+{8 * place}]; }}"
    return f'tl.inline_asm_elementwise("{text}", "=l,r", [row], dtype=tl.int64, is_pure=True, pack=1)'


def read_inputs_early(kernels: Kernels, program: Program, kind: str) -> Kernels:
    """Have kernels of inference read what nothing writes while the kernel before them ends; but not the first one's."""
    constant, loops = early_inputs(kernels, program, kind), [step for step in program.steps if isinstance(step, Loop)]
    if not constant:
        return kernels
    first = first_launch(fuse_launches(kernels, program).calls)
    calls, table = list(kernels.calls), program.table
    for number, loop in enumerate(loops):
        if number > first and constant & loop.reads and loop_traits(loop, table).many_threads:
            calls[number] = emit(loop, table, EmitRequest(constant=constant))
    early = replace(kernels, calls=tuple(calls))
    if first_launch(fuse_launches(early, program).calls) != first:
        return kernels
    return end_with_loops(early, program, kernels.epilogues.values(), constant, first)


MARK = "_n"
"""End of the name of a kernel that lets the next one start first."""


def start_next_first(kernels: Kernels, program: Program, kind: str) -> Kernels:
    """Have all kernels of inference but the first let their successors start at once.

    The first one waits before. So no kernel after it runs beside the previous program, which may write this one's
    inputs. A rank that waits for its peers' words in an all-reduce fills its registers with weights of the next matmul
    meanwhile.
    """
    if early_inputs(kernels, program, kind) is None:
        return kernels
    first, started, loops = first_launch(kernels.calls), dict(kernels.all_reduces), 0
    for step in program.steps:
        loops += isinstance(step, Loop)
        if isinstance(step, Collective) and loops > first:
            kernel = started[step.bucket]
            started[step.bucket] = replace(kernel, source=_started(kernel.source))
    calls = tuple(call if number <= first else _started(call) for number, call in enumerate(kernels.calls))
    return replace(kernels, calls=calls, all_reduces=started)


def _started(kernel: KernelSource) -> KernelSource:
    if WAIT_FIRST not in kernel.text:
        return kernel
    return replace(kernel, name=kernel.name + MARK, text=kernel.text.replace(WAIT_FIRST, START_NEXT_FIRST))
