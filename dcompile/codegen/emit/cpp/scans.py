"""Scans within a row: a block of the row at a time, first what goes in, side by side, then one element after another.

A pass with scans takes several rounds over each block: a round computes what the next scans take and runs these over
the block in memory; the last round is the pass's own. So whatever surrounds a scan is vectorised, and a row of any
length needs no more memory than a block. The order of combination is that of the row, as eager's, on any number of
threads and whatever else the kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcompile.codegen.emit.cpp.ops import SPELLING, c_type, literal
from dcompile.codegen.emit.cpp.printer import KEEP_COST, Statements
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis, cone_cost
from dcompile.ir.analysis import operands
from dcompile.ir.index import Size
from dcompile.ir.nodes import Apply, Load, Ref, Scan
from dcompile.ir.ops import OPS, SCANS

SERIAL_COST = 8
"""Additions for each element up to which a pass with scans is one loop, one element after another."""
SCAN_BLOCK = 1024
"""Elements of a block: 8 KB of float64 for each scan, so that a few of them share L1 with what they are made from."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The scans of each round, and the values that lie in block arrays once computed: scans, and what is costly.

    A `serial` pass has none of these, only scans.
    """

    scans: tuple[tuple[Ref, ...], ...] = ()
    held: frozenset[Ref] = frozenset()
    serial: bool = False


class Scans(Statements):
    """Writes the scans of a pass."""

    def _needed(self, number: int, targets: list[Ref], held: frozenset[Ref] = frozenset()) -> list[Ref]:
        """Element values that `targets` are made of, in order; kept ones of earlier passes and held ones end it."""
        stack, seen = list(targets), set[Ref]()
        while stack:
            ref = stack.pop()
            if ref not in seen and self.levels.element[ref]:
                seen.add(ref)
                if self.kept.get(ref, number) == number and ref not in held:
                    stack += operands(self.nest.body[ref])
        return sorted(seen)

    def _scan(self, ref: Ref) -> Scan:
        value = self.nest.body[ref]
        assert isinstance(value, Scan)
        return value

    def _rounds(self, number: int) -> Rounds:
        """What a pass has to scan, in rounds: a scan comes after those that its argument is made of."""
        depth: dict[Ref, int] = {}
        for ref in (needed := self._needed(number, self._targets(number))):
            below = max((depth.get(operand, 0) for operand in operands(self.nest.body[ref])), default=0)
            new = isinstance(self.nest.body[ref], Scan) and self.kept.get(ref, number) == number
            depth[ref] = below + new
        scans = [r for r in needed if isinstance(self.nest.body[r], Scan) and self.kept.get(r, number) == number]
        if not scans:
            return Rounds()
        if self._is_serial(needed, scans):
            return Rounds((tuple(scans),), serial=True)
        groups = tuple(tuple(r for r in scans if depth[r] == d) for d in range(1, max(depth.values()) + 1))
        held = frozenset(scans)
        computed = [set(self._needed(number, self._arguments(group), held)) for group in groups]
        computed.append(set(self._needed(number, self._targets(number), held)))
        for ref in needed:
            again = sum(ref in values for values in computed) > 1 and self.kept.get(ref, number) == number
            costly = again and not isinstance(self.nest.body[ref], Load)
            if costly and cone_cost(ref, self.nest.body, held) >= KEEP_COST:
                held |= {ref}
        return Rounds(groups, held)

    def _is_serial(self, needed: list[Ref], scans: list[Ref]) -> bool:
        """Is there so little besides the scans that it may wait for them? Float sums take long enough by themselves."""
        cost = sum(OPS[value.op].cost for ref in needed if isinstance(value := self.nest.body[ref], Apply))
        slow = all(self._scan(ref).op not in ("max", "min") and "float" in self._scan(ref).dtype for ref in scans)
        return cost <= SERIAL_COST and not slow

    def _arguments(self, scans: tuple[Ref, ...]) -> list[Ref]:
        return [self._scan(ref).arg for ref in scans]

    def _open_scans(self, rounds: Rounds, size: Size) -> None:
        """Memory of a block, and what each scan carries from block to block."""
        length = min(size, SCAN_BLOCK) if isinstance(size, int) else SCAN_BLOCK
        for ref in sorted(rounds.held):
            self._declare_once(f"h{self.number(ref)}", self.nest.body[ref].dtype, f"[{max(length, 1)}]")
        for group in rounds.scans:
            for ref in group:
                carried = self._declare_once(f"u{self.number(ref)}", self._scan(ref).dtype)
                self.line(f"{carried} = {self._identity_of(ref)};")

    def _run_rounds(self, number: int, rounds: Rounds, axis: Axis, blocked: bool) -> frozenset[Ref]:
        """All rounds over a block but the last; returns what that finds in block arrays."""
        ready: frozenset[Ref] = frozenset()
        at = f"{axis.name} - {axis.name}_low" if blocked else axis.name
        for group in () if rounds.serial else rounds.scans:
            self.line("#pragma omp simd")
            self._open_axis(axis, blocked)
            computed = self._values(number, self._arguments(group), rounds, ready, at)
            for ref in group:
                self.line(f"h{self.number(ref)}[{at}] = {self.name(self._scan(ref).arg)};")
            self.close()
            self._open_axis(axis, blocked)
            for ref in group:
                carried, place = f"u{self.number(ref)}", f"h{self.number(ref)}[{at}]"
                self.line(self._step(ref, carried, place))
                self.line(f"{place} = {carried};")
                if ref in self.kept:
                    self.line(f"r{self.number(ref)}[{self._row_place()}] = {carried};")
            self.close()
            ready |= (rounds.held & computed) | frozenset(group)
        return ready

    def _values(
        self, number: int, targets: list[Ref], rounds: Rounds, ready: frozenset[Ref], at: str
    ) -> frozenset[Ref]:
        """Declare the element values that `targets` are made of, reading what is ready, and hold what is to be held."""
        place = self._row_place()
        needed = self._needed(number, targets, ready)
        for ref in needed:
            kind, name, n = c_type(self.nest.body[ref].dtype), self.name(ref), self.number(ref)
            if self.kept.get(ref, number) < number:
                self.line(f"const {kind} {name} = r{n}[{place}];")
            elif ref in ready:
                self.line(f"const {kind} {name} = h{n}[{at}];")
            else:
                if isinstance(self.nest.body[ref], Scan):
                    self._advance(ref, f"u{n}")
                else:
                    self.declare(ref)
                if ref in self.kept:
                    self.line(f"r{n}[{place}] = {name};")
                if ref in rounds.held:
                    self.line(f"h{n}[{at}] = {name};")
        return frozenset(needed)

    def _step(self, ref: Ref, carried: str, value: str) -> str:
        """A statement that takes a value into what a scan carries."""
        scan = self._scan(ref)
        combine = SCANS[scan.op].combine
        assert combine is not None
        return f"{carried} = {c_type(scan.dtype)}({SPELLING[combine].format(carried, value, dtype=scan.dtype)});"

    def _open_lane_scans(self, needed: list[Ref]) -> list[Ref]:
        """What each scan carries from element to element, for `OUTER_VECTOR_ROWS` rows side by side."""
        scans = [ref for ref in needed if isinstance(self.nest.body[ref], Scan)]
        for ref in scans:
            carried = self._declare_once(f"u{self.number(ref)}", self._scan(ref).dtype, f"[{OUTER_VECTOR_ROWS}]")
            self.line(f"for (int64 l = 0; l < {OUTER_VECTOR_ROWS}; l++) {carried}[l] = {self._identity_of(ref)};")
        return scans

    def _declare_once(self, name: str, dtype: str, size: str = "") -> str:
        """A variable of the row; a later pass that runs a scan again finds it there."""
        if name not in self.opened:
            self.opened.add(name)
            self.line(f"{'alignas(64) ' if size else ''}{c_type(dtype)} {name}{size};")
        return name

    def _identity_of(self, ref: Ref) -> str:
        scan = self._scan(ref)
        return literal(SCANS[scan.op].identity(scan.dtype), scan.dtype)

    def _advance(self, ref: Ref, carried: str) -> None:
        """The next value of a scan, from what it carries."""
        self.line(self._step(ref, carried, self.name(self._scan(ref).arg)))
        self.line(f"const {c_type(self._scan(ref).dtype)} {self.name(ref)} = {carried};")

    def _bounds(self, axis: Axis, bounded: bool) -> tuple[str, str]:
        """Where a loop over an axis begins and ends."""
        tiled = bounded or axis is self.split or any(row.name == axis.name and row.tile > 1 for row in self.nest.rows)
        return (f"{axis.name}_low", f"{axis.name}_high") if tiled else ("0", self.size(axis.size))

    def _open_axis(self, axis: Axis, bounded: bool = False, start: str | None = None) -> None:
        low, high = self._bounds(axis, bounded)
        self.open(f"for (int64 {axis.name} = {start or low}; {axis.name} < {high}; {axis.name}++)")

    def _row_place(self) -> str:
        """Position of an element in its row."""
        text = ""
        for axis in self.nest.elements:
            text = f"({text}) * {self.size(axis.size)} + {axis.name}" if text else axis.name
        return text
