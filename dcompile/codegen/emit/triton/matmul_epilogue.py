"""Triton matmuls with an epilogue: the loop uses the result while it is still in registers.

A program multiplies one tile after another. Sums are in float32. The result is rounded to its own dtype before the loop
uses it, as if a library had written it to memory. The loop's statements are those of any kernel (`printer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dcompile.codegen.emit.target import KernelSource, Launch
from dcompile.codegen.emit.triton.kernel import finished, function_text, types_of
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.nest.loop_nest import flatten_loop
from dcompile.codegen.nest.tile_plan import TileDim, TilePlan
from dcompile.ir.analysis import product_buffer
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Loop, Matmul, View

TOGETHER = 8
"""Rows of tiles that are traversed column by column, so that concurrent programs share their inputs."""
PRODUCT = "product"
"""Name of the rounded result in kernels."""


def emit(loop: Loop, table: Mapping[str, Buffer]) -> KernelSource:
    """Return the source of one kernel. Sizes are static."""
    assert loop.product is not None, f"{loop.name} ends no product"
    writer = MatmulWriter(loop, loop.product, table)
    writer.run()
    body = writer.text
    arguments, numbers = tuple(body.arguments), tuple(body.draws)
    named = (*body.arguments.values(), *body.draws.values())
    types, tile = types_of(arguments, len(named), table), loop.product.tile
    launch = Launch("kernel", tile.programs or writer.tiles, tile.warps, tuple(range(len(named))), types)
    cost = 200 + sum(map(bool, body.classes))  # Triton compiles it for seconds
    parts = [function_text("kernel", named, body.lines)]
    kernel = finished("product", parts, [launch], arguments, cost, {"kernel": "product"}, loop.origin)
    return replace(kernel, numbers=numbers)


class MatmulWriter:
    """Writes the body of a kernel to `text`."""

    def __init__(self, loop: Loop, product: Matmul, table: Mapping[str, Buffer]) -> None:
        nest, tile = flatten_loop(loop), product.tile
        y, x = TileDim("y", nest.rows, tile.rows), TileDim("x", nest.elements, tile.columns // tile.parts)
        nest = replace(nest, rows=(), elements=(*y.axes, *x.axes), row_stores=(False,) * len(nest.stores))
        self.product, self.result = product, product_buffer(product)
        (rows, columns), plan = self.sizes, TilePlan("turn", nest, (y, x), tile.warps)
        # a run of columns of the last tile may be outside the loop as a whole
        ragged = [name for name, rest in (("y", rows % tile.rows), ("x", columns % tile.columns)) if rest]
        buffers = {**table, product.out: self.result}
        self.text = TritonText(plan, buffers, registers={product.out: PRODUCT}, ragged=ragged)
        self.plan, self.nest, self.line = plan, nest, self.text.line
        *added, self.left, self.right = product.call.views
        self.bias = added[0] if added else None
        self.down, self.across = (
            -(-size // block) for size, block in zip((rows, columns), (tile.rows, tile.columns), strict=True)
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        rows, columns = self.result.shape
        assert isinstance(rows, int) and isinstance(columns, int), "products of known sizes end in loops"
        return rows, columns

    @property
    def deep(self) -> int:
        depth = self.left.shape[1]
        assert isinstance(depth, int), "products of known sizes end in loops"
        return depth

    @property
    def tiles(self) -> int:
        return self.down * self.across

    # --- text ---

    def run(self) -> None:
        """Write all statements."""
        tile = self.product.tile
        for view in (self.left, self.right, *([self.bias] if self.bias else [])):
            self.text.argument(view.buffer)
        if tile.descriptors:
            self._describe("left", self.left, tile.rows, tile.depth)
            self._describe("right", self.right, tile.depth, tile.columns)
        if tile.programs:
            flat = ", flatten=True" if tile.flat else ""
            self.line(f"for tile in tl.range(tl.program_id(0), {self.tiles}, {tile.programs}{flat}):")
            self.text.depth += 1
        else:
            self.line("tile = tl.program_id(0)")
        self._place()
        self._multiply()
        for part, name in enumerate(self._parts()):
            self._end(part, name)

    def _place(self) -> None:
        """Compute a tile's position: consecutive tiles share rows of the left or columns of the right factor."""
        tile, group = self.product.tile, TOGETHER * self.across
        high: int | str = TOGETHER
        self.line(f"top = tile // {group} * {TOGETHER}")
        if self.down % TOGETHER:
            high = f"tl.minimum({self.down} - top, {TOGETHER})"
            self.line(f"high = {high}")
            high = "high"
        self.line(f"y0 = (top + tile % {group} % {high}) * {tile.rows}")
        self.line(f"x0 = tile % {group} // {high} * {tile.columns}")

    def _multiply(self) -> None:
        """Compute the sums of a tile, in float32."""
        tile = self.product.tile
        read = self._through_descriptors() if tile.descriptors else self._through_pointers()
        self.line(f"sums = tl.zeros([{tile.rows}, {tile.columns}], tl.float32)")
        self.line(f"for k in tl.range(0, {self.deep}, {tile.depth}, num_stages={tile.stages}):")
        self.line(f"    sums = tl.dot({read[0]}, {read[1]}, sums)")

    def _describe(self, name: str, view: View, rows: int, columns: int) -> None:
        """Make a descriptor of a factor and of its blocks, in the order of memory."""
        turned = is_turned(view)
        shape, block = view.shape, (rows, columns)
        if turned:
            shape, block = shape[::-1], block[::-1]
        lead = view.strides[1 if turned else 0]
        self.line(
            f"{name} = tl.make_tensor_descriptor({self._start(view)}, [{shape[0]}, {shape[1]}], [{lead}, 1], "
            f"[{block[0]}, {block[1]}])"
        )

    def _start(self, view: View) -> str:
        name = self.text.argument(view.buffer)
        return f"{name} + {view.offset}" if view.offset != 0 else name

    def _through_descriptors(self) -> tuple[str, str]:
        left = "left.load([k, y0]).T" if is_turned(self.left) else "left.load([y0, k])"
        return left, "right.load([x0, k]).T" if is_turned(self.right) else "right.load([k, x0])"

    def _through_pointers(self) -> tuple[str, str]:
        """Return loads through pointers; rows and columns beyond the end wrap around, so only the depth needs masks."""
        tile, (rows, columns) = self.product.tile, self.sizes
        whole = self.deep % tile.depth == 0
        self.line(f"z = tl.arange(0, {tile.depth})")
        inside = ("", "") if whole else (f", mask=z[None, :] < {self.deep} - k", f", mask=z[:, None] < {self.deep} - k")
        read = []
        for name, view, at, block, size, place, mask in (
            ("left", self.left, "y0", tile.rows, rows, "{p}[:, None] * {a} + z[None, :] * {b}", inside[0]),
            ("right", self.right, "x0", tile.columns, columns, "z[:, None] * {a} + {p}[None, :] * {b}", inside[1]),
        ):
            beyond = f" % {size}" if size % block else ""
            positions = f"({at} + tl.arange(0, {block})){beyond}" if beyond else f"{at} + tl.arange(0, {block})"
            self.line(f"{name}_at = {positions}")
            down, right = view.strides
            self.line(f"{name} = {self._start(view)} + ({place.format(p=f'{name}_at', a=down, b=right)})")
            step = right if name == "left" else down
            zero = ", other=0.0" if mask else ""
            read.append(f"tl.load({name} + k * {step}{mask}{zero})")
        return read[0], read[1]

    def _parts(self) -> list[str]:
        """Split the sums into runs of columns; return their names, in order."""
        tile, names, width = self.product.tile, ["sums"], self.product.tile.columns
        while len(names) < tile.parts:
            width //= 2
            halves = []
            for name in names:
                halves += [f"{name}_0", f"{name}_1"]
                pair = f"tl.permute(tl.reshape({name}, [{tile.rows}, 2, {width}]), [0, 2, 1])"
                self.line(f"{halves[-2]}, {halves[-1]} = tl.split({pair})")
            names = halves
        return names

    def _end(self, part: int, sums: str) -> None:
        """Write the loop for a run of columns of the tile."""
        y, x = self.plan.dims
        if part == 0:
            self.text.position(y, "y0")
        else:
            self.line(f"x0 += {x.block}")
        self.text.position(x, "x0")
        if self.bias is not None:
            self.line(f"bias = {self._bias(self.bias)}")
            sums = f"({sums} + bias)"
        dtype = self.result.dtype
        self.line(f"{PRODUCT} = {sums}.to(tl.{dtype}).to(tl.float32)")
        for ref in sorted(self.text.levels.live):
            self.text.declare(ref)
        self.text.store_all()

    def _bias(self, view: View) -> str:
        """Return the bias of each row, which is added before rounding."""
        mask = f", mask={self.text.mask({'x'})}" if self.text.mask({"x"}) else ""
        step = view.strides[-1]
        return f"tl.load({self._start(view)} + x{'' if step == 1 else f' * {step}'}{mask}).to(tl.float32)"


def is_turned(view: View) -> bool:
    """Return whether a factor is column-major."""
    return view.strides[0] == 1 and view.strides[1] != 1
