"""The passes over one row: element loops with their reductions, and the row values between them."""

from __future__ import annotations

import math

from dcompile.codegen.emit.cpp.ops import COMPOUND, c_type, clause, literal, memory_type, watches_nan
from dcompile.codegen.emit.cpp.outer_vectorize import Lanes
from dcompile.codegen.emit.cpp.prefetch import AHEAD_BYTES
from dcompile.codegen.emit.cpp.prefetch_gather import ask_ahead
from dcompile.codegen.emit.cpp.printer import BEFORE
from dcompile.codegen.emit.cpp.scans import SCAN_BLOCK, Rounds
from dcompile.codegen.emit.cpp.split_loops import pieces, within
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, WIDE_TILE_SIDE, Axis, Nest, may_exceed
from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.index import ZERO, Size, size_product, substitute, var
from dcompile.ir.nodes import ITEMSIZE, Const, Load, Reduce, Ref, Scan
from dcompile.ir.ops import REDUCTIONS

PARTIAL = 4096
"""Longest run of float additions into one vector of accumulators; runs are added up in float64."""
BLOCKS = 1024
"""Blocks at most that threads take of one long row."""


class Passes(Lanes):
    """Writes what happens within a row, or within `OUTER_VECTOR_ROWS` rows side by side."""

    def _row(self) -> None:
        """All passes over one row (over `OUTER_VECTOR_ROWS` rows, if there is a lane)."""
        ask_ahead(self)
        behind, early = self.delay, self.delay.kept if self.delay else ()
        for ref in (ref for ref, number in self.kept.items() if number > BEFORE and ref not in early):
            value = self.nest.body[ref]
            count = size_product(axis.size for axis in self.nest.elements)
            self._open_kept(c_type(value.dtype), f"r{self.number(ref)}", count)
        for number in range(self._passes() + 1):
            self._between(number)
            if behind and number == behind.number:
                self._leave_behind()
                self.plain = True
                self._pass(number)
                self.plain = False
                self.line("#endif")
            elif number < self._passes():
                self._pass(number)
        if not isinstance(size_product(axis.size for axis in self.nest.elements), int):
            for ref in self.kept:
                self.line(f"if (r{self.number(ref)} != r{self.number(ref)}_local) free(r{self.number(ref)});")

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
            self.line(f"alignas(64) {c_type(body[ref].dtype)} l{self.number(ref)}[{OUTER_VECTOR_ROWS}];")
        self._open_lane(simd=all(self._simd(n, lane.name) for n in stores))
        used = {ref for value in here for ref in operands(body[value])} | {
            r for n in stores for r in store_operands(self.nest.stores[n])
        }
        self._fetch(used - set(here))
        for ref in here:
            if isinstance(body[ref], Reduce):
                self.line(f"const {c_type(body[ref].dtype)} {self.name(ref)} = s{self.number(ref)}[l];")
            else:
                self.declare(ref)
            self.line(f"l{self.number(ref)}[l] = {self.name(ref)};")
        for n in stores:
            self.store(n)
        self.close()

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
        last, rounds = self.nest.elements[-1], self._rounds(number)
        self._open_scans(rounds, last.size)
        self._turn_in()
        self._point(number)
        for axis in self.nest.elements[:-1]:
            self._open_axis(axis)
        block = SCAN_BLOCK if rounds.held else PARTIAL
        long = may_exceed(last.size, SCAN_BLOCK if rounds.held else 2 * PARTIAL)
        blocked = long and bool(partial or rounds.held)
        if blocked:
            size = self.size(last.size)
            self.open(f"for (int64 {last.name}_low = 0; {last.name}_low < {size}; {last.name}_low += {block})")
            self.line(
                f"const int64 {last.name}_high = "
                f"{last.name}_low + {block} < {size} ? {last.name}_low + {block} : {size};"
            )
        ready = self._run_rounds(number, rounds, last, blocked)
        for ref in sorted(partial):
            self._accumulator(ref, "s", wide=False)
        scalars = [n for n in stores if self._is_scalar_column(n, last.name)]
        for n in scalars:
            store = self.nest.stores[n]
            dtype = self.table[store.buffer].dtype
            self.line(f"{c_type(dtype)} c{n} = {literal(REDUCTIONS[store.mode].identity(dtype), dtype)};")
        simd = not rounds.serial and all(self._simd(n, last.name) for n in stores)
        counts = simd and not rounds.held and self._open_counter(number, last, blocked)
        moved = self.copies and self.streams.issuperset(stores)
        wide = simd and not (moved or rounds.held or scalars) and self._is_wide(number, reduces, stores, last)
        start = self._wide_loop(number, reduces, stores, last, blocked) if wide else None
        low, high = self._bounds(last, blocked)
        whole = reduces or scalars or counts or wide or blocked or not simd or rounds.held
        at = f"{last.name} - {last.name}_low" if blocked else last.name
        nest = self.nest
        if moved:
            self._move(stores, last, (low, high))
        for begin, end, told in () if moved else [(start or low, high, nest)] if whole else self._pieces(number, last):
            self.nest = told
            self._simd_pragma(reduces, scalars, simd)
            self.open(f"for (int64 {last.name} = {begin}; {last.name} < {end}; {last.name}++)")
            for place in self._picked_ahead(number, last):
                self.line(f"__builtin_prefetch(&{place});")
            self._values(number, self._targets(number), rounds, ready, at)
            self._combine_elements(reduces, [n for n in stores if n not in scalars])
            for n in scalars:
                store = self.nest.stores[n]
                self.line(self._combine(store.mode, f"c{n}", self.name(store.value), self.table[store.buffer].dtype))
            if counts:
                self.line("place++;")
                self.counted = None
            self.close()
        self.nest = nest
        if wide and start == self._bounds(last, blocked)[0]:
            self.line("#endif")
        self.close(int(counts))
        for n in scalars:
            store = self.nest.stores[n]
            place = f"{self.columns[n]}[{self.index(store.index)}]"
            self.line(self._combine(store.mode, place, f"c{n}", self.table[store.buffer].dtype))
        for ref in sorted(partial):
            self.line(f"w{self.number(ref)} += s{self.number(ref)};")
        self.close(len(self.nest.elements) - 1 + blocked)
        self._turn_out()
        for ref in sorted(partial):
            self.line(f"const float64 s{self.number(ref)} = w{self.number(ref)};")

    def _pieces(self, number: int, axis: Axis) -> list[tuple[str, str, Nest]]:
        """A loop over a whole axis in parts: where each begins and ends, and what the nest is there."""
        low, high = self._bounds(axis, False)
        if not isinstance(axis.size, int) or high != str(axis.size):
            return [(low, high, self.nest)]
        stores = [self.nest.stores[n] for n in self._roots(number)[1]]
        parts = pieces(self.nest, axis, self._needed(number, self._targets(number)), stores)
        if len(parts) == 1:
            return [(low, high, self.nest)]
        return [(str(a), str(b), within(self.nest, axis, a, b)) for a, b in parts]

    def _open_counter(self, number: int, axis: Axis, blocked: bool) -> bool:
        """Begin to count in an int32, where that stands for a value of the pass."""
        if (counted := self._countable(number)) is None:
            return False
        self.counted = counted
        self.open("")
        self.line(f"int32 place = {self._bounds(axis, blocked)[0]};")
        for ref in sorted(set(counted.matches.values())):
            self.line(f"const int32 e{self.number(ref)} = as_place({self.name(ref)});")
        return True

    def _point(self, number: int) -> None:
        """Decide once a row, rather than at each element, whether a load reads memory or zeros."""
        last = self.nest.elements[-1]
        for ref in self._needed(number, self._targets(number)):
            load = self.nest.body[ref]
            if ref in self.pointed or not self._may_point(ref) or self.kept.get(ref, number) < number:
                continue
            assert isinstance(load, Load) and load.mask is not None
            self.pointed.add(ref)
            kind = memory_type(load.dtype)
            start = self.place(load.buffer, substitute(load.index, {last.name: ZERO}, {}))
            row = f"{self.name(load.mask)} ? &{start} : (const {kind}*)zeros"
            self.line(f"const {kind}* const z{self.number(ref)} = {row};")

    def _move(self, stores: list[int], last: Axis, bounds: tuple[str, str]) -> None:
        """Write elements past the caches, as they are read."""
        low, high = bounds
        self.line(f"const int64 {last.name} = {low};")
        for n in stores:
            store = self.nest.stores[n]
            load = self.nest.body[store.value]
            assert isinstance(load, Load)
            read = self.place(load.buffer, load.index)
            if self.turned and store.value in self.turned.loads:
                read = f"x{self.number(store.value)}[{self.turned.place}]"
            size = f"({high} - {last.name}) * {ITEMSIZE[load.dtype]}"
            given = f"(&{self.place(store.buffer, store.index)}, &{read}, {size});"
            unless = f"if ({stays}) __builtin_memcpy{given} else " if (stays := self._stays(n)) else ""
            self.line(f"{unless}stream_bytes{given}")

    def _turn_in(self) -> None:
        """Read a tile of each tensor whose rows lie across the simd loop."""
        if self.turned is None:
            return
        across, along = self.turned.across, self.turned.along
        for ref, distance in self.turned.loads.items():
            load = self.nest.body[ref]
            assert isinstance(load, Load)
            x = f"x{self.number(ref)}"
            self.line(f"alignas(64) {memory_type(load.dtype)} {x}[{across.tile * along.tile}];")
            corner = self.place(load.buffer, self.turned.corner(load.index))
            extents = f"{self.turned.extent(along)}, {self.turned.extent(across)}"
            self._ask_for_tile(load, distance)
            self.line(f"turn(&{corner}, {self.size(distance)}, {x}, {along.tile}, {extents});")
        for number in self.turned.stores:
            dtype = memory_type(self.table[self.nest.stores[number].buffer].dtype)
            self.line(f"alignas(64) {dtype} y{number}[{across.tile * along.tile}];")

    def _ask_for_tile(self, load: Load, distance: Size) -> None:
        """Ask for the next tile, if its rows are so short that memory is not read ahead by itself.

        Of 2 bytes, a transposed tensor took 0.85 of the time with AVX-512, 0.7 to 1.05 with AVX2; of 4 and 8 none less.
        """
        assert self.turned is not None
        across, along = self.turned.across, self.turned.along
        nbytes = self.bytes_of(load.buffer)
        if (
            ITEMSIZE[load.dtype] > 2
            or along.tile < WIDE_TILE_SIDE
            or (isinstance(nbytes, int) and nbytes < AHEAD_BYTES)
        ):
            return
        low = f"{along.name}_low"
        corner = substitute(self.turned.corner(load.index), {low: var(low) + along.tile}, {})
        asked = f"&{self.place(load.buffer, corner)}, {self.size(distance)}, {along.tile}, {across.tile}"
        self.line(f"if ({low} + {along.tile} < {self.size(along.size)}) ask_for({asked});")

    def _turn_out(self) -> None:
        """Write a tile of each such result."""
        if self.turned is None:
            return
        across, along = self.turned.across, self.turned.along
        for number, distance in self.turned.stores.items():
            store = self.nest.stores[number]
            corner = self.place(store.buffer, self.turned.corner(store.index))
            extents = f"{self.turned.extent(across)}, {self.turned.extent(along)}"
            self.line(f"turn(y{number}, {along.tile}, &{corner}, {self.size(distance)}, {extents});")

    def _shares_elements(self) -> bool:
        """One long row: threads take blocks of its elements, whose results are combined in order."""
        one = not self._row_axes() and len(self.nest.elements) == 1
        one = one and may_exceed(self.nest.elements[0].size, 2 * PARTIAL)
        serial = any(isinstance(value, Scan) for value in self.nest.body)
        return one and self.parallel and not self.kept and not self.columns and not serial

    def _shared_pass(self, number: int, reduces: list[Ref], stores: list[int]) -> None:
        """A pass over one long row; the blocks depend on its length only, so the result on no number of threads."""
        (axis,) = self.nest.elements
        block, blocks, most = self._blocks(axis)
        wide = self._partial(reduces)
        for ref in reduces:
            kind = "int32" if self._reduce(ref).dtype == "bool" else c_type(self._reduce(ref).dtype)
            self.line(f"{kind} p{self.number(ref)}[{most}];")
            if watches_nan(self._reduce(ref)):
                self.line(f"int32 m{self.number(ref)}[{most}];")
        self.line(f"#pragma omp parallel for schedule(static){self._worthwhile()}")
        self.open(f"for (int64 b = 0; b < {blocks}; b++)")
        self.line(f"const int64 {axis.name}_low = b * {block};")
        last = f"b == {blocks - 1 if isinstance(blocks, int) else f'{blocks} - 1'}"
        self.line(f"const int64 {axis.name}_high = {last} ? {self.size(axis.size)} : {axis.name}_low + {block};")
        for ref in reduces:
            self._accumulator(ref, "s", wide=False)
        self._simd_pragma(reduces, [], simd=True)
        self._open_axis(axis, bounded=True)
        self._values(number, self._targets(number), Rounds(), frozenset(), "")
        self._combine_elements(reduces, stores)
        self.close()
        for ref in reduces:
            self.line(f"p{self.number(ref)}[b] = s{self.number(ref)};")
            if watches_nan(self._reduce(ref)):
                self.line(f"m{self.number(ref)}[b] = n{self.number(ref)};")
        self.close()
        for ref in reduces:
            self._accumulator(ref, "s", wide=ref in wide)
        if reduces:
            self.open(f"for (int64 b = 0; b < {blocks}; b++)")
            for ref in reduces:
                self._combine_partial(ref, f"p{self.number(ref)}[b]")
                if watches_nan(self._reduce(ref)):
                    self.line(f"n{self.number(ref)} |= m{self.number(ref)}[b];")
            self.close()

    def _blocks(self, axis: Axis) -> tuple[int | str, int | str, int]:
        """Length and number of blocks of one long row, and their greatest number."""
        if isinstance(axis.size, int):
            block = PARTIAL * math.ceil(axis.size / (PARTIAL * BLOCKS))
            return block, math.ceil(axis.size / block), math.ceil(axis.size / block)
        size = self.size(axis.size)
        if "block" not in self.declared:
            self.declared.add("block")
            most = PARTIAL * BLOCKS
            self.line(f"const int64 block = {size} <= {most} ? {PARTIAL} : ({size} + {most - 1}) / {most} * {PARTIAL};")
            self.line(f"const int64 blocks = ({size} + block - 1) / block;")
        return "block", "blocks", BLOCKS

    def _partial(self, reduces: list[Ref]) -> frozenset[Ref]:
        """Float sums too long, or too nested, for one vector of accumulators."""
        long = len(self.nest.elements) > 1 or may_exceed(self.nest.elements[-1].size, 2 * PARTIAL)
        return frozenset(
            r for r in reduces if long and self._reduce(r).op == "sum" and self._reduce(r).dtype == "float32"
        )

    def _accumulator(self, ref: Ref, prefix: str, wide: bool) -> None:
        reduce = self._reduce(ref)
        identity = literal(REDUCTIONS[reduce.op].identity(reduce.dtype), reduce.dtype)
        kind = "float64" if wide else "int32" if reduce.dtype == "bool" else c_type(reduce.dtype)
        self.line(f"{kind} {prefix}{self.number(ref)} = {identity};")
        if watches_nan(reduce):
            self.line(f"int32 n{self.number(ref)} = 0;")

    def _simd_pragma(self, reduces: list[Ref], scalars: list[int], simd: bool) -> None:
        if not simd:
            return
        clauses = []
        for ref in reduces:
            reduce = self._reduce(ref)
            clauses.append(f"reduction({clause(reduce)}:s{self.number(ref)})")
            if watches_nan(reduce):
                clauses.append(f"reduction(|:n{self.number(ref)})")
        for n in scalars:
            if self.nest.stores[n].mode not in COMPOUND:
                return
            clauses.append(f"reduction({COMPOUND[self.nest.stores[n].mode]}:c{n})")
        if self.counted:
            clauses.append("linear(place:1)")
        self.line(" ".join(("#pragma omp simd", *clauses)))

    def _combine_elements(self, reduces: list[Ref], stores: list[int]) -> None:
        """What becomes of an element: reductions, then stores."""
        for ref in reduces:
            value = self.name(self._reduce(ref).arg)
            self._combine_partial(ref, value)
            if watches_nan(self._reduce(ref)):
                self.line(f"n{self.number(ref)} |= {value} != {value};")
        for n in stores:
            self.store(n)

    def _finish(self, ref: Ref) -> None:
        """Name the result of a reduction, after its pass."""
        reduce, s = self._reduce(ref), f"s{self.number(ref)}"
        result = f'n{self.number(ref)} ? __builtin_nan("") : {s}' if watches_nan(reduce) else s
        dtype = c_type(reduce.dtype)
        self.line(f"const {dtype} {self.name(ref)} = {dtype}({result});")
