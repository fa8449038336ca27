"""The Triton target: a loop becomes one kernel, or two if the buffers that it combines into must be filled first.

A program of a kernel computes a tile, and a tile's values are tensors: over rows `x`, over elements `r`, over both, or
scalars. Row programs keep a row in registers from its first pass to its last, and read longer rows again in every pass.
Text is normalized, and static sizes are literals in it: equal text is an equal kernel. Size symbols are arguments after
the addresses. Positions then have 64 bits, and grids are computed when the host program prepares a call.

A skinny GEMM's program streams some rows of each matrix once, and multiplies them by all of the few rows. The matrix is
the left operand of tensor cores. Their 8 columns are the few rows, and their 16 or 64 rows are rows of the matrix. Sums
are in float32, and a program has whole sums: nothing is combined in memory. The values after the sums are those of any
kernel (`printer.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.target import KernelSource, Launch, describe_loop, kernel_name
from dcompile.codegen.emit.triton.library import AFTER, HEADER, PREFETCH, used_functions
from dcompile.codegen.emit.triton.ops import ALIGNED, POINTERS, literal
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.emit.triton.row_passes import RowPassWriter
from dcompile.codegen.nest.contraction import Contraction
from dcompile.codegen.nest.gpu_tiling import leaves_gaps, make_plan
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.codegen.nest.row_matmul import RowTile
from dcompile.codegen.nest.tile_plan import ceil_div
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.index import ZERO, exact_quotient, substitute, var
from dcompile.ir.nodes import Load, Loop, Reduce, Ref, Store, Tile
from dcompile.ir.ops import REDUCTIONS

FILL = 1024
INTEGER = "i64"
"""Type of a size symbol, or of another number argument."""


def emit(
    loop: Loop,
    table: Mapping[str, Buffer],
    constant: frozenset[str] | None = None,
    row_tile: RowTile | None = None,
) -> KernelSource:
    """Return the source of one kernel; `table` gives the buffers' sizes, and offsets in the arena.

    Buffers in `constant` are written neither by this kernel nor by the one before it. If it reads some, it may start
    and read them while that kernel ends. If it reads none, it may still start then; with None it may not.
    `row_tile`: see `make_plan`.
    """
    plan = make_plan(loop, row_tile)
    filled = [
        store
        for store in plan.nest.stores
        if store.mode != "set" and (plan.atomic or leaves_gaps(plan, store, table[store.buffer].extent))
    ]
    body = TritonText(plan, table, None if filled else constant)
    (SkinnyMatmulWriter if plan.skinny else RowPassWriter)(body).run()
    arguments = tuple(body.arguments)
    for store in filled:
        body.size(body.extent(store.buffer))  # every function takes all symbols
    fills = [fill(body, store) for store in filled]
    sizes, numbers = tuple(body.symbols), tuple(body.draws)
    named = (*body.arguments.values(), *body.symbols.values(), *body.draws.values())
    parts = [function_text("kernel", named, body.lines)]
    launches = [
        Launch("kernel", plan.grid, plan.warps, tuple(range(len(named))), types_of(arguments, len(named), table))
    ]
    for buffer, name, text in fills:
        grid = ceil_div(body.extent(buffer), FILL)
        parts.append(text)
        places = [arguments.index(buffer), *range(len(arguments), len(arguments) + len(sizes))]
        launches.insert(0, Launch(name, grid, 4, tuple(places), types_of((buffer,), len(places), table)))
    cost = sum(map(bool, body.classes)) + 4  # scalars of all programs cost next to nothing
    described = describe_loop(loop)
    entries = {"kernel": f"{plan.kind}_{described}"}
    kernel = finished(described, parts, launches, arguments, cost, entries, loop.origin)
    return replace(kernel, sizes=sizes, numbers=numbers, kind=plan.kind)


def finished(
    described: str,
    parts: Sequence[str],
    launches: Sequence[Launch],
    arguments: tuple[str, ...],
    cost: int,
    entries: Mapping[str, str],
    origin: tuple[str, ...] = (),
) -> KernelSource:
    """Return the kernel of some functions, after those of the library that they call.

    `entries`: functions that are launched -> their names in profilers, to which digits of the text are added.
    """
    text = "\n\n".join(parts)
    text = f"{HEADER}\n\n{used_functions(text)}\n\n{text}"
    shape = [(launch.function, launch.warps, launch.types) for launch in launches]
    digest = hashlib.sha256(f"{text}\n{shape}".encode()).hexdigest()[:24]
    named = {function: f"dcompile_{entry}_{digest[:8]}" for function, entry in entries.items()}
    for function, entry in named.items():
        text = text.replace(f"def {function}(", f"def {entry}(")
    launched = tuple(replace(launch, function=named.get(launch.function, launch.function)) for launch in launches)
    return KernelSource(kernel_name(described, digest), text, arguments, cost, False, origin, launches=launched)


def function_text(name: str, arguments: Iterable[str], lines: list[str]) -> str:
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n" + "\n".join(lines or ["    pass"]) + "\n"


def fill(body: TritonText, store: Store) -> tuple[str, str, str]:
    """Return (buffer, name and text of the function that fills it with the identity of its reduction)."""
    dtype, size = body.table[store.buffer].dtype, body.extent(store.buffer)
    identity, name = literal(REDUCTIONS[store.mode].identity(dtype), dtype), f"fill_{body.argument(store.buffer)}"
    wide = "tl.program_id(0).to(tl.int64)" if may_exceed(size, 2**31 - 1) else "tl.program_id(0)"
    lines = [
        f"    x = {wide} * {FILL} + tl.arange(0, {FILL})",
        f"    tl.store(a + x, {identity}, x < {body.size(size)})",
    ]
    return store.buffer, name, function_text(name, ["a", *body.symbols.values()], lines)


def types_of(buffers: Iterable[str], count: int, table: Mapping[str, Buffer]) -> tuple[str, ...]:
    """Return the types of `count` arguments: buffers, followed by 64-bit integers."""
    offsets = [(POINTERS[table[name].dtype], exact_quotient(table[name].offset, 16)) for name in buffers]
    types = [pointer + ("" if whole is None else ALIGNED) for pointer, whole in offsets]
    return (*types, *[INTEGER] * (count - len(types)))


# --- skinny GEMM ------------------------------------------------------------------------------------------------------


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
        self.text.store_all()

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
