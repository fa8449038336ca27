"""Rules for well-formed programs, each stated once. `verify` raises with the step and its neighbours.

The rules:
  1. Values refer to earlier values. Arity, kinds and dtypes follow `OPS`, `REDUCTIONS` and `SCANS`.
  2. bfloat16 and float16 are only loaded, stored and cast.
  3. An index uses the loop's variables, size symbols and integers computed earlier, and stays inside its buffer.
  4. A `set` store writes no element twice, except one number to an input. It covers its buffer, unless that is an
     input.
  5. A step reads inputs, and what was written before it. A buffer has one writer. Exceptions are library calls that
     work in place, and loops that write to an input at one position known at run time. No step reads an input after
     the step that overwrites it. A size that a library call defines is used after that call.
  6. A loop reads an input that it overwrites only where it writes.
  7. Each collective has one wait, and no step touches its buffers in between.
  8. Outputs and gradients exist.
  9. A loop that is an epilogue loads the matmul's result only at its own element, in row-major order.
 10. Once memory is planned, every buffer has a place, and buffers that are live at the same time do not overlap. A
     donor buffer is a result, an allocation of the library, or a donated input.
 11. A loop reads and writes buffers of one device, and so does a check of indices. Otherwise a GPU kernel would use an
     address of CPU memory as one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from dcompile.errors import VerifyError
from dcompile.ir.analysis import inner_names, outer_names, product_buffer
from dcompile.ir.buffers import ITEMSIZE, NUMBER, Buffer
from dcompile.ir.index import Index, as_index, contiguous_strides, flatten, var
from dcompile.ir.nodes import Collective, Extern, Load, Loop, Program, View, Wait
from dcompile.ir.symbols import specialise, symbols_of
from dcompile.ir.text import show_step
from dcompile.ir.verify_loop import BrokenRule, check_loop, extent_of, require
from dcompile.ir.verify_memory import check_memory
from dcompile.ir.verify_order import OrderCheck


def verify(program: Program, sizes: Mapping[str, int] | None = None, before: Program | None = None) -> None:
    """Raise `VerifyError` unless the program is well formed.

    Where sizes are symbols, bounds, coverage and overlaps are checked for the given `sizes`, if any.

    `before` is a program that was verified with the same sizes. Steps that it has over equal buffers are checked only
    for their order. Most passes change few steps, and checking the others took half of the time. An equal program is
    not checked.
    """
    if before is not None and program == before:
        return
    kept = _unchanged_steps(program, before)
    if sizes and symbols_of(program):
        _verify(specialise(program, sizes), kept)
    _verify(program, kept)


def _unchanged_steps(program: Program, before: Program | None) -> frozenset[int]:
    """Positions of steps, by identity, that `before` has over equal buffers: they obey rules 1 to 4."""
    if before is None or set(before.inputs) != set(program.inputs) or before.sizes != program.sizes:
        return frozenset()
    old, new = before.table, program.table
    if not _symbols(before, old) <= _symbols(program, new):
        return frozenset()
    same = {name for name, buffer in new.items() if name in old and _facts(buffer) == _facts(old[name])}
    known = set(map(id, before.steps))  # all of them are alive
    return frozenset(
        number
        for number, step in enumerate(program.steps)
        if id(step) in known and step.reads <= same and step.writes <= same
    )


def _facts(buffer: Buffer) -> tuple[object, ...]:
    """Properties of a buffer that rules for single steps use; its place in memory is not one."""
    return buffer.dtype, buffer.shape, buffer.strides, buffer.device


def _verify(program: Program, kept: frozenset[int]) -> None:
    position: int | None = None
    try:
        table = _check_table(program)
        symbols = _symbols(program, table)
        state = OrderCheck(program, table)
        for number, step in enumerate(program.steps):
            position = number
            if isinstance(step, Loop) and number not in kept:
                at_hand = _check_product(step, table, symbols)
                check_loop(step, {**table, **at_hand}, symbols, frozenset(program.inputs))
            elif isinstance(step, Extern) and number not in kept:
                _check_extern(step, table, symbols)
            elif isinstance(step, Collective) and step.call is not None and number not in kept:
                _check_extern(step.call, table, symbols)
                require(step.writes == step.call.writes, f"{step.bucket} writes other buffers than its call")
            if number not in kept:
                _check_device(step, table)
            state.advance(step)
        position = None
        state.finish()
        _check_outputs(program, table, symbols, state.written)
        check_memory(program, table)
    except BrokenRule as broken:
        raise VerifyError(_message(program, position, str(broken))) from None


def _message(program: Program, position: int | None, what: str) -> str:
    lines = [f"{program.name}: {what}"]
    if position is not None:
        for near in range(max(position - 1, 0), min(position + 2, len(program.steps))):
            text = show_step(program.steps[near]).replace("\n", "\n      ")
            lines.append(f"{'>' if near == position else ' '}{near:3} {text}")
    return "\n".join(lines)


def _check_table(program: Program) -> dict[str, Buffer]:
    table = program.table
    require(len(table) == len(program.buffers), "two buffers have one name")
    require(len(set(program.inputs)) == len(program.inputs), "an input is listed twice")
    for buffer in program.buffers:
        require(buffer.dtype in ITEMSIZE, f"{buffer.name} has an unknown dtype {buffer.dtype}")
        if len(buffer.shape) != len(buffer.strides):  # the message may be slow to build
            raise BrokenRule(f"{buffer.name} has {buffer.shape} but {buffer.strides}")
    return table


def _symbols(program: Program, table: Mapping[str, Buffer]) -> frozenset[str]:
    """Size symbols of a program: integer inputs, and variables in shapes of input buffers and of library results."""
    results = {name for step in program.steps if isinstance(step, Extern) for name in step.writes}
    names = {name for name in program.inputs if name not in table}
    for _, value in program.sizes:
        names |= value.variables
    for name in (*program.inputs, *results):
        if name in table:
            for size in (*table[name].shape, *table[name].strides):
                names |= as_index(size).variables
            if table[name].dtype == NUMBER:
                names.add(name)
    return frozenset(names)


def _check_product(loop: Loop, table: Mapping[str, Buffer], symbols: frozenset[str]) -> dict[str, Buffer]:
    """Check rule 9. Return the matmul's result as a buffer that only the loop knows."""
    if loop.product is None:
        return {}
    result = product_buffer(loop.product)
    _check_extern(loop.product.call, {**table, result.name: result}, symbols)
    space = (prod(n for n in sizes if isinstance(n, int)) for sizes in (loop.outer, loop.inner))
    require(tuple(space) == result.shape, f"{loop.name} is not over {result.name}'s rows and columns")
    place = flatten(
        [*map(var, (*outer_names(loop), *inner_names(loop)))], contiguous_strides((*loop.outer, *loop.inner))
    )
    own = [value for value in loop.body if isinstance(value, Load) and value.buffer == result.name]
    at = all(load.index == place and load.mask is None for load in own)
    require(bool(own) and at, f"{loop.name} loads {result.name} from elsewhere")
    return {result.name: result}


def _check_device(step: Loop | Extern | Collective | Wait, table: Mapping[str, Buffer]) -> None:
    """Check rule 11."""
    if isinstance(step, Loop) or (isinstance(step, Extern) and step.op == "dcompile.check_bounds"):
        devices = {table[name].device for name in step.reads | step.writes if name in table}
        require(len(devices) <= 1, f"one step uses memory of {' and '.join(sorted(devices))}")


# --- library calls and outputs ----------------------------------------------------------------------------------------


def _check_view(view: View, table: Mapping[str, Buffer], symbols: frozenset[str]) -> None:
    require(view.buffer in table, f"a view of unknown buffer {view.buffer}")
    require(len(view.shape) == len(view.strides), f"a view of {view.buffer} has {view.shape} but {view.strides}")
    buffer = table[view.buffer]
    # a whole library result is passed on unchanged: its sizes need no computation, and may be known at run time only
    if (view.shape, view.strides, view.offset) != (buffer.shape, buffer.strides, 0):
        for size in (*view.shape, *view.strides, view.offset):
            require(as_index(size).variables <= symbols, f"a view of {view.buffer} uses an unknown symbol in {size}")
    numbers = [size for size in (*view.shape, *view.strides, view.offset) if isinstance(size, int)]
    extent = extent_of(table[view.buffer])
    if extent is None or len(numbers) != 2 * len(view.shape) + 1 or 0 in view.shape:
        return
    rank = len(view.shape)
    reaches = [(n - 1) * s for n, s in zip(numbers[:rank], numbers[rank:-1], strict=True)]
    low = numbers[-1] + sum(min(reach, 0) for reach in reaches)
    high = numbers[-1] + sum(max(reach, 0) for reach in reaches)
    require(low >= 0 and high < extent, f"a view runs from {low} to {high}, outside {view.buffer} of {extent}")


def _check_extern(step: Extern, table: Mapping[str, Buffer], symbols: frozenset[str]) -> None:
    for leaf in step.leaves:
        if isinstance(leaf, View):
            _check_view(leaf, table, symbols)
        elif isinstance(leaf, Index):
            require(leaf.variables <= symbols, f"{step.op} uses an unknown symbol in {leaf}")
    for name in step.outs:
        require(name is not None or step.mode == "alloc", f"{step.op}: only an alloc call may drop a result")
        require(name is None or name in table, f"{step.op} writes unknown buffer {name}")
    outs = [name for name in step.outs if name is not None]
    require(len(set(outs)) == len(outs), f"{step.op} names one result twice")
    if step.mode == "mutate":
        require(step.writes <= step.reads, f"{step.op} works in place on what is not an argument")
    else:
        require(not step.writes & step.reads, f"{step.op} reads what it writes")


def _check_outputs(program: Program, table: Mapping[str, Buffer], symbols: frozenset[str], written: set[str]) -> None:
    for output in program.outputs:
        if isinstance(output, View):
            _check_view(output, table, symbols)
            require(output.buffer in written, f"output {output.buffer} is never written")
        elif isinstance(output, Index):
            require(output.variables <= symbols, f"output {output} uses an unknown symbol")
    for position, number in program.grads:
        require(0 <= position < len(program.outputs), f"gradient of parameter {number} is not among the outputs")
