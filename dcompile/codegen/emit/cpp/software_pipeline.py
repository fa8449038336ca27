"""Rows written one behind the row that is worked on, so that memory takes results in while the processor computes.

The last pass over a row does nothing but write, and the processor waits for memory in it; in the pass before, with its
exponentials, memory waits for the processor. A thread keeps what the last pass needs of its row, and takes each of its
steps beside one over the next row: cross-entropy with its gradient took 0.68 of the time so (128 rows of 32000 in
float32, one thread; 0.73 with two, Zen 4). What the row has kept from pass to pass is read before the next row writes
there, so it is held once.
"""

from __future__ import annotations

import re

from dcompile.codegen.emit.cpp.ops import c_type
from dcompile.codegen.emit.cpp.prefetch import Delay
from dcompile.codegen.emit.cpp.printer import BEFORE, LOCAL
from dcompile.codegen.emit.cpp.vector_printer import Vectors
from dcompile.codegen.emit.cpp.vectorize import STEPS
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.ir.index import Size, size_product
from dcompile.ir.nodes import Scan

_NAMES = re.compile(r"\b[tie]\d+\b")
"""What a row may have named."""


class Behind(Vectors):
    """Writes a kernel's last pass beside an earlier one over the next row."""

    late: tuple[tuple[str, str, str], ...] = ()
    """What the row that waits is told by: type, name, and what it is worth at the end of its own passes."""

    def _find_delay(self) -> Delay | None:
        """Whether the last pass is delayed: it only writes, by whole vectors; so goes the pass that keeps for it."""
        nest, number = self.nest, self._passes() - 1
        if not self.parallel or nest.lane or self.columns or self.split or self.turned or len(nest.elements) != 1:
            return None
        several = may_exceed(size_product(axis.size for axis in nest.rows), 1)
        if not several or any(row.tile != 1 for row in nest.rows) or any(isinstance(v, Scan) for v in nest.body):
            return None
        (last,), (reduces, stores) = nest.elements, self._roots(number)
        needed = self._needed(number, self._targets(number))
        if reduces or not stores or any(map(self._may_point, needed)):
            return None
        kept = tuple(ref for ref in needed if BEFORE < self.kept.get(ref, number) < number)
        hosts = {self.kept[ref] for ref in kept}
        if len(hosts) != 1 or not self._is_host(host := min(hosts)) or not isinstance(last.size, int):
            return None
        self.counted = self._countable(number)  # as it is while the pass is written
        wide = self._has_vectors(number, reduces, stores, last)
        many, self.counted = self._many(number, reduces, stores, last), None
        fits = wide and last.size % STEPS[many] == 0 and STEPS[many] <= self._step_of_pass(host)
        return Delay(number, host, kept, many) if fits else None

    def _is_host(self, number: int) -> bool:
        """Does a pass go through the row by whole vectors, one behind the other?"""
        (last,), (reduces, stores) = self.nest.elements, self._roots(number)
        if self._countable(number) or any(map(self._may_point, self._anew(number))):
            return False
        whole = isinstance(last.size, int) and last.size % self._step_of_pass(number) == 0
        one = self._ways(number, reduces, stores, last) == 1
        everywhere = self._guard(number, reduces, stores, last) == "VECTORS"
        return whole and one and self._is_wide(number, reduces, stores, last) and everywhere

    def _step_of_pass(self, number: int) -> int:
        return STEPS[self._many(number, *self._roots(number), self.nest.elements[-1])]

    def _open_behind(self) -> None:
        """Before a thread's rows: what it keeps of the row before, and a step of that row's last pass."""
        if (delay := self.delay) is None:
            return
        (last,), stores = self.nest.elements, self._roots(delay.number)[1]
        for ref in delay.kept:
            self._open_kept(c_type(self.nest.body[ref].dtype), f"r{self.number(ref)}", last.size)
        self.line("#ifdef VECTORS")
        begin = len(self.lines)
        self.counted = self._countable(delay.number)
        self.many = delay.many
        self.depth += 1
        self._one_step(delay.number, last.name, [], stores)
        self.depth -= 1
        self.late = self._told(self.lines[begin:])
        self.counted, self.many = None, ""
        given = ", ".join([f"int64 {last.name}", *(f"{kind} {name}" for kind, name, _ in self.late)])
        kept = "".join(f", &r{self.number(ref)}" for ref in delay.kept)
        head = f"const auto behind = [={kept}]({given}) __attribute__((always_inline)) {{"
        self.lines.insert(begin, "  " * self.depth + head)
        self.line("};")
        self.line("bool waits = false;")
        for kind, name, _ in self.late:
            self.line(f"{kind} {name}_behind = 0;")
        self.line("#endif")

    def _open_kept(self, kind: str, name: str, count: Size) -> None:
        """The array of a value that is kept from pass to pass."""
        if isinstance(count, int):
            self.line(f"alignas(64) {kind} {name}[{max(count, 1)}];")
            return
        self.line(f"alignas(64) {kind} {name}_local[{LOCAL}];")
        length = self.size(count)
        self.line(f"{kind}* const {name} = {length} <= {LOCAL} ? {name}_local : scratch<{kind}>({length});")

    def _told(self, lines: list[str]) -> tuple[tuple[str, str, str], ...]:
        """What lines use of their row."""
        used = {name for line in lines for name in _NAMES.findall(line)}
        rows = [("int64", axis.name, axis.name) for axis in self.nest.rows if axis.name in used]
        refs = sorted(ref for ref in self.levels.live if not self.levels.element[ref] and ref in self.numbers)
        values = [(c_type(self.nest.body[ref].dtype), self.name(ref), self.name(ref)) for ref in refs]
        places = [("int32", f"e{self.number(ref)}", f"as_place({self.name(ref)})") for ref in refs]
        return (*rows, *(told for told in (*values, *places) if told[1] in used))

    def _call_behind(self, at: str) -> str:
        return f"behind({', '.join([at, *(f'{name}_behind' for _, name, _ in self.late)])});"

    def _beside_step(self, number: int, at: str) -> None:
        if not self.delay or number != self.delay.host:
            return
        width = self._width_of(self.delay.many)
        self.open("if (waits)")
        for n in range(STEPS[self.many] // STEPS[self.delay.many]):
            self.line(self._call_behind(f"{at} + {n} * {width}" if n else at))
        self.close()

    def _leave_behind(self) -> None:
        """In place of the last pass: let the row wait. Without vectors, the pass follows."""
        self.line("#ifdef VECTORS")
        for _, name, value in self.late:
            self.line(f"{name}_behind = {value};")
        self.line("waits = true;")
        self.line("#else")

    def _close_behind(self) -> None:
        """After a thread's rows: the last pass over the last of them."""
        if self.delay is None:
            return
        (last,), width = self.nest.elements, self._width_of(self.delay.many)
        self.line("#ifdef VECTORS")
        call = self._call_behind(last.name)
        self.line(f"if (waits) for (int64 {last.name} = 0; {last.name} < {last.size}; {last.name} += {width}) {call}")
        self.line("#endif")
