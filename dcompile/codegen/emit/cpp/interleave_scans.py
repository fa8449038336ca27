"""Running sums of several rows at a time: each waits for its own additions, and the others fill the time.

What a row is summed up in, and in what order, stays the same. A row at a time took twice as long
(float32, 1 MB, Zen 3).
"""

from __future__ import annotations

from dcompile.codegen.emit.cpp.ops import c_type
from dcompile.codegen.emit.cpp.row_passes import Passes
from dcompile.codegen.emit.cpp.scans import SCAN_BLOCK, Rounds
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.ir.index import size_product
from dcompile.ir.nodes import Load, Reduce, Ref

ABREAST = 4
"""Rows at a time: an addition takes 3 cycles, and what goes in and comes out lies in L1."""
ENOUGH = 32
"""Rows from which on they are taken so: fewer are left to as many threads."""


class Abreast(Passes):
    """Writes the loop over rows that are scanned together."""

    def _decompose(self, row: str) -> None:
        """Name the row's coordinates."""
        axes = self._row_axes()
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

    def _goes_abreast(self) -> bool:
        """Are running sums, one after another, all that takes long in the kernel?"""
        nest = self.nest
        if nest.lane or self.columns or self.kept or self.turned or len(nest.elements) != 1 or any(nest.row_stores):
            return False
        if any(row.tile > 1 for row in nest.rows) or any(isinstance(value, Reduce) for value in nest.body):
            return False
        if any(isinstance(value, Load) and value.mask is not None for value in nest.body):
            return False
        rounds = self._rounds(0)
        many = may_exceed(size_product(axis.count for axis in nest.rows), ENOUGH - 1)
        return many and len(rounds.scans) == 1 and not rounds.serial

    def _rows_abreast(self, parallel: bool) -> None:
        (last,), rounds = self.nest.elements, self._rounds(0)
        (scans,), rows = rounds.scans, self.size(size_product(axis.count for axis in self.nest.rows))
        length = max(min(last.size, SCAN_BLOCK) if isinstance(last.size, int) else SCAN_BLOCK, 1)
        if parallel:
            self.line(f"#pragma omp parallel for schedule(static){self._worthwhile()}")
        self.open(f"for (int64 g = 0; g < {rows}; g += {ABREAST})")
        self.line(f"const int64 g_end = g + {ABREAST} < {rows} ? g + {ABREAST} : {rows};")
        for ref in sorted(rounds.held):
            kind = c_type(self.nest.body[ref].dtype)
            self.line(f"alignas(64) {kind} all{self.number(ref)}[{ABREAST * length}];")
        for ref in scans:
            start = ", ".join([self._identity_of(ref)] * ABREAST)
            self.line(f"{c_type(self._scan(ref).dtype)} u{self.number(ref)}[{ABREAST}] = {{{start}}};")
        blocked, at = may_exceed(last.size, SCAN_BLOCK), last.name
        if blocked:
            size, at = self.size(last.size), f"{last.name} - {last.name}_low"
            self.open(f"for (int64 {last.name}_low = 0; {last.name}_low < {size}; {last.name}_low += {SCAN_BLOCK})")
            end = f"{last.name}_low + {SCAN_BLOCK}"
            self.line(f"const int64 {last.name}_high = {end} < {size} ? {end} : {size};")
        ready = self._fill_rows(rounds, blocked, at, length)
        self._walk_rows(scans, blocked, at, length)
        self._empty_rows(rounds, ready, blocked, at, length)
        self.close(1 + blocked)

    def _open_rows(self, rounds: Rounds, length: int) -> None:
        """One row after another, with its parts of the arrays."""
        self.open("for (int64 r = g; r < g_end; r++)")
        self._decompose("r")
        for ref in sorted(rounds.held):
            n = self.number(ref)
            self.line(f"{c_type(self.nest.body[ref].dtype)}* const h{n} = all{n} + (r - g) * {length};")
        self._between(0)

    def _fill_rows(self, rounds: Rounds, blocked: bool, at: str, length: int) -> frozenset[Ref]:
        """Compute what the scans take; returns what lies in arrays then, scans included."""
        (scans,), (last,) = rounds.scans, self.nest.elements
        self._open_rows(rounds, length)
        self.line("#pragma omp simd")
        self._open_axis(last, blocked)
        computed = self._values(0, self._arguments(scans), rounds, frozenset(), at)
        for ref in scans:
            self.line(f"h{self.number(ref)}[{at}] = {self.name(self._scan(ref).arg)};")
        self.close(2)
        return (rounds.held & computed) | frozenset(scans)

    def _walk_rows(self, scans: tuple[Ref, ...], blocked: bool, at: str, length: int) -> None:
        """All rows by one element, then by the next; or, if some are missing, row by row."""
        (last,) = self.nest.elements
        for ref in scans:
            n, kind = self.number(ref), c_type(self._scan(ref).dtype)
            self.open(f"if (g_end - g == {ABREAST})")
            for row in range(ABREAST):
                self.line(f"{kind} c{row} = u{n}[{row}];")
            self._open_axis(last, blocked)
            for row in range(ABREAST):
                place = f"all{n}[{row * length} + {at}]"
                self.line(self._step(ref, f"c{row}", place))
                self.line(f"{place} = c{row};")
            self.close()
            for row in range(ABREAST):
                self.line(f"u{n}[{row}] = c{row};")
            self.close()
            self.open("else for (int64 r = 0; r < g_end - g; r++)")
            self._open_axis(last, blocked)
            place = f"all{n}[r * {length} + {at}]"
            self.line(self._step(ref, f"u{n}[r]", place))
            self.line(f"{place} = u{n}[r];")
            self.close(2)

    def _empty_rows(self, rounds: Rounds, ready: frozenset[Ref], blocked: bool, at: str, length: int) -> None:
        """Compute and store what is made of the scans."""
        (last,), stores = self.nest.elements, self._roots(0)[1]
        self._open_rows(rounds, length)
        if all(self._simd(n, last.name) for n in stores):
            self.line("#pragma omp simd")
        self._open_axis(last, blocked)
        self._values(0, self._targets(0), rounds, ready, at)
        for n in stores:
            self.store(n)
        self.close(2)
