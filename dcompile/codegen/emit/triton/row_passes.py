"""Order the statements of a Triton kernel: passes over rows, and accumulators of column reductions between rows.

The text of reductions and scans comes first, and the statements of a kernel that receives a tile from other GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from dcompile.codegen.emit.triton.library import AFTER
from dcompile.codegen.emit.triton.ops import SPELLING, literal, register_type
from dcompile.codegen.emit.triton.printer import Class, TritonText
from dcompile.codegen.nest.tile_plan import PROGRAMS, TileDim
from dcompile.ir.analysis import operands, runtime_refs, store_operands
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import size_product
from dcompile.ir.nodes import IndexOf, Load, Reduce, Ref, Scan
from dcompile.ir.ops import REDUCTIONS, SCANS

COMBINE = {"prod": "mul_", "max": "max_", "min": "min_", "logsumexp": "logaddexp_"}
"""The kernel function that combines two partial results."""


def identity_text(op: str, dtype: str) -> str:
    """The value that changes no result."""
    return literal((REDUCTIONS.get(op) or SCANS[op]).identity(dtype), dtype)


def reduced(op: str, dtype: str, value: str, axis: int) -> str:
    """Reduce a tensor along one axis."""
    kind = register_type(dtype)
    if dtype == "bool":
        how = "max" if op in ("max", "any") else "min"
        return f"(tl.{how}({value}.to(tl.int32), {axis}) != 0)"
    if op in ("prod", "logsumexp") or (op in ("max", "min") and dtype.startswith("float")):
        return f"tl.reduce({value}, {axis}, {COMBINE[op]})"
    return f"tl.{op}({value}, {axis}).to(tl.{kind})"


def scanned(op: str, dtype: str, value: str, axis: int) -> str:
    """Scan a tensor along one axis."""
    if op == "sum":
        return f"tl.cumsum({value}, {axis}).to(tl.{register_type(dtype)})"
    return f"tl.associative_scan({value}, {axis}, {COMBINE[op]})"


def combine(op: str, a: str, b: str, dtype: str) -> str:
    """Combine two partial results."""
    if dtype == "bool":
        return f"{a} {'|' if op in ('max', 'any') else '&'} {b}"
    how = (REDUCTIONS.get(op) or SCANS[op]).combine
    assert how is not None
    text = SPELLING[how].format(a, b, dtype=dtype)
    return f"({text}).to(tl.{dtype})" if dtype in ("int8", "int16", "uint8") else text


@dataclass(frozen=True, slots=True)
class ReceivedTile:
    """Statements around a kernel that receives the elements of `buffer` from other GPUs, as a tile in registers."""

    buffer: str
    before_wait: Sequence[str]
    send: Sequence[str]
    """Behind the wait for earlier kernels. Other loads come next."""
    receive: Sequence[str]
    """Before the first value that depends on the tile."""
    store: Sequence[str]
    """Before the kernel's own stores, after a barrier."""
    finish: Sequence[str]


NOTHING_RECEIVED = ReceivedTile("", (), (), (), (), ())


PID = "tl.program_id(0)"
PREFETCHED = 96 << 10
"""Bytes of shared memory for loads of later iterations: GPUs from compute capability 8.0 on have 99 KiB."""


class RowPassWriter:
    """Writes the body of a kernel to `text`. Kernels that receive a tile do not loop over blocks of a row."""

    def __init__(self, text: TritonText, received: ReceivedTile = NOTHING_RECEIVED) -> None:
        self.text, self.line, self.received = text, text.line, received
        self.plan, self.nest, self.table = text.plan, text.nest, text.table
        self.levels, self.classes = text.levels, text.classes

    @property
    def pid(self) -> str:
        """The program's number."""
        return PID + (".to(tl.int64)" if self.text.wide else "")

    def run(self) -> None:
        """Write all statements."""
        match self.plan.kind:
            case "flat":
                (x,) = self.plan.dims
                self.text.position(x, f"{self.pid} * {x.block}")
                self._straight()
            case "turn":
                self._turn()
                self._straight()
            case "rows":
                x, r = self.plan.dims
                self.text.position(x, self.pid if x.block == 1 else f"{self.pid} * {x.block}")
                if self.plan.looped:
                    self._wait()
                    self._looped(r)
                else:
                    self.text.position(r, "0")
                    self._straight()
            case "columns":
                self._columns()

    # --- everything at once ---

    def _turn(self) -> None:
        """Compute the position of a two-dimensional tile; tiles along the contiguous dimension run concurrently."""
        y, x = self.plan.dims
        self.line(f"pid = {self.pid}")
        self.text.position(x, f"(pid % {self.text.size(x.blocks)}) * {x.block}")
        self.text.position(y, f"(pid // {self.text.size(x.blocks)} % {self.text.size(y.blocks)}) * {y.block}")
        if self.plan.batch:
            self.line(f"batch = pid // {self.text.size(size_product((x.blocks, y.blocks)))}")
            self.text.coordinates("batch", self.plan.batch)

    def _straight(self) -> None:
        """Write each value once, then the stores."""
        live, received = sorted(self.levels.live), self.received
        early = [ref for ref in live if self._may_be_early(ref)]
        for ref in early:
            self._value(ref)
        self._lines(received.before_wait)
        self._wait(bool(early or received.buffer))
        self._lines(received.send)
        soon = [ref for ref in live if ref not in early and self._may_be_soon(ref)]
        for ref in soon:
            self._value(ref)
        self._lines(received.receive)
        for ref in live:
            if ref not in early and ref not in soon:
                self._value(ref)
        self._barrier()
        self._lines(received.store)
        together = {number for word in self.plan.words for number in word}
        for number in range(len(self.nest.stores)):
            if number not in together:
                self.text.store(number)
        for word in self.plan.words:
            self.text.store_word(word)
        self._lines(received.finish)

    def _lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.line(line)

    def _wait(self, has_begun: bool = False) -> None:
        """Wait for the previous kernel, if this one may have started meanwhile, or `has_begun` to read."""
        if self.text.waits or has_begun:
            self.line(AFTER)

    def _may_be_early(self, ref: Ref) -> bool:
        """Is a value a load of memory that no kernel writes, at a position that depends on no load?"""
        value = self.nest.body[ref]
        return (
            isinstance(value, Load)
            and value.buffer in self.text.constant
            and value.mask is None
            and not runtime_refs(value.index)
        )

    def _may_be_soon(self, ref: Ref) -> bool:
        """Is a value a load that a brief kernel of few programs starts before its reductions, which wait for others?

        So does a kernel that waits for a tile.
        """
        value, grid = self.nest.body[ref], self.plan.grid
        if not isinstance(value, Load) or value.mask is not None or runtime_refs(value.index):
            return False
        if self.received.buffer:
            return value.buffer != self.received.buffer
        return self.text.waits and isinstance(grid, int) and grid <= PROGRAMS

    def _value(self, ref: Ref) -> None:
        value = self.nest.body[ref]
        if isinstance(value, Scan):
            argument = self.text.whole(value.arg, self.classes[ref])
            self.line(f"{self.text.name(ref)} = {scanned(value.op, value.dtype, argument, self._along)}")
            return
        if not isinstance(value, Reduce):
            self.text.declare(ref)
            return
        result = reduced(value.op, value.dtype, self._masked_operand(value, self.plan.dims[1]), self._along)
        self.line(f"{self.text.name(ref)} = {result}{self._column}")

    @property
    def _along(self) -> int:
        """The axis of a tile's elements."""
        return 0 if self.text.flat_rows else 1

    @property
    def _column(self) -> str:
        """The suffix that broadcasts a reduced tensor over elements again."""
        return "" if self.text.flat_rows else "[:, None]"

    def _masked_operand(self, reduce: Reduce | Scan, r: TileDim) -> str:
        """Return the reduced tensor, with the identity beyond the row."""
        kept: Class = self.classes[reduce.arg] | {"r"}
        value = self.text.whole(reduce.arg, kept)
        return f"tl.where(rm, {value}, {identity_text(reduce.op, reduce.dtype)})" if self.text.has_mask(r) else value

    def _barrier(self) -> None:
        if self.text.overlaps or self.received.buffer:
            self.line("tl.debug_barrier()")

    # --- rows in pieces ---

    def _looped(self, r: TileDim) -> None:
        last = max(self.levels.store_at) + 1
        for number in range(last + 1):
            self._write_row_values(number)
            if number < last:
                self._pass(number, r)

    def _write_row_values(self, number: int) -> None:
        """Write the row values that are known after a pass, and their stores."""
        for ref in sorted(self.levels.live):
            reduces = isinstance(self.nest.body[ref], Reduce)
            if not self.levels.element[ref] and self.levels.known[ref] == number and not reduces:
                self.text.declare(ref)
        for store, row in enumerate(self.nest.row_stores):
            if row and self.levels.store_at[store] == number:
                self.text.store(store)

    def _pass(self, number: int, r: TileDim) -> None:
        """Write one loop over the blocks of a row."""
        body, known = self.nest.body, self.levels.known
        reduces = [n for n in sorted(self.levels.live) if isinstance(body[n], Reduce) and known[n] == number + 1]
        stores = [n for n, row in enumerate(self.nest.row_stores) if not row and self.levels.store_at[n] == number]
        if not reduces and not stores:
            return
        online: dict[Ref, list[Ref]] = {
            reduce.arg: [] for reduce in map(self._reduce, reduces) if reduce.op == "sum_exp"
        }
        for ref in reduces:  # the maximum comes with the sum of exponentials below it
            if self._reduce(ref).op in ("sum_exp", "max") and self._reduce(ref).arg in online:
                online[self._reduce(ref).arg].append(ref)
        reduces = [ref for ref in reduces if all(ref not in together for together in online.values())]
        for arg in online:
            self._begin_online(arg, r)
        for ref in reduces:
            reduce = self._reduce(ref)
            shape = self.text.shape(self.classes[reduce.arg] | {"r"})
            self.line(f"s{self.text.number(ref)} = tl.broadcast_to({identity_text(reduce.op, reduce.dtype)}, {shape})")
        roots = {self._reduce(ref).arg for ref in reduces} | online.keys()
        roots |= {ref for n in stores for ref in store_operands(self.nest.stores[n])}
        below = self._elements_below(roots)
        for ref in below:
            value = body[ref]
            if isinstance(value, Scan):
                before = f"tl.broadcast_to({identity_text(value.op, value.dtype)}, {self.text.shape({'x'})})"
                flat = identity_text(value.op, value.dtype)
                self.line(f"c{self.text.number(ref)} = {flat if self.text.flat_rows else before}")
        self.line(f"for r0 in {self._steps(r)}:")
        self.text.depth += 1
        self.text.position(r, "r0")
        for ref in below:
            self._carried(ref, r)
        for ref in reduces:
            reduce, s = self._reduce(ref), f"s{self.text.number(ref)}"
            self.line(f"{s} = {combine(reduce.op, s, self._masked_operand(reduce, r), reduce.dtype)}")
        for arg in online:
            self._step_online(arg, r)
        if stores:
            self._barrier()
        for n in stores:
            self.text.store(n)
        self.text.depth -= 1
        for ref in reduces:
            reduce = self._reduce(ref)
            total = reduced(reduce.op, reduce.dtype, f"s{self.text.number(ref)}", self._along)
            self.line(f"{self.text.name(ref)} = {total}{self._column}")
        for arg, together in online.items():
            self._end_online(arg, together)

    def _steps(self, r: TileDim) -> str:
        """Return the range of a loop over the blocks of a row."""
        return f"range(0, {self.text.size(r.size)}, {r.block})"

    # A running maximum, and a sum below it, for each few elements that a thread reads at once: Milakov and Gimelshein,
    # "Online normalizer calculation for softmax", 2018

    def _width(self, arg: Ref, r: TileDim) -> int:
        """Return how many adjacent elements share a running maximum: 16 bytes of loads, which one thread holds."""
        loads = [value for ref in self._elements_below({arg}) if isinstance(value := self.nest.body[ref], Load)]
        return min(16 // max((ITEMSIZE[load.dtype] for load in loads), default=4), r.block)

    def _begin_online(self, arg: Ref, r: TileDim) -> None:
        n, dtype = self.text.number(arg), self.nest.body[arg].dtype
        rows = self.plan.dims[0].block if "x" in self.classes[arg] else 1
        lanes = r.block // self._width(arg, r) if self.text.flat_rows else rows
        for name, op in (("m", "max"), ("s", "sum")):
            self.line(f"{name}{n} = tl.broadcast_to({identity_text(op, dtype)}, [{lanes}])")

    def _step_online(self, arg: Ref, r: TileDim) -> None:
        n, value = self.text.number(arg), self._masked_operand(Reduce("max", arg, self.nest.body[arg].dtype), r)
        if self.text.flat_rows:
            width = self._width(arg, r)
            value = f"tl.reshape({value}, [{r.block // width}, {width}])"
        self.line(f"e{n} = {value}")
        self.line(f"h{n} = max_(m{n}, tl.reduce(e{n}, 1, max_))")
        self.line(f"s{n} = online_(s{n}, m{n}, h{n}, e{n})")
        self.line(f"m{n} = h{n}")

    def _end_online(self, arg: Ref, together: list[Ref]) -> None:
        """Combine the running maxima and sums, and name the reductions of `arg` that they are."""
        n = self.text.number(arg)
        self.line(f"h{n} = tl.reduce(m{n}, 0, max_)" if self.text.flat_rows else f"h{n} = m{n}")
        self.line(f"s{n} = s{n} * libdevice.exp(m{n} - h{n})")
        if self.text.flat_rows:
            self.line(f"s{n} = tl.sum(s{n}, 0)")
        for ref in together:
            self.line(f"{self.text.name(ref)} = {'h' if self._reduce(ref).op == 'max' else 's'}{n}{self._column}")

    def _carried(self, ref: Ref, r: TileDim) -> None:
        """Write an element value of one block of a row; a scan continues from the previous block."""
        value = self.nest.body[ref]
        self._value(ref)
        if isinstance(value, Scan):
            carry, name = f"c{self.text.number(ref)}", self.text.name(ref)
            self.line(f"{name} = {combine(value.op, carry, name, value.dtype)}")
            total = reduced(value.op, value.dtype, self._masked_operand(value, r), self._along)
            self.line(f"{carry} = {combine(value.op, carry, f'{total}{self._column}', value.dtype)}")

    def _elements_below(self, roots: set[Ref]) -> list[Ref]:
        """Return the element values that `roots` depend on, in order: each pass recomputes them."""
        stack, seen = list(roots), set[Ref]()
        while stack:
            ref = stack.pop()
            if ref not in seen and self.levels.element[ref]:
                seen.add(ref)
                stack += operands(self.nest.body[ref])
        return sorted(seen)

    def _reduce(self, ref: Ref) -> Reduce:
        value = self.nest.body[ref]
        assert isinstance(value, Reduce)
        return value

    # --- columns ---

    def _columns(self) -> None:
        """Write the loop over some rows, with accumulators of column reductions."""
        self._wait()
        x, r = self.plan.dims
        pieces, chunk = self.text.size(r.blocks), self.text.size(self.plan.chunk)
        self.line(f"part = {self.pid}" + ("" if pieces in ("0", "1") else f" // {pieces}"))
        self.line(f"first = part * {chunk}")
        self.line(f"last = tl.minimum(first + {chunk}, {self.text.size(x.size)})")
        self.text.position(r, "0" if pieces in ("0", "1") else f"({self.pid} % {pieces}) * {r.block}")
        live, inside = sorted(self.levels.live), self._inside_loop()
        for ref in live:
            if ref not in inside:
                self._value(ref)
        columns = [n for n, store in enumerate(self.nest.stores) if store.mode != "set"]
        for n in columns:
            store = self.nest.stores[n]
            identity = identity_text(store.mode, self.table[store.buffer].dtype)
            shape = self.text.shape(self._space(n))
            self.line(f"q{n} = {f'tl.broadcast_to({identity}, {shape})' if self._space(n) & self._tile else identity}")
        self.line(f"for x0 in tl.range(first, last, {x.block}, num_stages={self._stages()}):")
        self.text.depth += 1
        self.text.position(x, "x0")
        for ref in live:
            if ref in inside:
                self._value(ref)
        for n in columns:
            self._collect(n)
        sets = [n for n, store in enumerate(self.nest.stores) if store.mode == "set"]
        if sets:
            self._barrier()
        for n in sets:
            self.text.store(n)
        self.text.depth -= 1
        for n in columns:
            self._finish_column(n)

    def _inside_loop(self) -> set[Ref]:
        """Return the values that vary from tile to tile of a run of rows, if not inside one."""
        fixed = {axis.name for axis in self.text.fixed(self.plan.dims[0])}
        found: set[Ref] = set()
        for ref, value in enumerate(self.nest.body):
            own = value.index.variables & fixed if isinstance(value, (Load, IndexOf)) else frozenset()
            if own or "x" in self.classes[ref] or not found.isdisjoint(operands(value)):
                found.add(ref)
        return found

    def _stages(self) -> int:
        """Return the number of iterations in flight: each but the last holds its loads in shared memory."""
        inside = self._inside_loop()
        loads = [self.nest.body[ref] for ref in self.levels.live if ref in inside]
        held = sum(self._tile_bytes(load) for load in loads if isinstance(load, Load))
        return next((stages for stages in (3, 2) if (stages - 1) * held <= PREFETCHED), 1)

    def _tile_bytes(self, load: Load) -> int:
        place = self.text.varying_dims(load.index)
        return prod(dim.block for dim in self.plan.dims if dim.name in place) * ITEMSIZE[load.dtype]

    @property
    def _tile(self) -> Class:
        """The dimensions of the tile that are dimensions of its tensors."""
        return frozenset(("r",)) if self.text.flat_rows else self.text.everything

    def _space(self, number: int) -> Class:
        """Return the dimensions over which a combining store happens."""
        return frozenset(("x",)) if self.nest.row_stores[number] else self.text.everything

    def _collect(self, number: int) -> None:
        """Combine a tile's values with the accumulator of a column reduction."""
        store, space = self.nest.stores[number], self._space(number)
        dtype = self.table[store.buffer].dtype
        value = self.text.whole(store.value, space) if space & self._tile else self.text.name(store.value)
        mask = self.text.mask(space)
        if mask:
            value = f"tl.where({mask}, {value}, {identity_text(store.mode, dtype)})"
        self.line(f"q{number} = {combine(store.mode, f'q{number}', value, dtype)}")

    def _finish_column(self, number: int) -> None:
        """Reduce over the rows of the tile, and store this program's part."""
        store, space = self.nest.stores[number], self._space(number)
        dtype = self.table[store.buffer].dtype
        columns_vary = self.text.varying_dims(store.index) & {"r"}
        q = f"q{number}"
        if not columns_vary and space & self._tile:
            q = reduced(store.mode, dtype, q, 0 if self.text.flat_rows else 1)
        if not self.text.flat_rows:
            q = reduced(store.mode, dtype, q, 0) + ("[None, :]" if columns_vary else "")
        packed = f"({q}).to(tl.{dtype})" if dtype in ("bfloat16", "float16") else q
        mask = self.text.mask(columns_vary)
        self.line(f"tl.store({self.text.pointer(store)}, {packed}{f', {mask}' if mask else ''})")
