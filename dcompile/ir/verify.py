"""What a well-formed program is: few rules, each stated once. `verify` raises with the step and its neighbours.

The rules:
  1. values refer to earlier values; arity, kinds and dtypes follow `OPS` and `REDUCTIONS`;
  2. bfloat16 and float16 are only loaded, stored and cast;
  3. an index uses the loop's variables, size symbols and integers computed earlier, and stays inside its buffer;
  4. a `set` store writes no element twice, and covers its buffer unless that is an input;
  5. what a step reads was written before it or is an input; a buffer has one writer (besides library calls that work in
     place), and no step after the one that overwrites an input reads that input;
  6. a loop reads an input that it overwrites only where it writes;
  7. each collective has one wait, and nothing touches its buffers in between;
  8. outputs and gradients exist;
  9. once memory is planned, every buffer has a place, and buffers alive at the same time do not overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod

import numpy as np

from dcompile.errors import VerifyError
from dcompile.ir.analysis import (
    can_overwrite,
    inner_names,
    is_row_store,
    outer_names,
    ranges,
    runtime_refs,
    sizes,
)
from dcompile.ir.index import Index, Ranges, as_index, evaluate_on, upper_bound
from dcompile.ir.nodes import (
    ITEMSIZE,
    Apply,
    Arg,
    Buffer,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Program,
    Reduce,
    Ref,
    Store,
    Value,
    View,
    Wait,
    views_of,
)
from dcompile.ir.ops import COMPUTE_DTYPES, DTYPES, OPS, REDUCTIONS
from dcompile.ir.text import show_step

POINTS = 1 << 16
"""Spaces up to this size are enumerated where the algebra cannot prove an index right; larger ones are trusted."""


class _BrokenRule(Exception):
    """A rule does not hold; `verify` adds where."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise _BrokenRule(message)


def verify(program: Program) -> None:
    """Raise `VerifyError` unless the program is well formed."""
    position: int | None = None
    try:
        table = _check_table(program)
        symbols = _symbols(program, table)
        state = _Order(program, table)
        for number, step in enumerate(program.steps):
            position = number
            if isinstance(step, Loop):
                _check_loop(step, table, symbols, frozenset(program.inputs))
            elif isinstance(step, Extern):
                _check_extern(step, table, symbols)
            state.advance(step)
        position = None
        state.finish()
        _check_outputs(program, table, symbols, state.written)
        _check_memory(program, table)
    except _BrokenRule as broken:
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
    _require(len(table) == len(program.buffers), "two buffers have one name")
    _require(len(set(program.inputs)) == len(program.inputs), "an input is listed twice")
    for buffer in program.buffers:
        _require(buffer.dtype in ITEMSIZE, f"{buffer.name} has an unknown dtype {buffer.dtype}")
        _require(len(buffer.shape) == len(buffer.strides), f"{buffer.name} has {buffer.shape} but {buffer.strides}")
    return table


def _symbols(program: Program, table: Mapping[str, Buffer]) -> frozenset[str]:
    """Size symbols: integer inputs, and what the shapes of input buffers are made of."""
    names = {name for name in program.inputs if name not in table}
    for name in program.inputs:
        if name in table:
            for size in (*table[name].shape, *table[name].strides):
                names |= as_index(size).variables
    return frozenset(names)


# --- one loop ---------------------------------------------------------------------------------------------------------


def _check_loop(loop: Loop, table: Mapping[str, Buffer], symbols: frozenset[str], inputs: frozenset[str]) -> None:
    for size in (*loop.outer, *loop.inner):
        _require(as_index(size).variables <= symbols, f"size {size} of {loop.name} uses an unknown symbol")
    known = ranges(loop)
    empty = 0 in known.values()
    allowed = symbols | sizes(loop).keys()
    for ref, value in enumerate(loop.body):
        try:
            _check_value(loop, ref, value, table, allowed)
            if isinstance(value, Load) and value.mask is None and not empty:
                _check_bounds(value.index, table[value.buffer], known)
        except _BrokenRule as broken:
            raise _BrokenRule(f"value {ref} of {loop.name}: {broken}") from None
    _require(bool(loop.stores), f"{loop.name} stores nothing")
    for store in loop.stores:
        _check_store(loop, store, table, allowed)
        if not empty:
            _check_bounds(store.index, table[store.buffer], known)
    _check_coverage(loop, table, known, inputs)


def _check_value(
    loop: Loop, ref: Ref, value: Value, table: Mapping[str, Buffer], allowed: frozenset[str] | set[str]
) -> None:
    def dtype_of(other: Ref) -> str:
        _require(0 <= other < ref, f"refers to value {other}, which is not earlier")
        return loop.body[other].dtype

    _require(value.dtype in DTYPES, f"a loop cannot compute {value.dtype}")
    match value:
        case Const(_, dtype):
            _require(dtype in COMPUTE_DTYPES, f"a constant in {dtype}: make it float32 and cast")
        case IndexOf(index, dtype):
            _check_index(index, allowed, ref, loop)
            _require(DTYPES[dtype] == "int", f"an index in {dtype}")
        case Load(buffer, index, dtype, mask):
            _require(buffer in table, f"loads unknown buffer {buffer}")
            _require(table[buffer].dtype == dtype, f"loads {buffer}, {table[buffer].dtype}, as {dtype}")
            _check_index(index, allowed, ref, loop)
            _require(mask is None or dtype_of(mask) == "bool", "the mask is not a truth value")
        case Apply(op, args, dtype):
            _require(op in OPS, f"unknown operation {op}")
            _require(len(args) == OPS[op].arity, f"{op} takes {OPS[op].arity} arguments, not {len(args)}")
            _check_apply(op, tuple(dtype_of(arg) for arg in args), dtype)
        case Reduce(op, arg, dtype):
            _require(op in REDUCTIONS, f"unknown reduction {op}")
            _check_reduce(op, dtype_of(arg), dtype)


def _check_apply(op: str, args: tuple[str, ...], dtype: str) -> None:
    if op == "cast":
        return
    _require({*args, dtype} <= COMPUTE_DTYPES, f"{op} on {args}: arithmetic in 16 bits; cast to float32 first")
    if op == "where":
        _require(args == ("bool", dtype, dtype), f"where({', '.join(args)}) gives {dtype}")
        return
    _require(len(set(args)) == 1, f"{op} mixes {args}")
    _require(DTYPES[args[0]] in OPS[op].kinds, f"{op} is not for {args[0]}")
    expected = "bool" if OPS[op].rule == "bool" else args[0]
    _require(dtype == expected, f"{op} on {args[0]} gives {expected}, not {dtype}")


def _check_reduce(op: str, arg: str, dtype: str) -> None:
    _require(arg in COMPUTE_DTYPES, f"{op} over {arg}: cast to float32 first")
    combine = REDUCTIONS[op].combine
    if combine is None:
        _require(dtype == "int64", f"{op} gives int64, not {dtype}")
        return
    kinds = frozenset(("bool",)) if op in ("any", "all") else OPS[combine].kinds
    _require(dtype == arg and DTYPES[arg] in kinds, f"{op} over {arg} cannot give {dtype}")


def _check_index(index: Index, allowed: frozenset[str] | set[str], ref: Ref, loop: Loop) -> None:
    for name in index.variables - allowed:
        number = name[1:]
        _require(name[0] == "v" and number.isdigit() and int(number) < ref, f"[{index}] uses unknown {name}")
        _require(DTYPES[loop.body[int(number)].dtype] == "int", f"[{index}] uses {name}, which is not an integer")


def _check_store(loop: Loop, store: Store, table: Mapping[str, Buffer], allowed: frozenset[str] | set[str]) -> None:
    where = f"the store to {store.buffer} in {loop.name}"
    _require(store.buffer in table, f"{where}: unknown buffer")
    _require(0 <= store.value < len(loop.body), f"{where}: unknown value {store.value}")
    dtype = loop.body[store.value].dtype
    _require(table[store.buffer].dtype == dtype, f"{where}: {dtype} into {table[store.buffer].dtype}")
    _check_index(store.index, allowed, len(loop.body), loop)
    if store.mode == "set":
        _require(not runtime_refs(store.index), f"{where}: [{store.index}] is known only at run time")
        return
    reduction = REDUCTIONS.get(store.mode)
    _require(reduction is not None and reduction.combine is not None, f"{where}: unknown mode {store.mode}")
    _check_reduce(store.mode, dtype, dtype)


# --- indices ----------------------------------------------------------------------------------------------------------


def _extent(buffer: Buffer) -> int | None:
    """Elements from the first to the last, None if the shape is dynamic."""
    if not all(isinstance(size, int) for size in (*buffer.shape, *buffer.strides)):
        return None
    return buffer.nbytes // ITEMSIZE[buffer.dtype]


def _check_bounds(index: Index, buffer: Buffer, known: Ranges) -> None:
    extent = _extent(buffer)
    if extent is None or not index.variables <= known.keys():
        return  # a dynamic shape, or an integer known only at run time
    highest = upper_bound(index, known)
    lowest = upper_bound(index * -1, known)
    assert highest is not None and lowest is not None
    if highest < extent and lowest <= 0:
        return
    values = _all_values(index, known)  # the bounds ignore that terms vary together: look before accusing
    if values is not None:
        _require(
            int(values.min()) >= 0 and int(values.max()) < extent,
            f"[{index}] runs from {values.min()} to {values.max()}, outside {buffer.name} of {extent} elements",
        )


def _grid(names: Iterable[str], known: Ranges) -> dict[str, np.ndarray] | None:
    """Every point of the space of `names`, one flat array for each variable; None if it is too large to enumerate."""
    names = tuple(names)
    shape = tuple(known[name] for name in names)
    if prod(shape) > POINTS:
        return None
    return {name: axis.reshape(-1) for name, axis in zip(names, np.indices(shape), strict=True)}


def _all_values(index: Index, known: Ranges, names: Iterable[str] | None = None) -> np.ndarray | None:
    grid = _grid(sorted(index.variables) if names is None else names, known)
    if grid is None:
        return None
    points = len(next(iter(grid.values()))) if grid else 1
    return np.broadcast_to(np.asarray(evaluate_on(index, grid)), (points,))


def _check_coverage(loop: Loop, table: Mapping[str, Buffer], known: Ranges, inputs: frozenset[str]) -> None:
    """Rule 4, for each buffer over all `set` stores to it; where sizes are static and the space is small enough."""
    groups: dict[str, list[Store]] = defaultdict(list)
    for store in loop.stores:
        groups[store.buffer].append(store)
    for name, stores in groups.items():
        modes = {store.mode for store in stores}
        _require(modes == {"set"} or len(stores) == 1, f"{loop.name} stores to {name} in more than one way")
        if modes != {"set"} or len(known) != len(loop.outer) + len(loop.inner):
            continue
        spaces = [_space_of(loop, store) for store in stores]
        for store, space in zip(stores, spaces, strict=True):
            missing = [v for v in space if known[v] > 1 and v not in store.index.variables]
            _require(not missing, f"{loop.name} writes {name}[{store.index}] again for every {', '.join(missing)}")
        written = sum(prod(known[v] for v in space) for space in spaces)
        numel = prod(size for size in table[name].shape if isinstance(size, int))
        if name not in inputs and _extent(table[name]) is not None:
            _require(written >= numel, f"{loop.name} writes {written} of the {numel} elements of {name}")
        _check_injective(loop, name, stores, spaces, known)


def _space_of(loop: Loop, store: Store) -> tuple[str, ...]:
    return outer_names(loop) if is_row_store(loop, store) else (*outer_names(loop), *inner_names(loop))


def _check_injective(loop: Loop, name: str, stores: list[Store], spaces: list[tuple[str, ...]], known: Ranges) -> None:
    if len(stores) == 1 and _is_injective(stores[0].index, spaces[0], known):
        return
    values = [_all_values(store.index, known, space) for store, space in zip(stores, spaces, strict=True)]
    if any(value is None for value in values):
        return
    places = np.concatenate([value for value in values if value is not None])
    _require(len(np.unique(places)) == len(places), f"{loop.name} writes an element of {name} twice")


def _is_injective(index: Index, names: tuple[str, ...], known: Ranges) -> bool:
    """Proof for the common form: an affine index whose strides step over all that varies faster."""
    strides: list[tuple[int, int]] = []
    for name in names:
        if known[name] > 1:
            factor = index.coefficient(name)
            constant = None if factor is None else factor.constant
            if constant is None:
                return False
            strides.append((abs(constant), known[name]))
    reach = 0
    for stride, size in sorted(strides):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


# --- library calls and outputs ----------------------------------------------------------------------------------------


def _check_view(view: View, table: Mapping[str, Buffer], symbols: frozenset[str]) -> None:
    _require(view.buffer in table, f"a view of unknown buffer {view.buffer}")
    _require(len(view.shape) == len(view.strides), f"a view of {view.buffer} has {view.shape} but {view.strides}")
    for size in (*view.shape, *view.strides, view.offset):
        _require(as_index(size).variables <= symbols, f"a view of {view.buffer} uses an unknown symbol in {size}")
    numbers = [size for size in (*view.shape, *view.strides, view.offset) if isinstance(size, int)]
    extent = _extent(table[view.buffer])
    if extent is None or len(numbers) != 2 * len(view.shape) + 1 or 0 in view.shape:
        return
    rank = len(view.shape)
    reaches = [(n - 1) * s for n, s in zip(numbers[:rank], numbers[rank:-1], strict=True)]
    low = numbers[-1] + sum(min(reach, 0) for reach in reaches)
    high = numbers[-1] + sum(max(reach, 0) for reach in reaches)
    _require(low >= 0 and high < extent, f"a view runs from {low} to {high}, outside {view.buffer} of {extent}")


def _check_extern(step: Extern, table: Mapping[str, Buffer], symbols: frozenset[str]) -> None:
    for arg in (*step.args, *(value for _, value in step.kwargs)):
        for view in views_of(arg):
            _check_view(view, table, symbols)
        for index in _indices_of(arg):
            _require(index.variables <= symbols, f"{step.op} uses an unknown symbol in {index}")
    for name in step.outs:
        _require(name is not None or step.mode == "alloc", f"{step.op}: only an alloc call may drop a result")
        _require(name is None or name in table, f"{step.op} writes unknown buffer {name}")
    outs = [name for name in step.outs if name is not None]
    _require(len(set(outs)) == len(outs), f"{step.op} names one result twice")
    if step.mode == "mutate":
        _require(step.writes <= step.reads, f"{step.op} works in place on what is not an argument")
    else:
        _require(not step.writes & step.reads, f"{step.op} reads what it writes")


def _indices_of(arg: Arg) -> Iterable[Index]:
    if isinstance(arg, Index):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _indices_of(item)


def _check_outputs(program: Program, table: Mapping[str, Buffer], symbols: frozenset[str], written: set[str]) -> None:
    for output in program.outputs:
        if isinstance(output, View):
            _check_view(output, table, symbols)
            _require(output.buffer in written, f"output {output.buffer} is never written")
        elif isinstance(output, Index):
            _require(output.variables <= symbols, f"output {output} uses an unknown symbol")
    for position, number in program.grads:
        _require(0 <= position < len(program.outputs), f"gradient of parameter {number} is not among the outputs")


# --- the order of steps -----------------------------------------------------------------------------------------------


class _Order:
    """Rules 5 to 7, step by step."""

    def __init__(self, program: Program, table: Mapping[str, Buffer]) -> None:
        self.inputs = frozenset(program.inputs) & table.keys()
        self.buckets = {bucket.name: bucket for bucket in program.buckets}
        self.table = table
        self.written = set(self.inputs)
        self.closed: set[str] = set()
        """Buffers that a loop or an out call has written: no second one may."""
        self.flying: dict[str, Collective] = {}
        self.landed: set[str] = set()

    def advance(self, step: Loop | Extern | Collective | Wait) -> None:
        if isinstance(step, Wait):
            started = self.flying.pop(step.bucket, None)
            _require(started is not None, f"wait for {step.bucket}, which is not in flight")
            assert started is not None
            _require(set(started.buffers) == set(step.buffers), f"{step.bucket} was started on other buffers")
            self.landed.add(step.bucket)
            return
        for collective in self.flying.values():
            touched = (step.reads | step.writes).intersection(collective.buffers)
            _require(not touched, f"{', '.join(sorted(touched))} is touched while {collective.bucket} is in flight")
        if isinstance(step, Collective):
            self._start(step)
        elif isinstance(step, Extern) and step.mode == "mutate":
            self._read(step.reads)
        else:
            self._write(step)

    def _read(self, names: frozenset[str]) -> None:
        for name in sorted(names):
            _require(name in self.table, f"{name} is unknown")
            _require(name in self.written, f"{name} is read before it is written")
            _require(not (name in self.inputs and name in self.closed), f"input {name} is read after it is overwritten")

    def _write(self, step: Loop | Extern) -> None:
        own = step.reads & step.writes
        _require(own <= self.inputs, f"{', '.join(sorted(own))} is read by the step that writes it")
        self._read(step.reads)
        for name in sorted(step.writes):
            _require(name not in self.closed, f"{name} has a second writer")
            if isinstance(step, Loop) and name in own:
                _require(can_overwrite(step, name, name), f"{step.name} overwrites elements of {name} still to be read")
            self.closed.add(name)
            self.written.add(name)

    def _start(self, step: Collective) -> None:
        for name in step.buffers:
            _require(name in self.written, f"{name} is sent before it is written")
        again = step.bucket in self.flying or step.bucket in self.landed
        _require(not again, f"{step.bucket} is started a second time")
        if self.buckets:
            _require(step.bucket in self.buckets, f"unknown bucket {step.bucket}")
        self.flying[step.bucket] = step

    def finish(self) -> None:
        _require(not self.flying, f"nothing waits for {', '.join(sorted(self.flying))}")


# --- memory -----------------------------------------------------------------------------------------------------------

_PLANNED = frozenset(("arena", "out", "input", "library"))


def _check_memory(program: Program, table: Mapping[str, Buffer]) -> None:
    if not any(buffer.storage in _PLANNED for buffer in program.buffers):
        return
    capacity = {"arena": program.arena_bytes}
    capacity |= {f"bucket:{b.name}": b.numel * ITEMSIZE[b.dtype] for b in program.buckets}
    escaping = {output.buffer for output in program.outputs if isinstance(output, View)}
    shared: dict[str, list[Buffer]] = defaultdict(list)
    for buffer in program.buffers:
        _require(buffer.storage is not None, f"{buffer.name} has no place in memory")
        is_input = buffer.name in program.inputs
        _require((buffer.storage == "input") == is_input, f"{buffer.name} cannot lie in {buffer.storage}")
        _require(buffer.storage != "arena" or buffer.name not in escaping, f"output {buffer.name} lies in the arena")
        if buffer.storage in capacity:
            shared[buffer.storage].append(buffer)
            aligned = buffer.offset % ITEMSIZE[buffer.dtype] == 0
            inside = buffer.offset >= 0 and buffer.offset + buffer.nbytes <= capacity[buffer.storage]
            _require(aligned and inside, f"{buffer.name} lies outside {buffer.storage}, or not on an element")
    lives = _lives(program)
    for buffers in shared.values():
        _check_overlaps(program, buffers, lives)


def _lives(program: Program) -> dict[str, tuple[int, int]]:
    """First and last step that touch each buffer; an output lives on. A wait touches, so flight counts as life.

    What a fallback call allocates may be a view of its arguments, so they live as long as its results.
    """
    lives: dict[str, tuple[int, int]] = {}
    for position, step in enumerate(program.steps):
        for name in step.reads | step.writes:
            lives[name] = (lives.get(name, (position, position))[0], position)
    for output in program.outputs:
        if isinstance(output, View) and output.buffer in lives:
            lives[output.buffer] = (lives[output.buffer][0], len(program.steps))
    for step in reversed(program.steps):
        if isinstance(step, Extern) and step.fallback and step.mode == "alloc":
            end = max((lives[name][1] for name in step.writes), default=0)
            for name in step.reads:
                lives[name] = (lives[name][0], max(lives[name][1], end))
    return lives


def _check_overlaps(program: Program, buffers: list[Buffer], lives: Mapping[str, tuple[int, int]]) -> None:
    """Sweep over the steps with the set of live byte ranges; few are live at once."""
    live: list[Buffer] = []
    for buffer in sorted((b for b in buffers if b.name in lives and b.nbytes), key=lambda b: lives[b.name][0]):
        first = lives[buffer.name][0]
        live = [other for other in live if lives[other.name][1] >= first]
        for other in live:
            apart = other.offset + other.nbytes <= buffer.offset or buffer.offset + buffer.nbytes <= other.offset
            if not apart and not _replaces(program, other, buffer, lives):
                raise _BrokenRule(f"{other.name} and {buffer.name} are alive together and overlap in {buffer.storage}")
        live.append(buffer)


def _replaces(program: Program, old: Buffer, new: Buffer, lives: Mapping[str, tuple[int, int]]) -> bool:
    """Does `new` take the memory of `old` in place, in the last step that reads `old`?"""
    at = lives[new.name][0]
    step = program.steps[at] if at < len(program.steps) else None
    same = old.offset == new.offset and ITEMSIZE[old.dtype] == ITEMSIZE[new.dtype]
    fresh = isinstance(step, Loop) and old.name not in step.writes and new.name not in step.reads
    return (
        same
        and fresh
        and lives[old.name][1] == at
        and isinstance(step, Loop)
        and can_overwrite(step, old.name, new.name)
    )
