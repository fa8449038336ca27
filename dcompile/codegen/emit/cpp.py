"""The C++ target: a loop becomes one function of plain loops over plain pointers, which g++ vectorises.

A row is processed in passes: pass k computes the element values that reductions of passes before k allow. Row values
are computed between passes. What a later pass needs again is computed again when that is cheap (the row is in L1 by
then), and kept in an array on the stack when it is not. No pointer is `restrict`, since the memory planner may let an
output take the memory of an input; `omp simd` promises all that the vectoriser needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from math import prod

import numpy as np

from dcompile.codegen.emit.emitter import Emitter, Kernels, KernelSource
from dcompile.codegen.emit.nest import LANES, Axis, Levels, Nest, cone_cost, levels, make_nest
from dcompile.ir.analysis import operands
from dcompile.ir.index import Atom, Div, Index, Var
from dcompile.ir.nodes import ITEMSIZE, Apply, Buffer, Const, IndexOf, Load, Loop, Program, Reduce, Ref, Store, Value
from dcompile.ir.ops import DTYPES, OPS, REDUCTIONS

SPELLING: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "floordiv": "floordiv_({0}, {1})", "truncdiv": "truncdiv_({0}, {1})",
    "mod": "mod_({0}, {1})", "fmod": "fmod_({0}, {1})", "min": "min_({0}, {1})", "max": "max_({0}, {1})",
    "pow": "pow_({0}, {1})", "atan2": "atan2_({0}, {1})", "neg": "-{0}", "abs": "abs_({0})", "sign": "sign_({0})",
    "reciprocal": "1 / {0}", "sqrt": "sqrt_({0})", "rsqrt": "1 / sqrt_({0})", "exp": "exp_({0})", "exp2": "exp2_({0})",
    "expm1": "expm1_({0})", "log": "log_({0})", "log1p": "log1p_({0})", "log2": "log2_({0})", "log10": "log10_({0})",
    "sin": "sin_({0})", "cos": "cos_({0})", "tan": "tan_({0})", "tanh": "tanh_({0})", "sigmoid": "sigmoid_({0})",
    "erf": "erf_({0})", "floor": "floor_({0})", "ceil": "ceil_({0})", "trunc": "trunc_({0})", "round": "round_({0})",
    "isnan": "{0} != {0}", "isinf": "isinf_({0})", "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}",
    "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}",
    "xor": "{0} ^ {1}", "not": "not_({0})", "shl": "shl_({0}, {1})", "shr": "shr_({0}, {1})",
    "where": "{0} ? {1} : {2}", "cast": "to_{dtype}({0})",
}  # fmt: skip

PARALLEL_WORK = 32768
"""Element operations below which a kernel stays on one thread: about 10 us, what waking a thread pool costs."""
ROW_ARRAY_BYTES = 65536
"""Stack for values kept from pass to pass."""
KEEP_COST = 10
"""Additions from which a value is kept rather than computed again: one exp, about what a store and a load cost."""
PARTIAL = 4096
"""Longest run of float additions into one vector of accumulators; runs are added up in float64."""
SPLIT = 64
"""Columns that a thread takes, where threads share rows, are a multiple of this: whole cache lines."""
SCRATCH_BYTES = 1 << 20
"""Largest column reduction that each thread does in memory of its own."""

_MEMORY = {"bool": "uint8", "bfloat16": "u16", "float16": "u16"}
_COMPOUND = {"sum": "+", "prod": "*", "any": "|", "all": "&"}


def emit(loop: Loop, table: Mapping[str, Buffer]) -> KernelSource:
    """The source of one kernel; `table` says how large the buffers are."""
    nest = make_nest(loop)
    writer = _Writer(nest, table)
    writer.function()
    body = "\n".join(writer.lines)
    arguments = ", ".join(
        f"{'' if name in loop.writes else 'const '}{_memory_type(table[name].dtype)}* {short}"
        for name, short in writer.arguments.items()
    )
    text = f"({arguments}) {{\n{body}\n  return {'take_division_by_zero()' if writer.checked else '0'};\n}}\n"
    name = "k" + hashlib.sha256(text.encode()).hexdigest()[:24]
    text = f'extern "C" int64 {name}{text}'
    return KernelSource(name, text, tuple(writer.arguments), len(loop.body) + 4, writer.checked, loop.origin)


def emit_all(program: Program) -> Kernels:
    """The kernels of a program, one for each of its loops."""
    table = program.table
    return Kernels(tuple(emit(step, table) for step in program.steps if isinstance(step, Loop)))


EMITTER = Emitter("c++", SPELLING, emit)


def _memory_type(dtype: str) -> str:
    return _MEMORY.get(dtype, dtype)


def _type(dtype: str) -> str:
    return "bool" if dtype == "bool" else dtype


def literal(value: bool | int | float, dtype: str) -> str:
    """A constant as C++ text that reads back as exactly this value."""
    kind = DTYPES[dtype]
    if kind == "bool":
        return "true" if value else "false"
    if kind == "int":
        number = int(value)
        return "(-9223372036854775807l - 1)" if number == -(2**63) else f"{dtype}({number}l)"
    with np.errstate(over="ignore"):
        number_ = float(np.float32(value)) if dtype != "float64" else float(value)
    suffix = "" if dtype == "float64" else "f"
    if math.isnan(number_):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number_):
        return f"{'-' if number_ < 0 else ''}__builtin_inf{suffix}()"
    return f"{dtype}({number_.hex()}{suffix})"


class _Writer:
    """Writes one function, line by line. Row values are C++ variables of the row, element values of their loop."""

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
        self.parallel = self._work() > PARALLEL_WORK
        self.in_place = any(self._column_bytes(n) > SCRATCH_BYTES for n in self.columns)
        self.split = self._find_split()
        self._plan_kept()

    # --- decisions ---

    def _work(self) -> int:
        cost = sum(OPS[v.op].cost if isinstance(v, Apply) else 1 for v in self.nest.body)
        return self.nest.points * (cost + len(self.nest.stores))

    def _column_bytes(self, store: int) -> int:
        return self.table[self.nest.stores[store].buffer].nbytes

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
        uses = [ref for n in stores for ref in _store_refs(self.nest.stores[n])]
        return [self._reduce(ref).arg for ref in reduces] + uses

    def _plan_kept(self) -> None:
        """Which element values are kept from the pass that computes them to later ones."""
        count = prod(axis.size for axis in self.nest.elements)
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

    def _keep(self, ref: Ref, count: int) -> bool:
        value = self.nest.body[ref]
        if ref in self.kept:
            return True
        size = count * ITEMSIZE[value.dtype if value.dtype not in _MEMORY else "float32"]
        if self.nest.lane or isinstance(value, Load) or self.kept_bytes + size > ROW_ARRAY_BYTES:
            return False
        if cone_cost(ref, self.nest.body, frozenset(self.kept)) < KEEP_COST:
            return False
        self.kept[ref] = self.computed[ref]
        self.kept_bytes += size
        return True

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
        if isinstance(atom, Var):
            return f"int64({self.name(int(atom.name[1:]))})" if atom.name[0] == "v" else atom.name
        return f"(({self.index(atom.base)}) {'/' if isinstance(atom, Div) else '%'} {atom.divisor})"

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
                read = f"load_{dtype}({read})" if dtype in _MEMORY else read
                return read if mask is None else f"{self.name(mask)} ? {read} : {_type(dtype)}(0)"
            case Apply("cast", (arg,), dtype):
                source = self.nest.body[arg].dtype
                exact = source == dtype or (dtype == "float32" and source in _MEMORY and source != "bool")
                return self.name(arg) if exact else SPELLING["cast"].format(self.name(arg), dtype=dtype)
            case Apply(op, args, dtype):
                return self.apply(op, args, dtype)
            case Reduce():
                raise AssertionError("a reduction has no expression of its own")

    def apply(self, op: str, args: tuple[Ref, ...], dtype: str) -> str:
        kind = DTYPES[self.nest.body[args[0]].dtype]
        names = [self.name(arg) for arg in args]
        if kind == "int" and op in ("floordiv", "truncdiv", "mod", "fmod"):
            self.checked = True
        text = SPELLING[op].format(*names, dtype=dtype)
        return f"{dtype}({text})" if dtype in ("int8", "int16", "uint8") else text

    def declare(self, ref: Ref) -> None:
        value = self.nest.body[ref]
        if not isinstance(value, Const):
            self.line(f"const {_type(value.dtype)} {self.name(ref)} = {self.expression(value)};")

    def store(self, number: int) -> None:
        """Write one store's value to its place."""
        store = self.nest.stores[number]
        dtype = self.table[store.buffer].dtype
        value = self.name(store.value)
        if store.mode == "set":
            packed = f"store_{dtype}({value})" if dtype in ("bfloat16", "float16") else value
            self.line(f"{self.place(store.buffer, store.index)} = {packed};")
        else:
            self.line(self._combine(store.mode, f"{self.columns[number]}[{self.index(store.index)}]", value, dtype))

    def _combine(self, mode: str, place: str, value: str, dtype: str) -> str:
        """A statement that adds a value to what is at `place`."""
        op = REDUCTIONS[mode].combine
        assert op is not None
        if dtype == "bool" and mode in ("max", "min"):
            op = {"max": "or", "min": "and"}[mode]
        return f"{place} = {_type(dtype)}({SPELLING[op].format(place, value, dtype=dtype)});"

    # --- structure ---

    def function(self) -> None:
        for number, name in self.columns.items():
            self._open_column(number, name)
        if self.columns and not self.in_place:
            self._column_region()
        else:
            self._rows(self.parallel and not self.columns)

    def _rows(self, parallel: bool) -> None:
        """The loop over all rows, shared among threads."""
        counts = [math.ceil(axis.size / axis.tile) for axis in self._row_axes()]
        if not counts:
            self.open("")
            self._row()
            self.close()
            return
        if self.split:
            self._open_split()
        if parallel and prod(counts) > 1:
            self.line("#pragma omp parallel for schedule(static)")
        self.open(f"for (int64 r = 0; r < {prod(counts)}; r++)")
        self._decompose("r")
        self._row()
        self.close(1 + (self.split is not None))

    def _open_split(self) -> None:
        """Give each thread some columns of every row."""
        assert self.split is not None
        name, size = self.split.name, self.split.size
        # as wide as possible: narrow columns read each row in pieces (1.4 times slower at 64 of 768)
        self.line("const int64 threads = omp_get_max_threads();")
        self.line(f"const int64 width = ({size} / threads + {SPLIT}) / {SPLIT} * {SPLIT};")
        self.line(f"const int64 parts = ({size} + width - 1) / width;")
        self.line("#pragma omp parallel for schedule(static)")
        self.open("for (int64 c = 0; c < parts; c++)")
        self.line(f"const int64 {name}_low = c * width;")
        self.line(f"const int64 {name}_high = {name}_low + width < {size} ? {name}_low + width : {size};")

    def _find_split(self) -> Axis | None:
        """The innermost variable, if every column reduction keeps its values apart whatever the row is.

        Then threads may share a result that is too large to have one each: the gradient of an embedding.
        """
        last, stores = self.nest.elements[-1], self.nest.stores
        if not (self.in_place and self.parallel) or any(self.nest.row_stores) or last.size < 2 * SPLIT:
            return None
        if any(row.name == last.name for row in self.nest.rows) or any(isinstance(v, Reduce) for v in self.nest.body):
            return None
        return last if all(self._keeps_apart(n, last) for n in range(len(stores))) else None

    def _keeps_apart(self, number: int, axis: Axis) -> bool:
        index = self.nest.stores[number].index
        others = [coefficient for monomial, coefficient in index.terms if monomial != (Var(axis.name),)]
        unit = index.coefficient(axis.name)
        fixed = self.nest.stores[number].mode == "set" or self._simd(number, axis.name)
        return fixed and unit is not None and unit.constant == 1 and all(c % axis.size == 0 for c in others)

    def _row_axes(self) -> tuple[Axis, ...]:
        lane = self.nest.lane
        return (*self.nest.rows, *((Axis(lane.name, lane.size, LANES),) if lane else ()))

    def _decompose(self, row: str) -> None:
        """Name the row's coordinates."""
        rest = prod(math.ceil(axis.size / axis.tile) for axis in self._row_axes())
        for axis in self._row_axes():
            count = math.ceil(axis.size / axis.tile)
            rest = rest // count if count else 0
            place = row if rest == 1 else f"({row} / {max(rest, 1)})"
            place = place if axis is self._row_axes()[0] else f"({place} % {max(count, 1)})"
            if axis.tile == 1:
                self.line(f"const int64 {axis.name} = {place};")
            else:
                self.line(f"const int64 {axis.name}_low = {place} * {axis.tile};")
                self.line(
                    f"const int64 {axis.name}_high = {axis.name}_low + {axis.tile} < {axis.size} ? "
                    f"{axis.name}_low + {axis.tile} : {axis.size};"
                )

    def _row(self) -> None:
        """All passes over one row (over `LANES` rows, if there is a lane)."""
        for ref in self.kept:
            value = self.nest.body[ref]
            count = prod(axis.size for axis in self.nest.elements)
            self.line(f"alignas(64) {_type(value.dtype)} r{self.number(ref)}[{max(count, 1)}];")
        for number in range(self._passes() + 1):
            self._between(number)
            if number < self._passes():
                self._pass(number)

    def _between(self, number: int) -> None:
        """Row values that become known after pass `number - 1`, and their stores."""
        body, known, live = self.nest.body, self.levels.known, self.levels.live
        here = [
            ref
            for ref in sorted(live)
            if not self.levels.element[ref] and known[ref] == number and not isinstance(body[ref], Const)
        ]
        stores = [n for n, row in enumerate(self.nest.row_stores) if row and self.levels.store_at[n] == number]
        if not here and not stores:
            return
        lane = self.nest.lane
        if lane is None:
            for ref in here:
                self._finish(ref) if isinstance(body[ref], Reduce) else self.declare(ref)
            for n in stores:
                self.store(n)
            return
        for ref in here:
            self.line(f"alignas(64) {_type(body[ref].dtype)} l{self.number(ref)}[{LANES}];")
        self._open_lane(simd=all(self._simd(n, lane.name) for n in stores))
        used = {ref for value in here for ref in operands(body[value])} | {
            r for n in stores for r in _store_refs(self.nest.stores[n])
        }
        self._fetch(used - set(here))
        for ref in here:
            if isinstance(body[ref], Reduce):
                self.line(f"const {_type(body[ref].dtype)} {self.name(ref)} = s{self.number(ref)}[l];")
            else:
                self.declare(ref)
            self.line(f"l{self.number(ref)}[l] = {self.name(ref)};")
        for n in stores:
            self.store(n)
        self.close()

    def _open_lane(self, simd: bool) -> None:
        lane = self.nest.lane
        assert lane is not None
        if simd:
            self.line("#pragma omp simd")
        self.open(f"for (int64 l = 0; l < {lane.name}_high - {lane.name}_low; l++)")
        self.line(f"const int64 {lane.name} = {lane.name}_low + l;")

    def _fetch(self, refs: set[Ref]) -> None:
        """Read row values of this lane from their arrays."""
        for ref in sorted(refs):
            value = self.nest.body[ref]
            if not self.levels.element[ref] and not isinstance(value, Const):
                self.line(f"const {_type(value.dtype)} {self.name(ref)} = l{self.number(ref)}[l];")

    def _needed(self, number: int) -> list[Ref]:
        """Element values that a pass computes, in order; kept ones of earlier passes end the search."""
        stack, seen = self._targets(number), set[Ref]()
        while stack:
            ref = stack.pop()
            if ref not in seen and self.levels.element[ref]:
                seen.add(ref)
                if self.kept.get(ref, number) == number:
                    stack += operands(self.nest.body[ref])
        return sorted(seen)

    def _pass(self, number: int) -> None:
        """One pass over the elements of the row."""
        reduces, stores = self._roots(number)
        if not reduces and not stores:
            return
        if self.nest.lane:
            self._lane_pass(number, reduces, stores)
            return
        if self._shares_elements():
            self._shared_pass(number, reduces, stores)
            return
        partial = self._partial(reduces)
        for ref in reduces:
            self._accumulator(ref, "w" if ref in partial else "s", wide=ref in partial)
        last = self.nest.elements[-1]
        for axis in self.nest.elements[:-1]:
            self._open_axis(axis)
        blocked = bool(partial) and last.size > 2 * PARTIAL
        if blocked:
            self.open(f"for (int64 {last.name}_low = 0; {last.name}_low < {last.size}; {last.name}_low += {PARTIAL})")
            self.line(
                f"const int64 {last.name}_high = {last.name}_low + {PARTIAL} < {last.size} ? "
                f"{last.name}_low + {PARTIAL} : {last.size};"
            )
        for ref in sorted(partial):
            self._accumulator(ref, "s", wide=False)
        scalars = [n for n in stores if self._is_scalar_column(n, last.name)]
        for n in scalars:
            store = self.nest.stores[n]
            dtype = self.table[store.buffer].dtype
            self.line(f"{_type(dtype)} c{n} = {literal(REDUCTIONS[store.mode].identity(dtype), dtype)};")
        self._simd_pragma(reduces, scalars, all(self._simd(n, last.name) for n in stores))
        self._open_axis(last, bounded=blocked)
        self._elements(number, reduces, [n for n in stores if n not in scalars])
        for n in scalars:
            store = self.nest.stores[n]
            self.line(self._combine(store.mode, f"c{n}", self.name(store.value), self.table[store.buffer].dtype))
        self.close()
        for n in scalars:
            store = self.nest.stores[n]
            place = f"{self.columns[n]}[{self.index(store.index)}]"
            self.line(self._combine(store.mode, place, f"c{n}", self.table[store.buffer].dtype))
        for ref in sorted(partial):
            self.line(f"w{self.number(ref)} += s{self.number(ref)};")
        self.close(len(self.nest.elements) - 1 + blocked)
        for ref in sorted(partial):
            self.line(f"const float64 s{self.number(ref)} = w{self.number(ref)};")

    def _shares_elements(self) -> bool:
        """One long row: threads take blocks of its elements, whose results are combined in order."""
        one = not self._row_axes() and len(self.nest.elements) == 1 and self.nest.elements[0].size > 2 * PARTIAL
        return one and self.parallel and not self.kept and not self.columns

    def _shared_pass(self, number: int, reduces: list[Ref], stores: list[int]) -> None:
        """A pass over one long row; the blocks depend on its length only, so the result on no number of threads."""
        (axis,) = self.nest.elements
        block = PARTIAL * math.ceil(axis.size / (PARTIAL * 1024))
        blocks = math.ceil(axis.size / block)
        wide = self._partial(reduces)
        for ref in reduces:
            kind = "int32" if self._reduce(ref).dtype == "bool" else _type(self._reduce(ref).dtype)
            self.line(f"{kind} p{self.number(ref)}[{blocks}];")
            if _watches_nan(self._reduce(ref)):
                self.line(f"int32 m{self.number(ref)}[{blocks}];")
        self.line("#pragma omp parallel for schedule(static)")
        self.open(f"for (int64 b = 0; b < {blocks}; b++)")
        self.line(f"const int64 {axis.name}_low = b * {block};")
        self.line(f"const int64 {axis.name}_high = b == {blocks - 1} ? {axis.size} : {axis.name}_low + {block};")
        for ref in reduces:
            self._accumulator(ref, "s", wide=False)
        self._simd_pragma(reduces, [], simd=True)
        self._open_axis(axis, bounded=True)
        self._elements(number, reduces, stores)
        self.close()
        for ref in reduces:
            self.line(f"p{self.number(ref)}[b] = s{self.number(ref)};")
            if _watches_nan(self._reduce(ref)):
                self.line(f"m{self.number(ref)}[b] = n{self.number(ref)};")
        self.close()
        for ref in reduces:
            self._accumulator(ref, "s", wide=ref in wide)
        if reduces:
            self.open(f"for (int64 b = 0; b < {blocks}; b++)")
            for ref in reduces:
                self._combine_partial(ref, f"p{self.number(ref)}[b]")
                if _watches_nan(self._reduce(ref)):
                    self.line(f"n{self.number(ref)} |= m{self.number(ref)}[b];")
            self.close()

    def _partial(self, reduces: list[Ref]) -> frozenset[Ref]:
        """Float sums too long, or too nested, for one vector of accumulators."""
        long = len(self.nest.elements) > 1 or self.nest.elements[-1].size > 2 * PARTIAL
        return frozenset(
            r for r in reduces if long and self._reduce(r).op == "sum" and self._reduce(r).dtype == "float32"
        )

    def _open_axis(self, axis: Axis, bounded: bool = False) -> None:
        tiled = bounded or axis is self.split or any(row.name == axis.name and row.tile > 1 for row in self.nest.rows)
        low, high = (f"{axis.name}_low", f"{axis.name}_high") if tiled else ("0", str(axis.size))
        self.open(f"for (int64 {axis.name} = {low}; {axis.name} < {high}; {axis.name}++)")

    def _accumulator(self, ref: Ref, prefix: str, wide: bool) -> None:
        reduce = self._reduce(ref)
        identity = literal(REDUCTIONS[reduce.op].identity(reduce.dtype), reduce.dtype)
        kind = "float64" if wide else "int32" if reduce.dtype == "bool" else _type(reduce.dtype)
        self.line(f"{kind} {prefix}{self.number(ref)} = {identity};")
        if _watches_nan(reduce):
            self.line(f"int32 n{self.number(ref)} = 0;")

    def _simd_pragma(self, reduces: list[Ref], scalars: list[int], simd: bool) -> None:
        if not simd:
            return
        clauses = []
        for ref in reduces:
            reduce = self._reduce(ref)
            clauses.append(f"reduction({_clause(reduce)}:s{self.number(ref)})")
            if _watches_nan(reduce):
                clauses.append(f"reduction(|:n{self.number(ref)})")
        for n in scalars:
            if self.nest.stores[n].mode not in _COMPOUND:
                return
            clauses.append(f"reduction({_COMPOUND[self.nest.stores[n].mode]}:c{n})")
        self.line(" ".join(("#pragma omp simd", *clauses)))

    def _elements(self, number: int, reduces: list[Ref], stores: list[int]) -> None:
        """The statements for one element: values, then reductions, then stores."""
        place = self._row_place()
        for ref in self._needed(number):
            if self.kept.get(ref, number) < number:
                self.line(f"const {_type(self.nest.body[ref].dtype)} {self.name(ref)} = r{self.number(ref)}[{place}];")
                continue
            self.declare(ref)
            if ref in self.kept:
                self.line(f"r{self.number(ref)}[{place}] = {self.name(ref)};")
        for ref in reduces:
            value = self.name(self._reduce(ref).arg)
            self._combine_partial(ref, value)
            if _watches_nan(self._reduce(ref)):
                self.line(f"n{self.number(ref)} |= {value} != {value};")
        for n in stores:
            self.store(n)

    def _combine_partial(self, ref: Ref, value: str) -> None:
        """Take a value into the accumulator of a reduction, in a form that OpenMP recognises."""
        s, clause = f"s{self.number(ref)}", _clause(self._reduce(ref))
        if clause in ("max", "min"):
            self.line(f"{s} = {value} {'>' if clause == 'max' else '<'} {s} ? {value} : {s};")
        else:
            self.line(f"{s} {clause}= {value};")

    def _row_place(self) -> str:
        """Position of an element in its row."""
        text = ""
        for axis in self.nest.elements:
            text = f"({text}) * {axis.size} + {axis.name}" if text else axis.name
        return text

    def _finish(self, ref: Ref) -> None:
        """Name the result of a reduction, after its pass."""
        reduce, s = self._reduce(ref), f"s{self.number(ref)}"
        result = f'n{self.number(ref)} ? __builtin_nan("") : {s}' if _watches_nan(reduce) else s
        dtype = _type(reduce.dtype)
        self.line(f"const {dtype} {self.name(ref)} = {dtype}({result});")

    # --- rows side by side ---

    def _lane_pass(self, number: int, reduces: list[Ref], stores: list[int]) -> None:
        lane = self.nest.lane
        assert lane is not None
        for ref in reduces:
            reduce = self._reduce(ref)
            wide = reduce.op == "sum" and reduce.dtype == "float32"
            self.line(f"alignas(64) {'float64' if wide else _type(reduce.dtype)} s{self.number(ref)}[{LANES}];")
            identity = literal(REDUCTIONS[reduce.op].identity(reduce.dtype), reduce.dtype)
            self.line(f"for (int64 l = 0; l < {LANES}; l++) s{self.number(ref)}[l] = {identity};")
        for axis in self.nest.elements:
            self._open_axis(axis)
        self._open_lane(simd=all(self._simd(n, lane.name) for n in stores))
        needed = self._needed(number)
        used = {ref for value in needed for ref in operands(self.nest.body[value])} | set(self._targets(number))
        self._fetch(used)
        for ref in needed:
            self.declare(ref)
        for ref in reduces:
            reduce, place = self._reduce(ref), f"s{self.number(ref)}[l]"
            wide = reduce.op == "sum" and reduce.dtype == "float32"
            self.line(self._combine(reduce.op, place, self.name(reduce.arg), "float64" if wide else reduce.dtype))
        for n in stores:
            self.store(n)
        self.close(len(self.nest.elements) + 1)

    # --- column reductions ---

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

    def _column_count(self, number: int) -> int:
        buffer = self.table[self.nest.stores[number].buffer]
        return buffer.nbytes // ITEMSIZE[buffer.dtype]

    def _identity(self, number: int) -> tuple[str, str]:
        """Type and identity of a column reduction."""
        store = self.nest.stores[number]
        dtype = self.table[store.buffer].dtype
        return _memory_type(dtype), literal(REDUCTIONS[store.mode].identity(dtype), dtype)

    def _open_column(self, number: int, name: str) -> None:
        """Prepare where a column reduction is collected: the result itself, or memory of each thread."""
        kind, identity = self._identity(number)
        target, count = self.argument(self.nest.stores[number].buffer), self._column_count(number)
        if self.in_place:
            if self.parallel:
                self.line("#pragma omp parallel for schedule(static)")
            self.line(f"for (int64 k = 0; k < {count}; k++) {target}[k] = {identity};")
            self.line(f"{kind}* const {name} = {target};")

    def _column_region(self) -> None:
        """Rows in blocks; a block's sums are added to its thread's, and in the end the threads' in their order.

        Two levels keep the error of a sum over many rows near that of pairwise summation.
        """
        axes = self._row_axes()
        rows = prod(math.ceil(axis.size / axis.tile) for axis in axes)
        block = max(min(64, rows // 64), 1)
        blocks = math.ceil(rows / block)
        parallel = self.parallel and blocks > 1
        self.line(f"const int64 threads = {'omp_get_max_threads()' if parallel else '1'};")
        for number, name in self.columns.items():
            kind, identity = self._identity(number)
            count = self._column_stride(number)
            self.line(f"{kind}* const {name}_all = scratch<{kind}>(threads * {2 * count});")
            self.line(f"for (int64 k = 0; k < threads * {2 * count}; k++) {name}_all[k] = {identity};")
        if parallel:
            self.line("#pragma omp parallel num_threads(threads)")
        self.open("")
        thread = "omp_get_thread_num()" if parallel else "0"
        for number, name in self.columns.items():
            kind, _ = self._identity(number)
            self.line(f"{kind}* const {name} = {name}_all + {thread} * {2 * self._column_stride(number)};")
        if parallel:
            self.line("#pragma omp for schedule(static)")
        self.open(f"for (int64 b = 0; b < {blocks}; b++)")
        if axes:
            high = f"b * {block} + {block} < {rows} ? b * {block} + {block} : {rows}"
            self.open(f"for (int64 r = b * {block}; r < ({high}); r++)")
            self._decompose("r")
        self._row()
        self.close(bool(axes))
        for number, name in self.columns.items():
            self._flush(number, name)
        self.close(2)
        for number, name in self.columns.items():
            self._collect(number, name)

    def _column_stride(self, number: int) -> int:
        """Elements from one partial result to the next: whole cache lines, so that threads do not share one."""
        return (self._column_count(number) + 63) // 64 * 64

    def _flush(self, number: int, name: str) -> None:
        store, (_, identity), stride = self.nest.stores[number], self._identity(number), self._column_stride(number)
        dtype = self.table[store.buffer].dtype
        self.line("#pragma omp simd")
        self.open(f"for (int64 k = 0; k < {self._column_count(number)}; k++)")
        self.line(self._combine(store.mode, f"{name}[{stride} + k]", f"{name}[k]", dtype))
        self.line(f"{name}[k] = {identity};")
        self.close()

    def _collect(self, number: int, name: str) -> None:
        store, stride = self.nest.stores[number], self._column_stride(number)
        target, dtype, count = self.argument(store.buffer), self.table[store.buffer].dtype, self._column_count(number)
        self.line("#pragma omp simd")
        self.line(f"for (int64 k = 0; k < {count}; k++) {target}[k] = {name}_all[{stride} + k];")
        self.open("for (int64 thread = 1; thread < threads; thread++)")
        self.line("#pragma omp simd")
        self.open(f"for (int64 k = 0; k < {count}; k++)")
        place = f"{name}_all[thread * {2 * stride} + {stride} + k]"
        self.line(self._combine(store.mode, f"{target}[k]", place, dtype))
        self.close(2)
        self.line(f"free({name}_all);")


def _store_refs(store: Store) -> list[Ref]:
    return [store.value, *(int(name[1:]) for name in store.index.variables if name[0] == "v")]


def _clause(reduce: Reduce) -> str:
    """The operator of an OpenMP reduction."""
    if reduce.dtype == "bool" and reduce.op in ("max", "min"):
        return {"max": "|", "min": "&"}[reduce.op]
    return _COMPOUND.get(reduce.op, reduce.op)


def _watches_nan(reduce: Reduce) -> bool:
    return reduce.op in ("max", "min") and reduce.dtype.startswith("float")
