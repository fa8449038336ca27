"""The host program: readable Python that calls kernels and the library in order, with every address known in advance.

The text defines `make(run)`, which prepares kernels and arena memory through `run` (runtime/program/executable.py) and
returns `call(args, buckets, sync)`. Names with a leading underscore are the compiler's, the others are buffers.

Where sizes are symbols, `sizes(args)` reads them from the arguments, and `arena_bytes(*sizes)` returns the memory
needed. `make(run, *sizes)` then prepares a call for these sizes, and later calls with the same sizes reuse it. `late`
sizes, known only after a library call, are not among them. Kernels receive those as arguments, as they do addresses,
and GPU launches their grids.

Statements that start collectives, and those that wait for them, come last in this file.

Steps of a GPU program that a CUDA graph cannot record are marked in the text, with the reason. A recording is split
there: pieces before and after them are recorded, and the marked statements run as they are
(`runtime/program/graph_partition.py`). Calls that fail in a recording without being marked here are learned then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dcompile import compat
from dcompile.codegen.emit.host.batch_launches import HostBuffers, LaunchBatch, all_views, last_uses
from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.codegen.emit.host.extern_calls import ExternCalls, in_torch, read_by_chosen, resolve
from dcompile.codegen.emit.target import AllReduceKernel, Kernels, KernelSource, LibraryReplacement
from dcompile.collectives.contract import APART, TOGETHER
from dcompile.ir.buffers import NUMBER, Bucket, Buffer
from dcompile.ir.collective_kinds import HOST_LINK, bucket_traits
from dcompile.ir.gemm import Chosen
from dcompile.ir.index import Index, Size, as_index
from dcompile.ir.nodes import REGION, SCALE, Collective, Extern, Loop, Program, Step, View, Wait, views_of
from dcompile.ir.symbols import SymbolSource, late_symbols, sources, symbols_of, used_symbols, valued_symbols

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
        self.views_of: dict[str, list[View]] = {}
        """All views of each buffer in library calls and outputs."""
        for view in all_views(program):
            self.views_of.setdefault(view.buffer, []).append(view)
        offloaded = {s.bucket for s in program.steps if isinstance(s, Collective) and s.kind == "offload"}
        self.buffers = HostBuffers(self.table, self.text, self.batch, recycle, offloaded)
        self.collectives = CollectiveCalls(program, self.text, self.buffers, kernels.all_reduces)
        loop_places = [place for place, step in enumerate(program.steps) if isinstance(step, Loop)]
        self.epilogues = {loop_places[number]: bucket for number, bucket in kernels.epilogues.items()}
        """Positions of loops that the kernel of an all-reduce may end with -> its bucket."""
        self.externs = ExternCalls(
            self.text, self.batch, self.buffers, chosen, self.last, self.early, self.in_kernels, self.views_of
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
        return name in self.in_kernels or any(view != whole for view in self.views_of.get(name, ()))

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


class CollectiveCalls:
    """Writes them by the table of kinds: dcompile's own go through a source, the model's through `run.collective`.

    Copies to and from host memory go through `run.host_copy`.
    """

    def __init__(
        self, program: Program, text: HostExpressions, buffers: HostBuffers, kernels: Mapping[str, AllReduceKernel]
    ) -> None:
        self.table: Mapping[str, Buffer] = buffers.table
        self.text, self.lines, self.buffers = text, text.lines, buffers
        self.batch: LaunchBatch = buffers.batch
        self.loops = [step for step in program.steps if isinstance(step, Loop)]
        self.exchanged = {bucket.name: bucket for bucket in program.buckets}
        self.kernels = kernels
        """Kernels of collectives that may be one kernel, by bucket."""
        self.made = {s.bucket: s.made for s in program.steps if isinstance(s, Collective)}
        self.started: dict[str, str] = {}
        """Name of one of the model's own collectives -> the object that starts it and waits for it."""

    def start(self, step: Collective) -> None:
        """Print the start of a collective: dcompile's, through `buckets`, or one that the model itself calls."""
        if step.call is not None:
            self._start_own(step, step.call)
        else:
            self._start(step)

    def wait(self, step: Wait) -> None:
        """Wait for one."""
        if step.bucket in self.exchanged:
            self._wait(step.bucket)
        else:
            self.lines.append(f"{self.started[step.bucket]}.wait()")

    def _start(self, step: Collective) -> None:
        """Start one of dcompile's own, by the method that the table of kinds names."""
        traits = bucket_traits(step.kind)
        match traits.carries:
            case "gradients":
                memory = self.text.memory(step.bucket)
                self.lines += ["if sync:", f"    buckets.{traits.start}({step.bucket!r}, {memory})"]
            case "units":
                self._start_units(traits.start, self.exchanged[step.bucket])

    def _start_units(self, method: str, bucket: Bucket) -> None:
        """Start gathering or reducing units, each as one flat tensor."""
        for name in bucket.holders:
            self.buffers.ensure(name)
        whole = [View(name, (size,), (1,)) for name, size in zip(bucket.holders, bucket.sizes, strict=True)]
        tensors = ", ".join(map(self.text.view, whole))
        self.lines.append(f"buckets.{method}({bucket.name!r}, [{tensors}])")

    def _start_own(self, step: Collective, call: Extern) -> None:
        """Start one of the model's own collectives: on tensors that it sends and others that it fills, or in place."""
        for name in step.buffers:
            self.buffers.ensure(name)
        sent = [self.text.view(view) for view in views_of(call.args[0])]
        made = [name for name in step.buffers if name not in call.reads]
        filled = [self.text.view(View(name, self.table[name].shape, self.table[name].strides)) for name in made]
        rest = [repr(HOST_LINK)] if step.copies_by_host else [self.text.argument(arg) for arg in call.args[1:]]
        kernel, given = self._kernel(step)
        made_by = f"host_copy({step.kind!r}" if step.copies_by_host else f"collective({call.op!r}"
        collective = self.text.once(f"run.{made_by}, {step.bucket!r}{kernel})", "collective")
        self.started[step.bucket] = collective
        if call.origin:
            self.lines.append(f"# {', '.join(call.origin)}")
        self.lines.append(f"{collective}([{', '.join(sent)}], [{', '.join(filled)}], {', '.join(rest)}{given})")

    def _kernel(self, step: Collective) -> tuple[str, str]:
        """Return the arguments that describe the kernel of a collective that may be one, and those of its call."""
        kernel = self.kernels.get(step.bucket)
        if kernel is None:
            return "", ""
        if kernel.loop is not None:
            for name in sorted(self.loops[kernel.loop].writes):
                self.buffers.ensure(name)
        arguments, slots = self.batch.arguments_of(kernel.source)
        launch = kernel.source.launches[0]
        described = (kernel.source.name, launch.function, kernel.words, kernel.loop is not None, len(slots))
        text = ", ".join(map(repr, described))
        return f", ({text}, ({arguments}))", f", given=({', '.join(slots)},)" if slots else ""

    def run_epilogue(self, bucket: str, kernel: KernelSource) -> None:
        """Launch the loop that a collective's kernel may end with, where it did not."""
        launch, values = self.batch.launch_call([(kernel, self.batch.named(kernel))])
        self.lines.append(f"{self.started[bucket]}.run_epilogue({', '.join((launch, *values))})")

    def _wait(self, name: str) -> None:
        traits = self.exchanged[name].traits
        match traits.carries:
            case "gradients":
                self.lines += ["if sync:", f"    buckets.{traits.wait}({name!r}, {self.text.memory(name)})"]
            case "units" if self.made[name]:
                shards = ", ".join(map(self.text.name, self.made[name]))
                sizes = ", ".join(self.text.tuple_of(self.table[shard].shape) for shard in self.made[name])
                self.lines.append(f"{shards}, = buckets.take_shards({name!r}, [{sizes}])")
                self.batch.allocated.update(self.made[name])
            case "units":
                self.lines.append(f"buckets.{traits.wait}({name!r})")


# --- what a CUDA graph cannot record ----------------------------------------------------------------------------------


TAGS: Mapping[torch.Tag, str] = {
    torch.Tag.cudagraph_unsafe: "is tagged cudagraph_unsafe",
    torch.Tag.dynamic_output_shape: "waits for the size of its result",
    torch.Tag.data_dependent_output: "waits for a value of the device",
}
"""Tags of operators that no CUDA graph can record, and what they say."""


def unrecordable_steps(program: Program) -> dict[int, str]:
    """Return the positions of the steps that cannot be recorded, each with its operation and the reason."""
    if all(buffer.device == "cpu" for buffer in program.buffers):
        return {}
    read = {name for step in program.steps for name in step.reads}
    on_host = {buffer.name for buffer in program.buffers if buffer.device == "cpu" and buffer.is_tensor}
    numbers = {buffer.name for buffer in program.buffers if buffer.dtype == NUMBER}
    late = valued_symbols(program)
    sized = {
        buffer.name for buffer in program.buffers if not late.isdisjoint(_symbols((*buffer.shape, *buffer.strides)))
    }
    if any(isinstance(step, Collective) and step.copies_by_host for step in program.steps):
        # a copy that a piece starts would be awaited at its end, where nothing hides it
        return dict.fromkeys(range(len(program.steps)), "copies to or from host memory, beside which kernels run")
    told = set[str]()
    found: dict[int, str] = {}
    for position, step in enumerate(program.steps):
        touched = step.reads | step.writes
        constant = isinstance(step, Loop) and not step.reads and step.writes.isdisjoint(read)
        if tagged := _tag(step):
            reason = tagged
        elif not constant and not on_host.isdisjoint(touched):
            reason = "works on the CPU"
        elif not sized.isdisjoint(touched) or not late.isdisjoint(used_symbols(step)) or _tells(step, late):
            reason = "has sizes that depend on values"
        elif not told.isdisjoint(step.reads):
            reason = "reads a number that depends on values"
        else:
            continue
        told |= step.writes & numbers
        found[position] = f"{_name(step)} {reason}"
    return found


def _symbols(sizes: tuple[object, ...]) -> frozenset[str]:
    return frozenset(name for size in sizes if isinstance(size, Index) for name in size.variables)


def _tells(step: Step, late: frozenset[str]) -> bool:
    return isinstance(step, Extern) and not late.isdisjoint(step.tells)


def _tag(step: Step) -> str:
    """Return what a tag says about a call; empty without one."""
    call = step.call if isinstance(step, Collective) else step
    if not isinstance(call, Extern) or not in_torch(call.op):
        return ""
    tags = getattr(resolve(call.op), "tags", ())
    return next((reason for tag, reason in TAGS.items() if tag in tags), "")


def _name(step: Step) -> str:
    """Return the operation of a step as people know it."""
    match step:
        case Loop():
            return ", ".join(name.removesuffix(".default") for name in step.origin) or "a kernel"
        case (Extern() as call) | Collective(call=Extern() as call):
            return call.op.removesuffix(".default")
    return "a wait"
