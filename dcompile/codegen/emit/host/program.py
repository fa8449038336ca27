"""The host program: readable Python that calls kernels and the library in order, with every address known in advance.

The text defines `make(run)`, which prepares kernels and arena memory through `run` (runtime/program/executable.py) and
returns `call(args, buckets, sync)`. Names with a leading underscore are the compiler's, the others are buffers.

Where sizes are symbols, `sizes(args)` reads them from the arguments, and `arena_bytes(*sizes)` returns the memory
needed. `make(run, *sizes)` then prepares a call for these sizes, and later calls with the same sizes reuse it. `late`
sizes, known only after a library call, are not among them. Kernels receive those as arguments, as they do addresses,
and GPU launches their grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from dcompile import compat
from dcompile.codegen.emit.host.aten_calls import (
    NARROWED,
    function,
    has_late_shape,
    in_torch,
    is_custom,
    out_overload,
    returns_one_tensor,
)
from dcompile.codegen.emit.host.batch_launches import LaunchBatch
from dcompile.codegen.emit.host.buffer_uses import all_views, last_uses
from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.codegen.emit.host.gemm_geometry import factors_of, geometry
from dcompile.codegen.emit.target import Kernels, KernelSource, LibraryReplacement
from dcompile.ir.gemm import Chosen
from dcompile.ir.index import Index, Size, as_index, var
from dcompile.ir.nodes import (
    REGION,
    SCALE,
    SCALED,
    Bucket,
    Collective,
    Extern,
    Loop,
    Program,
    Step,
    View,
    Wait,
    views_of,
)
from dcompile.ir.symbols import SymbolSource, late_symbols, sources, symbols_of

RECYCLE_BYTES = 1 << 18
"""Bytes from which a result reuses the memory of an earlier call's result. Fresh pages of a large allocation cost up to
three times as much as a memory-bound kernel."""


_IMPORTS = (
    "import torch",
    "from torch import as_strided, empty_strided",
    "from dcompile.runtime.program.fast_aten import empty_cpu, empty_cuda, entry, look",
)
_QUICK = {"cpu": "empty_cpu", "cuda": "empty_cuda"}


_STARTS = {"all_gather": "start_gather", "reduce_scatter": "start_scatter"}
_WAITS = {"all_gather": "wait_gather", "reduce_scatter": "wait_scatter"}


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
        self.recycle, self.chosen, self.saved = recycle, chosen, saved
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
        self.learnt: set[str] = set(self.early)
        self.in_kernels = {name for loop in loops for name in loop.reads | loop.writes}
        self.in_kernels |= {view.buffer for product in self.products.values() for view in product.views if view}
        self.in_kernels |= {name for product in self.products.values() for name in product.kernel.arguments}
        self.in_kernels |= self._in_chosen()
        self.exchanged = {bucket.name: bucket for bucket in program.buckets}
        self.started: dict[str, str] = {}
        """Name of one of the model's own collectives -> the object that starts it and waits for it."""
        self.looks: dict[str, list[View]] = {}
        """All views of each buffer in library calls and outputs."""
        for view in all_views(program):
            self.looks.setdefault(view.buffer, []).append(view)

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
        said += [f"on_host = {found!r}"] if (found := self._on_host()) else []
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

    def _on_host(self) -> str:
        """Return the CPU computation of a GPU program, if any: a CUDA graph's replay would skip it.

        Loops that read nothing are constants, the same at each call.
        """
        if not any(buffer.device != "cpu" for buffer in self.program.buffers):
            return ""
        tensors = {b.name for b in self.program.buffers if b.device == "cpu" and b.is_tensor}
        steps = (step for step in self.program.steps if not isinstance(step, Loop) or step.reads)
        found = next((step for step in steps if not tensors.isdisjoint(step.writes)), None)
        return "" if found is None else ", ".join(getattr(found, "origin", ())) or "a step of it"

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
            if bucket.kind == "all_reduce":
                self.lines.append(f"{self.text.memory(bucket.name)} = buckets.acquire({bucket.name!r})")
        if any(bucket.scaled for bucket in self.program.buckets):
            self.lines.append(f"{SCALE.text} = buckets.scale(sync)")
        calls = iter(self.calls)
        dying: dict[int, list[str]] = {}
        for name, position in self.last.items():
            dying.setdefault(position, []).append(name)
        for position, step in enumerate(self.program.steps):
            product = self.products.get(position)
            if not isinstance(step, Loop) and not (product and product.kernel.launches):
                self.batch.launch()
            if position in self.products:
                self._product(step, self.products[position])
            elif isinstance(step, Extern) and step.op == REGION:
                dying[position] = self._region(step, dying.get(position, []))
            else:
                self._step(step, calls)
            if self.batch.waiting:
                self.batch.dying += dying.get(position, [])
            else:
                self.batch.drop(dying.get(position, []))
        self.batch.launch()
        outputs = ", ".join(self.text.output(output) for output in self.program.outputs)
        self.lines.append(f"return [{outputs}]")

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
                self._extern(step)
            case Collective(call=Extern() as call):
                self._own_exchange(step, call)
            case Collective("all_reduce"):
                memory = self.text.memory(step.bucket)
                self.lines += ["if sync:", f"    buckets.start({step.bucket!r}, {memory})"]
            case Collective(kind):
                self._exchange(kind, self.exchanged[step.bucket])
            case Wait() if step.bucket in self.exchanged:
                self._wait(step.bucket)
            case Wait():
                self.lines.append(f"{self.started[step.bucket]}.wait()")

    def _exchange(self, kind: str, bucket: Bucket) -> None:
        """Start gathering or reducing units, each as one flat tensor."""
        for name in bucket.holders:
            self._ensure(name)
        whole = [View(name, (size,), (1,)) for name, size in zip(bucket.holders, bucket.sizes, strict=True)]
        tensors = ", ".join(map(self.text.view, whole))
        self.lines.append(f"buckets.{_STARTS[kind]}({bucket.name!r}, [{tensors}])")

    def _own_exchange(self, step: Collective, call: Extern) -> None:
        """Start one of the model's own collectives: on tensors that it sends and others that it fills, or in place."""
        for name in step.buffers:
            self._ensure(name)
        sent = [self.text.view(view) for view in views_of(call.args[0])]
        made = [name for name in step.buffers if name not in call.reads]
        filled = [self.text.view(View(name, self.table[name].shape, self.table[name].strides)) for name in made]
        rest = [self.text.argument(arg) for arg in call.args[1:]]
        exchange = self.text.once(f"run.collective({call.op!r}, {step.bucket!r})", "exchange")
        self.started[step.bucket] = exchange
        if call.origin:
            self.lines.append(f"# {', '.join(call.origin)}")
        self.lines.append(f"{exchange}([{', '.join(sent)}], [{', '.join(filled)}], {', '.join(rest)})")

    def _wait(self, name: str) -> None:
        kind = self.exchanged[name].kind
        if kind == "all_reduce":
            self.lines += ["if sync:", f"    buckets.wait({name!r}, {self.text.memory(name)})"]
        else:
            self.lines.append(f"buckets.{_WAITS[kind]}({name!r})")

    # --- memory ---

    def _ensure(self, name: str) -> None:
        """Allocate an escaping buffer before the first step that writes it."""
        buffer = self.text.placed(name)
        if buffer.name != name:
            self._ensure(buffer.name)
            return
        if name in self.text.hosts:
            self._inherit(self.text.hosts[name])
            return
        if name in self.batch.allocated or buffer.storage == "arena" or self.text.bucket_of(buffer) is not None:
            return
        self.batch.make_room(buffer)
        self.batch.allocated.add(name)
        shape, strides = self.text.tuple_of(buffer.shape), self.text.tuple_of(buffer.strides)
        layout = f"torch.{buffer.dtype}, {shape}, {strides}"
        late = any(not self.text.late.isdisjoint(as_index(size).variables) for size in (*buffer.shape, *buffer.strides))
        recycle = self.recycle and buffer.device == "cpu" and not late and name in self.batch.outputs
        if recycle and not isinstance(buffer.extent, int):
            new = self.text.once(f"run.recycled({name!r}, {layout})", "new")
            self.lines.append(f"{self.text.name(name)} = {new}()")
            return
        if recycle and buffer.nbytes >= RECYCLE_BYTES:
            self.lines.append(f"{self.text.name(name)} = {self.text.once(f'run.fresh({layout})  # {name}', 'new')}()")
            return
        if buffer.device in _QUICK:
            made = f"{_QUICK[buffer.device]}({shape}, {strides}, torch.{buffer.dtype})"
        else:
            made = f"empty_strided({shape}, {strides}, dtype=torch.{buffer.dtype}, device={buffer.device!r})"
        self.lines.append(f"{self.text.name(name)} = {made}")

    def _inherit(self, host: str) -> None:
        """Make a donor's memory available from now on, or as much new memory if somebody else refers to it."""
        if self.table[host].storage == "out":
            self._ensure(host)
        elif host not in self.text.inherited:
            self.text.inherited.add(host)
            self.lines.append(f"{self.text.room(host)} = run.inherit({self.text.name(host)})")

    def _loop(self, loop: Loop, kernel: KernelSource) -> None:
        for name in sorted(loop.writes):
            self._ensure(name)
        if kernel.launches or not self.batch.on_gpu:
            self.batch.add(kernel)
        else:
            self.batch.call_kernel(kernel)

    def _product(self, step: Step, product: LibraryReplacement) -> None:
        """Call a kernel that replaces a library call; a matmul takes sizes and strides as numbers in memory."""
        for name in sorted(step.writes):
            self._ensure(name)
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

    # --- library calls ---

    def _in_chosen(self) -> set[str]:
        """Return inputs of matmuls with a chosen algorithm, which needs known strides and 16-byte alignment."""
        if not self.chosen:
            return set()
        steps = [step for step in self.program.steps if isinstance(step, Extern)]
        found = [step for step in steps if geometry(step, self.table) in self.chosen]
        return {view.buffer for step in found for view in factors_of(step) or ()}

    def _chosen(self, step: Extern) -> bool:
        """Call a matmul by its chosen algorithm, if there is one; return whether there is."""
        shape = geometry(step, self.table) if self.chosen else None
        if shape is None or shape not in self.chosen:
            return False
        factors, (out,) = factors_of(step), step.outs
        assert factors is not None and out is not None, "what has a geometry multiplies two, and is written somewhere"
        self._ensure(out)
        whole = View(out, self.table[out].shape, self.table[out].strides)
        given = [self.text.view(view) for view in (*factors, whole)] + ([SCALE.text] if step.kwargs == SCALED else [])
        product = self.text.once(f"run.product({step.op!r}, {astuple(shape)}, {self.chosen[shape]})", "op")
        self.lines += [f"# {', '.join(step.origin)}"] if step.origin else []
        self.lines.append(f"{product}({', '.join(given)})")
        return True

    def _extern(self, step: Extern) -> None:
        if self._chosen(step):
            return
        if step.mode == "mutate":
            for out in filter(None, step.outs):
                self._ensure(out)
        written = step.mode == "mutate"
        arguments = [self.text.argument(arg, written) for arg in step.args]
        arguments += [f"{name}={self.text.argument(arg, written)}" for name, arg in step.kwargs]
        if step.origin:
            self.lines.append(f"# {', '.join(step.origin)}")
        if step.mode == "out":
            op, names = out_overload(step.op)
            for result, keyword_ in zip(step.outs, names, strict=True):
                assert result is not None, f"{step.op} drops a result that it is to write"
                self._ensure(result)
                whole = View(result, self.table[result].shape, self.table[result].strides)
                arguments.append(f"{keyword_}={self.text.view(whole)}")
            called = function(op)
            if op in NARROWED and all(self._is_narrow(name) for name in step.outs if name is not None):
                called = f"run.narrow_product({op!r}, {called})"
            self.lines.append(f"{self.text.once(called, 'op')}({', '.join(arguments)})")
            return
        found = function(step.op) if in_torch(step.op) else f"run.function({step.op!r})"
        call = f"{self.text.once(found, 'op')}({', '.join(arguments)})"
        if step.mode == "mutate" or not any(step.outs):
            self.lines.append(call)
        else:
            self._take_results(step, call)

    def _take_results(self, step: Extern, call: str) -> None:
        """Name the results of a call, and check that they are as traced."""
        targets = [self.text.name(out) if out is not None else "_" for out in step.outs]
        single = len(targets) == 1 and returns_one_tensor(step.op)
        self.lines.append(f"{targets[0] if single else '(' + ', '.join(targets) + ',)'} = {call}")
        if "_" in targets:
            self.lines.append("del _")
        for out in filter(None, step.outs):
            self.batch.allocated.add(out)
            self._learn(out)
            self._check(out, step)
            self._fit(out, copied="_copy." in step.op)  # aten.split_with_sizes_copy.default
            if out not in self.last:
                self.batch.drop([out])

    def _region(self, step: Extern, dying: Sequence[str]) -> list[str]:
        """Call a region of another compiler, which holds its dying inputs alone and frees them during its run.

        Returns the buffers still to be released after it.
        """
        made, *inputs = step.args
        assert isinstance(made, View), "a region is called by its name among the constants"
        self.lines.append(f"_given = [{', '.join(map(self.text.argument, inputs))}]")
        handed = {name for name in step.reads if name != made.buffer}
        self.batch.drop([name for name in dying if name in handed])
        self.lines += [f"# {', '.join(step.origin)}"] if step.origin else []
        self._take_results(
            step, f"{self.text.once(f'run.function({step.op!r})', 'op')}({self.text.argument(made)}, _given)"
        )
        return [name for name in dying if name not in handed]

    def _is_narrow(self, name: str) -> bool:
        """Return whether a matmul's result has 16 bits and is on a CPU, which may lack instructions for it."""
        return self.table[name].device == "cpu" and self.table[name].dtype in ("bfloat16", "float16")

    def _learn(self, name: str) -> None:
        """Read sizes from a library result that defines them."""
        for dim, size in enumerate(self.table[name].shape):
            found = [symbol for symbol in as_index(size).variables if symbol in self.text.late - self.learnt]
            if len(found) == 1 and as_index(size) == var(found[0]):
                self.learnt.add(found[0])
                self.lines.append(f"{self.text.name(found[0])} = {self.text.name(name)}.shape[{dim}]")

    def _check(self, name: str, step: Extern) -> None:
        """Check a result's shape: kernels would read beyond one that is smaller than a custom operator's fake says."""
        buffer, result = self.table[name], self.text.name(name)
        if is_custom(step.op) and buffer.is_tensor and self._told(buffer.shape):
            wanted = f"({self.text.tuple_of(buffer.shape)}, torch.{buffer.dtype})"
            wanted, origin = self.text.once_if_known(wanted, "wanted", buffer.shape), ", ".join(step.origin) or step.op
            self.lines.append(f"if ({result}.shape, {result}.dtype) != {wanted}:")
            self.lines.append(f"    run.differs({result}, {wanted}, {origin!r})")
        elif not step.tells and has_late_shape(step.op) and buffer.is_tensor and self._told(buffer.shape):
            # torch._check fixes the size, and tracing trusts it
            wanted, origin = self.text.tuple_of(buffer.shape), ", ".join(step.origin) or step.op
            self.lines.append(f"if {result}.shape != {wanted}:")
            self.lines.append(f"    run.unlike({result}, {wanted}, {origin!r})")

    def _told(self, sizes: tuple[Size, ...]) -> bool:
        """Return whether all symbols in `sizes` are defined by now."""
        symbols = {symbol for size in sizes for symbol in as_index(size).variables}
        return not any(symbol.startswith("?") or symbol in self.text.late - self.learnt for symbol in symbols)

    def _fit(self, name: str, copied: bool) -> None:
        """Convert a library result whose strides differ from the traced ones that kernels rely on.

        Kernels of the backward rely on them, too, if the result is returned. A copy (`copied`) in place of the model's
        view has other strides than the view. Other returned results are eager's.
        """
        buffer = self.table[name]
        whole = View(name, buffer.shape, buffer.strides)
        returned = copied and name in self.batch.outputs and bool(buffer.strides) and self._told(buffer.strides)
        if returned or name in self.in_kernels or any(view != whole for view in self.looks.get(name, ())):
            strides = self.text.tuple_of(buffer.strides)
            if not all(isinstance(stride, int) for stride in buffer.strides):
                strides = self.text.once_if_known(strides, "strides", buffer.strides)
            self.lines.append(f"if {self.text.name(name)}.stride() != {strides}:")
            self.lines.append(f"    {self.text.name(name)} = run.fit({self.text.name(name)}, {strides})")


def _looked_around(step: Step) -> list[View]:
    """Return arguments that a call reads by an offset from the start of their storage."""
    if not isinstance(step, Extern) or step.op not in compat.storage_offsets.FROM_STORAGE:
        return []
    return [arg for arg in step.args[:1] if isinstance(arg, View)]
