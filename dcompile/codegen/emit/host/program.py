"""The host program: readable Python that calls kernels and the library in order, with every address known in advance.

The text defines `make(run)`, which prepares kernels and arena memory through `run` (runtime/program/executable.py) and
returns `call(args, buckets, sync)`. Names with a leading underscore are the compiler's, the others are buffers.

Where sizes are symbols, `sizes(args)` reads them from the arguments, and `arena_bytes(*sizes)` returns the memory
needed. `make(run, *sizes)` then prepares a call for these sizes, and later calls with the same sizes reuse it. `late`
sizes, known only after a library call, are not among them. Kernels receive those as arguments, as they do addresses,
and GPU launches their grids.
"""

from __future__ import annotations

from typing import Any

from dcompile import compat
from dcompile.codegen.emit.host.allocate import HostBuffers
from dcompile.codegen.emit.host.batch_launches import LaunchBatch
from dcompile.codegen.emit.host.buffer_uses import all_views, last_uses
from dcompile.codegen.emit.host.collective_calls import CollectiveCalls
from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.codegen.emit.host.extern_calls import ExternCalls, read_by_chosen
from dcompile.codegen.emit.host.unrecordable import unrecordable_steps
from dcompile.codegen.emit.target import Kernels, KernelSource, LibraryReplacement
from dcompile.collectives.contract import APART, TOGETHER
from dcompile.ir.gemm import Chosen
from dcompile.ir.index import Index, Size, as_index
from dcompile.ir.nodes import (
    REGION,
    SCALE,
    Collective,
    Extern,
    Loop,
    Program,
    Step,
    View,
    Wait,
)
from dcompile.ir.symbols import SymbolSource, late_symbols, sources, symbols_of

_IMPORTS = (
    "import torch",
    "from torch import as_strided, empty_strided",
    "from dcompile.runtime.program.fast_aten import empty_cpu, empty_cuda, entry, strided_view",
)


def emit(
    program: Program,
    kernels: Kernels,
    *,
    recycle: bool = True,
    chosen: Chosen | None = None,
    saved: frozenset[str] = frozenset(),
) -> str:
    """Return the text of the host program. `chosen`: algorithms for matmuls that replace ATen's.

    `saved`: inputs of a backward whose layout may differ from the forward's by now.

    With `recycle`, results' memory is kept for the next call, for programs whose results are short-lived. In training,
    the forward's saved tensors are freed while gradients arrive, and holding both would set the step's peak.
    """
    return HostProgramWriter(program, kernels, recycle, chosen or {}, saved).print()


class HostProgramWriter:
    """Collects the lines of `make` and of `call`."""

    def __init__(
        self, program: Program, kernels: Kernels, recycle: bool, chosen: Chosen, saved: frozenset[str]
    ) -> None:
        self.saved = saved
        self.calls, self.products = kernels.calls, kernels.products
        loops = [step for step in program.steps if isinstance(step, Loop)]
        late = late_symbols(program)
        self.sources = sources(program)
        """Sources of the sizes that calls are prepared for."""
        self.early: dict[str, SymbolSource] = {}
        """Sizes that the call itself reads from its arguments, where preparation would gain nothing."""
        if not loops and not isinstance(program.arena_bytes, Index):
            self.early, self.sources, late = self.sources, {}, symbols_of(program)
        self.text = HostExpressions(program, late)
        self.batch = LaunchBatch(program, kernels, self.text)
        self.program, self.table, self.lines = program, program.table, self.text.lines
        self.last = last_uses(program, self.calls, self.text.hosts)
        self.in_kernels = {name for loop in loops for name in loop.reads | loop.writes}
        self.in_kernels |= {view.buffer for product in self.products.values() for view in product.views if view}
        self.in_kernels |= {name for product in self.products.values() for name in product.kernel.arguments}
        self.in_kernels |= read_by_chosen(program, chosen)
        self.looks: dict[str, list[View]] = {}
        """All views of each buffer in library calls and outputs."""
        for view in all_views(program):
            self.looks.setdefault(view.buffer, []).append(view)
        self.buffers = HostBuffers(self.table, self.text, self.batch, recycle)
        self.collectives = CollectiveCalls(program, self.text, self.buffers, kernels.all_reduces)
        loop_places = [place for place, step in enumerate(program.steps) if isinstance(step, Loop)]
        self.epilogues = {loop_places[number]: bucket for number, bucket in kernels.epilogues.items()}
        """Positions of loops that the kernel of an all-reduce may end with -> its bucket."""
        self.externs = ExternCalls(
            self.text, self.batch, self.buffers, chosen, self.last, self.early, self.in_kernels, self.looks
        )

    # --- text ---

    def print(self) -> str:
        """Return the whole text."""
        self._call()
        loops = sum(isinstance(step, Loop) for step in self.program.steps)
        externs = sum(isinstance(step, Extern) for step in self.program.steps)
        head = f'"""{loops} kernel calls, {externs} library calls, arena of {self.program.arena_bytes} bytes."""'
        prepared = [f"    {name} = {expression}" for expression, name in self.text.prepared.items()]
        body = [f"        {line}" for line in self.lines]
        said = ["quiet = True"] if self._is_quiet() else []
        lines = [head, "", *_IMPORTS, *said, "", ""]
        lines += self._sizes()
        lines += [f"def make({', '.join(('run', *map(self.text.name, self.sources)))}):"]
        lines += [*prepared, "", "    def call(args, buckets=None, sync=False):", *body, "", "    return call", ""]
        return "\n".join(lines)

    def _is_quiet(self) -> bool:
        """Return whether the program is only kernels and allocations for them: autograd sees nothing of it."""
        steps = enumerate(self.program.steps)
        kernels = all(isinstance(step, Loop) or place in self.products for place, step in steps)
        return kernels and not any("as_strided(" in line for line in self.lines)

    def _sizes(self) -> list[str]:
        """Return functions that read the sizes from the arguments and compute the arena's size."""
        if not self.sources:
            return []
        names = ", ".join(map(self.text.name, self.sources))
        lines = ["def sizes(args):"]
        for symbol, source in self.sources.items():
            given = f"args[{self.program.inputs.index(source.input)}]"
            lines.append(f"    {self.text.name(symbol)} = {self._value(source, given)}")
        lines += [f"    return ({names},)", "", "", f"def arena_bytes({names}):"]
        return [*lines, f"    return {self.text.index(self.program.arena_bytes)}", "", ""]

    def _value(self, source: SymbolSource, given: str) -> str:
        """Return the value of a size, `given` being its input."""
        text = {"value": given, "shape": f"{given}.shape[{source.dim}]", "stride": f"{given}.stride({source.dim})"}
        value = text[source.what]
        if source.rest != as_index(0):
            value = f"({value} - ({self.text.index(source.rest)}))"
        return value if source.factor == as_index(1) else f"{value} // ({self.text.index(source.factor)})"

    # --- the call ---

    def _call(self) -> None:
        self._inputs()
        for bucket in self.program.buckets:
            if not bucket.carries_units:
                self.lines.append(f"{self.text.memory(bucket.name)} = buckets.acquire({bucket.name!r})")
        if any(bucket.scaled for bucket in self.program.buckets):
            self.lines.append(f"{SCALE.text} = buckets.scale(sync)")
        calls, apart, reason = iter(self.calls), unrecordable_steps(self.program), ""
        dying: dict[int, list[str]] = {}
        for name, position in self.last.items():
            dying.setdefault(position, []).append(name)
        for position, step in enumerate(self.program.steps):
            product = self.products.get(position)
            if apart.get(position, "") != reason:
                reason = self._begin_section(apart.get(position, ""))
            if not isinstance(step, Loop) and not (product and product.kernel.launches):
                self.batch.launch()
            if position in self.products:
                self._product(step, self.products[position])
            elif position in self.epilogues:
                self.collectives.run_epilogue(self.epilogues[position], next(calls))
            elif isinstance(step, Extern) and step.op == REGION:
                dying[position] = self.externs.call_region(step, dying.get(position, []))
            else:
                self._step(step, calls)
            if self.batch.waiting:
                self.batch.dying += dying.get(position, [])
            else:
                self.batch.drop(dying.get(position, []))
        self.batch.launch()
        if reason:
            self._begin_section("")
        outputs = ", ".join(self.text.output(output) for output in self.program.outputs)
        self.lines.append(f"return [{outputs}]")

    def _begin_section(self, reason: str) -> str:
        """Mark the beginning of steps that cannot be recorded for this reason; empty: of others."""
        self.batch.launch()
        self.lines.append(f"{APART}{reason}" if reason else TOGETHER)
        return reason

    def _inputs(self) -> None:
        names = [self.text.name(name) for name in self.program.inputs]
        if names:
            self.lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        for symbol, source in self.early.items():
            if symbol not in self.program.inputs:
                self.lines.append(f"{self.text.name(symbol)} = {self._value(source, self.text.name(source.input))}")
        self._check_saved()
        self._check_alignment()
        if self.batch.on_gpu:
            self.lines.append("stream = run.stream()")
        self.lines.append("args.clear()")
        self.batch.drop([name for name in self.program.inputs if name in self.table and name not in self.last])

    def _check_saved(self) -> None:
        """Check the layout of saved tensors that kernels, or views of another shape, rely on as traced.

        A CUDA graph's recording keeps the result of these lines (`runtime.cuda_graphs.recording`).
        """
        written = {name for step in self.program.steps for name in step.writes} - {*self.program.donated}
        names, layouts, sizes = list[str](), list[str](), list[Size]()
        for name in self.program.inputs:
            if name in self.saved and self._relies_on(name):
                buffer = self.table[name]
                shape, strides = self.text.tuple_of(buffer.shape), self.text.tuple_of(buffer.strides)
                names.append(self.text.name(name))
                layouts.append(f"(torch.{buffer.dtype}, {shape}, {strides}, {buffer.device!r}, {name in written})")
                sizes += [*buffer.shape, *buffer.strides]
        if names:
            text, given = f"run.saved({', '.join(layouts)})", ", ".join(names)
            saved = self.text.once_if_known(text, "saved", sizes)
            if saved == text:
                saved = "_saved"
                self.lines.append(f"{saved} = {text}")
            self.lines += [f"if not {saved}.check({given}):", f"    [{given}] = {saved}.fit({given})"]

    def _relies_on(self, name: str) -> bool:
        """Return whether the program itself relies on the layout of an input."""
        buffer = self.table[name]
        whole = View(name, buffer.shape, buffer.strides)
        return name in self.in_kernels or any(view != whole for view in self.looks.get(name, ()))

    def _check_alignment(self) -> None:
        """Check that addresses are multiples of 16 bytes, as GPU kernels expect; a caller's slices may not be."""
        used = [name for name in self.program.inputs if name in self.in_kernels and self.table[name].device != "cpu"]
        pointers = [self.text.pointer(name) for name in used]
        if pointers:
            written = {name for step in self.program.steps for name in step.writes}
            places = tuple(place for place, name in enumerate(self.program.inputs) if name in written)
            around = {view.buffer for step in self.program.steps for view in _looked_around(step)}
            whole = tuple(place for place, name in enumerate(self.program.inputs) if name in around)
            self.lines += [
                f"if ({' | '.join(pointers)}) & 15:",
                f"    return run.realigned(call, args, {places!r}, buckets, sync{f', {whole!r}' if whole else ''})",
            ]

    def _step(self, step: Step, calls: Any) -> None:
        match step:
            case Loop():
                self._loop(step, next(calls))
            case Extern():
                self.externs.call(step)
            case Collective():
                self.collectives.start(step)
            case Wait():
                self.collectives.wait(step)

    def _loop(self, loop: Loop, kernel: KernelSource) -> None:
        for name in sorted(loop.writes):
            self.buffers.ensure(name)
        if kernel.launches or not self.batch.on_gpu:
            self.batch.add(kernel)
        else:
            self.batch.call_kernel(kernel)

    def _product(self, step: Step, product: LibraryReplacement) -> None:
        """Call a kernel that replaces a library call; matmul and attention take sizes as numbers in memory."""
        for name in sorted(step.writes):
            self.buffers.ensure(name)
        if product.kernel.launches:
            self.batch.add(product.kernel)
            return
        numbers = f"run.numbers({', '.join(map(self.text.index, product.sizes))})"
        sizes = self.text.once_if_known(numbers, "n", product.sizes)
        pointers = [sizes, *(self.text.address(view) if view else "0" for view in product.views)]
        function = self.text.once(f"run.kernel({product.kernel.name!r}, {len(pointers)})", "k")
        origin = step.origin if isinstance(step, Extern) else ()
        if origin:
            self.lines.append(f"# {', '.join(origin)}")
        self.lines.append(f"{function}({', '.join(pointers)})")


def _looked_around(step: Step) -> list[View]:
    """Return arguments that a call reads by an offset from the start of their storage."""
    if not isinstance(step, Extern) or step.op not in compat.storage_offsets.FROM_STORAGE:
        return []
    return [arg for arg in step.args[:1] if isinstance(arg, View)]
