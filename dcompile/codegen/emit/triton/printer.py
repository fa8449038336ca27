"""Print the statements of a Triton kernel: coordinates and masks of a tile, values, loads and stores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dcompile.codegen.emit.float8 import decoded
from dcompile.codegen.emit.target import index_text
from dcompile.codegen.emit.triton.ops import SPELLING, literal
from dcompile.codegen.nest.loop_nest import Axis, Levels, levels, may_exceed
from dcompile.codegen.nest.tile_plan import TileDim, TilePlan, count, row_number
from dcompile.device_traits import MAX_INT32_ELEMENTS, MULTIPROCESSORS
from dcompile.ir.analysis import is_clamped, is_softmax, operands, runtime_refs
from dcompile.ir.buffers import IN_BUCKET, IN_DONOR, ITEMSIZE, WITHIN, Buffer
from dcompile.ir.float8 import MAX_FLOAT8
from dcompile.ir.index import (
    Atom,
    Div,
    Extreme,
    Index,
    Size,
    Var,
    as_index,
    as_size,
    bounds,
    exact_quotient,
    is_nonnegative,
    is_symbol,
)
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Reduce, Ref, Scan, Store

CHECK = "tl.device_assert"
"""Assertion that ends the kernel, and with it the process's GPU work, as the library's checks of positions do."""
MAX_COLUMN_WARPS = 2 * MULTIPROCESSORS * 64
"""Warps of all programs that may start early: twice what a GPU runs at a time. Waiting costs each program about 0.3 us,
a start after the previous kernel's end 1 us once. With waits, the rotary embedding of 8192 tokens (40960 programs of 4
warps) took 53 us, without 46 (one H200)."""
NOWHERE: Mapping[Axis, str] = {}
NO_REGISTERS: Mapping[str, str] = {}
Class = frozenset[str]
"""The dimensions of the tile along which a value varies."""


class TritonText:
    """Collects lines, and knows the dimensions of the tile along which each value varies."""

    def __init__(
        self,
        plan: TilePlan,
        table: Mapping[str, Buffer],
        constant: frozenset[str] | None = None,
        *,
        registers: Mapping[str, str] = NO_REGISTERS,
        ragged: Collection[str] | None = None,
    ) -> None:
        self.plan, self.nest, self.table, self.constant = plan, plan.nest, table, constant or frozenset[str]()
        self.registers = registers
        """Buffers with elements in registers already -> the name of the tile that holds them."""
        self._ragged = ragged
        """Dimensions along which the last tile exceeds the loop, if the plan does not say so."""
        brief = isinstance(plan.grid, int) and plan.grid * plan.warps <= MAX_COLUMN_WARPS * (1 + plan.looped)
        self.waits = constant is not None and brief
        """Whether the kernel starts while the previous one ends, even if it can read nothing meanwhile."""
        self.levels: Levels = levels(plan.nest)
        self.lines: list[str] = []
        self.depth = 1
        self.arguments: dict[str, str] = {}
        self.symbols: dict[str, str] = {}
        """Size symbols -> their arguments."""
        self.numbers: dict[Ref, int] = {}
        self.draws: dict[int, str] = {}
        """Number of a random operation in its graph -> its argument. So layers share their kernels."""
        self.drawn = {v.args[2] for v in self.nest.body if isinstance(v, Apply) and v.op == "philox"}
        self.names = {axis.name: dim.name for dim in plan.dims for axis in dim.axes if axis not in self.fixed(dim)}
        self._ranges = {axis.name: axis.size for axis in self.nest.axes}
        self.classes = self._classes()
        self.wide = self._is_wide()
        self.overlaps = self._overlaps()

    # --- analysis ---

    def _classes(self) -> list[Class]:
        found: list[Class] = []
        for value in self.nest.body:
            own: Class = self.varying_dims(value.index, found) if isinstance(value, (Load, IndexOf)) else frozenset()
            own = own.union(*(found[ref] for ref in operands(value)))
            if isinstance(value, Scan):
                own = self.everything  # Triton 3.6 fails on scans of one row that all rows of a tile share
            found.append(own - {"r"} if isinstance(value, Reduce) else own)
        return found

    def varying_dims(self, index: Index, classes: list[Class] | None = None) -> Class:
        """Return the dimensions along which an index varies."""
        known = self.classes if classes is None else classes
        direct = frozenset(self.names[name] for name in index.variables if name in self.names)
        return direct.union(*(known[ref] for ref in runtime_refs(index)))

    def extent(self, buffer: str) -> Size:
        """Return the elements from the first to the last of a buffer."""
        return self.table[buffer].extent

    def _is_wide(self) -> bool:
        """Do positions need 64 bits? Those of symbolic sizes may."""
        buffers = {value.buffer for value in self.nest.body if isinstance(value, Load)}
        buffers |= {store.buffer for store in self.nest.stores}
        if any(
            may_exceed(size, MAX_INT32_ELEMENTS - 1) for size in (count(self.nest.axes), *map(self.extent, buffers))
        ):
            return True
        for value in self.nest.body:
            if isinstance(value, IndexOf) and not runtime_refs(value.index):
                low, high = bounds(value.index, self._ranges)
                if low is None or high is None or low <= -MAX_INT32_ELEMENTS or high >= MAX_INT32_ELEMENTS:
                    return True
        return False

    def _overlaps(self) -> bool:
        """Does the kernel write memory that it reads? The thread that writes an element may not be its reader."""
        reads = {value.buffer for value in self.nest.body if isinstance(value, Load)} - self.registers.keys()
        return any(overlap(self.table[a], self.table[store.buffer]) for a in reads for store in self.nest.stores)

    # --- text ---

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def argument(self, buffer: str) -> str:
        return self.arguments.setdefault(buffer, f"a{len(self.arguments)}")

    def number(self, ref: Ref) -> int:
        return self.numbers.setdefault(ref, len(self.numbers))

    def name(self, ref: Ref) -> str:
        return f"t{self.number(ref)}"

    def index(self, index: Index) -> str:
        return index_text(index, self._atom, " * ")

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, Var):
            if is_symbol(atom.name):
                return self.symbol(atom.name)
            if atom.name[0] != "v":
                return atom.name
            ref = int(atom.name[1:])
            if self.wide:
                return f"{self.name(ref)}.to(tl.int64)"
            narrow = self.nest.body[ref].dtype in ("int64", "uint8")
            return f"{self.name(ref)}.to(tl.int32)" if narrow else self.name(ref)
        if isinstance(atom, Extreme):
            return f"tl.{atom.kind}imum({self.index(atom.left)}, {self.index(atom.right)})"
        chunked = self.plan.chunk and isinstance(atom, Div) and atom.divisor == self.plan.chunk
        if chunked and atom.base == row_number(self.plan.dims[0].axes):
            return "part"
        divides = isinstance(atom, Div)
        # LLVM computes signed remainders of small numbers in 8 bits, two at a time. ptxas (Triton 3.6) compiled these
        # for windows shifted around an edge (Swin v2) such that they read wrong addresses.
        if isinstance(atom.divisor, int) and is_nonnegative(as_index(atom.base), self._ranges):
            return f"{'quotient_' if divides else 'remainder_'}({self.index(atom.base)}, {atom.divisor})"
        return f"(({self.index(atom.base)}) {'//' if divides else '%'} {self.size(atom.divisor)})"

    def symbol(self, name: str) -> str:
        """Return the argument of a size symbol."""
        return self.symbols.setdefault(name, f"d{len(self.symbols)}")

    def size(self, size: Size) -> str:
        """Return a length as an operand."""
        return str(size) if isinstance(size, int) else f"({self.index(size)})"

    # --- the tile ---

    @property
    def flat_rows(self) -> bool:
        """Whether a tile is one row or a part of it: row values are scalars, and a tile has one dimension."""
        return self.plan.kind != "flat" and self.plan.dims[0].block == 1

    def shape(self, of: Iterable[str]) -> str:
        """Return the shape of a tensor that varies along some dimensions."""
        kept = set(of)
        dims = self.plan.dims[1:] if self.flat_rows else self.plan.dims
        return "[" + ", ".join(str(dim.block) if dim.name in kept else "1" for dim in dims) + "]"

    @property
    def everything(self) -> Class:
        return frozenset(dim.name for dim in self.plan.dims)

    def arange(self, dim: TileDim) -> str:
        """Return positions within a tile along one of its dimensions."""
        text = f"tl.arange(0, {dim.block})"
        if len(self.plan.dims) > 1 and not self.flat_rows:
            text += "[:, None]" if dim is self.plan.dims[0] else "[None, :]"
        return text

    def position(self, dim: TileDim, start: str) -> None:
        """Name the positions along `dim`, from `start` on, their mask, and the loop variables there."""
        scalar = dim.block == 1 and self.flat_rows and dim is self.plan.dims[0]
        steps = self.arange(dim) + (".to(tl.int64)" if self.wide else "")
        fixed = self.fixed(dim)
        first = start
        if fixed and not start.isidentifier():
            first = f"{dim.name}0"
            self.line(f"{first} = {start}")
        self.line(f"{dim.name} = {first if scalar else steps if first == '0' else f'{first} + {steps}'}")
        if self.has_mask(dim):
            self.line(f"{dim.name}m = {dim.name} < {self.end(dim)}")
        self.coordinates(dim.name, dim.axes, dict.fromkeys(fixed, first))

    def fixed(self, dim: TileDim) -> tuple[Axis, ...]:
        """Return variables that are constant over a tile, which fits between two of their steps."""
        is_chunked = self.plan.kind == "columns" and dim is self.plan.dims[0]
        if dim.block == 1 or (is_chunked and exact_quotient(self.plan.chunk, dim.block) is None):
            return ()
        behind = [count(dim.axes[place + 1 :]) for place in range(len(dim.axes))]
        whole = [isinstance(size, int) and size > 0 and size % dim.block == 0 for size in behind]
        return tuple(axis for axis, holds in zip(dim.axes, whole, strict=True) if holds)

    def end(self, dim: TileDim) -> str:
        return "last" if self.plan.kind == "columns" and dim is self.plan.dims[0] else self.size(dim.size)

    def coordinates(self, place: str, axes: tuple[Axis, ...], starts: Mapping[Axis, str] = NOWHERE) -> None:
        """Name the loop variables of a position; `starts` has the tile's start for variables constant in the tile."""
        inner: Size = 1
        for axis in reversed(axes):
            at = starts.get(axis, place)
            text = at if inner == 1 else f"({at} // {self.size(inner)})"
            inner = as_size(as_index(inner) * axis.size)
            self.line(f"{axis.name} = {text if axis is axes[0] else f'{text} % {self.size(axis.size)}'}")

    def has_mask(self, dim: TileDim) -> bool:
        """Does the last tile exceed the loop?"""
        if self._ragged is not None:
            return dim.name in self._ragged
        if self.plan.kind == "columns" and dim is self.plan.dims[0]:
            ends = self.plan.chunk, dim.size  # of a run of rows, and of the last one
            return dim.block > 1 and any(exact_quotient(end, dim.block) is None for end in ends)
        return dim.size == 0 or exact_quotient(dim.size, dim.block) is None

    def mask(self, of: Iterable[str]) -> str:
        """Return the mask of a tile that varies along some dimensions; empty if all of it is inside the loop."""
        kept = set(of)
        return " & ".join(f"{dim.name}m" for dim in self.plan.dims if dim.name in kept and self.has_mask(dim))

    # --- values ---

    def declare(self, ref: Ref) -> None:
        self.line(f"{self.name(ref)} = {self.expression(ref)}")

    def expression(self, ref: Ref) -> str:
        """Return the right-hand side of a value's declaration."""
        match self.nest.body[ref]:
            case Const(value, "int64") if ref in self.drawn:
                draw, word = divmod(int(value), 4)
                return f"({self.draws.setdefault(draw, f'n{len(self.draws)}')}.to(tl.int64) << 2) | {word}"
            case Const(value, dtype):
                return literal(value, dtype)
            case IndexOf(index, dtype):
                constant = index.constant
                return literal(constant, dtype) if constant is not None else f"({self.index(index)}).to(tl.{dtype})"
            case Load() as load:
                return self._load(load)
            case Apply("cast", (arg,), dtype):
                source = self.nest.body[arg].dtype
                if source == dtype or (dtype == "float32" and source in ("bfloat16", "float16")):
                    return self.name(arg)
                how = "clamped_" if is_clamped(self.nest.body, arg, MAX_FLOAT8.get(dtype, -1.0)) else ""
                return how + SPELLING["cast"].format(decoded(self.name(arg), source), dtype=dtype)
            case Apply("div", (exp, total), "float32") if is_softmax(self.nest.body, ref):
                return f"share_({self.name(exp)}, {self.name(total)})"
            case Apply(op, args, dtype):
                text = SPELLING[op].format(*map(self.name, args), dtype=dtype)
                # Triton computes 8 and 16 bits in 32
                return f"({text}).to(tl.{dtype})" if dtype in ("int8", "int16", "uint8") else text
            case Reduce() | Scan():
                raise AssertionError("a reduction has no expression of its own")

    def _load(self, load: Load) -> str:
        if load.buffer in self.registers:
            return self.registers[load.buffer]
        place = self.varying_dims(load.index)
        index = self.index(load.index)
        masks = [self.mask(place)] if self.mask(place) else []
        if load.mask is not None:
            if not self.classes[load.mask] <= place:  # the address must have the shape of the mask
                place |= self.classes[load.mask]
                index = self.broadcast_index(load.index, place)
                masks = [self.mask(place)] if self.mask(place) else []
            masks.append(self.name(load.mask))
        pointer = self.argument(load.buffer) if index == "0" else f"{self.argument(load.buffer)} + ({index})"
        options = f", mask={' & '.join(masks)}" if masks else ""
        options += ", other=0" if load.mask is not None else ""
        options += ', eviction_policy="evict_first"' if self._is_streamed(load) else ""
        wide = ".to(tl.float32)" if load.dtype in ("bfloat16", "float16") else ""
        return f"tl.load({pointer}{options}){wide}"

    def _is_streamed(self, load: Load) -> bool:
        """Is it a matrix that is read once, and gives way to others in caches?"""
        found = self.plan.row_matmul
        return found is not None and any(self.nest.body[ref] == load for ref in found[0].matrices)

    def broadcast_index(self, index: Index, of: Class) -> str:
        """Return an index as a tensor of the shape of `of`; a scalar where nothing along `of` is a tensor."""
        if self.flat_rows and not of & {dim.name for dim in self.plan.dims[1:]}:
            return self.index(index)
        text = self.index(index) if index.variables else literal(index.constant or 0, "int32")
        return f"tl.broadcast_to({text}, {self.shape(of)})"

    def packed(self, ref: Ref, dtype: str) -> str:
        """Return a value in its memory dtype."""
        name = self.name(ref)
        return f"{name}.to(tl.{dtype})" if dtype in ("bfloat16", "float16") else name

    def store(self, number: int) -> None:
        """Print one store, or a combination with the value in memory."""
        store = self.nest.stores[number]
        dtype = self.table[store.buffer].dtype
        if store.mode != "set":
            self._atomic(number, store, dtype)
            return
        mask = self.mask(self.varying_dims(store.index))
        pointer = self.pointer(store)
        if runtime_refs(store.index):
            place, size = f"({self.index(store.index)})", self.size(self.extent(store.buffer))
            inside = f"({place} >= 0) & ({place} < {size})"
            inside = f"(({mask}) == 0) | ({inside})" if mask else inside
            self.line(f'{CHECK}({inside}, "a position lies outside of what is written to")')
        self.line(f"tl.store({pointer}, {self.packed(store.value, dtype)}{f', {mask}' if mask else ''})")

    def store_all(self) -> None:
        """Print all stores, after all reads of memory that they write."""
        if self.overlaps:
            self.line("tl.debug_barrier()")
        for number in range(len(self.nest.stores)):
            self.store(number)

    def store_word(self, numbers: Sequence[int]) -> None:
        """Print one store of the bytes of several: see `byte_words`."""
        stores = [self.nest.stores[number] for number in numbers]
        place = exact_quotient(stores[0].index, len(stores))
        assert place is not None, "words are aligned"
        pointer = f"{self.argument(stores[0].buffer)}.to(tl.pointer_type(tl.int32)) + ({self.index(as_index(place))})"
        how, packed = "pack_bytes", [store.value for store in stores]
        dtype = self.nest.body[packed[0]].dtype
        casts = [value for ref in packed if isinstance(value := self.nest.body[ref], Apply) and value.op == "cast"]
        if dtype in MAX_FLOAT8 and len(casts) == len(packed):
            before = [cast.args[0] for cast in casts]
            if all(is_clamped(self.nest.body, ref, MAX_FLOAT8[dtype]) for ref in before):
                how, packed = f"pack_{dtype}", before
        mask = self.mask(self.varying_dims(stores[0].index))
        self.line(f"tl.store({pointer}, {how}({', '.join(map(self.name, packed))}){f', {mask}' if mask else ''})")

    def pointer(self, store: Store) -> str:
        """Return the address that a store writes to."""
        index = self.index(store.index)
        return self.argument(store.buffer) if index == "0" else f"{self.argument(store.buffer)} + ({index})"

    def _atomic(self, number: int, store: Store, dtype: str) -> None:
        space = self.everything - ({"r"} if self.nest.row_stores[number] else frozenset())
        value, mask = self.name(store.value), self.mask(space)
        if dtype.startswith("float") and store.mode in ("max", "min"):  # the sign of a NaN would decide
            value = f'tl.where({value} == {value}, {value}, float("nan"))'
        shape = self.shape(space)
        if self.flat_rows and space == {"x"}:
            shape = ""
        place = self.index(store.index)
        if shape and self.varying_dims(store.index) != space:
            place = self.broadcast_index(store.index, space)
        if shape and self.classes[store.value] != space:
            value = f"tl.broadcast_to({value}, {shape})"
        how = {"sum": "add", "max": "max", "min": "min"}[store.mode]
        options = f", mask={mask}" if mask else ""
        self.line(f'tl.atomic_{how}({self.argument(store.buffer)} + ({place}), {value}{options}, sem="relaxed")')

    def whole(self, ref: Ref, of: Class) -> str:
        """Return a value as a tensor of the tile's full shape along `of`."""
        return self.name(ref) if self.classes[ref] == of else f"tl.broadcast_to({self.name(ref)}, {self.shape(of)})"


def overlap(a: Buffer, b: Buffer) -> bool:
    """Do two buffers share memory?"""
    if a.name == b.name:
        return True
    if a.storage is None or _home(a) != _home(b):
        return False
    first, second = as_index(a.offset), as_index(b.offset)
    ends = first + as_index(a.extent) * ITEMSIZE[a.dtype], second + as_index(b.extent) * ITEMSIZE[b.dtype]
    return not (is_nonnegative(first - ends[1], {}) or is_nonnegative(second - ends[0], {}))


def _home(buffer: Buffer) -> str:
    """Return the memory that the buffer's offset refers to: shared, or that of one buffer."""
    storage = buffer.storage or ""
    if storage == "arena" or storage.startswith((IN_BUCKET, WITHIN)):
        return storage
    return storage if storage.startswith(IN_DONOR) else IN_DONOR + buffer.name
