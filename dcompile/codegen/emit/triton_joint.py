"""Several loops as one launch: small kernels that need nothing of one another run side by side instead of in turn.

A launch in a CUDA graph costs a microsecond or two, and the end of one kernel leaves most of a GPU idle. The programs
of a joint kernel ask by their number which loop they belong to; each loop's statements are what they are alone, so that
values do not depend on what was joined.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.emitter import KernelSource, Launch
from dcompile.codegen.emit.triton_prelude import AFTER, HEADER, used_functions
from dcompile.codegen.emit.triton_text import overlap
from dcompile.ir.nodes import Buffer, Collective, Extern, Loop, Program, Wait

MOST = 8
"""Loops in one launch."""
MOST_EQUAL = 64
"""Equal ones in one, if they are tiny: their statements are there once. Each thread chooses its addresses among all:
where it has little else to do that shows. With large updates joined so, a step of a 1B model with its AdamW compiled
took 0.9 ms longer than with torch's fused one, where it had taken 0.6 ms less (one H200)."""
MOST_ADDRESSES = 448
"""Of buffers in one launch: a kernel takes 4 KiB of arguments."""
MOST_BYTES = 1 << 28
"""Of a loop's buffers: longer kernels lose nothing by running in turn, and may lose by sharing registers."""
TINY_BYTES = 1 << 22
"""Of a loop's buffers: whatever it is, it takes no longer than a launch."""
PID = "tl.program_id(0)"


def joined(program: Program, calls: Sequence[KernelSource]) -> tuple[KernelSource, ...]:
    """The kernels of a program's loops, neighbours that may run at the same time as one.

    A joint kernel stands where the last of its loops does, and a launch of no programs in the place of each other.
    Relies on: memory being planned, for loops that need nothing of one another may still take turns with memory.
    """
    table, found = program.table, list(calls)
    group: list[int] = []
    loops: dict[int, Loop] = {}
    for step in program.steps:
        if not isinstance(step, Loop):
            _close(group, loops, found)
            continue
        number = len(loops)
        loops[number] = step
        if not _is_small(step, calls[number], table):
            _close(group, loops, found)
        elif _is_room([*group, number], loops, calls, table) and all(
            _may_join(loops[n], calls[n], step, calls[number], table) for n in group
        ):
            group.append(number)
        else:
            _close(group, loops, found)
            group.append(number)
    _close(group, loops, found)
    return tuple(found)


def constants(program: Program) -> frozenset[str] | None:
    """Inputs that no step of the program writes, so that its kernels may read them while others still run.

    None where kernels are to start in turn: beside NCCL's streams nothing else was tried.
    """
    if any(isinstance(step, (Collective, Wait)) for step in program.steps):
        return None
    if any(isinstance(step, Extern) and step.op.startswith("_c10d_functional.") for step in program.steps):
        return None
    written = frozenset[str]().union(*(step.writes for step in program.steps))
    return frozenset(program.inputs) - written - frozenset(program.donated)


def first_launch(calls: Sequence[KernelSource]) -> int:
    """The first kernel that starts whatever the sizes are: once a later one comes, what ran before the program is over.

    See `triton_prelude.AFTER`.
    """
    grids = ([launch.grid for launch in kernel.launches] for kernel in calls)
    return next((n for n, found in enumerate(grids) if any(isinstance(g, int) and g > 0 for g in found)), len(calls))


def _close(group: list[int], loops: Mapping[int, Loop], found: list[KernelSource]) -> None:
    """Join what has been collected, and begin anew."""
    if len(group) > 1:
        kernel = _joint([found[n] for n in group])
        (launch,) = kernel.launches
        for n in group[:-1]:
            nothing = replace(launch, grid=0, arguments=())
            found[n] = replace(kernel, arguments=(), origin=loops[n].origin, launches=(nothing,))
        found[group[-1]] = kernel
    group.clear()


def _is_room(
    group: Sequence[int], loops: Mapping[int, Loop], calls: Sequence[KernelSource], table: Mapping[str, Buffer]
) -> bool:
    """May all of these share a launch?"""
    if len(group) <= MOST:
        return True
    kernels = [calls[n] for n in group]
    if len(group) > MOST_EQUAL or sum(len(kernel.arguments) for kernel in kernels) > MOST_ADDRESSES:
        return False
    return _are_equal(kernels) and all(_nbytes(loops[n], table) <= TINY_BYTES for n in group)


def _are_equal(kernels: Sequence[KernelSource]) -> bool:
    """Do these differ in their buffers alone?"""
    first = kernels[0]
    return all(kernel.text == first.text and kernel.launches == first.launches for kernel in kernels[1:])


def _is_small(loop: Loop, kernel: KernelSource, table: Mapping[str, Buffer]) -> bool:
    """One launch that is told nothing but addresses, of buffers that are not large?"""
    if len(kernel.launches) != 1 or kernel.numbers or kernel.sizes:
        return False
    known = [kernel.launches[0].grid, *(table[name].extent for name in loop.reads | loop.writes)]
    if not known[0] or not all(isinstance(size, int) for size in known):
        return False
    return _nbytes(loop, table) <= MOST_BYTES


def _nbytes(loop: Loop, table: Mapping[str, Buffer]) -> int:
    return sum(table[name].nbytes for name in loop.reads | loop.writes)


def _are_alike(first: KernelSource, second: KernelSource) -> bool:
    """Of one kind and about as much work: a kernel of few registers would run with the few programs of one of many."""
    kinds = {kernel.launches[0].function.rsplit("_", 1)[0] for kernel in (first, second)}
    costs = sorted(kernel.cost for kernel in (first, second))
    return len(kinds) == 1 and costs[1] <= 2 * costs[0]


def _may_join(a: Loop, first: KernelSource, b: Loop, second: KernelSource, table: Mapping[str, Buffer]) -> bool:
    """As many threads a program, both or neither waiting, and neither writes memory that the other touches?"""
    if first.launches[0].warps != second.launches[0].warps or (AFTER in first.text) != (AFTER in second.text):
        return False
    if not _are_alike(first, second) and not all(_nbytes(loop, table) <= TINY_BYTES for loop in (a, b)):
        return False
    touched = [(a.writes, b.reads | b.writes), (b.writes, a.reads)]
    return not any(overlap(table[x], table[y]) for written, others in touched for x in written for y in others)


def _joint(kernels: Sequence[KernelSource]) -> KernelSource:
    """One kernel whose programs are those of all `kernels`, one after another."""
    buffers = tuple(dict.fromkeys(name for kernel in kernels for name in kernel.arguments))
    names = {buffer: f"a{n}" for n, buffer in enumerate(buffers)}
    types: dict[str, str] = {}
    for kernel in kernels:
        (launch,) = kernel.launches
        types |= {kernel.arguments[n]: kind for n, kind in zip(launch.arguments, launch.types, strict=True)}
    functions, lines = (_chosen if len(kernels) > MOST else _branches)(kernels, names)
    parts = [f"@triton.jit\ndef {name}{text}" for text, name in functions.items()]
    parts.append(f"@triton.jit\ndef kernel({', '.join(names.values())}):\n" + "\n".join(lines) + "\n")
    text = "\n\n".join(parts)
    text = f"{HEADER}\n\n{used_functions(text)}\n\n{text}"
    kinds = tuple(types[name] for name in buffers)
    grid, warps = sum(_grid(kernel) for kernel in kernels), kernels[0].launches[0].warps
    digest = hashlib.sha256(f"{text}\n{(grid, warps, kinds)}".encode()).hexdigest()[:24]
    entry = f"dcompile_joint_{digest[:8]}"
    launch = Launch(entry, grid, warps, tuple(range(len(buffers))), kinds)
    origin = tuple(dict.fromkeys(line for kernel in kernels for line in kernel.origin))
    cost = sum(kernel.cost for kernel in kernels)
    text = text.replace("def kernel(", f"def {entry}(")
    return KernelSource(f"k{digest}", text, buffers, cost, False, origin, launches=(launch,))


def _grid(kernel: KernelSource) -> int:
    grid = kernel.launches[0].grid
    assert isinstance(grid, int), "only kernels of known size are joined"
    return grid


def _statements(kernel: KernelSource) -> str:
    """A kernel as a function of a program's number and the addresses, from its parenthesis on."""
    body = kernel.text[kernel.text.index(f"def {kernel.launches[0].function}(") :].split("):\n", 1)[1]
    head = ", ".join(("pid", *(f"a{n}" for n in range(len(kernel.arguments)))))
    return f"({head}):\n{body.replace(PID, 'pid')}"


def _branches(kernels: Sequence[KernelSource], names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Functions, and statements by which each program takes the branch of its kernel."""
    functions: dict[str, str] = {}
    lines, first = [f"    pid = {PID}"], 0
    for place, kernel in enumerate(kernels):
        part = functions.setdefault(_statements(kernel), f"part{len(functions)}")
        test = f"{'elif' if place else 'if'} pid < {first + _grid(kernel)}"
        lines.append(f"    {'else' if place == len(kernels) - 1 else test}:")
        given = ", ".join((f"pid - {first}" if first else "pid", *(names[name] for name in kernel.arguments)))
        lines.append(f"        {part}({given})")
        first += _grid(kernel)
    return functions, lines


def _chosen(kernels: Sequence[KernelSource], names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The function of equal kernels, and statements that give it the addresses of the one a program belongs to.

    An address that differs is chosen among the arguments, one by one: of one that came from a table in memory nothing
    would be known, and what is known to be a multiple of 16 is read 16 bytes at a time.
    """
    grid = _grid(kernels[0])
    lines, given = [f"    pid = {PID}", f"    number = pid // {grid}"], [f"pid % {grid}"]
    for place in range(len(kernels[0].arguments)):
        first, *others = (names[kernel.arguments[place]] for kernel in kernels)
        if set(others) == {first}:
            given.append(first)
            continue
        lines.append(f"    b{place} = {first}")
        lines += [f"    b{place} = tl.where(number == {n}, {name}, b{place})" for n, name in enumerate(others, 1)]
        given.append(f"b{place}")
    return {_statements(kernels[0]): "part0"}, [*lines, f"    part0({', '.join(given)})"]
