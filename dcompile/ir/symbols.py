"""Size symbols: how a call computes their values, which ones a program has, and specialization to numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dcompile.ir.buffers import NUMBER, Buffer
from dcompile.ir.index import Index, Size, Var, as_index, is_symbol, substitute, substitute_size, var
from dcompile.ir.nodes import (
    Arg,
    Collective,
    Extern,
    IndexOf,
    Load,
    Loop,
    Program,
    Step,
    Store,
    Value,
    View,
    map_arguments,
)

What: TypeAlias = Literal["value", "shape", "stride"]


@dataclass(frozen=True, slots=True)
class SymbolSource:
    """Formula of a symbol from an input: `(its value, or a size or stride of it, - rest) // factor`.

    `rest` and `factor` consist of symbols that come before it.
    """

    input: str
    what: What
    dim: int
    factor: Index
    rest: Index


def sources(program: Program) -> dict[str, SymbolSource]:
    """Symbols that the inputs determine, in an order in which they can be computed."""
    found: dict[str, SymbolSource] = {}
    facts = [fact for fact in _facts(program) if fact[0].variables]
    before = -1
    while len(found) > before:
        before = len(found)
        for index, name, what, dim in facts:
            unknown = [symbol for symbol in index.variables if symbol not in found]
            if len(unknown) == 1:
                factor, rest = index.split(Var(unknown[0]))
                if factor is not None:
                    found[unknown[0]] = SymbolSource(name, what, dim, factor, rest)
    return found


def _facts(program: Program) -> Iterator[tuple[Index, str, What, int]]:
    """(expression, input, attribute, dimension) of all sizes that the inputs determine, simple ones first."""
    table = program.table
    tensors = [table[name] for name in program.inputs if name in table]
    values = dict(program.sizes)
    for name in program.inputs:
        if name not in table and name not in values:
            yield var(name), name, "value", 0
    for buffer in tensors:
        for dim, size in enumerate(buffer.shape):
            if isinstance(size, Index):
                yield size, buffer.name, "shape", dim
    for name, value in values.items():
        yield value, name, "value", 0
    for buffer in tensors:
        for dim, stride in enumerate(buffer.strides):
            if isinstance(stride, Index):
                yield stride, buffer.name, "stride", dim


def late_symbols(program: Program) -> frozenset[str]:
    """Symbols that only a library call's result determines, such as the number of nonzero elements."""
    return symbols_of(program) - sources(program).keys()


def valued_symbols(program: Program) -> frozenset[str]:
    """Late symbols that depend on elements of tensors. Others, such as `int(1.7 * size)`, follow from other sizes."""
    if not (late := late_symbols(program)):
        return late
    numbers = {buffer.name for buffer in program.buffers if buffer.dtype == NUMBER}
    follow: set[str] = set()
    for step in program.steps:
        if isinstance(step, Extern) and step.reads <= numbers:
            follow.update(step.tells)
        else:
            numbers -= step.writes
    return late - follow


def symbols_of(program: Program) -> frozenset[str]:
    """All size symbols of a program."""
    found: set[str] = set()
    for size in _sizes_of(program):
        if isinstance(size, Index):
            found.update(filter(is_symbol, size.variables))
    return frozenset(found)


def _sizes_of(program: Program) -> Iterator[Size]:
    yield program.arena_bytes
    yield from (value for _, value in program.sizes)
    for buffer in program.buffers:
        yield from (*buffer.shape, *buffer.strides, buffer.offset)
    for output in program.outputs:
        yield from _sizes_of_argument(output)
    for step in program.steps:
        yield from _sizes_of_step(step)


def used_symbols(step: Step) -> frozenset[str]:
    """Size symbols that a step needs. Sizes of its results consist of them, or are defined by the step."""
    sizes = (size for size in _sizes_of_step(step) if isinstance(size, Index))
    return frozenset(name for size in sizes for name in size.variables if is_symbol(name))


def _sizes_of_step(step: Step) -> Iterator[Size]:
    match step:
        case Loop():
            yield from (*step.outer, *step.inner, *(store.index for store in step.stores))
            yield from (value.index for value in step.body if isinstance(value, Load | IndexOf))
        case (Extern() as call) | Collective(call=Extern() as call):
            for leaf in call.leaves:
                yield from _sizes_of_argument(leaf)


def _sizes_of_argument(leaf: Arg) -> Iterator[Size]:
    if isinstance(leaf, Index):
        yield leaf
    elif isinstance(leaf, View):
        yield from (*leaf.shape, *leaf.strides, leaf.offset)


# --- numbers for symbols ----------------------------------------------------------------------------------------------


def specialise(program: Program, numbers: Mapping[str, int]) -> Program:
    """Substitute numbers for size symbols; integer inputs stay inputs."""
    values = {name: as_index(number) for name, number in numbers.items()}
    return replace(
        program,
        outputs=tuple(_fixed(output, values) for output in program.outputs),  # type: ignore[misc]
        buffers=tuple(_fixed_buffer(buffer, values) for buffer in program.buffers),
        steps=tuple(_fixed_step(step, values) for step in program.steps),
        arena_bytes=substitute_size(program.arena_bytes, values),
        sizes=(),
    )


def _fixed_buffer(buffer: Buffer, values: Mapping[str, Index]) -> Buffer:
    shape, strides = _all(buffer.shape, values), _all(buffer.strides, values)
    return replace(buffer, shape=shape, strides=strides, offset=substitute_size(buffer.offset, values))


def _all(sizes: tuple[Size, ...], values: Mapping[str, Index]) -> tuple[Size, ...]:
    return tuple(substitute_size(size, values) for size in sizes)


def _fixed(arg: Arg, values: Mapping[str, Index]) -> Arg:
    match arg:
        case View(buffer, shape, strides, offset):
            return View(buffer, _all(shape, values), _all(strides, values), substitute_size(offset, values))
        case Index():
            return substitute_size(arg, values)
        case _:
            return arg


def _fixed_step(step: Step, values: Mapping[str, Index]) -> Step:
    match step:
        case Loop():
            return _fixed_loop(step, values)
        case Extern():
            return map_arguments(step, lambda arg: _fixed(arg, values))
        case Collective(call=Extern() as call):
            return replace(step, call=map_arguments(call, lambda arg: _fixed(arg, values)))
        case _:
            return step


def _fixed_loop(loop: Loop, values: Mapping[str, Index]) -> Loop:
    outer, inner = _all(loop.outer, values), _all(loop.inner, values)
    bounds = {f"i{k}": n for k, n in enumerate(outer)} | {f"j{k}": n for k, n in enumerate(inner)}

    def fixed(value: Value) -> Value:
        if isinstance(value, Load | IndexOf):
            return replace(value, index=substitute(value.index, values, bounds))
        return value

    def stored(store: Store) -> Store:
        return replace(store, index=substitute(store.index, values, bounds))

    return replace(
        loop,
        outer=outer,
        inner=inner,
        body=tuple(map(fixed, loop.body)),
        stores=tuple(map(stored, loop.stores)),
    )
