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

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from dcompile.errors import VerifyError
from dcompile.ir.analysis import can_overwrite, inner_names, outer_names, product_buffer, runtime_refs, takes_over
from dcompile.ir.buffers import IN_BUCKET, IN_DONOR, ITEMSIZE, NUMBER, WITHIN, Buffer
from dcompile.ir.index import Index, Size, as_index, contiguous_strides, flatten, var
from dcompile.ir.nodes import Collective, Extern, Load, Loop, Program, View, Wait
from dcompile.ir.symbols import specialise, symbols_of, used_symbols
from dcompile.ir.text import show_step
from dcompile.ir.verify_loop import BrokenRule, check_loop, extent_of, require


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


# --- order of steps ---------------------------------------------------------------------------------------------------


class OrderCheck:
    """Check rules 5 to 7, step by step."""

    def __init__(self, program: Program, table: Mapping[str, Buffer]) -> None:
        self.inputs = frozenset(program.inputs) & table.keys()
        self.buckets = {bucket.name: bucket for bucket in program.buckets}
        self.table = table
        self.written = set(self.inputs)
        self.closed: set[str] = set()
        """Buffers that a loop or an out call has written: they may have no second writer."""
        self.in_flight: dict[str, Collective] = {}
        self.landed: set[str] = set()
        self.late = {symbol for step in program.steps if isinstance(step, Extern) for symbol in step.tells}
        """Sizes that no call has defined so far."""

    def advance(self, step: Loop | Extern | Collective | Wait) -> None:
        if isinstance(step, Wait):
            started = self.in_flight.pop(step.bucket, None)
            require(started is not None, f"wait for {step.bucket}, which is not in flight")
            assert started is not None
            same = (set(started.buffers), set(started.sent)) == (set(step.buffers), set(step.sent))
            require(same, f"{step.bucket} was started on other buffers")
            self.landed.add(step.bucket)
            return
        untold = used_symbols(step) & self.late if self.late else None
        require(not untold, f"{', '.join(sorted(untold or ()))} is used before a library call tells it")
        self.late.difference_update(step.tells if isinstance(step, Extern) else ())
        for collective in self.in_flight.values():
            touched = (step.reads | step.writes).intersection(collective.buffers) | step.writes.intersection(
                collective.sent
            )
            require(not touched, f"{', '.join(sorted(touched))} is touched while {collective.bucket} is in flight")
        if isinstance(step, Collective):
            self._start(step)
        elif isinstance(step, Extern) and step.mode == "mutate":
            self._read(step.reads)
        else:
            self._write(step)

    def _read(self, names: frozenset[str]) -> None:
        for name in sorted(names):
            require(name in self.table, f"{name} is unknown")
            require(name in self.written, f"{name} is read before it is written")
            require(not (name in self.inputs and name in self.closed), f"input {name} is read after it is overwritten")

    def _write(self, step: Loop | Extern) -> None:
        own = step.reads & step.writes
        require(own <= self.inputs, f"{', '.join(sorted(own))} is read by the step that writes it")
        self._read(step.reads)
        partly = _partly_written(step)
        require(partly <= self.inputs, f"{', '.join(sorted(partly))} is written in part, and is no input")
        for name in sorted(step.writes):
            require(name not in self.closed, f"{name} has a second writer")
            if isinstance(step, Loop) and name in own:
                require(can_overwrite(step, name, name), f"{step.name} overwrites elements of {name} still to be read")
            if name not in partly:
                self.closed.add(name)
            self.written.add(name)

    def _start(self, step: Collective) -> None:
        for name in sorted(step.reads):
            require(name in self.written, f"{name} is sent before it is written")
        made = step.writes - step.reads
        for name in sorted(made):
            require(name not in self.closed and name not in self.inputs, f"{name} has a second writer")
        self.closed.update(made)
        self.written.update(made)
        again = step.bucket in self.in_flight or step.bucket in self.landed
        require(not again, f"{step.bucket} is started a second time")
        if step.call is None and self.buckets:
            require(step.bucket in self.buckets, f"unknown bucket {step.bucket}")
        self.in_flight[step.bucket] = step

    def finish(self) -> None:
        require(not self.in_flight, f"nothing waits for {', '.join(sorted(self.in_flight))}")


def _partly_written(step: Loop | Extern) -> frozenset[str]:
    """Buffers that a loop writes at a position known only at run time."""
    stores = step.stores if isinstance(step, Loop) else ()
    return frozenset(store.buffer for store in stores if store.mode == "set" and runtime_refs(store.index))


# --- memory -----------------------------------------------------------------------------------------------------------


_PLANNED = frozenset(("arena", "out", "input", "library"))


def check_memory(program: Program, table: Mapping[str, Buffer]) -> None:
    """Check that every buffer of a planned program has a place, and that buffers alive together do not overlap."""
    if not any(buffer.storage in _PLANNED for buffer in program.buffers):
        return
    capacity: dict[str, Size] = {"arena": program.arena_bytes}
    capacity |= {IN_BUCKET + b.name: b.numel * ITEMSIZE[b.dtype] for b in program.buckets}
    hosts = [buffer for buffer in program.buffers if isinstance(buffer.extent, int) and _may_host(buffer, program)]
    capacity |= {IN_DONOR + buffer.name: buffer.nbytes for buffer in hosts}
    holders = {holder for buffer in program.buffers if (holder := buffer.holder) is not None}
    require(holders <= table.keys(), f"parts of unknown buffers: {', '.join(sorted(holders - table.keys()))}")
    capacity |= {f"{WITHIN}{name}": table[name].nbytes for name in holders}
    escaping = program.returned
    shared: dict[str, list[Buffer]] = defaultdict(list)
    for buffer in program.buffers:
        require(buffer.storage is not None, f"{buffer.name} has no place in memory")
        is_input = buffer.name in program.inputs
        require((buffer.storage == "input") == is_input, f"{buffer.name} cannot lie in {buffer.storage}")
        has_donor = buffer.donor is not None
        inside = buffer.storage == "arena" or has_donor
        over = has_donor and _is_over_saved(buffer, program, table)
        hidden = not inside or over or buffer.name not in escaping
        require(hidden, f"output {buffer.name} lies in the {buffer.storage}")
        require(not has_donor or buffer.storage in capacity, f"{buffer.name} may not lie in {buffer.storage}")
        if buffer.storage in capacity:
            shared[buffer.storage].append(buffer)
            offset, size = buffer.offset, capacity[buffer.storage]
            if isinstance(offset, int) and isinstance(buffer.extent, int) and isinstance(size, int):
                inside = offset >= 0 and offset + buffer.nbytes <= size and offset % ITEMSIZE[buffer.dtype] == 0
                require(inside, f"{buffer.name} lies outside {buffer.storage}, or not on an element")
    lives = _lives(program)
    for storage, buffers in shared.items():
        host = table.get(storage.removeprefix(IN_DONOR)) if storage.startswith(IN_DONOR) else None
        _check_overlaps(program, buffers if host is None else [replace(host, offset=0), *buffers], lives)


def _is_over_saved(buffer: Buffer, program: Program, table: Mapping[str, Buffer]) -> bool:
    """Whether a buffer covers the whole of a donated input."""
    host = buffer.donor
    return host in program.donated and buffer.offset == 0 and buffer.extent == table[host].extent


def _may_host(buffer: Buffer, program: Program) -> bool:
    return buffer.storage in ("out", "library") or buffer.name in program.donated


def _lives(program: Program) -> dict[str, tuple[int, int]]:
    """First and last step that touch each buffer. An output lives until the end; a wait touches its buffers, too.

    A fallback's result may be a view of its arguments. A functional collective reads its arguments until the wait for
    its result. So such arguments live as long as the results.
    """
    lives: dict[str, tuple[int, int]] = {}
    holders = {buffer.name: holder for buffer in program.buffers if (holder := buffer.holder) is not None}
    for position, step in enumerate(program.steps):
        names = step.reads | step.writes
        for name in names.union(holders[name] for name in names if name in holders):
            lives[name] = (lives.get(name, (position, position))[0], position)
    for name in program.inputs:
        if name in lives:
            lives[name] = (-1, lives[name][1])
    for name in program.returned & lives.keys():
        lives[name] = (lives[name][0], len(program.steps))
    for step in reversed(program.steps):
        if isinstance(step, Extern) and step.holds:
            end = max((lives[name][1] for name in step.writes), default=0)
            for name in step.reads:
                lives[name] = (lives[name][0], max(lives[name][1], end))
    return lives


def _check_overlaps(program: Program, buffers: list[Buffer], lives: Mapping[str, tuple[int, int]]) -> None:
    """Sweep over the steps with the set of live byte ranges, of which few are live at once."""
    live: list[Buffer] = []
    known = [b for b in buffers if b.name in lives and isinstance(b.extent, int) and isinstance(b.offset, int)]
    for buffer in sorted((b for b in known if b.nbytes), key=lambda b: lives[b.name][0]):
        first = lives[buffer.name][0]
        live = [other for other in live if lives[other.name][1] >= first]
        for other in live:
            here, there = _place(buffer), _place(other)
            apart = there + other.nbytes <= here or here + buffer.nbytes <= there
            if not apart and not _replaces(program, other, buffer, lives):
                raise BrokenRule(f"{other.name} and {buffer.name} are alive together and overlap in {buffer.storage}")
        live.append(buffer)


def _place(buffer: Buffer) -> int:
    assert isinstance(buffer.offset, int), f"{buffer.name} lies at a symbolic place"
    return buffer.offset


def _replaces(program: Program, old: Buffer, new: Buffer, lives: Mapping[str, tuple[int, int]]) -> bool:
    """Whether `new` reuses the memory of `old` in place, in the last step that reads `old`."""
    at = lives[new.name][0]
    if at >= len(program.steps) or lives[old.name][1] != at or old.offset != new.offset:
        return False
    step = program.steps[at]
    return new.name not in step.reads and takes_over(step, old, new)
