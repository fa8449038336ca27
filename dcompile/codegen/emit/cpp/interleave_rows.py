"""Several rows at a time, read side by side: sums of rows and of columns, which do little but wait for memory."""

from __future__ import annotations

import math

from dcompile.codegen.emit.cpp.interleave_scans import Abreast
from dcompile.codegen.emit.cpp.prefetch import AHEAD_BYTES
from dcompile.codegen.emit.cpp.row_passes import PARTIAL
from dcompile.codegen.emit.cpp.vectorize import PAIR_WAYS, WAYS, WIDTH
from dcompile.ir.index import size_product
from dcompile.ir.nodes import ITEMSIZE, Apply, Const, Load, Reduce, Ref

TOGETHER = 8
"""Rows that are added to column sums at a time, where each is one stream from memory."""
ACROSS = 4
"""Vectors of each of them with AVX-512: whole lines, one after another."""
NEAR = 4096
"""Columns up to which sums stay in the first level cache from row to row."""


class Beside(Abreast):
    """Writes loops over elements that go through some rows at once."""

    def _open_add(self, sums: str) -> None:
        """Begin the function that adds some elements of a row to `sums`, its parameters: where there are vectors."""
        (last,) = self.nest.elements
        self.line("#ifdef VECTORS")
        self.open(f"const auto add = [=](int64 r, int64 {last.name}, {sums}) __attribute__((always_inline))")
        self._decompose("r")
        self._between(0)
        self._declare_vectors(0, last.name, self._wide_values(0))

    # --- sums of columns ---

    def _rows_together(self, at: str, high: str, block: str) -> None:
        """Add some rows at a time to column sums, which are read and written once for all of them.

        Reading several places of memory side by side is faster as well: 8 rows take 0.89 of the time of 4 in float32,
        0.7 in bfloat16 (Zen 3), 16 rows 0.97 and 1.3. With AVX-512 several vectors of each take 0.93 of the time of
        one, and in bfloat16 a row at a time 0.7 of it, 0.8 from the caches, of two tensors 0.54 (Zen 5; float32 1.0).
        """
        (last,) = self.nest.elements
        assert isinstance(last.size, int), "columns of symbolic size are not added up together"
        loads = [value for ref in self._wide_values(0) if isinstance(value := self.nest.body[ref], Load)]
        short = all(ITEMSIZE[load.dtype] == 2 for load in loads) and last.size <= NEAR
        self._open_add(", ".join(f"wide& x{n}" for n in self.columns))
        for how, place, nbytes in self._asked(0, [], last.name) if short else ():
            self.line(f"{how}<WIDTH * {nbytes}>(&{place});")
        for n in self.columns:
            self.line(f"x{n} += {self._as_vector(self.nest.stores[n].value)};")
        self.depth -= 1
        self.line("};")
        known = int(block) if block.isdigit() else None
        across = math.gcd(last.size // WIDTH, ACROSS) if len(self.columns) <= 2 else 1
        self.line(f"constexpr int64 across = WIDTH == 16 ? {across} : 1;")
        if len(loads) == 1 and (known is None or known >= TOGETHER):
            self._some_rows(at, high, TOGETHER, short)
        if len(loads) > 1 or known is None or known % TOGETHER:
            self._some_rows(at, high, WAYS, short)
        self.line("#endif")

    def _some_rows(self, at: str, high: str, most: int, short: bool) -> None:
        """The same for as long as there are so many; of short rows one at a time, with AVX-512."""
        (last,) = self.nest.elements
        places = {
            n: f"&{name}[{self.index(self.nest.stores[n].index)} + v * WIDTH]" for n, name in self.columns.items()
        }
        self.line(f"constexpr int64 rows{most} = {f'WIDTH == 16 ? 1 : {most}' if short else most};")
        self.open(f"for (; {at} + rows{most} <= {high}; {at} += rows{most})")
        self.open(f"for (int64 {last.name} = 0; {last.name} < {last.size}; {last.name} += across * WIDTH)")
        self.line(f"wide {', '.join(f'x{n}[across]' for n in places)};")
        self._across(*(f"x{n}[v] = load_float32({place});" for n, place in places.items()))
        self.line(f"#pragma GCC unroll {most}")
        self.open(f"for (int64 row = 0; row < rows{most}; row++)")
        self._across(f"add({at} + row, {last.name} + v * WIDTH, {', '.join(f'x{n}[v]' for n in places)});")
        self.close()
        self._across(*(f"put_float32({place}, x{n}[v]);" for n, place in places.items()))
        self.close(2)

    def _across(self, *lines: str) -> None:
        """Do the same with each of some vectors of a row."""
        self.line(f"#pragma GCC unroll {ACROSS}")
        self.open("for (int64 v = 0; v < across; v++)")
        for line in lines:
            self.line(line)
        self.close()

    # --- sums of rows ---

    def _beside(self) -> list[Ref]:
        """The sum that is all a kernel does with the elements of its rows, if rows are read side by side for it.

        With four, each its own stream from memory, a sum of rows of 16 MB took 0.86 of the time, 0.94 where it came
        from farther than the caches (Zen 3). Their accumulators take all sixteen registers: squares gained nothing.
        With AVX-512 they are read one after another: four at a time took 1.09 of that with two threads, 0.99 with one
        (Zen 4). There each line is asked for once before it is read: 0.95 of the time with one thread, 0.99 with two.
        Where caches are far (Intel's servers), four side by side and asked for ahead take 0.86 and 0.88 of one after
        another not asked for, 0.98 and 0.99 of four that are not. In bfloat16 they take 0.91 to 0.97 of one after
        another asked for 4 KB ahead there (8 MB from memory; two threads 0.98 to 1.01, from the caches 0.99 to 1.0),
        with AVX2's instructions 0.77 from memory and 0.87 from the caches, 0.82 and 0.99 with two threads (there).
        """
        nest = self.nest
        reduces, stores = self._roots(0)
        count = size_product(axis.count for axis in self._row_axes())
        if self.columns or self.split or self.turned or self.kept or nest.lane or stores or len(nest.elements) != 1:
            return []
        if len(reduces) != 1 or any(self._roots(later) != ([], []) for later in range(1, self._passes())):
            return []
        (last,) = nest.elements
        if not isinstance(count, int) or count % WAYS or any(axis.tile != 1 for axis in nest.rows):
            return []
        if not isinstance(last.size, int) or last.size % (WAYS * WIDTH) or last.size > 2 * PARTIAL:
            return []
        early = [r for r in self.levels.live if not self.levels.element[r] and self.levels.known[r] == 0]
        if not all(isinstance(nest.body[ref], Load | Const) for ref in early):
            return []
        streams = self._is_stream(self._reduce(reduces[0])) and self._ways(0, reduces, [], last) == WAYS
        return reduces if streams and self._is_wide(0, reduces, [], last) else []

    def _is_stream(self, reduce: Reduce) -> bool:
        """Does a reduction add up a large tensor as it is in memory?"""
        load = self._summed(reduce)
        if reduce.op != "sum" or load is None or load.mask is not None:
            return False
        size = self.bytes_of(load.buffer)
        return isinstance(size, int) and size >= AHEAD_BYTES

    def _summed(self, reduce: Reduce) -> Load | None:
        """The elements that are added up, if nothing is done to them before: float32, or bfloat16."""
        match value := self.nest.body[reduce.arg]:
            case Load(_, _, "float32"):
                return value
            case Apply("cast", (arg,), "float32") if isinstance(load := self.nest.body[arg], Load):
                return load if load.dtype == "bfloat16" else None
        return None

    def _sums_beside(self, reduces: list[Ref]) -> None:
        """Add up some rows, from `r_at` on, each as one alone would be."""
        (last,), n, load = self.nest.elements, self.number(reduces[0]), self._summed(self._reduce(reduces[0]))
        assert load is not None, "rows that are added up as they are"
        self.many = self._many(0, reduces, [], last)
        kind, width, ways = self._type("float32"), self._width(), PAIR_WAYS if self.many else WAYS
        self._open_add(f"{kind}& x{n}")
        place = self.place(load.buffer, load.index)
        asks = "caches_are_far" if self.many else "WIDTH == 16"
        self.line(f"if ({asks}) ask_next<{width} * {ITEMSIZE[load.dtype]}>(&{place});")
        self._take_vector(reduces[0], "")
        self.depth -= 1
        self.line("};")
        self.line(f"{kind} x{n}[{WAYS}][{ways}];")
        for row in range(WAYS):
            self.line(f"fill(x{n}[{row}], 0.f);")
        self.line(f"constexpr int64 abreast = WIDTH == 16 && !caches_are_far ? 1 : {WAYS};")
        self.line(f"#pragma GCC unroll {WAYS}")
        self.open(f"for (int64 first = 0; first < {WAYS}; first += abreast)")
        self.open(f"for (int64 {last.name} = 0; {last.name} < {last.size}; {last.name} += {ways} * {width})")
        for way in range(ways):
            self.line(f"#pragma GCC unroll {WAYS}")
            self.line("for (int64 row = first; row < first + abreast; row++)")
            self.line(f"  add(r_at + row, {last.name} + {way} * {width}, x{n}[row][{way}]);")
        self.close(2)
        totals = ", ".join(f"total(x{n}[{row}])" for row in range(WAYS))
        self.line(f"const float32 z{n}[{WAYS}] = {{{totals}}};")
        self.line("#endif")
        self.many = ""
        self.beside = {ref: f"z{self.number(ref)}[r - r_at]" for ref in reduces}
