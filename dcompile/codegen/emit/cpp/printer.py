"""What the text of a kernel is made of: decisions about values, and the statements that compute and store them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from dcompile.codegen.emit.cpp.column_sums import collects_in_place
from dcompile.codegen.emit.cpp.hoist import find_tables
from dcompile.codegen.emit.cpp.ops import MEMORY, SPELLING, c_type, clause, literal
from dcompile.codegen.emit.cpp.transpose import Turned, find_turned
from dcompile.codegen.emit.cpp.value_facts import Counted, round_values, short_nans, to_shorten
from dcompile.codegen.emit.float8 import decoded
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis, Levels, Nest, cone_cost, levels, may_exceed
from dcompile.ir.analysis import operands, runtime_refs, store_operands
from dcompile.ir.index import Atom, Div, Extreme, Index, Mod, Size, Var, as_size, is_symbol, size_product
from dcompile.ir.nodes import ITEMSIZE, Apply, Buffer, Const, IndexOf, Load, Reduce, Ref, Scan, Value
from dcompile.ir.ops import DTYPES, OPS, REDUCTIONS

PARALLEL_WORK = 32768
"""Element operations below which a kernel stays on one thread: about 10 us, what waking a thread pool costs."""
ROW_ARRAY_BYTES = 1 << 18
"""Stack for values kept from pass to pass. It fits into the second level of caches, from which they come for less than
an exponential takes: softmax of rows of 32000 took 0.75 of the time in float32 and 0.7 in bfloat16 (Zen 3)."""
KEEP_COST = 10
"""Additions from which a value is kept rather than computed again: one exp, about what a store and a load cost."""
LOCAL = 4096
"""Elements of a kept value that lie on the stack where the length of rows is known at run time only; longer rows are
kept on the heap."""
ZEROS_BYTES = 16384
"""Length of the prelude's `zeros`: rows up to it are read from there where their mask is false."""
SPLIT = 64
"""Columns that a thread takes, where threads share rows, are a multiple of this: whole cache lines."""
BEFORE = -1
"""The pass in which tables are made."""


class Statements:
    """Collects lines. Row values are C++ variables of the row, element values of their loop."""

    def __init__(self, nest: Nest, table: Mapping[str, Buffer]) -> None:
        self.nest, self.table = nest, table
        self.levels: Levels = levels(nest)
        self.lines: list[str] = []
        self.depth = 1
        self.arguments: dict[str, str] = {}
        self.numbers: dict[Ref, int] = {}
        self.kept: dict[Ref, int] = {}
        self.kept_bytes = 0
        self.computed: dict[Ref, int] = {}
        self.checked = False
        self.columns = {n: f"q{n}" for n, store in enumerate(nest.stores) if store.mode != "set"}
        self.symbols: dict[str, str] = {}
        """Size symbols -> the arguments that they are."""
        self.declared: set[str] = set()
        """Names of the whole kernel that are declared already."""
        self.parallel = may_exceed(self._work(), PARALLEL_WORK)
        self.in_place = any(self._collects_in_place(nest.stores[n].buffer) for n in self.columns)
        self.split = self._find_split()
        self.turned: Turned | None = find_turned(nest, table)
        self.pointed: set[Ref] = set()
        """Loads that read through a pointer of their row: to the row, or to zeros where the row's mask is false."""
        self.shortened = to_shorten(nest.body, self.levels.element, nest.stores) if not nest.lane else frozenset[Ref]()
        self.short_nans = short_nans(nest.body, self.shortened)
        self.round = {narrow: round_values(nest.body, narrow) for narrow in ("bfloat16", "float16")}
        """Values that these hold as they are."""
        self.counted: Counted | None = None
        """What the loop that is being written counts in an int32 of its own, `place`."""
        self.opened: set[str] = set()
        """Variables of scans that the row has already."""
        loads = [value.index for value in nest.body if isinstance(value, Load)]
        self.places = {r for index in (*loads, *(s.index for s in nest.stores)) for r in runtime_refs(index)}
        """Values that say where to read or write."""
        self.tables = find_tables(nest, self.levels)
        """Values that are read from arrays of the whole kernel."""
        self._plan_kept()

    # --- decisions ---

    def _work(self) -> Size:
        cost = sum(OPS[v.op].cost if isinstance(v, Apply) else 1 for v in self.nest.body)
        return as_size(self.nest.points * (cost + len(self.nest.stores)))

    def _worthwhile(self) -> str:
        """Whether there is work for several threads, where the sizes decide: a clause for the pragma."""
        work = self._work()
        return "" if isinstance(work, int) else f" if({self.size(work)} > {PARALLEL_WORK})"

    def bytes_of(self, name: str) -> Size:
        """From a buffer's first to its last element."""
        return as_size(self.table[name].extent * ITEMSIZE[self.table[name].dtype])

    def _roots(self, number: int) -> tuple[list[Ref], list[int]]:
        """Reductions and element stores of a pass."""
        known = self.levels.known
        reduces = [
            r for r in sorted(self.levels.live) if isinstance(self.nest.body[r], Reduce) and known[r] == number + 1
        ]
        stores = [n for n, row in enumerate(self.nest.row_stores) if not row and self.levels.store_at[n] == number]
        return reduces, stores

    def _passes(self) -> int:
        return max(self.levels.store_at) + 1

    def _targets(self, number: int) -> list[Ref]:
        """The values that a pass needs for its reductions and stores."""
        reduces, stores = self._roots(number)
        uses = [ref for n in stores for ref in store_operands(self.nest.stores[n])]
        return [self._reduce(ref).arg for ref in reduces] + uses

    def _plan_kept(self) -> None:
        """Which element values are kept from the pass that computes them to later ones."""
        count = size_product(axis.size for axis in self.nest.elements)
        for ref in self.tables:
            self.kept[ref] = self.computed[ref] = BEFORE
        for number in range(self._passes()):
            stack, seen = self._targets(number), set[Ref]()
            while stack:
                ref = stack.pop()
                if ref in seen or not self.levels.element[ref]:
                    continue
                seen.add(ref)
                if self.computed.get(ref, number) < number and self._keep(ref, count):
                    continue
                stack += operands(self.nest.body[ref])
            for ref in seen:
                self.computed.setdefault(ref, number)

    def _keep(self, ref: Ref, count: Size) -> bool:
        value = self.nest.body[ref]
        if ref in self.kept:
            return True
        itemsize = ITEMSIZE[value.dtype if value.dtype not in MEMORY else "float32"]
        size = count * itemsize if isinstance(count, int) else LOCAL * itemsize
        if self.nest.lane or isinstance(value, Load) or self.kept_bytes + size > ROW_ARRAY_BYTES:
            return False
        if cone_cost(ref, self.nest.body, frozenset(self.kept)) < KEEP_COST:
            return False
        self.kept[ref] = self.computed[ref]
        self.kept_bytes += size
        return True

    def _collects_in_place(self, buffer: str) -> bool:
        rows, held = size_product(axis.count for axis in self._row_axes()), self.table[buffer]
        return collects_in_place(rows, self.nest.points, held.extent, ITEMSIZE[held.dtype])

    def _find_split(self) -> Axis | None:
        """The innermost variable, if every column reduction keeps its values apart whatever the row is.

        Then threads may share a result that is too large to have one each: the gradient of an embedding.
        """
        last, stores = self.nest.elements[-1], self.nest.stores
        if not (self.in_place and self.parallel) or any(self.nest.row_stores):
            return None
        if not isinstance(last.size, int) or last.size < 2 * SPLIT:
            return None
        if any(row.name == last.name for row in self.nest.rows):
            return None
        if any(isinstance(value, (Reduce, Scan)) for value in self.nest.body):
            return None
        return last if all(self._keeps_apart(n, last) for n in range(len(stores))) else None

    def _keeps_apart(self, number: int, axis: Axis) -> bool:
        index, size = self.nest.stores[number].index, axis.size
        others = [coefficient for monomial, coefficient in index.terms if monomial != (Var(axis.name),)]
        unit = index.coefficient(axis.name)
        fixed = self.nest.stores[number].mode == "set" or self._simd(number, axis.name)
        return (
            fixed
            and unit is not None
            and unit.constant == 1
            and isinstance(size, int)
            and all(c % size == 0 for c in others)
        )

    def _is_scalar_column(self, number: int, name: str) -> bool:
        """A column reduction that all elements of the innermost loop share."""
        store = self.nest.stores[number]
        depends = name in store.index.variables or any(
            self.levels.element[int(v[1:])] for v in store.index.variables if v[0] == "v"
        )
        return store.mode != "set" and not depends

    def _simd(self, number: int, name: str) -> bool:
        """May neighbours along `name` make this store at the same time?"""
        store = self.nest.stores[number]
        if store.mode == "set":
            return True
        stride = store.index.coefficient(name)
        varying = [v for v in store.index.variables if v[0] == "v" and self._varies(int(v[1:]), name)]
        if stride is None or varying:
            return False
        return stride.constant != 0 or (self._is_scalar_column(number, name) and self.nest.lane is None)

    def _varies(self, ref: Ref, name: str) -> bool:
        value = self.nest.body[ref]
        direct = isinstance(value, (Load, IndexOf)) and name in value.index.variables
        return direct or any(self._varies(operand, name) for operand in operands(value))

    def _may_point(self, ref: Ref) -> bool:
        """Is this a load of a whole row or of none of it?"""
        load, last = self.nest.body[ref], self.nest.elements[-1]
        if not isinstance(load, Load) or load.mask is None or self.levels.element[load.mask]:
            return False
        if self.nest.lane or len(self.nest.elements) > 1 or may_exceed(last.size, ZEROS_BYTES // ITEMSIZE[load.dtype]):
            return False
        unit = load.index.coefficient(last.name)
        varies = any(self.levels.element[int(v[1:])] for v in load.index.variables if v[0] == "v")
        return unit is not None and unit.constant == 1 and not varies

    def _row_axes(self) -> tuple[Axis, ...]:
        lane = self.nest.lane
        return (*self.nest.rows, *((Axis(lane.name, lane.size, OUTER_VECTOR_ROWS),) if lane else ()))

    def _reduce(self, ref: Ref) -> Reduce:
        value = self.nest.body[ref]
        assert isinstance(value, Reduce)
        return value

    # --- text ---

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def close(self, count: int = 1) -> None:
        for _ in range(count):
            self.depth -= 1
            self.line("}")

    def argument(self, buffer: str) -> str:
        return self.arguments.setdefault(buffer, f"a{len(self.arguments)}")

    def number(self, ref: Ref) -> int:
        return self.numbers.setdefault(ref, len(self.numbers))

    def name(self, ref: Ref) -> str:
        value = self.nest.body[ref]
        return literal(value.value, value.dtype) if isinstance(value, Const) else f"t{self.number(ref)}"

    def index(self, index: Index) -> str:
        parts = []
        for monomial, coefficient in index.terms:
            factors = [self._atom(atom) for atom in monomial]
            if coefficient != 1 or not factors:
                factors.append(str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts) or "0"

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var(name) if name[0] == "v":
                ref = int(name[1:])
                return self.name(ref) if self._is_fixed_in_row(ref) else f"position({self.name(ref)})"
            case Var(name):
                return self.symbol(name) if is_symbol(name) else name
            case Extreme(kind, left, right):
                return f"{kind}_<int64>({self.index(left)}, {self.index(right)})"
            case Div(base, divisor):
                return f"(({self.index(base)}) / {self.size(divisor)})"
            case Mod(base, divisor):
                return f"(({self.index(base)}) % {self.size(divisor)})"

    def symbol(self, name: str) -> str:
        """The argument that a size symbol is."""
        return self.symbols.setdefault(name, f"d{len(self.symbols)}")

    def size(self, size: Size) -> str:
        """A length, in parentheses unless it is a number or a name."""
        if isinstance(size, int):
            return str(size)
        text = self.index(size)
        return text if text.isidentifier() else f"({text})"

    def place(self, buffer: str, index: Index) -> str:
        return f"{self.argument(buffer)}[{self.index(index)}]"

    def expression(self, value: Value) -> str:
        """The right-hand side of a value's declaration."""
        match value:
            case Const(literal_, dtype):
                return literal(literal_, dtype)
            case IndexOf(index, dtype):
                return f"{dtype}({self.index(index)})"
            case Load(buffer, index, dtype, mask):
                read = self.place(buffer, index)
                read = f"load_{dtype}({read})" if dtype in MEMORY else read
                return read if mask is None else f"{self.name(mask)} ? {read} : {c_type(dtype)}(0)"
            case Apply("cast", (arg,), dtype):
                source = self.nest.body[arg].dtype
                exact = source == dtype or (dtype == "float32" and source in MEMORY and source != "bool")
                exact = exact or (dtype in self.round and source == "float32" and arg in self.round[dtype])
                if not exact and dtype == "bfloat16" and source == "float32" and arg in self.short_nans:
                    return f"nearest_bfloat16({self.name(arg)})"
                return (
                    self.name(arg) if exact else SPELLING["cast"].format(decoded(self.name(arg), source), dtype=dtype)
                )
            case Apply("where", (mask, arg, other), _) if self._is_zero_anyway(mask, arg, other):
                return self.name(arg)
            case Apply("where", (mask, *args), "float32") if self.levels.element[mask] and any(map(self._jumps, args)):
                return f"picked({self.name(mask)}, {', '.join(map(self.name, args))})"
            case Apply(op, args, dtype):
                return self.apply(op, args, dtype)
            case Reduce() | Scan():
                raise AssertionError("a reduction or a scan has no expression of its own")

    def _jumps(self, ref: Ref) -> bool:
        """Is this read where a value of the element says? No loop with such a load is vectorised."""
        value = self.nest.body[ref]
        if isinstance(value, Apply) and value.op == "cast":
            return self._jumps(value.args[0])
        return isinstance(value, Load) and not all(map(self._is_fixed_in_row, runtime_refs(value.index)))

    def _is_zero_anyway(self, mask: Ref, arg: Ref, other: Ref) -> bool:
        """Does a masked load give the zero that is to be taken where its mask is false?"""
        load, zero = self.nest.body[arg], self.nest.body[other]
        return (
            isinstance(load, Load) and load.mask == mask and isinstance(zero, Const) and str(zero.value) in ("0", "0.0")
        )

    def apply(self, op: str, args: tuple[Ref, ...], dtype: str) -> str:
        kind = DTYPES[self.nest.body[args[0]].dtype]
        names = [self.name(arg) for arg in args]
        if kind == "int" and op in ("floordiv", "truncdiv", "mod", "fmod", "within"):
            self.checked = True
        text = self.spelling(Apply(op, args, dtype)).format(*names, dtype=dtype)
        return f"{dtype}({text})" if dtype in ("int8", "int16", "uint8") else text

    def spelling(self, value: Apply) -> str:
        """How an operation is written; beside a constant, only the other argument may be NaN."""
        if value.op == "exp" and value.dtype == "float32" and self._is_at_most_0(value.args[0]):
            return "exp_below_({0})"
        last = self.nest.body[value.args[-1]]
        number = last if isinstance(last, Const) and last.dtype in ("float32", "float64") else None
        if value.op in ("min", "max") and number is not None and not isnan(number.value):
            return f"{value.op}_number_({{0}}, {{1}})"
        return SPELLING[value.op]

    def _is_at_most_0(self, ref: Ref) -> bool:
        """Is this an element minus the largest one (or NaN)? Softmax's exponentials need half the care then."""
        match self.nest.body[ref]:
            case Apply("sub", (x, top), "float32"):
                return self.nest.body[top] == Reduce("max", x, "float32")
        return False

    def declare(self, ref: Ref) -> None:
        value = self.nest.body[ref]
        if isinstance(value, Load) and ref in self.pointed:
            read = f"z{self.number(ref)}[{self.nest.elements[-1].name}]"
            text = f"load_{value.dtype}({read})" if value.dtype in MEMORY else read
        elif isinstance(value, Load) and self.turned and ref in self.turned.loads:
            read = f"x{self.number(ref)}[{self.turned.place}]"
            text = f"load_{value.dtype}({read})" if value.dtype in MEMORY else read
        elif self.counted and ref in self.counted.positions:
            text = "place"
        elif self.counted and ref in self.counted.matches:
            text = f"place == e{self.number(self.counted.matches[ref])}"
        elif not isinstance(value, Const):
            text = f"short_nan({self.expression(value)})" if ref in self.shortened else self.expression(value)
        else:
            return
        if ref in self.places and self._is_fixed_in_row(ref):
            text = f"position({text})"
        self.line(f"const {c_type(value.dtype)} {self.name(ref)} = {text};")

    def _is_fixed_in_row(self, ref: Ref) -> bool:
        """Is an index that a value gives the same for a whole row? Then `position` stands before the loop over the row.

        Loops that have it inside are not vectorised: embeddings took 1.7 times as long, sums into rows 3.3 times.
        """
        value = self.nest.body[ref]
        return self.nest.lane is None and not self.levels.element[ref] and not isinstance(value, Const | Reduce)

    def store(self, number: int) -> None:
        """Write one store's value to its place."""
        store = self.nest.stores[number]
        dtype = self.table[store.buffer].dtype
        value = self.name(store.value)
        if store.mode == "set":
            packed = f"store_{dtype}({value})" if dtype in ("bfloat16", "float16") else value
            place = self.place(store.buffer, store.index)
            if self.turned and number in self.turned.stores:
                place = f"y{number}[{self.turned.place}]"
            self.line(f"{place} = {packed};")
        else:
            self.line(self._combine(store.mode, f"{self.columns[number]}[{self.index(store.index)}]", value, dtype))

    def _combine(self, mode: str, place: str, value: str, dtype: str) -> str:
        """A statement that adds a value to what is at `place`."""
        op = REDUCTIONS[mode].combine
        assert op is not None
        if dtype == "bool" and mode in ("max", "min"):
            op = {"max": "or", "min": "and"}[mode]
        return f"{place} = {c_type(dtype)}({SPELLING[op].format(place, value, dtype=dtype)});"

    def _combine_partial(self, ref: Ref, value: str) -> None:
        """Take a value into the accumulator of a reduction, in a form that OpenMP recognises."""
        s, how = f"s{self.number(ref)}", clause(self._reduce(ref))
        if how in ("max", "min"):
            self.line(f"{s} = {value} {'>' if how == 'max' else '<'} {s} ? {value} : {s};")
        else:
            self.line(f"{s} {how}= {value};")
