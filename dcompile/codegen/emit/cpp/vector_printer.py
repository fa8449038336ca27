"""Print loops over vectors of floats; `vectorize.py` decides which loops use them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcompile.codegen.emit.cpp.ops import literal, watches_nan
from dcompile.codegen.emit.cpp.prefetch import cached_condition, step_prefetches
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.value_facts import PositionCounter
from dcompile.codegen.emit.cpp.vectorize import KEPT_AS, STEP_ELEMENTS, random_stride
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.nodes import Apply, IndexOf, Load, Ref
from dcompile.ir.ops import REDUCTIONS

KINDS = {"": "wide", "pair": "pair", "two": "pair", "quad": "quad"}
"""The library's type for the floats of a step (`vectorize.STEP_ELEMENTS`)."""
_ARGUMENT = re.compile(r"\ba\d+\b")
INTS = frozenset(("bool", "int32"))
SPELLING = {"where": "select_({0}, {1}, {2})", "rsqrt": "1.f / sqrt_({0})", "reciprocal": "1.f / {0}"}
FOLDS = {"max": "largest", "min": "smallest", "sum": "total"}
NO_SUMS: Mapping[Ref, str] = {}


def _arguments(lines: Sequence[str]) -> list[str]:
    """Return the kernel's arguments in some lines."""
    return sorted({argument for line in lines for argument in _ARGUMENT.findall(line)})


def step_width(step: str) -> str:
    """Return the elements of a step, as the library's constant."""
    return KINDS[step].upper() if step else "WIDTH"


@dataclass(frozen=True, slots=True)
class VectorStep:
    """Prints one step of a vector loop: `step` says how many vectors it takes at a time.

    `counter`: values that the loop counts in an int32. A `branching` step learns from its parameter `held` whether it
    contains a searched position.
    """

    printer: Printer
    step: str = ""
    counter: PositionCounter | None = None
    branching: bool = False

    # --- types and functions of the library ---

    @property
    def width(self) -> str:
        """Elements of a step, as the library's constant."""
        return step_width(self.step)

    @property
    def widen(self) -> str:
        """The function that broadcasts a float to a vector."""
        return {"wide": "widen", "pair": "both", "quad": "twice"}[KINDS[self.step]]

    def type(self, dtype: str) -> str:
        """Return the vector type of a dtype."""
        return KINDS[self.step] + ("_int" if dtype in INTS else "")

    def moved(self, dtype: str) -> str:
        """Return the suffix of functions that load or store elements of a dtype, as in `load_float32`."""
        return {"": dtype, "two": f"two_{dtype}"}.get(self.step, self.step)

    # --- values ---

    def declare(self, number: int, name: str, values: Sequence[Ref]) -> None:
        """Declare element values of a pass, from element `name` on."""
        p, kept_by = self.printer, self.printer.plan.kept
        place = p.place_in_row()
        for ref in values:
            value, n = p.nest.body[ref], p.number(ref)
            early = kept_by.get(ref, number) < number
            kept = self.moved(KEPT_AS[value.dtype]) if ref in kept_by else ""
            text = f"load_{kept}(&r{n}[{place}])" if early else self._expression(ref, name)
            p.line(f"const {self.type(value.dtype)} {p.name(ref)} = {text};")
            if kept and not early:
                p.line(f"put_{kept}(&r{n}[{place}], {p.name(ref)});")

    def _expression(self, ref: Ref, name: str) -> str:
        """Return the right-hand side of an element value's declaration."""
        p = self.printer
        value = p.nest.body[ref]
        if self.counter and ref in self.counter.positions:
            return "place"
        if self.counter and ref in self.counter.matches:
            match = f"match{f'_{self.step}' if self.step else ''}({name}, e{p.number(self.counter.matches[ref])})"
            return f"held.any ? {match} : {self.type('bool')}{{}}" if self.branching else match
        if isinstance(value, Load):
            return self._load(ref, value, name)
        assert isinstance(value, Apply), "no other value is a vector"
        if value.op == "philox":
            return self._random(value, name)
        if value.op == "cast" and p.nest.body[value.args[0]].dtype == "int32":
            return f"from_int32({p.name(value.args[0])})"
        if value.op == "cast" or (value.op == "where" and p.is_zero_anyway(*value.args)):
            return p.expression(value)
        spelling = SPELLING.get(value.op) or p.spelling(value)
        return spelling.format(*map(p.name, value.args))

    def _load(self, ref: Ref, load: Load, name: str) -> str:
        p = self.printer
        if array := p.array_of(ref):
            return f"load_{self.moved(load.dtype)}(&{array})"
        if p.plan.constant_stride(load.index, name) == 1:
            return f"load_{self.moved(load.dtype)}(&{p.place(load.buffer, load.index)})"
        return f"{self.widen}({p.expression(load)})"

    def _random(self, value: Apply, name: str) -> str:
        """Return random bits of the elements from `name` on."""
        p, (key, position, draw) = self.printer, value.args
        first, many = p.nest.body[position], f"_{self.step}" if self.step else ""
        assert isinstance(first, IndexOf)
        stride = random_stride(p.plan, position, name)
        return f"philox_at{many}({p.name(key)}, {p.index(first.index)}, {stride}, {p.name(draw)})"

    def value(self, ref: Ref) -> str:
        """Return a value as a vector."""
        name = self.printer.name(ref)
        return name if self.printer.plan.levels.element[ref] else f"{self.widen}({name})"

    # --- stores and reductions ---

    def store(self, number: int) -> None:
        """Print one store of a vector."""
        p = self.printer
        store = p.nest.stores[number]
        value, dtype = self.value(store.value), p.plan.table[store.buffer].dtype
        if store.mode != "set":
            place, moved = f"&{p.plan.columns[number]}[{p.index(store.index)}]", self.moved("float32")
            p.line(f"put_{moved}({place}, load_{moved}({place}) + {value});")
            return
        tile, moved = p.plan.tile if p.plan.is_transposed(number) else None, self.moved(dtype)
        place = f"y{number}[{tile.place}]" if tile else p.place(store.buffer, store.index)
        put, stream = (f"{how}_{moved}(&{place}, {value});" for how in ("put", "stream"))
        unless = f"if ({cached}) {put} else " if (cached := cached_condition(p.plan, number)) else ""
        p.line(f"{unless}{stream}" if number in p.plan.streamed else put)

    def open_accumulators(self, ref: Ref, count: int) -> None:
        """Declare the accumulators of a reduction."""
        p, reduce = self.printer, self.printer.plan.reduce(ref)
        identity = literal(REDUCTIONS[reduce.op].identity("float32"), "float32")
        n, several = p.number(ref), f"[{count}]" if count > 1 else ""
        one = f"{self.type('float32')} x{n} = {self.widen}({identity});"
        p.line(f"{self.type('float32')} x{n}{several}; fill(x{n}, {identity});" if several else one)
        if watches_nan(reduce):
            p.line(f"{self.type('bool')} y{n}{several} = {{}};")

    def accumulate(self, ref: Ref, way: str = "") -> None:
        """Combine a vector with an accumulator; `way` selects one of several."""
        p, reduce = self.printer, self.printer.plan.reduce(ref)
        x, y = f"x{p.number(ref)}{way}", f"y{p.number(ref)}{way}"
        value = self.value(reduce.arg)
        if reduce.op == "sum":
            p.line(f"{x} += {value};")
            return
        p.line(f"{x} = {'greater' if reduce.op == 'max' else 'lesser'}({value}, {x});")
        p.line(f"{y} |= {value} != {value};")

    def fold(self, ref: Ref) -> None:
        """Reduce the vector accumulators into the accumulator of the row."""
        p, reduce = self.printer, self.printer.plan.reduce(ref)
        n = p.number(ref)
        p.accumulate(ref, f"{FOLDS[reduce.op]}(x{n})")
        if watches_nan(reduce):
            p.line(f"n{n} |= any(y{n});")

    # --- steps ---

    def prefetch(self, number: int, stores: Sequence[int], name: str) -> None:
        """Prefetch elements after those from `name` on."""
        p = self.printer
        for how, load in step_prefetches(p.plan, number, stores, name):
            p.line(f"{how}<{self.width} * {ITEMSIZE[load.dtype]}>(&{p.place(load.buffer, load.index)});")

    def elements(self, number: int, name: str, reduces: Sequence[Ref], stores: Sequence[int], way: str = "") -> None:
        """Process the elements from `name` on."""
        p = self.printer
        self.prefetch(number, stores, name)
        if self.counter and self.counter.positions:
            p.line(f"const {self.type('int32')} place = places{'_two' if self.step else ''}({name});")
        self.declare(number, name, p.plan.vector_values(number))
        for ref in reduces:
            self.accumulate(ref, way)
        for n in stores:
            self.store(n)

    def print(self, number: int, name: str, reduces: Sequence[Ref], stores: Sequence[int]) -> None:
        """Print one step of the loop; with searched positions, one copy for steps that contain one and one for others.

        Nearly all steps contain none and then need no selects. Cross-entropy's backward took 0.92 of the time in
        bfloat16, and the same in float32 (Zen 3).
        """
        p, matches = self.printer, self.counter.matches if self.counter else {}
        searched = {matches[ref] for ref in p.plan.vector_values(number) if ref in matches}
        if not searched:
            self.elements(number, name, reduces, stores)
            return
        p.local_function(
            lambda lines: f"const auto step{number} = [{', '.join(['&', *_arguments(lines)])}](auto held)",
            lambda: replace(self, branching=True).elements(number, name, reduces, stores),
        )
        within = " | ".join(f"holds<{self.width}>({name}, e{p.number(ref)})" for ref in sorted(searched))
        p.line(f"if (__builtin_expect({within}, 0)) step{number}(some_{{}}); else step{number}(none_{{}});")


def print_vector_loop(
    p: Printer,
    number: int,
    bounded: bool,
    sums: Mapping[Ref, str] = NO_SUMS,
    alongside: Callable[[str, str], None] | None = None,
) -> str:
    """Print the vector loop of a pass; return the start of the plain one.

    `sums`: reductions that are known already. `alongside(step, at)` prints further work of a step, from `at` on.
    """
    loop, last, (reduces, stores) = p.plan.vectors[number], p.nest.elements[-1], p.plan.pass_roots[number]
    low, high = p.bounds(last, bounded)
    if sums:
        p.line("#ifdef VECTORS")
        for ref in reduces:
            p.accumulate(ref, sums[ref])
        p.line("#else")
        return low
    counter = p.plan.counters.get(number)
    steps = VectorStep(p, loop.step, counter)
    whole = isinstance(last.size, int) and last.size % STEP_ELEMENTS[loop.step] == 0
    at = f"{last.name}_at{number}" if loop.accumulators > 1 or not whole else last.name
    if not whole:
        p.line(f"int64 {at} = {low};")
    p.line(f"#ifdef {loop.guard}")
    if loop.searched is not None:
        _search(steps, number, reduces[0], loop.searched, "" if whole else at, (low, high))
    else:
        for ref in reduces:
            steps.open_accumulators(ref, loop.accumulators)
        if loop.accumulators > 1:
            if whole:
                p.line(f"int64 {at} = {low};")
            _accumulate_in_turn(steps, number, at, high)
        else:
            first = f"int64 {at} = {low}" if whole else ""
            p.open(f"for ({first}; {at} + {steps.width} <= {high}; {at} += {steps.width})")
            if not whole:
                p.line(f"const int64 {last.name} = {at};")
            if alongside:
                alongside(loop.step, last.name)
            steps.print(number, last.name, reduces, stores)
            p.close()
        for ref in reduces:
            steps.fold(ref)
    p.line("#else" if whole else "#endif")
    if counter and not whole:
        p.line(f"place = {at};")
    return low if whole else at


def _search(steps: VectorStep, number: int, ref: Ref, searched: Ref, at: str, bounds: tuple[str, str]) -> None:
    """Search for the first vector in which the condition holds; `at`, if given, is the start of the plain loop."""
    p = steps.printer
    last, where = p.nest.elements[-1], p.nest.body[p.plan.reduce(ref).arg]
    assert isinstance(where, Apply)
    (low, high), s = bounds, f"s{p.number(ref)}"
    p.line(f"{s} = {p.name(where.args[2])};")
    step = at or last.name
    p.open(f"for ({'' if at else f'int64 {step} = {low}'}; {step} + WIDTH <= {high}; {step} += WIDTH)")
    if at:
        p.line(f"const int64 {last.name} = {at};")
    for load in p.plan.next_row if number == p.plan.next_row_pass else ():
        p.line(f"ask<WIDTH * {ITEMSIZE[load.dtype]}>(&{p.place(load.buffer, load.index)});")
    steps.declare(number, last.name, p.plan.needed(number, [searched]))
    p.open(f"if (const u32 here = holding({p.name(searched)}))")
    p.line(f"{s} = {last.name} + __builtin_ctz(here);")
    p.line(f"{step} = {high};")
    p.close(2)


def _accumulate_in_turn(steps: VectorStep, number: int, at: str, high: str) -> None:
    """Print the loop that fills the accumulators in turn, one vector each; remaining vectors go to the first.

    The lambda captures addresses by value, since g++ would reload them after each store of later passes: RMSNorm took
    0.88 to 0.98 of the time (docs/lab/constants.md, K12). Where a later pass prefetches two tensors, captures by value
    took 1.2 and are not used.
    """
    p, name, width = steps.printer, steps.printer.nest.elements[-1].name, steps.width
    few, count = len(p.plan.next_row) < 2, p.plan.vectors[number].accumulators

    def head(lines: Sequence[str]) -> str:
        own = _arguments(lines) if few else ()
        return f"const auto take{number} = [{', '.join(['&', *own])}](int64 {name}, int way)"

    p.local_function(head, lambda: steps.elements(number, name, p.plan.pass_roots[number][0], [], "[way]"))
    p.open(f"for (; {at} + {count} * {width} <= {high}; {at} += {count} * {width})")
    for way in range(count):
        p.line(f"take{number}({at} + {way} * {width}, {way});")
    p.close()
    p.line(f"for (; {at} + {width} <= {high}; {at} += {width}) take{number}({at}, 0);")
