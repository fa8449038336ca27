"""The C++ target: a loop becomes one function of plain loops over plain pointers, which g++ vectorises.

A row is processed in passes: pass k computes the element values that reductions of passes before k allow. Row values
are computed between passes. What a later pass needs again is computed again when that is cheap (the row is in L1 by
then), and kept in an array on the stack when it is not. No pointer is `restrict`, since the memory planner may let an
output take the memory of an input; `omp simd` promises all that the vectoriser needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

from dcompile.codegen.emit.cpp import sgemm
from dcompile.codegen.emit.cpp.column_sums import rows_of_block
from dcompile.codegen.emit.cpp.hoist import computation
from dcompile.codegen.emit.cpp.identity_scale import scaling_of
from dcompile.codegen.emit.cpp.interleave_rows import Beside
from dcompile.codegen.emit.cpp.ops import SPELLING, c_type, literal, memory_type
from dcompile.codegen.emit.cpp.printer import SPLIT
from dcompile.codegen.emit.cpp.vectorize import WAYS, may_stream
from dcompile.codegen.emit.target import Emitter, Kernels, KernelSource
from dcompile.codegen.nest.loop_nest import make_nest, may_exceed
from dcompile.ir.canonical_names import Nameless, nameless
from dcompile.ir.index import Size, size_product
from dcompile.ir.nodes import Buffer, Loop, Program
from dcompile.ir.ops import REDUCTIONS


def emit(loop: Loop, table: Mapping[str, Buffer], again: frozenset[str] = frozenset()) -> KernelSource:
    """The source of one kernel; `table` says how large the buffers are, `again` which are read once more behind it."""
    nest = make_nest(loop)
    writer = _Kernel(nest, table)
    writer.again = again
    writer.function()
    body = "\n".join(writer.lines)
    kinds = [
        f"{'' if name in loop.writes else 'const '}{memory_type(table[name].dtype)}*" for name in writer.arguments
    ] + ["int64"] * len(writer.symbols)
    shorts = (*writer.arguments.values(), *writer.symbols.values())
    arguments = ", ".join(f"{kind} {short}" for kind, short in zip(kinds, shorts, strict=True))
    text = f"({arguments}) {{\n{body}\n  return {'take_failure()' if writer.checked else '0'};\n}}\n"
    name = "k" + hashlib.sha256(text.encode()).hexdigest()[:24]
    text = f'extern "C" int64 {name}{text}'
    found = ", ".join(f"({kind})*a[{place}]" for place, kind in enumerate(kinds))  # for tables of calls
    text += f'extern "C" int64 {name}_at(const int64* const* a) {{ return {name}({found}); }}\n'
    cost = len(loop.body) + 4
    return KernelSource(name, text, tuple(writer.arguments), cost, writer.checked, loop.origin, tuple(writer.symbols))


def emit_all(program: Program, *, training: bool = False, own_products: bool = False) -> Kernels:
    """The kernels of a program, one for each of its loops; with `own_products` also for matrix products.

    `training`: a backward reads again what this one leaves, all of its results.
    Loops that differ in the names of their buffers alone, as those of equal layers, are written once: 21 of 300 for 32
    layers of a Llama, 0.1 s for 0.9.
    """
    table = program.table
    written: dict[tuple[Nameless, tuple[Buffer, ...], frozenset[str]], KernelSource] = {}
    last = {name: at for at, step in enumerate(program.steps) for name in step.reads}
    calls = []
    for at, step in enumerate(program.steps):
        if isinstance(step, Loop):
            names: dict[str, str] = {}
            loop = nameless(step, names)
            buffers = tuple(_numbered(table[name], number) for name, number in names.items())
            stored = (name for name in step.writes if training or last.get(name, at) > at)
            key = (loop, buffers, frozenset(names[name] for name in stored if may_stream(table[name])))
            kernel = written.get(key)
            if kernel is None:
                kernel = written[key] = emit(loop[0], {buffer.name: buffer for buffer in buffers}, key[2])
            own = {number: name for name, number in names.items()}
            arguments = tuple(own[number] for number in kernel.arguments)
            calls.append(replace(kernel, arguments=arguments, origin=step.origin))
    return Kernels(tuple(calls), sgemm.replace_matmuls(program) if own_products else {})


def _numbered(buffer: Buffer, number: str) -> Buffer:
    """All that a kernel's text depends on."""
    return Buffer(number, buffer.dtype, buffer.shape, buffer.strides)


EMITTER = Emitter("c++", SPELLING, emit)


class _Kernel(Beside):
    """Writes a whole function: rows, threads, and column reductions."""

    def function(self) -> None:
        self._leave_unscaled()
        self.delay = self._find_delay()
        if self.tables:
            self._make_tables()
        for number, name in self.columns.items():
            self._open_column(number, name)
        if self.columns and not self.in_place:
            self._column_region()
        else:
            self._rows(self.parallel and not self.columns)

    def _leave_unscaled(self) -> None:
        """Return at once where a tensor would be multiplied by 1 in its own memory."""
        scaling = scaling_of(self.nest)
        if scaling is None:
            return
        number = self.expression(self.nest.body[scaling.number])
        target, source = self.argument(self.nest.stores[0].buffer), self.argument(scaling.tensor.buffer)
        self.line(f"if ({target} == {source} && {number} == 1) return 0;")

    def _make_tables(self) -> None:
        """Compute what is the same in every row, for all threads."""
        (axis,) = self.nest.elements
        for ref in self.tables:
            self.line(f"alignas(64) {c_type(self.nest.body[ref].dtype)} r{self.number(ref)}[{axis.size}];")
        self.open(f"for (int64 {axis.name} = 0; {axis.name} < {axis.size}; {axis.name}++)")
        for ref in computation(self.nest, self.tables):
            self.declare(ref)
        for ref in self.tables:
            self.line(f"r{self.number(ref)}[{axis.name}] = {self.name(ref)};")
        self.close()

    def _rows(self, parallel: bool) -> None:
        """The loop over all rows, shared among threads."""
        rows = size_product(axis.count for axis in self._row_axes())
        if not self._row_axes():
            self.open("")
            self._row()
            if self.streams:
                self.line("finish_streams();")
            self.close()
            return
        if self._goes_abreast():
            self._rows_abreast(parallel)
            return
        if self.split:
            self._open_split()
        parallel = parallel and may_exceed(rows, 1)
        apart = parallel and (self.delay is not None or bool(self.streams))
        if apart:  # each thread has to finish its own
            self.line(f"#pragma omp parallel{self._worthwhile()}")
            self.open("")
            self._open_behind()
            self.line("#pragma omp for schedule(static) nowait")
        elif parallel:
            self.line(f"#pragma omp parallel for schedule(static){self._worthwhile()}")
        if beside := self._beside():
            self.open(f"for (int64 r_at = 0; r_at < {rows}; r_at += {WAYS})")
            self._sums_beside(beside)
        first, end = ("r_at", f"r_at + {WAYS}") if beside else ("0", self.size(rows))
        self.open(f"for (int64 r = {first}; r < {end}; r++)")
        self._decompose("r")
        self._row()
        self.close(1 + (self.split is not None) + bool(beside))
        self._close_behind()
        if self.streams:
            self.line("finish_streams();")
        self.close(int(apart))

    def _open_split(self) -> None:
        """Give each thread some columns of every row."""
        assert self.split is not None
        name, size = self.split.name, self.split.size
        # as wide as possible: narrow columns read each row in pieces (1.4 times slower at 64 of 768)
        self.line("const int64 threads = omp_get_max_threads();")
        self.line(f"const int64 width = ({size} / threads + {SPLIT}) / {SPLIT} * {SPLIT};")
        self.line(f"const int64 parts = ({size} + width - 1) / width;")
        self.line(f"#pragma omp parallel for schedule(static){self._worthwhile()}")
        self.open("for (int64 c = 0; c < parts; c++)")
        self.line(f"const int64 {name}_low = c * width;")
        self.line(f"const int64 {name}_high = {name}_low + width < {size} ? {name}_low + width : {size};")

    def _column_count(self, number: int) -> Size:
        return self.table[self.nest.stores[number].buffer].extent

    def _identity(self, number: int) -> tuple[str, str]:
        """Type and identity of a column reduction."""
        store = self.nest.stores[number]
        dtype = self.table[store.buffer].dtype
        return memory_type(dtype), literal(REDUCTIONS[store.mode].identity(dtype), dtype)

    def _open_column(self, number: int, name: str) -> None:
        """Prepare where a column reduction is collected: the result itself, or memory of each thread."""
        kind, identity = self._identity(number)
        target, count = self.argument(self.nest.stores[number].buffer), self._column_count(number)
        if self.in_place:
            if self.parallel:
                self.line(f"#pragma omp parallel for schedule(static){self._worthwhile()}")
            self.line(f"for (int64 k = 0; k < {self.size(count)}; k++) {target}[k] = {identity};")
            self.line(f"{kind}* const {name} = {target};")

    def _column_region(self) -> None:
        """Rows in blocks; a block's sums are added to its thread's, and in the end the threads' in their order.

        Two levels, of about the square root of the rows each, keep the error of a sum over many rows small: 100 000
        float32 in blocks of 64 were 1.2e-6 off, ten times eager's error.
        """
        axes = self._row_axes()
        rows, block, blocks = self._row_blocks()
        parallel = self.parallel and blocks != "1"
        threads = "omp_get_max_threads()" if parallel else "1"
        if parallel and self._worthwhile():
            threads = f"{self._worthwhile().removeprefix(' if')} && {blocks} > 1 ? {threads} : 1"
        self.line(f"const int64 threads = {threads};")
        for number, name in self.columns.items():
            kind, identity = self._identity(number)
            count = self._column_stride(number)
            self.line(f"{kind}* const {name}_all = scratch<{kind}>(threads * {2 * count});")
            self.line(f"for (int64 k = 0; k < threads * {2 * count}; k++) {name}_all[k] = {identity};")
        if parallel:
            self.line("#pragma omp parallel num_threads(threads)")
        self.open("")
        thread = "omp_get_thread_num()" if parallel else "0"
        for number, name in self.columns.items():
            kind, _ = self._identity(number)
            self.line(f"{kind}* const {name} = {name}_all + {thread} * {2 * self._column_stride(number)};")
        if parallel:
            self.line("#pragma omp for schedule(static)")
        self.open(f"for (int64 b = 0; b < {blocks}; b++)")
        if axes:
            low, high = f"b * {block}", f"(b * {block} + {block} < {rows} ? b * {block} + {block} : {rows})"
            if self._adds_up():
                self.line(f"int64 r_at = {low};")
                low = "r_at"
                self._rows_together(low, high, block)
            self.open(f"for (int64 r = {low}; r < {high}; r++)")
            self._decompose("r")
        self._row()
        self.close(bool(axes))
        for number, name in self.columns.items():
            self._flush(number, name)
        self.close()
        if self.streams:
            self.line("finish_streams();")
        self.close()
        for number, name in self.columns.items():
            self._collect(number, name)

    def _row_blocks(self) -> tuple[str, str, str]:
        """Number of rows, rows in a block, number of blocks."""
        rows = size_product(axis.count for axis in self._row_axes())
        if isinstance(rows, int):
            block = rows_of_block(rows)
            return str(rows), str(block), str(math.ceil(rows / block))
        self.line(f"const int64 rows = {self.size(rows)};")
        self.line("int64 root = 64;")
        self.line("while (root * root < rows) root *= 2;")
        self.line("const int64 block = rows < 128 ? 1 : root < rows / 64 ? root : rows / 64;")
        self.line("const int64 blocks = (rows + block - 1) / block;")
        return "rows", "block", "blocks"

    def _column_stride(self, number: int) -> int:
        """Elements from one partial result to the next: whole cache lines, so that threads do not share one."""
        count = self._column_count(number)
        assert isinstance(count, int), "results of symbolic size are collected in place"
        return (count + 63) // 64 * 64

    def _flush(self, number: int, name: str) -> None:
        store, (_, identity), stride = self.nest.stores[number], self._identity(number), self._column_stride(number)
        dtype = self.table[store.buffer].dtype
        self.line("#pragma omp simd")
        self.open(f"for (int64 k = 0; k < {self._column_count(number)}; k++)")
        self.line(self._combine(store.mode, f"{name}[{stride} + k]", f"{name}[k]", dtype))
        self.line(f"{name}[k] = {identity};")
        self.close()

    def _collect(self, number: int, name: str) -> None:
        store, stride = self.nest.stores[number], self._column_stride(number)
        target, dtype, count = self.argument(store.buffer), self.table[store.buffer].dtype, self._column_count(number)
        self.line("#pragma omp simd")
        self.line(f"for (int64 k = 0; k < {count}; k++) {target}[k] = {name}_all[{stride} + k];")
        self.open("for (int64 thread = 1; thread < threads; thread++)")
        self.line("#pragma omp simd")
        self.open(f"for (int64 k = 0; k < {count}; k++)")
        place = f"{name}_all[thread * {2 * stride} + {stride} + k]"
        self.line(self._combine(store.mode, f"{target}[k]", place, dtype))
        self.close(2)
        self.line(f"free({name}_all);")
