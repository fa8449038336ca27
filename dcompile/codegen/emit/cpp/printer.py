"""Print a kernel: lines, names, and the statements that compute, combine and store values, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan

from dcompile.codegen.emit.cpp.keep_values import MAX_STACK_ELEMENTS
from dcompile.codegen.emit.cpp.ops import MEMORY, SPELLING, c_type, clause, literal
from dcompile.codegen.emit.cpp.parallelize import MIN_PARALLEL_WORK
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.cpp.value_facts import PositionCounter
from dcompile.codegen.emit.float8 import decoded
from dcompile.codegen.emit.target import index_text
from dcompile.codegen.nest.loop_nest import Axis, Nest
from dcompile.ir.analysis import runtime_refs
from dcompile.ir.index import Atom, Div, Extreme, Index, Mod, Size, Var, is_symbol, size_product
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Reduce, Ref, Scan, Value
from dcompile.ir.ops import DTYPES, OPS, REDUCTIONS


class Printer:
    """The text of one kernel so far. Row values are C++ variables of the row, element values of their loop."""

    def __init__(self, plan: NestPlan) -> None:
        self.plan = plan
        self.lines: list[str] = []
        self.depth = 1
        self.arguments: dict[str, str] = {}
        """Buffers -> their arguments."""
        self.symbols: dict[str, str] = {}
        """Size symbols -> their arguments."""
        self.numbers: dict[Ref, int] = {}
        self.declared: set[str] = set()
        """Variables declared by earlier lines."""
        self.checked = False
        """Whether a value may fail: an integer division by zero, or a position out of range."""
        indices = [v.index for v in plan.nest.body if isinstance(v, Load)] + [s.index for s in plan.nest.stores]
        self._positions = {ref for index in indices for ref in runtime_refs(index)}
        """Values that are run-time indices of loads or stores."""

    @property
    def nest(self) -> Nest:
        """The nest of the plan."""
        return self.plan.nest

    # --- lines ---

    def line(self, text: str) -> None:
        """Add a line."""
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        """Open a block."""
        self.line(text + " {")
        self.depth += 1

    def close(self, count: int = 1) -> None:
        """Close some blocks."""
        for _ in range(count):
            self.depth -= 1
            self.line("}")

    def local_function(self, head: Callable[[Sequence[str]], str], body: Callable[[], None]) -> list[str]:
        """Print a lambda: `head` makes its first line from the lines that `body` prints. Returns these lines."""
        begin = len(self.lines)
        self.depth += 1
        body()
        self.depth -= 1
        lines = self.lines[begin:]
        self.lines.insert(begin, "  " * self.depth + head(lines) + " __attribute__((always_inline)) {")
        self.line("};")
        return lines

    def open_axis(self, axis: Axis, bounded: bool = False) -> None:
        """Open the loop over an axis."""
        low, high = self.bounds(axis, bounded)
        self.open(f"for (int64 {axis.name} = {low}; {axis.name} < {high}; {axis.name}++)")

    def open_blocks(self, axis: Axis, block: int) -> None:
        """Open a loop over blocks of an axis."""
        name, size = axis.name, self.size(axis.size)
        self.open(f"for (int64 {name}_low = 0; {name}_low < {size}; {name}_low += {block})")
        self.line(f"const int64 {name}_high = {name}_low + {block} < {size} ? {name}_low + {block} : {size};")

    def name_coordinates(self, row: str) -> None:
        """Name the coordinates of a row, whose number is `row`."""
        axes = self.plan.row_axes
        for number, axis in enumerate(axes):
            rest = size_product(inner.count for inner in axes[number + 1 :])
            place = row if rest in (0, 1) else f"({row} / {self.size(rest)})"
            place = place if number == 0 else f"({place} % {self.size(axis.count or 1)})"
            if axis.tile == 1:
                self.line(f"const int64 {axis.name} = {place};")
            else:
                self.line(f"const int64 {axis.name}_low = {place} * {axis.tile};")
                end, size = f"{axis.name}_low + {axis.tile}", self.size(axis.size)
                end = end if axis.divides else f"{end} < {size} ? {end} : {size}"  # g++ then knows the loop's length
                self.line(f"const int64 {axis.name}_high = {end};")

    # --- names, sizes and places ---

    def argument(self, buffer: str) -> str:
        """Return the argument of a buffer."""
        return self.arguments.setdefault(buffer, f"a{len(self.arguments)}")

    def symbol(self, name: str) -> str:
        """Return the argument of a size symbol."""
        return self.symbols.setdefault(name, f"d{len(self.symbols)}")

    def number(self, ref: Ref) -> int:
        """Return the number in a value's names."""
        return self.numbers.setdefault(ref, len(self.numbers))

    def name(self, ref: Ref) -> str:
        """Return the name of a declared value, or a constant's text."""
        value = self.nest.body[ref]
        return literal(value.value, value.dtype) if isinstance(value, Const) else f"t{self.number(ref)}"

    def index(self, index: Index) -> str:
        """Return a position as an expression."""
        return index_text(index, self._atom, "*")

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

    def size(self, size: Size) -> str:
        """Return a length, in parentheses unless it is a number or a name."""
        if isinstance(size, int):
            return str(size)
        text = self.index(size)
        return text if text.isidentifier() else f"({text})"

    def bounds(self, axis: Axis, bounded: bool) -> tuple[str, str]:
        """Return the bounds of a loop over an axis."""
        tiled = any(row.name == axis.name and row.tile > 1 for row in self.nest.rows)
        if bounded or tiled or axis == self.plan.shared_columns:
            return f"{axis.name}_low", f"{axis.name}_high"
        return "0", self.size(axis.size)

    def place(self, buffer: str, index: Index) -> str:
        """Return an element in memory."""
        return f"{self.argument(buffer)}[{self.index(index)}]"

    def place_in_row(self) -> str:
        """Return the position of an element in its row."""
        text = ""
        for axis in self.nest.elements:
            text = f"({text}) * {self.size(axis.size)} + {axis.name}" if text else axis.name
        return text

    def if_worthwhile(self) -> str:
        """Return a clause for the pragma if the sizes decide whether there is work for several threads."""
        work = self.plan.work
        return "" if isinstance(work, int) else f" if({self.size(work)} > {MIN_PARALLEL_WORK})"

    def parallel_for(self) -> None:
        """Share the iterations of the next loop among threads."""
        self.line(f"#pragma omp parallel for schedule(static){self.if_worthwhile()}")

    # --- values ---

    def expression(self, value: Value) -> str:
        """Return the right-hand side of a value's declaration."""
        body = self.nest.body
        match value:
            case Const(number, dtype):
                return literal(number, dtype)
            case IndexOf(index, dtype):
                return f"{dtype}({self.index(index)})"
            case Load(buffer, index, dtype, mask):
                read = self.place(buffer, index)
                read = f"load_{dtype}({read})" if dtype in MEMORY else read
                return read if mask is None else f"{self.name(mask)} ? {read} : {c_type(dtype)}(0)"
            case Apply("cast", (arg,), dtype):
                return self._cast(arg, dtype)
            case Apply("where", (mask, arg, other), _) if self.is_zero_anyway(mask, arg, other):
                return self.name(arg)
            case Apply("where", (mask, *args), "float32") if self.plan.levels.element[mask] and any(
                map(self._is_gathered, args)
            ):
                return f"picked({self.name(mask)}, {', '.join(map(self.name, args))})"
            case Apply(op, args, dtype):
                if DTYPES[body[args[0]].dtype] == "int" and OPS[op].fails is not None:
                    self.checked = True
                text = self.spelling(value).format(*map(self.name, args), dtype=dtype)
                return f"{dtype}({text})" if dtype in ("int8", "int16", "uint8") else text
            case Reduce() | Scan():
                raise AssertionError("a reduction or a scan has no expression of its own")

    def _cast(self, arg: Ref, dtype: str) -> str:
        source, exact = self.nest.body[arg].dtype, self.plan.exact
        same = source == dtype or (dtype == "float32" and source in MEMORY and source != "bool")
        if same or (dtype in exact and source == "float32" and arg in exact[dtype]):
            return self.name(arg)
        if dtype == "bfloat16" and source == "float32" and arg in self.plan.short_nans:
            return f"nearest_bfloat16({self.name(arg)})"
        return SPELLING["cast"].format(decoded(self.name(arg), source), dtype=dtype)

    def _is_gathered(self, ref: Ref) -> bool:
        """Is this loaded at an index that an element value gives? No loop with such a load is vectorized."""
        value = self.nest.body[ref]
        if isinstance(value, Apply) and value.op == "cast":
            return self._is_gathered(value.args[0])
        return isinstance(value, Load) and not all(map(self._is_fixed_in_row, runtime_refs(value.index)))

    def is_zero_anyway(self, mask: Ref, arg: Ref, other: Ref) -> bool:
        """Does a masked load already return the zero that is selected where its mask is false?"""
        load, zero = self.nest.body[arg], self.nest.body[other]
        return (
            isinstance(load, Load) and load.mask == mask and isinstance(zero, Const) and str(zero.value) in ("0", "0.0")
        )

    def spelling(self, value: Apply) -> str:
        """Return the spelling of an operation; next to a constant, only the other argument may be NaN."""
        if value.op == "exp" and value.dtype == "float32" and self._is_at_most_0(value.args[0]):
            return "exp_below_({0})"
        last = self.nest.body[value.args[-1]]
        number = last if isinstance(last, Const) and last.dtype in ("float32", "float64") else None
        if value.op in ("min", "max") and number is not None and not isnan(number.value):
            return f"{value.op}_number_({{0}}, {{1}})"
        return SPELLING[value.op]

    def _is_at_most_0(self, ref: Ref) -> bool:
        """Is this an element minus the maximum (or NaN)? Softmax's exponentials then need half the care."""
        match self.nest.body[ref]:
            case Apply("sub", (x, top), "float32"):
                return self.nest.body[top] == Reduce("max", x, "float32")
        return False

    def declare(self, ref: Ref, counter: PositionCounter | None = None) -> None:
        """Declare a value; `counter` lists the values that the loop counts in an int32."""
        value, plan = self.nest.body[ref], self.plan
        if isinstance(value, Const):
            return
        if counter and ref in counter.positions:
            text = "place"
        elif counter and ref in counter.matches:
            text = f"place == e{self.number(counter.matches[ref])}"
        elif isinstance(value, Load) and (array := self.array_of(ref)):
            text = f"load_{value.dtype}({array})" if value.dtype in MEMORY else array
        else:
            text = self.expression(value)
            text = f"short_nan({text})" if ref in plan.shortened else text
        if ref in self._positions and self._is_fixed_in_row(ref):
            text = f"position({text})"
        self.line(f"const {c_type(value.dtype)} {self.name(ref)} = {text};")

    def array_of(self, ref: Ref) -> str:
        """Return the element that a load reads from a row pointer or a transposed tile; empty if from neither."""
        if ref in self.plan.selected_rows:
            return f"z{self.number(ref)}[{self.nest.elements[-1].name}]"
        tile = self.plan.tile
        return f"x{self.number(ref)}[{tile.place}]" if tile and ref in tile.loads else ""

    def _is_fixed_in_row(self, ref: Ref) -> bool:
        """Is an index value equal for a whole row? Then `position` is called before the loop over the row.

        Loops with that call inside are not vectorized: embeddings took 1.7 times as long, sums into rows 3.3 times.
        """
        value, element = self.nest.body[ref], self.plan.levels.element[ref]
        return self.nest.lane is None and not element and not isinstance(value, Const | Reduce)

    def declare_once(self, name: str, dtype: str, size: str = "") -> str:
        """Declare a variable of the row, unless an earlier pass has."""
        if name not in self.declared:
            self.declared.add(name)
            self.line(f"{'alignas(64) ' if size else ''}{c_type(dtype)} {name}{size};")
        return name

    def declare_kept(self, ref: Ref, count: Size) -> None:
        """Declare the array of a value that is kept from pass to pass."""
        kind, name = c_type(self.nest.body[ref].dtype), f"r{self.number(ref)}"
        if isinstance(count, int):
            self.line(f"alignas(64) {kind} {name}[{max(count, 1)}];")
            return
        self.line(f"alignas(64) {kind} {name}_local[{MAX_STACK_ELEMENTS}];")
        length = self.size(count)
        place = f"{length} <= {MAX_STACK_ELEMENTS} ? {name}_local : scratch<{kind}>({length})"
        self.line(f"{kind}* const {name} = {place};")

    # --- stores and reductions ---

    def store(self, number: int) -> None:
        """Print one store."""
        store = self.nest.stores[number]
        dtype = self.plan.table[store.buffer].dtype
        value = self.name(store.value)
        if store.mode != "set":
            self.line(self.combine(store.mode, f"{self.plan.columns[number]}[{self.index(store.index)}]", value, dtype))
            return
        packed = f"store_{dtype}({value})" if dtype in ("bfloat16", "float16") else value
        place = self.place(store.buffer, store.index)
        if self.plan.tile and self.plan.is_transposed(number):
            place = f"y{number}[{self.plan.tile.place}]"
        self.line(f"{place} = {packed};")

    def combine(self, mode: str, place: str, value: str, dtype: str) -> str:
        """Return a statement that combines a value with the one at `place`."""
        op = REDUCTIONS[mode].combine
        assert op is not None
        if dtype == "bool" and mode in ("max", "min"):
            op = {"max": "or", "min": "and"}[mode]
        return f"{place} = {c_type(dtype)}({SPELLING[op].format(place, value, dtype=dtype)});"

    def accumulate(self, ref: Ref, value: str) -> None:
        """Combine a value with a reduction's accumulator, in a form that OpenMP recognizes."""
        s, how = f"s{self.number(ref)}", clause(self.plan.reduce(ref))
        if how in ("max", "min"):
            self.line(f"{s} = {value} {'>' if how == 'max' else '<'} {s} ? {value} : {s};")
        else:
            self.line(f"{s} {how}= {value};")
