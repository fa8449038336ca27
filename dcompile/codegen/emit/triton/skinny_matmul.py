"""Print skinny GEMMs: a program streams some rows of each matrix once, and multiplies them by all of the few rows.

The matrix is the left operand of tensor cores. Their 8 columns are the few rows, and their 16 or 64 rows are rows of
the matrix. Sums are in float32, and a program has whole sums: nothing is combined in memory. The values after the sums
are those of any kernel (`printer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.triton.library import AFTER, PREFETCH
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.nest.contraction import Contraction
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import ZERO, substitute, var
from dcompile.ir.nodes import Load, Reduce, Ref, Tile

PID = "tl.program_id(0)"
DOWN, ACROSS = "kd", "ka"
"""Positions along the sum as a column and as a row of a tile."""
PREFETCHED_BYTES = 2048
"""Bytes of each row of a matrix that a program asks for while the previous kernel ends: 17 MB for all programs that a
GPU runs at a time, which fit its L2 cache."""


class SkinnyMatmulWriter:
    """Writes the body of a kernel to `text`."""

    def __init__(self, text: TritonText) -> None:
        assert text.plan.skinny is not None, "a skinny GEMM has products"
        self.text, self.line, self.nest = text, text.line, text.nest
        self.found: Contraction = text.plan.skinny[0]
        self.tile: Tile = text.plan.skinny[1]
        (axis,) = self.nest.elements
        self.along = axis.name

    def run(self) -> None:
        """Write all statements."""
        self._place()
        self._prefetch()
        sums = self._dots()
        for ref in sorted(self.text.levels.live):
            if isinstance(self.nest.body[ref], Reduce):
                self.line(f"{self.text.name(ref)} = {sums[ref]}")
            elif not self.text.levels.element[ref]:
                self.text.declare(ref)
        if self.text.overlaps:
            self.line("tl.debug_barrier()")
        for number in range(len(self.nest.stores)):
            self.text.store(number)

    def _place(self) -> None:
        """Compute the position of the tile: consecutive programs have consecutive columns."""
        x, y = self.text.plan.dims
        pid = PID + (".to(tl.int64)" if self.text.wide else "")
        if self.found.batch:
            self.line(f"pid = {pid}")
            self.text.position(x, f"(pid % {self.text.size(x.blocks)}) * {x.block}")
            self.line(f"batch = pid // {self.text.size(x.blocks)}")
            self.text.coordinates("batch", self.found.batch)
        else:
            self.text.position(x, f"{pid} * {x.block}")
        self.text.position(y, "0")

    def _prefetch(self) -> None:
        """Ask for the start of the matrices' rows if no kernel writes them, then wait for the previous kernel."""
        constant = [ref for ref in self._rights() if self._load(ref).buffer in self.text.constant]
        for ref in constant:
            load = self._load(ref)
            nbytes = min(self.found.depth * ITEMSIZE[load.dtype], PREFETCHED_BYTES) // 16 * 16
            index = self.text.index(substitute(load.index, {self.along: ZERO}, {}))
            mask = self.text.mask({"x"}) or "x >= 0"
            self.line(f"{PREFETCH}({self.text.argument(load.buffer)} + ({index}), {nbytes}, {mask})")
        if self.text.waits or constant:
            self.line(AFTER)

    def _dots(self) -> Mapping[Ref, str]:
        """Write the loop over the sums for tensor cores; return the sums."""
        tile, sums = self.tile, {}
        for number, product in enumerate(self.found.products):
            sums[product.reduce] = f"sums{number}"
            self.line(f"sums{number} = tl.zeros([{tile.columns}, {tile.rows}], tl.float32)")
        self._begin_steps()
        self.line(f"{DOWN} = k + tl.arange(0, {tile.depth})[:, None]")
        dtype = self.found.dtype
        loaded = {ref: self._factor(f"left{n}", ref, dtype, DOWN, "y") for n, ref in enumerate(self._lefts())}
        for number, product in enumerate(self.found.products):
            if product.right not in loaded:
                loaded[product.right] = self._factor(f"right{number}", product.right, dtype, ACROSS, "x")
            total = sums[product.reduce]
            self.line(f"{total} = tl.dot({loaded[product.right]}, {loaded[product.left]}, {total})")
        self.text.depth -= 1
        return sums

    def _factor(self, name: str, ref: Ref, dtype: str, along: str, across: str) -> str:
        """Write the load of one step's factor, as `dtype`; return its name."""
        cast = "" if self._load(ref).dtype == dtype else f".to(tl.{dtype})"
        self.line(f"{name} = {self._loaded(ref, self._index(ref, along), along, across)}{cast}")
        return name

    # --- loads ---

    def _begin_steps(self) -> None:
        tile = self.tile
        self.line(f"for k in tl.range(0, {self.found.depth}, {tile.depth}, num_stages={tile.stages}):")
        self.text.depth += 1
        self.line(f"{ACROSS} = k + tl.arange(0, {tile.depth})[None, :]")

    def _index(self, ref: Ref, along: str) -> str:
        return self.text.index(substitute(self._load(ref).index, {self.along: var(along)}, {}))

    def _loaded(self, ref: Ref, index: str, along: str, across: str) -> str:
        """Return a load of one step, with zeros beyond the ends."""
        beyond = [f"({along} < {self.found.depth})"] if self.found.depth % self.tile.depth else []
        if mask := self.text.mask({across}):
            beyond.append(mask)
        options = f", mask={' & '.join(beyond)}, other=0" if beyond else ""
        return f"tl.load({self.text.argument(self._load(ref).buffer)} + ({index}){options})"

    def _lefts(self) -> list[Ref]:
        return list(dict.fromkeys(product.left for product in self.found.products))

    def _rights(self) -> list[Ref]:
        return list(dict.fromkeys(product.right for product in self.found.products))

    def _load(self, ref: Ref) -> Load:
        load = self.nest.body[ref]
        assert isinstance(load, Load)
        return load
