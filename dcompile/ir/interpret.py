"""Interpret programs in NumPy: the reference semantics to which every pass and every emitted kernel is compared.

Memory is modelled like the machine's. A buffer is a flat array of raw elements. Buffers in the arena or in a bucket are
slices of one byte array, which starts as garbage. A bfloat16 is the upper half of a float32. So a wrong memory plan
gives wrong values here, too.

Values of a loop body are whole arrays over the iteration space, broadcast where they do not vary. bfloat16 values are
float32 arrays of representable numbers, and float8 values are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from dcompile.ir.analysis import inner_names, is_row_store, outer_names, product_buffer
from dcompile.ir.buffers import IN_BUCKET, IN_DONOR, ITEMSIZE, WITHIN, Buffer
from dcompile.ir.float8 import BYTES, FLOAT8, from_bytes, to_bytes
from dcompile.ir.index import Index, Size, as_index, element_span, evaluate, evaluate_on
from dcompile.ir.nodes import (
    Apply,
    Arg,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Matmul,
    Program,
    Reduce,
    Scan,
    Step,
    Store,
    Value,
    Verbatim,
    View,
    Wait,
)
from dcompile.ir.ops import OPS, REDUCTIONS, SCANS
from dcompile.ir.symbols import sources

Array = np.ndarray[Any, Any]
Externs = Mapping[str, Callable[..., Any]]
GARBAGE = 0xFF
"""Content of every unwritten byte: NaN in all floating-point dtypes, so that it is close to no result."""


def interpret(
    program: Program, inputs: Mapping[str, Array | int], externs: Externs | None = None
) -> list[Array | int | float | bool | None]:
    """Outputs of a program, in order. `inputs` is not changed; `execute` also returns the content of mutated inputs.

    `externs` defines library calls by op: a function of NumPy arrays that returns the result, or a tuple in the order
    of `outs`. For a call in place, it returns the new content of the views that the call works on. Collectives are
    looked up by kind, as a function of the list of their arrays. A missing one is the identity (one rank).
    """
    return execute(program, inputs, externs).outputs


@dataclass(frozen=True, slots=True)
class InterpretedResult:
    """Outputs of a call, and the content of its inputs afterwards."""

    outputs: list[Array | int | float | bool | None]
    inputs: dict[str, Array]


def execute(
    program: Program,
    inputs: Mapping[str, Array | int],
    externs: Externs | None = None,
    late: frozenset[str] = frozenset(),
) -> InterpretedResult:
    """Like `interpret`, with the content of the inputs after the call. `late`: see `Machine`."""
    machine = Machine(program, inputs, externs or {}, late)
    for step in program.steps:
        machine.run(step)
    return machine.result()


# --- numbers ----------------------------------------------------------------------------------------------------------


def to_bfloat16(x: Array) -> Array:
    """Round to the nearest bfloat16, ties to even, and return its bits as uint16. NaN becomes the quiet NaN."""
    wide = np.asarray(x, np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    return np.where(np.isnan(wide), np.uint32(0x7FC0), rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """Convert the bits of bfloat16 numbers to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def cast(x: Array, dtype: str, source: str = "") -> Array:
    """Convert as torch does: round to nearest even, truncate towards zero, and map all but zero to true.

    `source`, the operand's dtype, distinguishes float8 bytes from integers.
    """
    if source in FLOAT8 and source != dtype:
        x = from_bytes(x, source)
    if dtype in FLOAT8:
        return x if source == dtype else to_bytes(x.astype(np.float32), dtype)
    if dtype == "bfloat16":
        return from_bfloat16(to_bfloat16(x.astype(np.float32)))
    if dtype == "float16" and x.dtype.kind in "iub":
        x = x.astype(np.float32)
    return x.astype(_numpy(dtype))


def _numpy(dtype: str) -> np.dtype[Any]:
    """NumPy dtype of a loop body's values."""
    return np.dtype("float32" if dtype == "bfloat16" else "uint8" if dtype in BYTES else dtype)


def _raw(dtype: str) -> np.dtype[Any]:
    """NumPy dtype of elements in memory."""
    return np.dtype("uint16" if dtype == "bfloat16" else "uint8" if dtype in BYTES else dtype)


def _decode(raw: Array, dtype: str) -> Array:
    return from_bfloat16(raw) if dtype == "bfloat16" else raw.copy()


def _encode(values: Any, dtype: str) -> Array:
    return to_bfloat16(np.asarray(values, np.float32)) if dtype == "bfloat16" else np.asarray(values, _numpy(dtype))


# --- the machine ------------------------------------------------------------------------------------------------------


def _is_within_another(buffer: Buffer) -> bool:
    return (buffer.storage or "").startswith((WITHIN, IN_DONOR))


class Machine:
    """Memory, and the steps that change it, one at a time.

    Collectives in `late` take place at their wait, all others at their start. A program without a race has the same
    results whichever they are.
    """

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, Array | int],
        externs: Externs,
        late: frozenset[str] = frozenset(),
    ) -> None:
        self._program, self.table = program, program.table
        self._late, self._in_flight = late, dict[str, Collective]()
        self.externs = externs
        self.symbols: dict[str, int] = {}
        self._learn_symbols(program, inputs)
        blocks = {"arena": self.size(program.arena_bytes)}
        blocks |= {IN_BUCKET + b.name: b.numel * ITEMSIZE[b.dtype] for b in program.buckets}
        self.blocks = {name: np.full(size, GARBAGE, np.uint8) for name, size in blocks.items()}
        self.memory: dict[str, Array] = {}
        for buffer in sorted(program.buffers, key=_is_within_another):
            self.memory[buffer.name] = self._allocate(buffer)
            inside = self.memory[buffer.name].view(np.uint8)
            self.blocks |= {WITHIN + buffer.name: inside, IN_DONOR + buffer.name: inside}
        for name in program.inputs:
            if name in self.table:
                self._fill(name, np.asarray(inputs[name]))

    def _learn_symbols(self, program: Program, inputs: Mapping[str, Array | int]) -> None:
        """Compute symbols that are not arguments themselves from shapes of inputs, and from other integers."""
        for symbol, source in sources(program).items():
            given = inputs[source.input]
            if source.what == "value":
                value = int(given)
            elif source.what == "shape":
                value = np.asarray(given).shape[source.dim]
            else:
                array = np.asarray(given)
                value = array.strides[source.dim] // array.itemsize
            rest, factor = evaluate(source.rest, self.symbols), evaluate(source.factor, self.symbols)
            self.symbols[symbol] = (value - rest) // factor

    def size(self, size: Size) -> int:
        return size if isinstance(size, int) else evaluate(as_index(size), self.symbols)

    def sizes(self, sizes: tuple[Size, ...]) -> tuple[int, ...]:
        return tuple(self.size(size) for size in sizes)

    def _allocate(self, buffer: Buffer) -> Array:
        shape, strides = self.sizes(buffer.shape), self.sizes(buffer.strides)
        extent = element_span(shape, strides)
        raw = _raw(buffer.dtype)
        block = self.blocks.get(buffer.storage or "")
        if block is None or not extent:
            block, start = np.full(extent * raw.itemsize, GARBAGE, np.uint8), 0
        else:
            start = self.size(buffer.offset)
        flat = block[start : start + extent * raw.itemsize].view(raw)
        assert len(flat) == extent, f"{buffer.name} does not fit in {buffer.storage}"
        return flat

    def _window(self, view: View) -> Array:
        """Writable raw elements of a view, in place."""
        flat, shape, offset = self.memory[view.buffer], self.sizes(view.shape), self.size(view.offset)
        if not prod(shape):
            return np.empty(shape, flat.dtype)
        strides = self.sizes(view.strides)
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        assert offset >= 0 and last < len(flat), f"a view leaves {view.buffer}"
        bytes_ = tuple(stride * flat.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(flat[offset:], shape, bytes_)

    def _all_of(self, name: str) -> View:
        return View(name, self.table[name].shape, self.table[name].strides)

    def whole(self, name: str) -> Array:
        """Copy of a buffer's content, in its shape."""
        return self.read(self._all_of(name))

    def read(self, view: View) -> Array:
        return _decode(self._window(view), self.table[view.buffer].dtype)

    def write(self, view: View, values: Any) -> None:
        self._window(view)[...] = _encode(values, self.table[view.buffer].dtype)

    def _fill(self, name: str, values: Array) -> None:
        shape = self.sizes(self.table[name].shape)
        assert values.shape == shape, f"input {name} is {values.shape}, not {shape}"
        self.write(self._all_of(name), values)

    def output(self, output: View | Index | int | float | bool | None) -> Array | int | float | bool | None:
        if isinstance(output, View):
            return self.read(output)
        return self.size(output) if isinstance(output, Index) else output

    def result(self) -> InterpretedResult:
        """Outputs, and the content of the inputs, as they are now."""
        outputs = [self.output(output) for output in self._program.outputs]
        return InterpretedResult(
            outputs, {name: self.whole(name) for name in self._program.inputs if name in self.table}
        )

    # --- steps ---

    def run(self, step: Step) -> None:
        """Run the next step."""
        with np.errstate(all="ignore"):
            match step:
                case Loop():
                    self.loop(step)
                case Extern():
                    self.extern(step)
                case Collective() if step.bucket in self._late:
                    self._in_flight[step.bucket] = step
                case Collective():
                    self.collective(step)
                case Wait() if step.bucket in self._in_flight:
                    self.collective(self._in_flight.pop(step.bucket))
                case Wait():
                    pass  # the collective took place at its start

    def collective(self, step: Collective) -> None:
        if step.call is not None and step.copies_by_host:
            self._window(self._all_of(step.buffers[0]))[...] = self._window(step.call.views[0])
            return
        if step.call is not None and (step.sent or step.call.op in self.externs):
            self.extern(step.call)
            return
        exchange = self.externs.get(step.kind)
        if exchange is not None:
            for name, values in zip(step.buffers, exchange([self.whole(n) for n in step.buffers]), strict=True):
                self.write(self._all_of(name), values)

    def extern(self, step: Extern) -> None:
        assert step.op in self.externs, f"interpret() was given no meaning for {step.op}"
        places = self._places(step)
        arguments = [self._argument(arg) for arg in step.args]
        named = {name: self._argument(arg) for name, arg in step.kwargs}
        results = self.externs[step.op](*arguments, **named)
        results = results if isinstance(results, (tuple, list)) else (results,)
        for out, values in zip(step.outs, results, strict=True):
            if out is not None:
                self.write(places.get(out, self._all_of(out)), values)

    def _places(self, step: Extern) -> dict[str, View]:
        """Views that a call in place writes: the first view of each buffer among its arguments."""
        if step.mode != "mutate":
            return {}
        return {view.buffer: view for view in reversed(step.views)}

    def _argument(self, arg: Arg) -> Any:
        match arg:
            case View():
                return self.read(arg)
            case Index():
                return self.size(arg)
            case tuple():
                return tuple(self._argument(item) for item in arg)
            case Verbatim(text):
                return text
            case _:
                return arg

    def loop(self, loop: Loop) -> None:
        if loop.product is not None:
            self._product(loop.product)
        space = _Space(loop, self.sizes(loop.outer), self.sizes(loop.inner), self.symbols)
        for value in loop.body:
            space.values.append(self._value(value, space, loop.body))
        for store in loop.stores:
            self._store(loop, store, space)

    def _product(self, product: Matmul) -> None:
        """Compute the matmul that the loop loads, in memory even if the program does not keep it there."""
        if product.out not in self.table:
            self.table = {**self.table, product.out: product_buffer(product)}
            self.memory[product.out] = self._allocate(self.table[product.out])
        self.extern(product.call)

    def _value(self, value: Value, space: _Space, body: tuple[Value, ...]) -> Array:
        match value:
            case Const(literal, dtype):
                return np.asarray(literal).astype(_numpy(dtype)).reshape(space.ones)
            case IndexOf(index, dtype):
                return space.at(index).astype(_numpy(dtype))
            case Load():
                return self._load(value, space)
            case Apply("cast", (arg,), dtype):
                return cast(space.values[arg], dtype, body[arg].dtype)
            case Apply(op, args, dtype):
                result = np.asarray(OPS[op].meaning(*(space.values[arg] for arg in args)))
                return result.astype(_numpy(dtype), copy=False)
            case Reduce(op, arg, dtype):
                return space.reduce(op, space.values[arg], dtype)
            case Scan(op, arg, dtype):
                return space.scan(op, space.values[arg], dtype)

    def _load(self, load: Load, space: _Space) -> Array:
        flat, index = self.memory[load.buffer], space.at(load.index)
        if load.mask is None:
            _check_range(load.buffer, index, len(flat))
            return _decode(flat[index], load.dtype)
        mask = space.values[load.mask]
        index = np.where(mask, index, 0)
        if not len(flat):
            return np.zeros(index.shape, _numpy(load.dtype))
        _check_range(load.buffer, index, len(flat))
        return np.where(mask, _decode(flat[index], load.dtype), _numpy(load.dtype).type(0))

    def _store(self, loop: Loop, store: Store, space: _Space) -> None:
        flat = self.memory[store.buffer]
        shape = space.outer + (tuple(1 for _ in space.inner) if is_row_store(loop, store) else space.inner)
        index = np.broadcast_to(space.at(store.index), shape).reshape(-1)
        values = np.broadcast_to(space.values[store.value], shape).reshape(-1)
        _check_range(store.buffer, index, len(flat))
        dtype = self.table[store.buffer].dtype
        if store.mode == "set":
            flat[index] = _encode(values, dtype)
            return
        reduction = REDUCTIONS[store.mode]
        assert reduction.combine is not None
        flat[...] = reduction.identity(dtype)
        OPS[reduction.combine].meaning.at(flat, index, values)  # type: ignore[attr-defined]


class _Space:
    """Iteration space of a loop, one NumPy axis for each variable, and the values computed over it."""

    def __init__(self, loop: Loop, outer: tuple[int, ...], inner: tuple[int, ...], symbols: Mapping[str, int]) -> None:
        self.outer, self.inner = outer, inner
        self.ones = (1,) * (len(outer) + len(inner))
        self.values: list[Array] = []
        axes = np.indices((*outer, *inner), sparse=True)
        names = (*outer_names(loop), *inner_names(loop))
        self.places: dict[str, Any] = dict(symbols) | dict(zip(names, axes, strict=True))

    def at(self, index: Index) -> Array:
        """Value of an index at every point."""
        runtime = {f"v{ref}": value for ref, value in enumerate(self.values)} if _has_runtime(index) else {}
        integers = {name: value.astype(np.int64) for name, value in runtime.items() if name in index.variables}
        number = np.asarray(evaluate_on(index, {**self.places, **integers}), np.int64)
        return number.reshape(self.ones) if number.ndim == 0 else number

    def reduce(self, op: str, values: Array, dtype: str) -> Array:
        """Reduce over the whole inner space, one result for each row.

        The order of summation depends on the space alone.
        """
        flat, reduction = self._rows(values), REDUCTIONS[op]
        rows = flat.shape[:-1]
        result = reduction.meaning(flat, axis=-1) if flat.shape[-1] else np.full(rows, reduction.identity(dtype))
        return np.asarray(result, _numpy(dtype)).reshape((*rows, *(1 for _ in self.inner)))

    def scan(self, op: str, values: Array, dtype: str) -> Array:
        """Scan over the inner space, one result for each element, combined sequentially."""
        flat = self._rows(values)
        return np.asarray(SCANS[op].meaning(flat, axis=-1), _numpy(dtype)).reshape((*flat.shape[:-1], *self.inner))

    def _rows(self, values: Array) -> Array:
        """Values of each row, in order, along the last axis."""
        rows = values.shape[: len(self.outer)]
        return np.ascontiguousarray(np.broadcast_to(values, rows + self.inner)).reshape(*rows, prod(self.inner))


def _has_runtime(index: Index) -> bool:
    return any(name[0] == "v" for name in index.variables)


def _check_range(name: str, index: Array, size: int) -> None:
    if index.size and (int(index.min()) < 0 or int(index.max()) >= size):
        raise IndexError(f"{name}[{index.min()}..{index.max()}] is outside its {size} elements")
