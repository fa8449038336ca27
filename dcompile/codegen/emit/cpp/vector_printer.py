"""The text of loops over vectors of floats; which loops are written so, `wide.py` decides."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dcompile.codegen.emit.cpp.ops import literal, watches_nan
from dcompile.codegen.emit.cpp.vectorize import KEPT, PAIR_WAYS, STEPS, Wide
from dcompile.codegen.nest.loop_nest import Axis
from dcompile.ir.nodes import Apply, IndexOf, Load, Ref
from dcompile.ir.ops import REDUCTIONS

KINDS = {"": "wide", "pair": "pair", "two": "pair", "quad": "quad"}
"""What holds the floats of a step."""
_ARGUMENT = re.compile(r"\ba\d+\b")
INTS = frozenset(("bool", "int32"))
SPELLING = {"where": "select_({0}, {1}, {2})", "rsqrt": "1.f / sqrt_({0})", "reciprocal": "1.f / {0}"}
FOLDS = {"max": "largest", "min": "smallest", "sum": "total"}


class Vectors(Wide):
    """Writes the wide loop of a pass."""

    many = ""
    """By what the loop goes that is being written, if not by single vectors (STEPS)."""
    telling = False
    """Is a step being written that is told, as `held`, whether it holds a place that is looked for?"""
    beside: Mapping[Ref, str] = {}
    """What reductions are known from already, where rows were read side by side (beside.py)."""

    def _wide_loop(self, number: int, reduces: list[Ref], stores: list[int], last: Axis, bounded: bool) -> str:
        """Write the wide loop; returns where the plain one has to begin."""
        low, high = self._bounds(last, bounded)
        if self.beside:
            self.line("#ifdef VECTORS")
            for ref in reduces:
                self._combine_partial(ref, self.beside[ref])
            self.line("#else")
            return low
        ways, sought = self._ways(number, reduces, stores, last), self._sought(reduces, stores, last)
        self.many = self._many(number, reduces, stores, last) if sought is None else ""
        ways = min(ways, PAIR_WAYS) if self.many else ways
        whole = isinstance(last.size, int) and last.size % STEPS[self.many] == 0
        at = f"{last.name}_at{number}" if ways > 1 or not whole else last.name
        if not whole:
            self.line(f"int64 {at} = {low};")
        self.line(f"#ifdef {self._guard(number, reduces, stores, last)}")
        for ref in reduces if sought is None else ():
            self._open_vectors(ref, ways)
        if sought is not None:
            self._search(number, reduces[0], sought, last, "" if whole else at, (low, high))
        elif ways > 1:
            if whole:
                self.line(f"int64 {at} = {low};")
            self._in_ways(number, reduces, last, at, high, ways)
        else:
            first = f"int64 {at} = {low}" if whole else ""
            width = self._width()
            self.open(f"for ({first}; {at} + {width} <= {high}; {at} += {width})")
            if not whole:
                self.line(f"const int64 {last.name} = {at};")
            self._beside_step(number, last.name)
            self._one_step(number, last.name, reduces, stores)
            self.close()
        self.many = ""
        for ref in reduces if sought is None else ():
            self._fold(ref)
        self.line("#else" if whole else "#endif")
        if self.counted and not whole:
            self.line(f"place = {at};")
        return low if whole else at

    def _open_vectors(self, ref: Ref, ways: int) -> None:
        """The accumulators of a reduction."""
        identity = literal(REDUCTIONS[self._reduce(ref).op].identity("float32"), "float32")
        n, several = self.number(ref), f"[{ways}]" if ways > 1 else ""
        one = f"{self._type('float32')} x{n} = {self._widen()}({identity});"
        self.line(f"{self._type('float32')} x{n}{several}; fill(x{n}, {identity});" if several else one)
        if watches_nan(self._reduce(ref)):
            self.line(f"{self._type('bool')} y{n}{several} = {{}};")

    def _search(self, number: int, ref: Ref, sought: Ref, last: Axis, at: str, bounds: tuple[str, str]) -> None:
        """Go on until the condition holds anywhere in a vector; `at`, if given, is where the plain loop begins."""
        where = self.nest.body[self._reduce(ref).arg]
        assert isinstance(where, Apply)
        (low, high), s = bounds, f"s{self.number(ref)}"
        self.line(f"{s} = {self.name(where.args[2])};")
        step = at or last.name
        self.open(f"for ({'' if at else f'int64 {step} = {low}'}; {step} + WIDTH <= {high}; {step} += WIDTH)")
        if at:
            self.line(f"const int64 {last.name} = {at};")
        for place, nbytes in self.ahead if number == self.asking else ():
            self.line(f"ask<WIDTH * {nbytes}>(&{place});")
        self._declare_vectors(number, last.name, self._needed(number, [sought]))
        self.open(f"if (const u32 here = holding({self.name(sought)}))")
        self.line(f"{s} = {last.name} + __builtin_ctz(here);")
        self.line(f"{step} = {high};")
        self.close(2)

    def _in_ways(self, number: int, reduces: list[Ref], last: Axis, at: str, high: str, ways: int) -> None:
        """One vector into each accumulator, and so on; what vectors are left into the first.

        Addresses are the function's own, for g++ would read them again behind each store of later passes: RMSNorm took
        0.88 to 0.98 of the time so, LayerNorm 0.9, cross-entropy 0.82 to 0.93 (Zen 5; with AVX2 0.88 to 1.01). Not
        where a later pass asks for two tensors: RMSNorm's backward took 1.2 with AVX-512 (0.89 with AVX2).
        """
        begin = len(self.lines)
        self.depth += 1
        self._vectors_at(number, last.name, reduces, [], "[way]")
        self.depth -= 1
        own = {name for line in self.lines[begin:] for name in _ARGUMENT.findall(line)} if len(self.ahead) < 2 else ()
        taken, given = ", ".join(["&", *sorted(own)]), f"(int64 {last.name}, int way) __attribute__((always_inline)) {{"
        self.lines.insert(begin, "  " * self.depth + f"const auto take{number} = [{taken}]{given}")
        self.line("};")
        width = self._width()
        self.open(f"for (; {at} + {ways} * {width} <= {high}; {at} += {ways} * {width})")
        for way in range(ways):
            self.line(f"take{number}({at} + {way} * {width}, {way});")
        self.close()
        self.line(f"for (; {at} + {width} <= {high}; {at} += {width}) take{number}({at}, 0);")

    def _beside_step(self, number: int, at: str) -> None:
        """What else is done in a step, from element `at` on (`behind.py`)."""

    def _one_step(self, number: int, name: str, reduces: list[Ref], stores: list[int]) -> None:
        """One step of the loop; where it looks for places in the row, once for steps that hold one, once for others.

        Nearly all hold none, and then nothing is chosen between: cross-entropy's backward took 0.92 of the time in
        bfloat16 so, and as long in float32 (Zen 3).
        """
        counted = self.counted
        sought = (
            {counted.matches[ref] for ref in self._wide_values(number) if ref in counted.matches} if counted else ()
        )
        if not sought:
            self._vectors_at(number, name, reduces, stores, "")
            return
        begin, self.telling = len(self.lines), True
        self.depth += 1
        self._vectors_at(number, name, reduces, stores, "")
        self.depth -= 1
        self.telling = False
        own = sorted({argument for line in self.lines[begin:] for argument in _ARGUMENT.findall(line)})
        head = f"const auto step{number} = [{', '.join(['&', *own])}](auto held) __attribute__((always_inline)) {{"
        self.lines.insert(begin, "  " * self.depth + head)
        self.line("};")
        within = " | ".join(f"holds<{self._width()}>({name}, e{self.number(ref)})" for ref in sorted(sought))
        self.line(f"if (__builtin_expect({within}, 0)) step{number}(some_{{}}); else step{number}(none_{{}});")

    def _vectors_at(self, number: int, name: str, reduces: list[Ref], stores: list[int], way: str) -> None:
        """What becomes of the elements from `name` on."""
        for how, place, nbytes in self._asked(number, stores, name):
            self.line(f"{how}<{self._width()} * {nbytes}>(&{place});")
        if self.counted and self.counted.positions:
            self.line(f"const {self._type('int32')} place = places{'_two' if self.many else ''}({name});")
        self._declare_vectors(number, name, self._wide_values(number))
        for ref in reduces:
            self._take_vector(ref, way)
        for n in stores:
            self._store_vector(n)

    def _declare_vectors(self, number: int, name: str, values: list[Ref]) -> None:
        place = self._row_place()
        for ref in values:
            value, n = self.nest.body[ref], self.number(ref)
            early = self.kept.get(ref, number) < number
            kept = self._moved(KEPT[value.dtype]) if ref in self.kept else ""
            text = f"load_{kept}(&r{n}[{place}])" if early else self._vector(ref, name)
            self.line(f"const {self._type(value.dtype)} {self.name(ref)} = {text};")
            if kept and not early:
                self.line(f"put_{kept}(&r{n}[{place}], {self.name(ref)});")

    def _vector(self, ref: Ref, name: str) -> str:
        """The right-hand side of an element value's declaration."""
        value = self.nest.body[ref]
        if self.counted and ref in self.counted.positions:
            return "place"
        if self.counted and ref in self.counted.matches:
            found = f"match{f'_{self.many}' if self.many else ''}({name}, e{self.number(self.counted.matches[ref])})"
            return f"held.any ? {found} : {self._type('bool')}{{}}" if self.telling else found
        if isinstance(value, Load):
            if self.turned and ref in self.turned.loads:
                return f"load_{self._moved(value.dtype)}(&x{self.number(ref)}[{self.turned.place}])"
            how = self._moved(value.dtype)
            if ref in self.pointed:
                return f"load_{how}(&z{self.number(ref)}[{name}])"
            if self._steps(value.index, name) == 1:
                return f"load_{how}(&{self.place(value.buffer, value.index)})"
            return f"{self._widen()}({self.expression(value)})"
        assert isinstance(value, Apply), "no other value is a vector"
        if value.op == "philox":
            return self._drawn(value, name)
        if value.op == "cast" and self.nest.body[value.args[0]].dtype == "int32":
            return f"from_int32({self.name(value.args[0])})"
        if value.op == "cast" or (value.op == "where" and self._is_zero_anyway(*value.args)):
            return self.expression(value)
        spelling = SPELLING.get(value.op) or self.spelling(value)
        return spelling.format(*map(self.name, value.args))

    def _drawn(self, value: Apply, name: str) -> str:
        """Random bits of the elements from `name` on."""
        key, position, draw = value.args
        first, many = self.nest.body[position], f"_{self.many}" if self.many else ""
        assert isinstance(first, IndexOf)
        step = self._step_of(position, name)
        return f"philox_at{many}({self.name(key)}, {self.index(first.index)}, {step}, {self.name(draw)})"

    def _as_vector(self, ref: Ref) -> str:
        return self.name(ref) if self.levels.element[ref] else f"{self._widen()}({self.name(ref)})"

    def _widen(self) -> str:
        return {"wide": "widen", "pair": "both", "quad": "twice"}[KINDS[self.many]]

    def _width(self) -> str:
        """Elements of a step."""
        return self._width_of(self.many)

    def _width_of(self, many: str) -> str:
        """Elements of such steps (STEPS)."""
        return KINDS[many].upper() if many else "WIDTH"

    def _type(self, dtype: str) -> str:
        return KINDS[self.many] + ("_int" if dtype in INTS else "")

    def _moved(self, dtype: str) -> str:
        """What functions are called that move elements of a dtype between memory and registers, behind load_."""
        return {"": dtype, "two": f"two_{dtype}"}.get(self.many, self.many)

    def _take_vector(self, ref: Ref, way: str) -> None:
        reduce, x, y = self._reduce(ref), f"x{self.number(ref)}{way}", f"y{self.number(ref)}{way}"
        value = self._as_vector(reduce.arg)
        if reduce.op == "sum":
            self.line(f"{x} += {value};")
            return
        self.line(f"{x} = {'greater' if reduce.op == 'max' else 'lesser'}({value}, {x});")
        self.line(f"{y} |= {value} != {value};")

    def _fold(self, ref: Ref) -> None:
        """Take what the lanes hold into the accumulator."""
        n, op = self.number(ref), self._reduce(ref).op
        self._combine_partial(ref, f"{FOLDS[op]}(x{n})")
        if watches_nan(self._reduce(ref)):
            self.line(f"n{n} |= any(y{n});")

    def _store_vector(self, number: int) -> None:
        store = self.nest.stores[number]
        value, dtype = self._as_vector(store.value), self.table[store.buffer].dtype
        if store.mode == "set":
            turned, moved = self.turned if self._is_turned(number) else None, self._moved(dtype)
            place = f"y{number}[{turned.place}]" if turned else self.place(store.buffer, store.index)
            put, stream = (f"{how}_{moved}(&{place}, {value});" for how in ("put", "stream"))
            unless = f"if ({stays}) {put} else " if (stays := self._stays(number)) else ""
            self.line(f"{unless}{stream}" if number in self.streams else put)
        else:
            place = f"&{self.columns[number]}[{self.index(store.index)}]"
            moved = self._moved("float32")
            self.line(f"put_{moved}({place}, load_{moved}({place}) + {value});")
