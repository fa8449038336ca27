"""What loops ask for before they come to it, since memory waits otherwise, or processors do.

Rows that later passes go through once more leave memory idle there: the next row is asked for meanwhile. Rows that
elements are picked from in any order are asked for in order. Where caches are far (`machine.py`), what a loop reads is
asked for some KB ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from dcompile.codegen.emit.cpp.scans import Scans
from dcompile.codegen.emit.cpp.value_facts import Counted, count_in_int32
from dcompile.codegen.nest.loop_nest import Axis, may_exceed, stride
from dcompile.ir.analysis import operands, runtime_refs
from dcompile.ir.index import Index, substitute, var
from dcompile.ir.nodes import ITEMSIZE, Apply, Load, Ref
from dcompile.ir.ops import OPS

AHEAD_BYTES = 1 << 20
"""Size from which the next row of a tensor is asked for while this one is worked on: smaller ones lie in caches."""
AHEAD_ROWS = 384 << 10
"""Bytes of a row of all of them, and of the next: less than a second level cache has."""
PICKED = 512
"""Bytes of a row from which elements are picked, from which on the next one is asked for."""
SLOW = frozenset(("div", "sqrt", "rsqrt", "reciprocal"))
"""Operations behind which what is read next waits: few of them fill what a processor holds at a time."""


@dataclass(frozen=True, slots=True)
class Delay:
    """A last pass that is taken a row later (`behind.py`), and the pass beside whose steps it is."""

    number: int
    host: int
    kept: tuple[Ref, ...]
    """What rows have kept for it."""
    many: str
    """By what it goes (STEPS)."""


class Asked(Scans):
    """Decides what a pass asks for."""

    delay: Delay | None = None
    """Decided before anything is written."""

    @functools.cached_property
    def ahead(self) -> tuple[tuple[str, int], ...]:
        """Addresses in the next row of what rows are read from, where later passes find this one's in the caches; the
        bytes of an element.

        Memory is idle there otherwise: a cross-entropy's forward took 0.7 of the time so, RMSNorm 0.65 (16 MB, Zen 3).
        """
        nest = self.nest
        if not self._later_passes() or nest.lane or not nest.rows or nest.rows[-1].tile > 1:
            return ()
        row, last = nest.rows[-1].name, nest.elements[-1].name
        found, size = dict[str, int](), 0
        for ref in self._needed(0, self._targets(0)):
            value = nest.body[ref]
            if not isinstance(value, Load) or value.mask is not None or runtime_refs(value.index):
                continue
            nbytes, distance = self.bytes_of(value.buffer), stride(value.index, row)
            if not isinstance(nbytes, int) or not isinstance(distance, int) or distance <= 0:
                continue
            if nbytes >= AHEAD_BYTES and stride(value.index, last) == 1:
                found[self.place(value.buffer, substitute(value.index, {row: var(row) + 1}, {}))] = ITEMSIZE[
                    value.dtype
                ]
                size += distance * ITEMSIZE[value.dtype]
        return tuple(found.items()) if 2 * size <= AHEAD_ROWS else ()

    def _picked_ahead(self, number: int, axis: Axis) -> list[str]:
        """Addresses in the next of the rows that elements are picked from in any order: asked for in order.

        Gathers from rows of 4 KB took 0.7 of the time (8 MB, Zen 3).
        """
        found = dict[str, None]()
        if not self.nest.rows or len(self.nest.elements) > 1 or self.nest.rows[-1].tile > 1:
            return []
        row = self.nest.rows[-1].name
        for ref in self._needed(number, self._targets(number)):
            value = self.nest.body[ref]
            if not isinstance(value, Load) or value.mask is not None or self.kept.get(ref, number) < number:
                continue
            picks = {f"v{r}": var(axis.name) for r in runtime_refs(value.index) if self.levels.element[r]}
            distance, nbytes = stride(value.index, row), self.bytes_of(value.buffer)
            if not picks or not isinstance(distance, int) or not isinstance(nbytes, int) or nbytes < AHEAD_BYTES:
                continue
            along = substitute(value.index, picks, {})
            if stride(along, axis.name) == 1 and PICKED <= distance * ITEMSIZE[value.dtype] <= AHEAD_ROWS:
                found[self.place(value.buffer, substitute(along, {row: var(row) + 1}, {}))] = None
        return list(found)

    def _later_passes(self) -> list[int]:
        """Those that go through the row once more."""
        return [number for number in range(1, self._passes()) if self._roots(number) != ([], [])]

    @property
    def asking(self) -> int | None:
        """The pass that asks for the next row: the one with most work, for which memory need not hurry."""
        return self.delay.host if self.delay and self.ahead else self._busiest

    @functools.cached_property
    def _busiest(self) -> int | None:
        later = self._later_passes()
        works = {n: self._work_of(self._computed(n)) for n in later}
        return max(works, key=lambda n: (works[n], n)) if self.ahead else None

    def _waits(self, number: int, name: str) -> bool:
        """Does the pass update several large float32 tensors by slow operations, as AdamW does?

        It asks for all it reads then, where caches are far: 0.87 of the time with one thread and with two (16 tensors
        of 1 MB, and three of their kind; Intel's servers).
        """
        values = [self.nest.body[ref] for ref in self._wide_values(number)]
        slow = any(isinstance(value, Apply) and value.op in SLOW and value.dtype == "float32" for value in values)
        return slow and len(self._updated(number, name)) > 1

    def _updated(self, number: int, name: str) -> list[Load]:
        """What a pass reads of large float32 tensors that the kernel writes as well."""
        written = {store.buffer for store in self.nest.stores}
        found = self._large(number, name)
        return [load for load in found if load.buffer in written and load.dtype == "float32"]

    def _large_loads(self, number: int, name: str) -> list[Load]:
        """What a pass reads, element by element, of large tensors that no pass before has read or asked for.

        What the kernel writes as well only where it waits: AdamW in bfloat16 took 1.02 to 1.05 of the time.
        """
        if self.turned or (number == 0 and self.asking is not None and not self._may_stop(self.asking)):
            return []
        written = {store.buffer for store in self.nest.stores}
        waits = self._waits(number, name)
        return [load for load in self._large(number, name) if waits or load.buffer not in written]

    def _large(self, number: int, name: str) -> list[Load]:
        """What a pass reads, element by element, of large tensors that no pass before has read."""
        before = {self.nest.body[ref] for earlier in range(number) for ref in self._wide_values(earlier)}
        found = dict[Load, None]()
        for ref in self._wide_values(number):
            value = self.nest.body[ref]
            if not isinstance(value, Load) or value.mask is not None or value in before:
                continue
            nbytes = self.bytes_of(value.buffer)
            if self._steps(value.index, name) == 1 and isinstance(nbytes, int) and nbytes >= AHEAD_BYTES:
                found[value] = None
        return list(found)

    def _may_stop(self, number: int) -> bool:
        """Does a pass look for places, as `_sought` tells while it is written? It need not come to the row's end."""
        chosen = (self.nest.body[self._reduce(ref).arg] for ref in self._roots(number)[0])
        return any(isinstance(value, Apply) and (value.op, value.dtype) == ("where", "int32") for value in chosen)

    def _work_of(self, refs: Iterable[Ref]) -> int:
        """What an element takes, in additions."""
        values = (self.nest.body[ref] for ref in refs)
        return sum(OPS[value.op].cost if isinstance(value, Apply) else 1 for value in values)

    def _wide_values(self, number: int) -> list[Ref]:
        """The element values of a pass, without positions that are only compared."""
        needed, used = self._needed(number, self._targets(number)), set(self._targets(number))
        for ref in needed:
            used |= set() if self._has_places(ref) else {*operands(self.nest.body[ref])}
        return [ref for ref in needed if ref in used]

    def _computed(self, number: int) -> list[Ref]:
        """Those that are not kept from earlier passes."""
        return [ref for ref in self._wide_values(number) if self.kept.get(ref, number) >= number]

    def _anew(self, number: int) -> list[Ref]:
        """Values that a pass works out or reads itself: none that an earlier one has kept, none that it never needs."""
        return [ref for ref in self._needed(number, self._targets(number)) if self.kept.get(ref, number) == number]

    def _countable(self, number: int) -> Counted | None:
        """What of a pass an int32 can count, if it can count anything there."""
        last = self.nest.elements[-1]
        if may_exceed(last.size, 2**31 - 1):
            return None
        return count_in_int32(self.nest.body, self._anew(number), self.levels.element, last.name) or None

    def _has_places(self, ref: Ref) -> bool:
        """Are the places of a value's elements known without a vector of them?"""
        return self._is_drawn(ref) or bool(self.counted and ref in self.counted.matches)

    def _is_drawn(self, ref: Ref) -> bool:
        return isinstance(value := self.nest.body[ref], Apply) and value.op == "philox"

    def _steps(self, index: Index, name: str) -> int | None:
        """Distance of neighbours along `name` in memory, if it is the same everywhere."""
        if any(self.nest.lane or self.levels.element[int(v[1:])] for v in index.variables if v[0] == "v"):
            return None
        found = stride(index, name)
        return found if isinstance(found, int) else None
