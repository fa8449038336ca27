"""Passes over `OUTER_VECTOR_ROWS` rows side by side, where neighbours in memory belong to different rows.

Each row value is an array over the lane, and so is what a reduction collects. Passes over floats are written in vectors
along the lane, two at a time; a reduction takes some elements of each row before it goes on to the next rows, so that
what it collects stays in registers meanwhile: a sum over a middle dimension took 0.6 of the time, softmax 0.67, in
float16 0.3 (Zen 3).
"""

from __future__ import annotations

from dcompile.codegen.emit.cpp.ops import c_type, literal
from dcompile.codegen.emit.cpp.software_pipeline import Behind
from dcompile.codegen.emit.cpp.vectorize import FLOATS, STEPS
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis
from dcompile.ir.analysis import operands
from dcompile.ir.index import substitute, var
from dcompile.ir.nodes import ITEMSIZE, Const, Ref
from dcompile.ir.ops import REDUCTIONS

GROUP = 8
"""Elements of each row that a reduction takes at a time: the longest run of float additions.

Runs are added up in float64."""
COLLECTED = {"sum": "{0} + {1}", "prod": "{0} * {1}", "max": "greater({1}, {0})", "min": "lesser({1}, {0})"}
"""Reductions that are written in vectors: what is collected with one more. The largest is NaN from the first one on."""


class Lanes(Behind):
    """Writes passes over rows side by side."""

    def _open_lane(self, simd: bool, start: str = "0") -> None:
        lane = self._lane()
        if simd:
            self.line("#pragma omp simd")
        self.open(f"for (int64 l = {start}; l < {lane.name}_high - {lane.name}_low; l++)")
        self.line(f"const int64 {lane.name} = {lane.name}_low + l;")

    def _lane(self) -> Axis:
        assert self.nest.lane is not None
        return self.nest.lane

    def _fetch(self, refs: set[Ref], vectors: bool = False) -> None:
        """Read row values of this lane from their arrays."""
        for ref in sorted(refs):
            value = self.nest.body[ref]
            if self.levels.element[ref] or isinstance(value, Const):
                continue
            kind, place = c_type(value.dtype), f"l{self.number(ref)}[l]"
            if vectors:
                moved = self._moved("bool" if value.dtype == "bool" else "float32")
                kind, place = self._type(value.dtype), f"load_{moved}(&{place})"
            self.line(f"const {kind} {self.name(ref)} = {place};")

    def _lane_pass(self, number: int, reduces: list[Ref], stores: list[int]) -> None:
        needed = self._needed(number, self._targets(number))
        for ref in reduces:
            reduce, name = self._reduce(ref), f"s{self.number(ref)}"
            self.line(
                f"alignas(64) {'float64' if self._is_long(ref) else c_type(reduce.dtype)} {name}[{OUTER_VECTOR_ROWS}];"
            )
            identity = literal(REDUCTIONS[reduce.op].identity(reduce.dtype), reduce.dtype)
            self.line(f"for (int64 l = 0; l < {OUTER_VECTOR_ROWS}; l++) {name}[l] = {identity};")
        if self._in_lane_vectors(number, reduces, stores, needed):
            self._grouped_lanes(number, reduces, stores, needed)
            return
        scans = self._open_lane_scans(needed)
        for axis in self.nest.elements:
            self._open_axis(axis)
        self._lane_loop(number, reduces, stores, needed, scans)
        self.close(len(self.nest.elements))

    def _is_long(self, ref: Ref) -> bool:
        """Is this collected in float64?"""
        return self._reduce(ref).op == "sum" and self._reduce(ref).dtype == "float32"

    def _lane_loop(
        self, number: int, reduces: list[Ref], stores: list[int], needed: list[Ref], scans: list[Ref], start: str = "0"
    ) -> None:
        """The plain loop over the lane, for one element of each row."""
        self._open_lane(simd=all(self._simd(n, self._lane().name) for n in stores), start=start)
        self._fetch(self._lane_operands(number, needed))
        for ref in needed:
            self._advance(ref, f"u{self.number(ref)}[l]") if ref in scans else self.declare(ref)
        for ref in reduces:
            reduce, place = self._reduce(ref), f"s{self.number(ref)}[l]"
            dtype = "float64" if self._is_long(ref) else reduce.dtype
            self.line(self._combine(reduce.op, place, self.name(reduce.arg), dtype))
        for n in stores:
            self.store(n)
        self.close()

    def _lane_operands(self, number: int, needed: list[Ref]) -> set[Ref]:
        """What a pass makes use of."""
        return {ref for value in needed for ref in operands(self.nest.body[value])} | set(self._targets(number))

    # --- in vectors ---

    def _in_lane_vectors(self, number: int, reduces: list[Ref], stores: list[int], needed: list[Ref]) -> bool:
        """Can the pass be written in vectors, and is it faster then?"""
        name, used = self._lane().name, self._lane_operands(number, needed)
        return (
            (bool(reduces) or any(map(self._gains, needed)))
            and all(self._reduce(ref).op in COLLECTED and self._reduce(ref).dtype == "float32" for ref in reduces)
            and all(self._has_vector(ref, number, name) for ref in needed)
            and all(self._stores_vector(n, name) for n in stores)
            and all(self.levels.element[ref] or self.nest.body[ref].dtype in {"bool", *FLOATS} for ref in used)
        )

    def _grouped_lanes(self, number: int, reduces: list[Ref], stores: list[int], needed: list[Ref]) -> None:
        """Some elements of each row at a time where the pass reduces, otherwise one."""
        last = self.nest.elements[-1]
        if not reduces:
            for axis in self.nest.elements:
                self._open_axis(axis)
            self._lane_vectors(number, reduces, stores, needed, "")
            self.close(len(self.nest.elements))
            return
        for axis in self.nest.elements[:-1]:
            self._open_axis(axis)
        first, high = f"{last.name}_first", self._bounds(last, False)[1]
        self.open(f"for (int64 {first} = 0; {first} < {high}; {first} += {GROUP})")
        divides = isinstance(last.size, int) and last.size % GROUP == 0
        end = f"{first} + {GROUP}" if divides else f"{first} + {GROUP} < {high} ? {first} + {GROUP} : {high}"
        self.line(f"const int64 {last.name}_end = {end};")
        each = f"for (int64 {last.name} = {first}; {last.name} < {last.name}_end; {last.name}++)"
        self._lane_vectors(number, reduces, stores, needed, each)
        self.close(len(self.nest.elements))

    def _lane_vectors(self, number: int, reduces: list[Ref], stores: list[int], needed: list[Ref], each: str) -> None:
        """The loop over the lane in vectors, and the plain one for the rows that are left, or without vectors.

        `each`: the loop over elements inside, if there are several.
        """
        lane = self._lane()
        whole = isinstance(lane.size, int) and lane.size % STEPS["two"] == 0
        if not whole:
            self.line("int64 l_at = 0;")
        self.line("#ifdef VECTORS")
        self.many = "two"
        at, begin = ("l", "int64 l = 0") if whole else ("l_at", "")
        self.open(f"for ({begin}; {at} + PAIR <= {lane.name}_high - {lane.name}_low; {at} += PAIR)")
        if not whole:
            self.line("const int64 l = l_at;")
        self.line(f"const int64 {lane.name} = {lane.name}_low + l;")
        self._fetch(self._lane_operands(number, needed), vectors=True)
        for ref in reduces:
            self._open_collected(ref)
        if each:
            self.open(each)
        self._ask_for_elements(number)
        self._declare_vectors(number, lane.name, needed)
        for ref in reduces:
            self._collect_vector(ref)
        for n in stores:
            self._store_vector(n)
        self.close(bool(each))
        for ref in reduces:
            self._put_collected(ref)
        self.close()
        self.many = ""
        self.line("#else" if whole else "#endif")
        if each:
            self.open(each)
        self._lane_loop(number, reduces, stores, needed, [], start="0" if whole else "l_at")
        self.close(bool(each))
        if whole:
            self.line("#endif")

    def _ask_for_elements(self, number: int) -> None:
        """Where caches are far, ask for what the same rows hold a little further: as near as rows are, memory is not
        read ahead by itself.

        A sum over a middle dimension took 0.94 of the time, in bfloat16 0.68, softmax over it 0.92 and 0.85 (Intel's
        servers, 16 and 8 MB).
        """
        last = self.nest.elements[-1].name
        for load in self._large_loads(number, self._lane().name):
            place = self.place(load.buffer, substitute(load.index, {last: var(last) + GROUP}, {}))
            self.line(f"ask_if_far<PAIR * {ITEMSIZE[load.dtype]}>(&{place});")

    def _open_collected(self, ref: Ref) -> None:
        n = self.number(ref)
        start = f"{self._widen()}(0.f)" if self._is_long(ref) else f"load_{self._moved('float32')}(&s{n}[l])"
        self.line(f"{self._type('float32')} x{n} = {start};")
        if self._reduce(ref).op in ("max", "min"):
            self.line(f"{self._type('bool')} y{n} = {{}};")

    def _collect_vector(self, ref: Ref) -> None:
        reduce, n = self._reduce(ref), self.number(ref)
        value = self._as_vector(reduce.arg)
        self.line(f"x{n} = {COLLECTED[reduce.op].format(f'x{n}', value)};")
        if reduce.op in ("max", "min"):
            self.line(f"y{n} = y{n} | ({value} != {value});")

    def _put_collected(self, ref: Ref) -> None:
        n, x = self.number(ref), f"x{self.number(ref)}"
        if self._reduce(ref).op in ("max", "min"):
            x = f'select_(y{n}, {self._widen()}(__builtin_nanf("")), {x})'
        put = "add_two_float64" if self._is_long(ref) else f"put_{self._moved('float32')}"
        self.line(f"{put}(&s{n}[l], {x});")
