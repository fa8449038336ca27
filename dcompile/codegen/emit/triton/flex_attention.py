"""FlexAttention on GPUs: blocks that a mask leaves, with functions of scores and positions in registers.

forward: a program has a block of queries. It goes through the key blocks that the tables name, with a softmax whose
sums are corrected as larger scores come (FlashAttention-2: Dao, 2023). Exponentials have base 2.
queries, keys: gradients of queries, and of keys and values. Scores are computed again. With weights w, the gradient of
a score is w * (grad @ value - level). A query's level is the sum of its result times the result's gradient, less what
the gradient of its logarithm adds. The kernel of queries comes first, and leaves these levels for the other.

The place of the next block is read one step ahead, so that its keys are asked for while those before are multiplied.
Sums are in float32 and in a fixed order.

Gradients of tensors that a score function reads are values of pairs, added at the elements that were read, in any
order. What all pairs of a program's rows share is summed first. ALiBi's slopes get one addition from each program, a
bias of each pair one from each pair. Learned slopes, 2 x 16 heads and 4096 positions: forward and backward take 1.1 ms
on an H200. With an addition for each pair they take 468.

Tiles, addresses, rows of heads, loops over a mask's blocks, and scores are common to the three kernels. Tiles depend on
the width of a head and on the memory of a GPU's multiprocessor. On an H100, 2 x 4096 positions, 1024 elements in all
heads, a window of 1024: the forward and both parts of the backward take 124, 122 and 181 us for heads of 64, 104, 124
and 167 us for heads of 128, 104, 154 and 310 us for heads of 256. Other tiles took up to four times as long. Tiles for
other GPUs need at most 99 KiB, and spill next to no registers; no such GPU has run them.

Functions of pairs are written for a tile of queries and keys, in the statements of any kernel (`printer.py`). What
depends neither on scores nor on the inner dimension of the tile is written once, before the loop over that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dcompile.codegen.emit.target import Kernels, KernelSource, Launch, LibraryReplacement
from dcompile.codegen.emit.triton.kernel import FILL, fill, finished, function_text, types_of
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.nest.loop_nest import Axis, Nest, may_exceed, renumber
from dcompile.codegen.nest.tile_plan import TileDim, TilePlan, ceil_div, power_of_two
from dcompile.device_traits import MAX_INT32_ELEMENTS
from dcompile.ir.analysis import ancestors
from dcompile.ir.attention import FLEX, FLEX_BACKWARD, BlockTable, CapturedTerm, FlexArguments, flex_arguments
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import (
    ZERO,
    Index,
    Size,
    as_index,
    as_size,
    contiguous_strides,
    exact_quotient,
    size_product,
    var,
)
from dcompile.ir.nodes import Extern, Load, Program, Ref, Store, Value, View
from dcompile.ir.pair_function import GRADIENT, PLACES, SCORE, PairFunction

BATCH, HEAD, QUERY, KEY = "i0", "i1", "i2", "j0"
"""Names of a pair's position in kernels: two numbers of the program, and two tensors of positions."""
_BOTH = var(QUERY) + var(KEY)
_VARYING: Mapping[str, Index] = {
    SCORE: _BOTH, GRADIENT: _BOTH, **dict(zip(PLACES, (ZERO, ZERO, var(QUERY), var(KEY)), strict=True))
}  # fmt: skip
"""Arguments of functions -> an index that varies as they do."""


class PairTile:
    """A tile with queries along one dimension and keys along the other, and functions of its pairs by name."""

    def __init__(
        self,
        functions: Mapping[str, PairFunction],
        table: Mapping[str, Buffer],
        outer: tuple[str, Size, int],
        inner: tuple[str, Size, int],
        ragged: Collection[str],
        warps: int,
    ) -> None:
        """`outer`, `inner`: the name of a position, how many there are, and how many of them a tile has.

        `ragged`: names of positions of which a tile may have some that do not exist.
        """
        dims = tuple(TileDim(name, (Axis(axis, size),), block) for name, (axis, size, block) in
                     zip("yx", (outer, inner), strict=True))  # fmt: skip
        beyond = [dim.name for dim in dims if dim.axes[0].name in ragged]
        body, self.results = _one_body(functions)
        stores = tuple(Store(SCORE, _BOTH, ref) for ref in self.results.values())
        axes = tuple(axis for dim in dims for axis in dim.axes)
        nest = Nest((), axes, None, body, stores, (False,) * len(stores))
        numbers = {name: Buffer(name, "float32", (1,), (1,)) for name in (SCORE, GRADIENT, *PLACES)}
        reads = {value.buffer for value in body if isinstance(value, Load)} & table.keys()
        wide = any(may_exceed(table[name].extent, MAX_INT32_ELEMENTS - 1) for name in reads)
        places = dict(zip(PLACES, (BATCH, HEAD, QUERY, KEY), strict=True))
        short = ".to(tl.int32)" if wide else ""
        held = {SCORE: SCORE, GRADIENT: GRADIENT, **{name: f"{place}{short}" for name, place in places.items()}}
        plan = TilePlan("turn", nest, dims, warps)
        self.text = TritonText(plan, {**table, **numbers}, registers=held, ragged=beyond)
        self.text.wide = wide
        self.outer, self.inner = dims
        self._before: set[Ref] = set()
        self._inside: set[Ref] = set()

    @property
    def shape(self) -> str:
        """Shape of a tile."""
        return self.text.shape("yx")

    def is_ragged(self, dim: TileDim) -> bool:
        """Whether the last tile exceeds what there is along a dimension."""
        return self.text.has_mask(dim)

    def write_outer(self, names: Iterable[str]) -> None:
        """Write what functions need and the loop over the inner dimension does not change."""
        for ref in self._needed(names):
            if self.text.classes[ref] <= {"y"}:
                self.text.declare(ref)
                self._before.add(ref)

    def begin_step(self, start: str) -> None:
        """Name the positions of a step along the inner dimension, from `start` on."""
        self._inside = {*self._before}
        self.text.position(self.inner, start)

    def write(self, names: Iterable[str]) -> None:
        """Write functions for the tile of a step, each value once: `value` gives their results."""
        for ref in self._needed(names):
            if ref not in self._inside:
                self.text.declare(ref)
                self._inside.add(ref)

    def value(self, name: str) -> str:
        """Return a function's results for the whole tile, in float32."""
        ref = self.results[name]
        found = self.text.whole(ref, self.text.everything)
        return found if self.text.nest.body[ref].dtype == "float32" else f"({found}).to(tl.float32)"

    def test(self, name: str) -> str:
        """Return whether a function's results are True, or not 0, for the whole tile."""
        ref = self.results[name]
        found = self.text.whole(ref, self.text.everything)
        return found if self.text.nest.body[ref].dtype == "bool" else f"({found} != 0)"

    def _needed(self, names: Iterable[str]) -> list[Ref]:
        return sorted(ancestors(self.text.nest.body, [self.results[name] for name in names]))


def _one_body(functions: Mapping[str, PairFunction]) -> tuple[tuple[Value, ...], dict[str, Ref]]:
    """Return the values of all functions as one body, equal ones once, and the result of each function."""
    body: list[Value] = []
    known: dict[str, Ref] = {}
    results: dict[str, Ref] = {}
    for name, function in functions.items():
        number: dict[Ref, Ref] = {}
        for ref, value in enumerate(function.body):
            placed = renumber(value, number)
            if isinstance(placed, Load) and placed.buffer in _VARYING:
                placed = replace(placed, index=_VARYING[placed.buffer])
            number[ref] = known.setdefault(repr(placed), len(body))
            if number[ref] == len(body):
                body.append(placed)
        results[name] = number[function.result]
    return tuple(body), results


@dataclass(frozen=True, slots=True)
class FlexTile:
    """Queries and keys of a tile, warps of a program, and steps whose keys are prefetched."""

    queries: int
    keys: int
    warps: int
    stages: int


Tiles = Mapping[int, tuple[FlexTile, FlexTile, FlexTile]]
"""Widest head -> tiles of the forward, of the gradients of queries, and of those of keys and values."""
_HOPPER: Tiles = {
    64: (FlexTile(64, 64, 4, 3), FlexTile(64, 64, 4, 3), FlexTile(64, 64, 4, 3)),
    128: (FlexTile(64, 64, 4, 3), FlexTile(128, 64, 8, 3), FlexTile(64, 64, 4, 2)),
    256: (FlexTile(128, 64, 8, 2), FlexTile(128, 32, 8, 2), FlexTile(64, 64, 8, 2)),
}
_OTHERS: Tiles = {
    64: (FlexTile(64, 64, 4, 3), FlexTile(64, 64, 4, 2), FlexTile(64, 64, 4, 2)),
    128: (FlexTile(64, 64, 4, 2), FlexTile(64, 64, 4, 2), FlexTile(32, 64, 4, 2)),
    256: (FlexTile(64, 32, 8, 2), FlexTile(32, 32, 4, 2), FlexTile(32, 32, 8, 2)),
}
_HAVE_MORE = (9, 10)
"""Major compute capabilities with at least 227 KiB of shared memory for a program."""


def tiles_of(width: int, arch: int | None) -> tuple[FlexTile, FlexTile, FlexTile]:
    """Return the three tiles for heads of this width. `arch`: compute capability, as 90 for 9.0; None where unknown."""
    table = _HOPPER if arch is None or arch // 10 in _HAVE_MORE else _OTHERS
    return next(tiles for widest, tiles in table.items() if width <= widest)


LOG2_E = 1 / math.log(2)
SCORES, MASK, JOINT = "scores", "mask", "joint"
"""Names of a call's functions."""
STARTS: Mapping[str, str] = {QUERY: "m0", KEY: "n0"}
"""Where a tile starts, by what it is a tile of."""
LONGEST = 1 << 24
"""Queries or keys from which on a block is the only one of its mask."""
WIDTHS = ("d", "e")
"""Names of positions in a head of queries and keys, and in one of values."""


class FlexText:
    """Writes statements of a kernel. `along`: what a program has a block of, queries or keys."""

    def __init__(
        self,
        step: Extern,
        call: FlexArguments,
        table: Mapping[str, Buffer],
        tile: FlexTile,
        functions: Mapping[str, PairFunction],
        along: str = QUERY,
    ) -> None:
        self.call, self.table, self.along = call, table, along
        self.outs = [name for name in step.outs if name is not None]
        self.batch, self.heads, queries, width = call.query.shape
        self.shared = call.key.shape[1]
        self.sizes: dict[str, Size] = {QUERY: queries, KEY: call.key.shape[2]}
        self.sides = {QUERY: call.query_block, KEY: call.key_block}
        self.blocks = {QUERY: min(tile.queries, call.query_block), KEY: min(tile.keys, call.key_block)}
        self.tile = FlexTile(self.blocks[QUERY], self.blocks[KEY], tile.warps, tile.stages)
        self.widths = dict(zip(WIDTHS, (_number(width), _number(call.value.shape[3])), strict=True))
        across = KEY if along == QUERY else QUERY
        dims = [(name, self.sizes[name], self.blocks[name]) for name in (along, across)]
        self.across = across
        ragged = [name for name in (along, across) if self._exceeds(name)]
        self.pairs = PairTile(functions, table, dims[0], dims[1], ragged, tile.warps)
        self.text, self.line = self.pairs.text, self.pairs.text.line
        self.dtype = table[call.query.buffer].dtype

    @property
    def programs(self) -> Size:
        """Number of programs."""
        heads = self.heads if self.along == QUERY else self.shared
        return size_product((ceil_div(self.sizes[self.along], self.blocks[self.along]), self.batch, heads))

    # --- memory ---

    def begin(self) -> None:
        """Compute which block of which head a program has, the longest ones of a causal mask first."""
        name, size = STARTS[self.along], self.text.size
        heads = self.heads if self.along == QUERY else self.shared
        blocks = size(ceil_div(self.sizes[self.along], self.blocks[self.along]))
        number = f"({blocks} - 1 - pid % {blocks})" if self.along == QUERY else f"(pid % {blocks})"
        self.line("pid = tl.program_id(0)")
        self.line(f"{name} = ({number} * {self.blocks[self.along]}).to(tl.int32)")
        self.line(f"{BATCH} = (pid // ({blocks} * {size(heads)})).to(tl.int32)")
        self.line(f"head = (pid // {blocks} % {size(heads)}).to(tl.int32)")
        for position, width in self.widths.items():
            self.line(f"{position} = tl.arange(0, {room(width)})")

    def base(self, name: str, view: View, head: str) -> None:
        """Name the address of a head's first row. One batch is every query's."""
        size = self.text.size
        terms = [self.text.argument(view.buffer)]
        terms += [size(view.offset)] if view.offset != 0 else []
        terms += [f"{BATCH}.to(tl.int64) * {size(view.strides[0])}"] if view.shape[0] != 1 else []
        self.line(f"{name}_at = {' + '.join(terms)} + {head}.to(tl.int64) * {size(view.strides[1])}")

    def base_of_keys(self) -> None:
        """Name the addresses of keys and values for a head of queries."""
        head = f"({HEAD} // {self.call.group})" if self.call.group > 1 else HEAD
        self.base("key", self.call.key, head)
        self.base("values", self.call.value, head)

    def whole(self, buffer: str) -> View:
        """Return a buffer as a view of all of it."""
        return View(buffer, self.table[buffer].shape, self.table[buffer].strides)

    def read_rows(self, name: str, view: View, axis: str, width: str, *, turned: bool = False) -> None:
        """Read a tile's rows of a head; `turned`: as columns. What does not exist is 0."""
        pointer, mask = self._rows(name, view, axis, width, turned=turned)
        self.line(f"{name} = tl.load({pointer}{f', mask={mask}, other=0.0' if mask else ''})")

    def write_rows(self, value: str, buffer: str, head: str, axis: str, width: str) -> None:
        """Write a tile's rows of a head of a result."""
        view = self.whole(buffer)
        self.base("result", view, head)
        pointer, mask = self._rows("result", view, axis, width)
        self.line(f"tl.store({pointer}, {value}.to(tl.{self.dtype}){f', {mask}' if mask else ''})")

    def read_numbers(self, name: str, view: View) -> None:
        """Read one number for each query of a tile."""
        pointer, mask = self._numbers(name, view)
        self.line(f"{name} = tl.load({pointer}{f', mask={mask}, other=0.0' if mask else ''})")

    def write_numbers(self, value: str, buffer: str) -> None:
        """Write one number for each query of a tile."""
        view = self.whole(buffer)
        self.base("result", view, HEAD)
        pointer, mask = self._numbers("result", view)
        self.line(f"tl.store({pointer}, {value}{f', {mask}' if mask else ''})")

    def _rows(self, name: str, view: View, axis: str, width: str, *, turned: bool = False) -> tuple[str, str]:
        """Return addresses and mask of a tile's rows."""
        down, across = ("[None, :]", "[:, None]") if turned else ("[:, None]", "[None, :]")
        at, size, have = self._at(axis), self.text.size, self.widths[width]
        masks = [f"({at}{down} < {size(self.sizes[axis])})"] if self.is_ragged(axis) else []
        masks += [f"({width}{across} < {have})"] if room(have) != have else []
        step = "" if view.strides[3] == 1 else f" * {size(view.strides[3])}"
        return f"{name}_at + {self._steps(view, axis, down)} + {width}{across}{step}", " & ".join(masks)

    def _numbers(self, name: str, view: View) -> tuple[str, str]:
        at = self._at(QUERY)
        mask = f"{at} < {self.text.size(self.sizes[QUERY])}" if self.is_ragged(QUERY) else ""
        return f"{name}_at + {self._steps(view, QUERY)}", mask

    def _steps(self, view: View, axis: str, down: str = "") -> str:
        """Return distances of a tile's rows from a head's first; the start has 64 bits where it may need them."""
        stride, own = self.text.size(view.strides[2]), f"tl.arange(0, {self.blocks[axis]}){down}"
        if may_exceed(as_size(as_index(self.sizes[axis]) * view.strides[2]), MAX_INT32_ELEMENTS - 1):
            return f"{STARTS[axis]}.to(tl.int64) * {stride} + {own}.to(tl.int64) * {stride}"
        return f"{self._at(axis)}{down} * {stride}"

    def _at(self, axis: str) -> str:
        return f"({STARTS[axis]} + tl.arange(0, {self.blocks[axis]}))"

    def is_ragged(self, axis: str) -> bool:
        """Whether the last tile exceeds what there is."""
        return self.pairs.is_ragged(self.pairs.outer if axis == self.along else self.pairs.inner)

    # --- blocks ---

    def through_blocks(self, partial: BlockTable, whole: BlockTable | None) -> Iterator[bool]:
        """Write a loop over the blocks of each kind. Yield whether it is over partial ones, inside of it."""
        for table, is_partial in ((partial, True), (whole, False)):
            if table is not None:
                self._begin_blocks(table)
                yield is_partial
                self.text.depth -= 1

    def _begin_blocks(self, table: BlockTable) -> None:
        """Begin the loop over the blocks that a table names for the program's own."""
        first, side, block = STARTS[self.across], self.sides[self.across], self.blocks[self.across]
        row = f"{STARTS[self.along]} // {self.sides[self.along]}"
        per = self._steps_of_a_block()
        self.line(f"count = tl.load({self._entry(table.counts, row)})")
        self.line(f"places = {self._entry(table.places, row)}")
        self.line("block = tl.load(places)")
        steps = "count" if per == "1" else f"count * {per}"
        self.line(f"for step in tl.range(0, {steps}, num_stages={self.tile.stages}):")
        self.text.depth += 1
        within = "" if per == "1" else f" + step % {per} * {block}"
        self.line(f"{first} = (block * {side}{within}).to(tl.int32)")
        following = "step + 1" if per == "1" else f"(step + 1) // {per}"
        last, stride = self.text.size(_less_one(table.places.shape[3])), self.text.size(table.places.strides[3])
        self.line(f"block = tl.load(places + tl.minimum({following}, {last}) * {stride})")
        self.pairs.begin_step(first)

    def _exceeds(self, axis: str) -> bool:
        """Whether a tile may have positions that do not exist. All tiles of a block are computed, also of the last."""
        whole_blocks = axis != self.along and not self._is_one_block(axis)
        return exact_quotient(self.sizes[axis], self.sides[axis] if whole_blocks else self.blocks[axis]) is None

    def _is_one_block(self, axis: str) -> bool:
        """Whether a mask has one block of all positions, of which those that exist are computed."""
        side, tiles = self.sides[axis], ceil_div(self.sizes[axis], self.blocks[axis])
        return side // self.blocks[axis] >= tiles if isinstance(tiles, int) else side >= LONGEST

    def _steps_of_a_block(self) -> str:
        """Return the tiles of a block. A call without a mask has one block, which is longer than what there is."""
        block = self.blocks[self.across]
        if self._is_one_block(self.across):
            return self.text.size(ceil_div(self.sizes[self.across], block))
        return str(self.sides[self.across] // block)

    def _entry(self, view: View, row: str) -> str:
        """Return the address of a row of a table, whose batches and heads may be shared."""
        size, terms = self.text.size, [self.text.argument(view.buffer)]
        terms += [size(view.offset)] if view.offset != 0 else []
        for name, wanted, have, stride in zip(
            (BATCH, HEAD), (self.batch, self.heads), view.shape[:2], view.strides[:2], strict=True
        ):
            if have != 1:
                terms.append(f"{name if have == wanted else f'{name} % {size(have)}'} * {size(stride)}")
        return " + ".join([*terms, f"({row}) * {size(view.strides[2])}"])

    # --- scores ---

    @property
    def factor(self) -> float:
        """What scores as `scores` leaves them are multiplied by, for exponentials of base 2."""
        return self.call.scale * LOG2_E if self.is_plain else LOG2_E

    @property
    def is_plain(self) -> bool:
        """Whether nothing is done to scores. A negative scale is applied before their largest is sought."""
        return self.call.score.is_argument("score") and self.call.scale > 0

    def scores(self, product: str) -> None:
        """Write a tile's products, and what the score function makes of them: `value`."""
        if self.is_plain:
            self.line(f"value = {product}")
            return
        self.line(f"score = {product} * {self.call.scale!r}")
        self.pairs.write([SCORES])
        self.line(f"value = {self.pairs.value(SCORES)}")

    def weights(self, level: str) -> None:
        """Write `weight`: exponentials of the scores less a level of each query."""
        factor = f"tl.full({self.pairs.shape}, {self.factor!r}, tl.float32)"
        self.line(f"weight = tl.math.exp2(tl.fma(value, {factor}, tl.broadcast_to(-{level}, {self.pairs.shape})))")

    def allowed(self, partial: bool) -> str:
        """Write which pairs of a tile exist and are allowed; empty if all are."""
        tests = []
        if partial and not self.call.mask.is_true:
            self.pairs.write([MASK])
            tests.append(self.pairs.test(MASK))
        tests += [f"{dim.name}m" for dim in (self.pairs.outer, self.pairs.inner) if self.pairs.is_ragged(dim)]
        return " & ".join(f"({test})" for test in tests)


def room(width: int) -> int:
    """Return the elements that a head has in registers."""
    return max(power_of_two(width), 16)


def _number(size: Size) -> int:
    assert isinstance(size, int), "heads have a known width"
    return size


def _less_one(size: Size) -> Size:
    return size - 1 if isinstance(size, int) else size + -1


def emit_flex_attention(kernels: Kernels, program: Program, arch: int | None = None) -> Kernels:
    """Emit the kernels of FlexAttention. `arch`: compute capability, if it is known."""
    calls = ((n, step) for n, step in enumerate(program.steps) if isinstance(step, Extern))
    found = {n: step for n, step in calls if step.op in (FLEX, FLEX_BACKWARD)}
    return kernels.with_products({n: LibraryReplacement(source(s, program.table, arch)) for n, s in found.items()})


def source(step: Extern, table: Mapping[str, Buffer], arch: int | None = None) -> KernelSource:
    """Return the kernels of one call."""
    call = flex_arguments(step)
    forward, queries, keys = tiles_of(max(int(call.query.shape[3]), int(call.value.shape[3])), arch)  # type: ignore[arg-type]
    if step.op == FLEX:
        return emit_forward(step, call, table, forward)
    return emit_backward(step, call, table, queries, keys)


def emit_forward(step: Extern, call: FlexArguments, table: Mapping[str, Buffer], tile: FlexTile) -> KernelSource:
    """Return the kernel of a call of the forward. `call`: the arguments of `step`."""
    writer = ForwardWriter(FlexText(step, call, table, tile, {SCORES: call.score, MASK: call.mask}))
    writer.run()
    return kernel_of("flex_attention", {"forward": writer.flex}, step)


def kernel_of(name: str, written: Mapping[str, FlexText], step: Extern, zeros: Sequence[str] = ()) -> KernelSource:
    """Return kernels that are launched one after another as one source. Each takes all size symbols.

    `zeros`: buffers that they add to, which are 0 at first.
    """
    table = next(iter(written.values())).table
    sizes = tuple(dict.fromkeys(symbol for flex in written.values() for symbol in flex.text.symbols))
    buffers = tuple(dict.fromkeys(buffer for flex in written.values() for buffer in flex.text.arguments))
    first, symbols = next(iter(written.values())).text, range(len(buffers), len(buffers) + len(sizes))
    parts, launches = [], list[Launch]()
    for symbol in sizes:
        first.symbol(symbol)  # every function takes all
    for buffer, entry, text in (fill(first, Store(buffer, ZERO, 0, "sum")) for buffer in zeros):
        parts.append(text)
        places, types = (buffers.index(buffer), *symbols), types_of([buffer], 1 + len(sizes), table)
        launches.append(Launch(entry, ceil_div(table[buffer].extent, FILL), 4, places, types))
    for entry, flex in written.items():
        own = [*flex.text.arguments]
        named = [*flex.text.arguments.values(), *(flex.text.symbol(symbol) for symbol in sizes)]
        parts.append(function_text(entry, named, flex.text.lines))
        places = (*map(buffers.index, own), *symbols)
        launches.append(Launch(entry, flex.programs, flex.tile.warps, places, types_of(own, len(places), table)))
    entries = {launch.function: f"{name}_{launch.function}" for launch in launches}
    cost = 400 * len(written)  # Triton compiles each for seconds
    return replace(finished(name, parts, launches, buffers, cost, entries, step.origin), sizes=sizes)


class ForwardWriter:
    """Writes the kernel of the forward."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.call = flex, flex.line, flex.call

    def run(self) -> None:
        """Write all statements."""
        call, flex, line = self.call, self.flex, self.line
        flex.begin()
        line(f"{HEAD} = head")
        flex.base("query", call.query, HEAD)
        flex.base_of_keys()
        flex.read_rows("query", call.query, QUERY, "d")
        flex.text.position(flex.pairs.outer, "m0")
        flex.pairs.write_outer([SCORES, MASK])
        rows = flex.tile.queries
        line(f'top = tl.full([{rows}], float("-inf"), tl.float32)')
        line(f"total = tl.zeros([{rows}], tl.float32)")
        line(f"mixed = tl.zeros([{rows}, {room(flex.widths['e'])}], tl.float32)")
        for partial in flex.through_blocks(call.partial, call.whole):
            self._step(partial)
        self._end()

    def _step(self, partial: bool) -> None:
        """Write what a program does for a tile of keys."""
        flex, line = self.flex, self.line
        flex.read_rows("key", self.call.key, KEY, "d", turned=True)
        flex.scores("tl.dot(query, key)")
        if test := flex.allowed(partial):
            line(f'value = tl.where({test}, value, float("-inf"))')
        line(f"high = tl.maximum(top, tl.max(value, 1) * {flex.factor!r})")
        line('level = tl.where(high == float("-inf"), 0.0, high)')
        flex.weights("level[:, None]")
        line("shrunk = tl.math.exp2(top - level)")
        line("total = total * shrunk + tl.sum(weight, 1)")
        flex.read_rows("values", self.call.value, KEY, "e")
        line(f"mixed = tl.dot(weight.to(tl.{flex.dtype}), values, mixed * shrunk[:, None])")
        line("top = high")

    def _end(self) -> None:
        """Write the results."""
        flex, line = self.flex, self.line
        out, logsumexp, largest = flex.outs
        line("whole = tl.where(total == 0.0, 1.0, total)")
        line("mixed = mixed / whole[:, None]")
        flex.write_rows("mixed", out, HEAD, QUERY, "e")
        flex.write_numbers('tl.where(total == 0.0, float("-inf"), top + tl.math.log2(whole))', logsumexp)
        flex.write_numbers("top", largest)


def emit_backward(
    step: Extern, call: FlexArguments, table: Mapping[str, Buffer], queries: FlexTile, keys: FlexTile
) -> KernelSource:
    """Return the kernels of a call of the backward, each with a tile of its own. `call`: the arguments of `step`."""
    assert call.joint is not None, "the backward has a function of a score's gradient"
    functions = {SCORES: call.score, MASK: call.mask, JOINT: call.joint}
    captured = captured_functions(call.terms)
    by_queries = FlexText(step, call, table, queries, functions | captured)
    by_keys = FlexText(step, call, table, keys, functions, KEY)
    QueriesWriter(by_queries).run()
    KeysWriter(by_keys).run()
    return kernel_of("flex_backward", {"queries": by_queries, "keys": by_keys}, step, by_queries.outs[4:])


def _given(call: FlexArguments) -> tuple[View, View, View]:
    """Return the forward's result, its logarithm, and the result's gradient."""
    assert call.out and call.logsumexp and call.grad, "the backward has all arguments"
    return call.out, call.logsumexp, call.grad


def _write_gradients(flex: FlexText, scores: str, products: str, level: str, base: str, partial: bool) -> str:
    """Write a tile's `weight` and `found`, the gradient of its products of queries and keys.

    Return which pairs are allowed, if not all.
    """
    line, joint = flex.line, flex.call.joint
    assert joint is not None, "the backward has a function of a score's gradient"
    flex.scores(scores)
    flex.weights(base)
    test = flex.allowed(partial)
    if test:
        line(f"test = {test}")
        line("weight = tl.where(test, weight, 0.0)")
    line(f"grad = weight * ({products} - {level})")
    line("found = grad")
    if joint.is_argument("grad"):
        return test
    if flex.is_plain and "score" in joint.reads:
        line(f"score = value * {flex.call.scale!r}")
    flex.pairs.write([JOINT])
    line(f"found = {flex.pairs.value(JOINT)}")
    if test:
        line("found = tl.where(test, found, 0.0)")
    return test


class QueriesWriter:
    """Writes the kernel for gradients of queries."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.call = flex, flex.line, flex.call
        self.captured = CapturedGradients(flex)

    def run(self) -> None:
        """Write all statements."""
        call, flex, line = self.call, self.flex, self.line
        out, logsumexp, grad = _given(call)
        flex.begin()
        line(f"{HEAD} = head")
        for name, view in (("query", call.query), ("out", out), ("given", grad), ("lse", logsumexp)):
            flex.base(name, view, HEAD)
        flex.base_of_keys()
        flex.read_rows("query", call.query, QUERY, "d")
        flex.read_rows("given", grad, QUERY, "e")
        self._levels(out, logsumexp)
        flex.text.position(flex.pairs.outer, "m0")
        flex.pairs.write_outer(flex.pairs.results)
        self.captured.begin()
        line(f"total = tl.zeros([{flex.tile.queries}, {room(flex.widths['d'])}], tl.float32)")
        for partial in flex.through_blocks(call.partial, call.whole):
            self._step(partial)
        line(f"total = total * {call.scale!r}")
        flex.write_rows("total", flex.outs[0], HEAD, QUERY, "d")
        self.captured.end()

    def _step(self, partial: bool) -> None:
        """Write what a program does for a tile of keys."""
        self.flex.read_rows("key", self.call.key, KEY, "d", turned=True)
        self.flex.read_rows("values", self.call.value, KEY, "e", turned=True)
        products = "tl.dot(given, values)"
        test = _write_gradients(self.flex, "tl.dot(query, key)", products, "level[:, None]", "lse[:, None]", partial)
        self.captured.step(test)
        self.line(f"total = tl.dot(found.to(tl.{self.flex.dtype}), tl.trans(key), total)")

    def _levels(self, out: View, logsumexp: View) -> None:
        """Compute the level of each query, and its logarithm as 0 where it has no key."""
        flex, line = self.flex, self.line
        flex.read_rows("out", out, QUERY, "e")
        line("level = tl.sum(out.to(tl.float32) * given.to(tl.float32), 1)")
        if self.call.grad_logsumexp is not None:
            flex.base("change", self.call.grad_logsumexp, HEAD)
            flex.read_numbers("change", self.call.grad_logsumexp)
            line(f"level = level - change * {LOG2_E!r}")
        flex.write_numbers("level", flex.outs[3])
        flex.read_numbers("lse", logsumexp)
        line('lse = tl.where(lse == float("-inf"), 0.0, lse)')


class KeysWriter:
    """Writes the kernel for gradients of keys and values. A program has a block of keys, for all heads with it."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.call = flex, flex.line, flex.call

    def run(self) -> None:
        """Write all statements."""
        call, flex, line = self.call, self.flex, self.line
        flex.begin()
        for name, view, width in (("key", call.key, "d"), ("values", call.value, "e")):
            flex.base(name, view, "head")
            flex.read_rows(name, view, KEY, width)
        flex.text.position(flex.pairs.outer, "n0")
        for name, width in (("keys", "d"), ("mixed", "e")):
            line(f"{name} = tl.zeros([{flex.tile.keys}, {room(flex.widths[width])}], tl.float32)")
        if call.group > 1:
            line(f"for member in range({call.group}):")
            flex.text.depth += 1
        line(f"{HEAD} = head * {call.group} + member" if call.group > 1 else f"{HEAD} = head")
        self._member()
        if call.group > 1:
            flex.text.depth -= 1
        flex.write_rows(f"(keys * {call.scale!r})", flex.outs[1], "head", KEY, "d")
        flex.write_rows("mixed", flex.outs[2], "head", KEY, "e")

    def _member(self) -> None:
        """Write the loops over the queries of a head."""
        call, flex = self.call, self.flex
        _, logsumexp, grad = _given(call)
        levels = flex.whole(flex.outs[3])
        for name, view in (("query", call.query), ("given", grad), ("lse", logsumexp), ("level", levels)):
            flex.base(name, view, HEAD)
        flex.pairs.write_outer([SCORES, MASK, JOINT])
        assert call.partial_of_keys is not None, "the backward has tables for keys"
        for partial in flex.through_blocks(call.partial_of_keys, call.whole_of_keys):
            self._step(logsumexp, grad, levels, partial)

    def _step(self, logsumexp: View, grad: View, levels: View, partial: bool) -> None:
        """Write what a program does for a tile of queries."""
        flex, line = self.flex, self.line
        flex.read_rows("query", self.call.query, QUERY, "d", turned=True)
        flex.read_numbers("lse", logsumexp)
        line('lse = tl.where(lse == float("-inf"), 0.0, lse)')
        flex.read_rows("given", grad, QUERY, "e")
        flex.read_numbers("level", levels)
        products = "tl.dot(values, tl.trans(given))"
        _write_gradients(flex, "tl.dot(key, query)", products, "level[None, :]", "lse[None, :]", partial)
        line(f"mixed = tl.dot(weight.to(tl.{flex.dtype}), given, mixed)")
        line(f"keys = tl.dot(found.to(tl.{flex.dtype}), tl.trans(query), keys)")


def captured_functions(terms: Sequence[CapturedTerm]) -> dict[str, PairFunction]:
    """Return the functions of all terms by name."""
    found: dict[str, PairFunction] = {}
    for number, term in enumerate(terms):
        found[f"value{number}"] = term.value
        found |= {f"index{number}_{dim}": function for dim, function in enumerate(term.indices)}
    return found


class CapturedGradients:
    """Writes the statements of all terms of a kernel whose programs have a block of queries."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.pairs = flex, flex.line, flex.pairs
        self.terms: Mapping[int, CapturedTerm] = dict(enumerate(flex.call.terms))

    def begin(self) -> None:
        """Name the sums of terms whose indices the loop over keys does not change."""
        for number in self.terms:
            if "x" not in self._varying(number):
                self.line(f"sum{number} = tl.zeros([{self.flex.tile.queries}], tl.float32)")

    def step(self, test: str) -> None:
        """Add the values of a tile. `test`: which pairs are allowed, if not all."""
        for number in self.terms:
            self.pairs.write([f"value{number}"])
            value = self.pairs.value(f"value{number}")
            self.line(f"part{number} = {f'tl.where(test, {value}, 0.0)' if test else value}")
            varying = self._varying(number)
            if "x" not in varying:
                self.line(f"sum{number} += tl.sum(part{number}, 1)")
                continue
            self.pairs.write(self._indices(number))
            self._add(number, f"part{number}" if "y" in varying else f"tl.sum(part{number}, 0)[None, :]")

    def end(self) -> None:
        """Add the sums."""
        for number in self.terms:
            varying = self._varying(number)
            if "x" not in varying:
                self._add(number, f"sum{number}[:, None]" if "y" in varying else f"tl.sum(sum{number})")

    def _indices(self, number: int) -> list[str]:
        return [f"index{number}_{dim}" for dim in range(len(self.terms[number].indices))]

    def _varying(self, number: int) -> frozenset[str]:
        """Return the dimensions of a tile along which a term's indices vary."""
        classes = self.pairs.text.classes
        return frozenset().union(*(classes[self.pairs.results[name]] for name in self._indices(number)))

    def _add(self, number: int, value: str) -> None:
        """Add values to the elements that the indices name."""
        text, varying = self.pairs.text, self._varying(number)
        buffer = self.flex.outs[4 + self.terms[number].total]
        pointer, (place, mask) = text.argument(buffer), self._place(number, buffer)
        if varying != text.everything:
            shape = text.shape(varying) if varying else ""
            self._add_at(f"{pointer} + ({place})", value, mask, shape)
            return
        # with clamped distances, all pairs of most tiles have one element, where additions would wait for each other
        self.line(f"place = tl.broadcast_to({place}, {text.shape(varying)})")
        self.line(f"inside = tl.broadcast_to({mask}, {text.shape(varying)})")
        self.line("first = tl.min(place)")
        self.line("if (first == tl.max(place)) & (tl.min(inside.to(tl.int32)) > 0):")
        text.depth += 1
        self._add_at(f"{pointer} + first", f"tl.sum({value})", "", "")
        text.depth -= 1
        self.line("else:")
        text.depth += 1
        self._add_at(f"{pointer} + place", value, "inside", text.shape(varying))
        text.depth -= 1

    def _place(self, number: int, buffer: str) -> tuple[str, str]:
        """Write a term's indices. Return the element that they name, and whether there is one: negative ones count from
        the end.
        """
        text, shape = self.pairs.text, self.flex.table[buffer].shape
        dims = {"y": self.pairs.outer, "x": self.pairs.inner}
        masks = [f"{name}m" for name in sorted(self._varying(number)) if self.pairs.is_ragged(dims[name])]
        places = []
        for name, size, stride in zip(self._indices(number), shape, contiguous_strides(shape), strict=True):
            have, at, index = text.size(size), f"at_{name}", text.name(self.pairs.results[name])
            self.line(f"{at} = tl.where({index} < 0, {index} + {have}, {index}).to(tl.int64)")
            masks.append(f"({at} >= 0) & ({at} < {have})")
            places.append(f"{at} * {text.size(stride)}")
        return " + ".join(places) or "0", " & ".join(masks)

    def _add_at(self, pointer: str, value: str, mask: str, shape: str) -> None:
        """Write additions at addresses, broadcast to a shape; without one, a single addition."""
        pointer, value, mask = (f"tl.broadcast_to({part}, {shape})" if shape and part else part
                                for part in (pointer, value, mask))  # fmt: skip
        self.line(f'tl.atomic_add({pointer}, {value}{f", mask={mask}" if mask else ""}, sem="relaxed")')
