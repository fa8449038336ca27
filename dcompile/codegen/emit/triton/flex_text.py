"""What FlexAttention's kernels have in common: tiles, addresses, rows of heads, loops over a mask's blocks, and scores.

Tiles depend on the width of a head and on the memory of a GPU's multiprocessor. On an H100, 2 x 4096 positions, 1024
elements in all heads, a window of 1024: the forward and both parts of the backward take 124, 122 and 181 us for heads
of 64, 104, 124 and 167 us for heads of 128, 104, 154 and 310 us for heads of 256. Other tiles took up to four times as
long. Tiles for other GPUs need at most 99 KiB, and spill next to no registers; no such GPU has run them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dcompile.codegen.emit.triton.pair_tile import BATCH, HEAD, KEY, QUERY, PairTile
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.codegen.nest.tile_plan import ceil_div, power_of_two
from dcompile.device_traits import MAX_INT32_ELEMENTS
from dcompile.ir.attention import BlockTable, FlexArguments
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Size, as_index, as_size, exact_quotient, size_product
from dcompile.ir.nodes import Extern, View
from dcompile.ir.pair_function import PairFunction


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
