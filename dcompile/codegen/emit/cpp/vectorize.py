"""Loops over vectors of floats, written out where g++ does not find the best instructions by itself.

These are rounding to bfloat16, float16's conversions (F16C), and what multiplies by a power of two at the end, as exp
does (3 instructions for 5 and 1 for 9 with AVX-512): of the prelude's functions on vectors (`wide_prelude.py`). Each
does to an element what the function on one float does, so it does not matter where in a loop an element lies. Beside it
stands the plain loop: for the elements that are left, and for machines without these instructions. A chain of four
operations in bfloat16 took 0.65 of the plain loop's time, a cross-entropy in float32 0.75 (one core of an AMD EPYC,
Zen 4); rounding to float16 0.35, SwiGLU in float16 0.45 (Zen 3).

Where all is bfloat16 in memory, elements of even and of odd places are vectors of their own, and four are taken at a
time: with AVX-512 0.62 to 0.76 of the time of single vectors.

Large results are streamed past the caches, which spares reading what is overwritten, unless they are read again while
they are there; so is what is only copied.
Reductions of little work have several accumulators, since g++ gives them one vector, in which each addition waits for
the one before.
"""

from __future__ import annotations

import functools

from dcompile.codegen.emit.cpp.prefetch import Asked
from dcompile.codegen.emit.host.buffer_uses import known_bytes
from dcompile.codegen.nest.loop_nest import Axis, may_exceed
from dcompile.ir.nodes import ITEMSIZE, Apply, Buffer, Const, IndexOf, Load, Reduce, Ref, Scan

WIDTH = 16
"""Elements of the widest vectors; narrower ones divide it."""
STEPS = {"": WIDTH, "pair": 2 * WIDTH, "quad": 4 * WIDTH, "two": 2 * WIDTH}
"""Elements of the widest vector, of two of them that are bfloat16 in memory, of twice that, and of two one behind the
other.

A polynomial's operations wait for each other, and those of a second vector fill the time (exp 0.9, GELU 0.87)."""
MOST = 64
"""Values up to which a loop takes two pairs at a time: each of them is four vectors, and sixteen registers hold few."""
SHORT = 8 * WIDTH
"""Length up to which a row must be whole vectors: what is left of it takes as long as the vectors."""
PAIR_WAYS = 2
"""Accumulators that are pairs of vectors."""
WAYS = 4
"""Accumulators of a reduction of little work: an addition takes 3 to 4 cycles, and two could begin in each."""
LIGHT = 8
"""Work up to which a reduction waits for its accumulator, in additions for each element."""
KEPT = {"float32": "float32", "bfloat16": "float32", "float16": "float32", "bool": "bool"}
"""How values lie that are kept from pass to pass."""
STREAM_BYTES = 12 << 20
"""Size from which a result is streamed. With 32 MB of L3, writing it and reading it again was 1.09 times as fast then,
32 MB 1.18 times, 8 MB about as fast as without, 4 MB 0.7 times (one core of an AMD EPYC; writing alone 1.7 times)."""
TILES_SOONER = 2 / 3
"""The same of a result that is written tile by tile, of that size: 8 MB of a transposed tensor took 0.64 (int64) to 0.8
(bfloat16) of the time (AVX2)."""
GAINS = frozenset((
    "exp", "exp2", "tanh", "sigmoid", "erf", "one_plus_erf", "sin", "cos", "pow", "fmod", "mod", "tan", "asin", "acos",
    "atan2", "sinh",
    "cosh", "erfc", "log", "log1p", "log2", "log10", "expm1", "asinh", "acosh", "atanh", "philox",
))  # fmt: skip
"""Operations that are faster on vectors of ours. So is rounding to bfloat16, and are float16's conversions."""
FLOATS = frozenset(("float32", "bfloat16", "float16"))
ROUNDING = frozenset(("floor", "ceil", "trunc", "round"))
ARITHMETIC = GAINS | ROUNDING | {"add", "sub", "mul", "div", "neg", "abs", "min", "max", "sqrt", "rsqrt", "reciprocal"}
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "signbit"))
LOGIC = frozenset(("and", "or", "xor", "not"))
WHOLE = frozenset(("cast", "lt", "and", "shr"))
"""What is made of an int32 and a number: shares of random bits."""
FOLDED = frozenset(("max", "min", "sum"))
"""Reductions that collect in lanes."""


def may_stream(buffer: Buffer) -> bool:
    """Is a buffer so large that what is written to it may be streamed?"""
    return known_bytes(buffer) >= STREAM_BYTES * TILES_SOONER


class Wide(Asked):
    """Decides which passes are written in vectors, and how; `vectors.py` writes them."""

    again: frozenset[str] = frozenset()
    """Buffers that are read again once the kernel is through."""
    plain = False
    """Is a pass being written for machines without vectors?"""

    def _is_wide(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> bool:
        """Can the pass be written in vectors, and is it faster then?"""
        if self.nest.lane or self.plain:
            return False
        if isinstance(last.size, int) and last.size % WIDTH and last.size <= SHORT:
            return False
        if (sought := self._sought(reduces, stores, last)) is not None:
            return all(self._has_vector(ref, number, last.name) for ref in self._needed(number, [sought]))
        gains = self._gains_anyway(number, reduces, stores, last) or any(map(self._gains, self._computed(number)))
        return (gains or self._waits(number, last.name)) and self._has_vectors(number, reduces, stores, last)

    def _has_vectors(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> bool:
        """Can all that a pass does be done with vectors?"""
        return (
            all(self._has_vector(ref, number, last.name) for ref in self._wide_values(number))
            and all(self._reduce(ref).op in FOLDED and self._reduce(ref).dtype == "float32" for ref in reduces)
            and all(self._stores_vector(n, last.name) for n in stores)
        )

    def _gains_anyway(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> bool:
        """Is the pass faster in vectors for another reason than what it computes?"""
        several = self._ways(number, reduces, stores, last) > 1 or self._adds_up_short(number, reduces, stores, last)
        return several or any(n in self.streams for n in stores) or number == self.asking

    def _adds_up_short(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> bool:
        """Are rows of bfloat16 added up by whole vectors? g++ widens and adds up in two to four times the time."""
        whole = isinstance(last.size, int) and last.size % WIDTH == 0
        return whole and bool(reduces) and not stores and self._reads_pairs(number, last)

    def _guard(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> str:
        """On which machines. AVX2 rounds no faster than g++'s loop, but for what is bfloat16 alone."""
        computed = self._computed(number)
        values = [self.nest.body[ref] for ref in computed]
        functions = any(isinstance(value, Apply) and value.op in GAINS for value in values)
        functions = functions or any(self._converts_half(ref) for ref in computed)
        sought = self._sought(reduces, stores, last) is not None
        everywhere = functions or sought or self._gains_anyway(number, reduces, stores, last)
        everywhere = everywhere or self._is_paired(number, reduces, stores, last)
        if everywhere:
            return "VECTORS"
        return "VECTORS_ROUND" if any(map(self._gains, computed)) else "VECTORS_FAR"

    def _is_paired(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> bool:
        """Is all that the pass reads and writes bfloat16 in memory, or the same for all elements of a vector?"""
        narrow = (self.table[self.nest.stores[n].buffer].dtype == "bfloat16" for n in stores)
        return self._reads_pairs(number, last) and all(narrow)

    def _reads_pairs(self, number: int, last: Axis) -> bool:
        """The same of what it reads."""
        needed = self._wide_values(number)
        if self.turned or any(ref in self.kept for ref in needed):
            return False
        if self.counted and self.counted.positions:
            return False
        if any(self.nest.body[ref].dtype == "float16" for ref in needed):
            return False
        steps = [
            (v.dtype, self._steps(v.index, last.name))
            for v in map(self.nest.body.__getitem__, needed)
            if isinstance(v, Load)
        ]
        return all(dtype == "bfloat16" or (dtype == "float32" and step == 0) for dtype, step in steps)

    def _many(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> str:
        """By how many vectors at a time a pass goes, and how elements lie in them (STEPS).

        A tile is whole steps: of one that is narrower none would fit, and what is behind the last is nobody's.
        """
        found = self._most(number, reduces, stores, last)
        tile = max((row.tile for row in self.nest.rows if row.name == last.name), default=1)
        return found if tile == 1 or tile % STEPS[found] == 0 else ""

    def _most(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> str:
        """The same of an axis that is not tiled."""
        if not self._is_paired(number, reduces, stores, last):
            computed = (self.nest.body[ref] for ref in self._computed(number))
            functions = any(isinstance(value, Apply) and value.op in GAINS for value in computed)
            return "two" if functions and self._ways(number, reduces, stores, last) == 1 else ""
        if isinstance(last.size, int) and last.size <= SHORT and last.size % STEPS["pair"]:
            return ""  # what a pair leaves of such a row takes as long as all pairs
        if reduces:
            return "pair"
        fits = not isinstance(last.size, int) or last.size > 2 * SHORT or last.size % STEPS["quad"] == 0
        tiled = any(row.name == last.name and 1 < row.tile < SHORT for row in self.nest.rows)
        return "quad" if fits and not tiled and len(self._wide_values(number)) <= MOST else "pair"

    def _adds_up(self) -> bool:
        """Is all that the kernel does to add up columns, with little work for each element?"""
        nest = self.nest
        if self._passes() > 1 or self._roots(0)[0] or self.kept or nest.lane or self.turned or len(nest.elements) != 1:
            return False
        (last,), number = nest.elements, 0
        if not isinstance(last.size, int) or last.size % WIDTH or len(self.columns) != len(nest.stores):
            return False
        same = all(store.mode == "sum" and store.index.variables == {last.name} for store in nest.stores)
        row = (nest.body[ref] for ref in self.levels.live if not self.levels.element[ref])
        needed = self._wide_values(number)
        return (
            same
            and all(isinstance(value, Load | Const) for value in row)
            and not any(
                isinstance(value, Load) and value.mask is not None for value in map(nest.body.__getitem__, needed)
            )
            and self._work_of(needed) <= LIGHT
            and all(self._has_vector(ref, number, last.name) for ref in needed)
            and all(self._stores_vector(n, last.name) for n in self.columns)
        )

    def _sought(self, reduces: list[Ref], stores: list[int], last: Axis) -> Ref | None:
        """The condition, if all that a pass does is look for the first place where it holds, as argmax's second."""
        if stores or len(reduces) != 1 or not self.counted or not isinstance(last.size, int):
            return None
        reduce = self._reduce(reduces[0])
        match self.nest.body[reduce.arg]:
            case Apply("where", (hit, place, end), "int32") if reduce.op == "min" and place in self.counted.positions:
                behind = self.nest.body[end]
                beyond = isinstance(behind, Const) and behind.value >= last.size
                return hit if beyond and self.levels.element[hit] else None
        return None

    def _ways(self, number: int, reduces: list[Ref], stores: list[int], last: Axis) -> int:
        """How many accumulators each reduction of a pass has."""
        if not reduces or stores or not may_exceed(last.size, SHORT):
            return 1
        return WAYS if self._work_of(self._computed(number)) <= LIGHT else 1

    def _gains(self, ref: Ref) -> bool:
        match self.nest.body[ref]:
            case Apply("cast", (arg,), "bfloat16"):
                return arg not in self.round["bfloat16"]
            case Apply("cast"):
                return self._converts_half(ref)
            case Apply(op, _, _):
                return op in GAINS
        return False

    def _converts_half(self, ref: Ref) -> bool:
        """Is the value rounded to float16, or read from it? Without instructions of their own both take several."""
        match self.nest.body[ref]:
            case Apply("cast", (arg,), "float16"):
                return arg not in self.round["float16"]
            case Apply("cast", (arg,), _):
                return isinstance(load := self.nest.body[arg], Load) and load.dtype == "float16"
        return False

    def _has_vector(self, ref: Ref, number: int, name: str) -> bool:
        """Can this value be a vector along `name`?"""
        value = self.nest.body[ref]
        if self.kept.get(ref, number) < number or ref in self.kept:
            if value.dtype not in KEPT:
                return False
            if self.kept[ref] < number:
                return True
        if self.counted and (ref in self.counted.positions or ref in self.counted.matches):
            return True
        match value:
            case Load(_, _, dtype, _) if self.turned and ref in self.turned.loads:
                return dtype in FLOATS
            case Load(_, index, dtype, mask):
                readable = (dtype in FLOATS or dtype == "bool") and (mask is None or ref in self.pointed)
                return readable and self._steps(index, name) in (0, 1)
            case Apply("philox", (key, position, _), _):
                return not self.levels.element[key] and self._step_of(position, name) is not None
            case Apply(op, args, _) if self.nest.body[args[0]].dtype == "int32":
                return self._has_whole_vector(op, args)
            case Apply("cast", (arg,), dtype):
                source = self.nest.body[arg].dtype
                return (source, dtype) == ("bool", "float32") or {source, dtype} <= FLOATS
            case Apply("where", _, dtype):
                return dtype in FLOATS
            case Apply(op, args, dtype) if op in LOGIC:
                return dtype == "bool" and all(self.levels.element[arg] for arg in args)
            case Apply(op, args, _) if op in COMPARISONS:
                return all(self.nest.body[arg].dtype == "float32" for arg in args)
            case Apply(op, _, dtype):
                return op in ARITHMETIC and dtype == "float32"
        return False

    def _has_whole_vector(self, op: str, args: tuple[Ref, ...]) -> bool:
        """Can this be made of random bits in vectors?"""
        first, *others = args
        return op in WHOLE and self.levels.element[first] and all(isinstance(self.nest.body[r], Const) for r in others)

    def _step_of(self, position: Ref, name: str) -> int | None:
        """From the number of an element to its neighbour's, if all are the same."""
        value = self.nest.body[position]
        return self._steps(value.index, name) if isinstance(value, IndexOf) else None

    def _stores_vector(self, number: int, name: str) -> bool:
        store = self.nest.stores[number]
        dtype, value = self.table[store.buffer].dtype, self.nest.body[store.value]
        in_order = self._is_turned(number) or self._steps(store.index, name) == 1
        if not in_order or value.dtype != dtype:
            return False
        if store.mode == "sum":
            return dtype == "float32"
        return store.mode == "set" and (dtype in FLOATS or (dtype == "bool" and self.levels.element[store.value]))

    def _is_turned(self, number: int) -> bool:
        """Does a store go through a tile that is turned afterwards?"""
        return self.turned is not None and number in self.turned.stores

    @functools.cached_property
    def streams(self) -> frozenset[int]:
        """Stores too large for caches, of what the kernel does not read."""
        if self.split:  # threads there share rows, and none of them ends a row
            return frozenset()
        read = {value.buffer for value in self.nest.body if isinstance(value, Load)}
        least = STREAM_BYTES * (TILES_SOONER if self.turned else 1)
        return frozenset(
            n
            for n, store in enumerate(self.nest.stores)
            if store.mode == "set" and store.buffer not in read
            if not self.nest.row_stores[n] and not self._is_turned(n)
            if self.table[store.buffer].dtype in FLOATS or self.copies
            if isinstance(size := self.bytes_of(store.buffer), int) and size >= least
        )

    def _stays(self, number: int) -> str:
        """The condition on which a result that would be streamed is left to the caches, if there is one.

        Four linear layers with norms and residuals, tensors of 16 and 64 MB, train in 0.97 to 1.0 of the time so in
        float32 and in 0.94 to 0.96 in bfloat16, a Llama's layer in 0.99 (Intel with 480 MB of L3, one and two threads).
        """
        store = self.nest.stores[number]
        return f"stays<{self.bytes_of(store.buffer)}>" if store.buffer in self.again else ""

    @functools.cached_property
    def copies(self) -> bool:
        """Is all that the kernel does to write what it reads, in the same order, once tiles are turned?"""
        nest = self.nest
        if nest.lane or any(isinstance(value, Reduce | Scan) for value in nest.body):
            return False
        return all(map(self._is_copied, range(len(nest.stores))))

    def _is_copied(self, number: int) -> bool:
        """Does a store write elements as they are read, with neighbours side by side in both?"""
        store, last = self.nest.stores[number], self.nest.elements[-1].name
        value = self.nest.body[store.value]
        if not isinstance(value, Load) or value.mask is not None or value.dtype != self.table[store.buffer].dtype:
            return False
        turned = self.turned is not None and store.value in self.turned.loads
        in_order = turned or self._steps(value.index, last) == 1
        return store.mode == "set" and in_order and self._steps(store.index, last) == 1

    def _asked(self, number: int, stores: list[int], name: str) -> list[tuple[str, str, int]]:
        """What a step of a pass asks for: how, where, and the bytes of an element.

        A little ahead, if functions of one large tensor are streamed: what comes next is fetched too late then. An
        exponential of 16 MB took 0.9 of the time, cross-entropy's backward 0.86 to 0.98, sigmoid 0.95, GELU 0.99 (Zen
        3, 1 KB ahead; 2 and 4 were no better); loops over several tensors 1.0 to 1.04. Where caches are far, all of
        it (Intel's servers, 8 and 16 MB from the third level): cross-entropy's backward 0.76 with 4 KB, argmax 0.74,
        SwiGLU, sums of rows and of columns in bfloat16 0.85 to 0.9, a chain 0.93, AdamW 1.0.
        """
        if number == self.asking:
            return [("ask", place, nbytes) for place, nbytes in self.ahead]
        loads = self._large_loads(number, name)
        values = [self.nest.body[ref] for ref in self._computed(number)]
        functions = any(isinstance(value, Apply) and value.op in GAINS for value in values)
        soon = len(loads) == 1 and functions and any(n in self.streams for n in stores)
        how = "ask_soon" if soon else "ask_far"
        return [(how, self.place(load.buffer, load.index), ITEMSIZE[load.dtype]) for load in loads]
