"""The host program: readable Python that calls kernels and the library in order, and knows every address beforehand.

The text defines `make(run)`, which prepares kernels and arena memory through `run` (runtime/launch.py) and returns
`call(args, buckets, sync)`. Names that begin with an underscore are ours, the others are buffers of the program.

Where sizes are symbols, `sizes(args)` reads them off the arguments, `arena_bytes(*sizes)` says how much memory is
needed, and `make(run, *sizes)` prepares a call for these sizes: calls with the same sizes find all of it prepared.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dcompile.codegen.emit.emitter import Kernels, KernelSource, Product
from dcompile.ir.index import Atom, Div, Extreme, Index, Mod, Size, Var, as_index, as_size, floordiv, var
from dcompile.ir.nodes import (
    ITEMSIZE,
    LODGED,
    Arg,
    Bucket,
    Buffer,
    Collective,
    Extern,
    Literally,
    Loop,
    Program,
    Step,
    View,
    Wait,
    holder_of,
    views_of,
)
from dcompile.ir.symbols import Source, late_symbols, sources, symbols_of

RECYCLE_BYTES = 1 << 18
"""Results from this size on are written to memory that an earlier call's result has left: fresh pages of a large
allocation cost up to three times what a memory-bound kernel does."""
ROOM_BYTES = 1 << 24
"""Kernels on GPUs are started together where that does not hold this much memory longer: a start takes some 3 us."""
_TAKEN = frozenset(
    (
        *keyword.kwlist,
        *dir(builtins),
        "torch",
        "as_strided",
        "empty_strided",
        "empty_cpu",
        "empty_cuda",
        "entry",
        "look",
        "run",
        "args",
        "buckets",
        "sync",
        "call",
        "make",
        "stream",
    )
)


_IMPORTS = (
    "import torch",
    "from torch import as_strided, empty_strided",
    "from dcompile.runtime.quick import empty_cpu, empty_cuda, entry, look",
)
_QUICK = {"cpu": "empty_cpu", "cuda": "empty_cuda"}
_PYTHON = {f"aten.{name}.out": f"torch.{name}" for name in ("mm", "addmm", "bmm", "baddbmm")} | {
    "aten.convolution.default": "torch.convolution"
}
"""Functions whose arguments torch reads in half the time that it takes for an operator's: 0.8 for 1.5 us."""


_STARTS = {"all_gather": "start_gather", "reduce_scatter": "start_scatter"}
_WAITS = {"all_gather": "wait_gather", "reduce_scatter": "wait_scatter"}


def emit(program: Program, kernels: Kernels, *, recycle: bool = True) -> str:
    """The text of the host program.

    With `recycle`, results' memory is kept for the next call. That is for programs whose results nobody keeps for long:
    in training, what the forward saves goes while gradients come, and holding both would be the step's largest memory.
    """
    return _Host(program, kernels, recycle).text()


class _Host:
    """Collects the lines of `make` and of `call`."""

    def __init__(self, program: Program, kernels: Kernels, recycle: bool) -> None:
        self.recycle = recycle
        self.program, self.table = program, program.table
        self.calls, self.products = kernels.calls, kernels.products
        self.prepared: dict[str, str] = {}
        """Expression -> name of what `make` computes once."""
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        self.pointers: set[str] = set()
        self.allocated: set[str] = set(program.inputs)
        self.outputs = frozenset(output.buffer for output in program.outputs if isinstance(output, View))
        self.hosts = {b.name: (b.storage or "").removeprefix(LODGED) for b in program.buffers if _is_lodged(b)}
        """Buffer -> the buffer in whose memory it lies."""
        self.inherited: set[str] = set()
        self.last = _last_uses(program, self.hosts)
        loops = [step for step in program.steps if isinstance(step, Loop)]
        prepares = bool(loops) or isinstance(program.arena_bytes, Index)
        self.sources = sources(program)
        """Where sizes come from for which calls are prepared."""
        self.late = late_symbols(program)
        """Size symbols that only the call tells."""
        self.early: dict[str, Source] = {}
        """Sizes that the call itself reads off its arguments: where nothing is worth preparing for them."""
        if not prepares:
            self.early, self.sources, self.late = self.sources, {}, symbols_of(program)
        self.learnt: set[str] = set(self.early)
        self.in_kernels = {name for loop in loops for name in loop.reads | loop.writes}
        self.in_kernels |= {view.buffer for product in self.products.values() for view in product.views if view}
        self.waiting: list[tuple[KernelSource, list[str]]] = []
        """GPU kernels to be launched together, each with what its arguments are called."""
        self.dying: list[str] = []
        """Tensors to be released behind that launch."""
        self.on_gpu = any(kernel.launches for kernel in self.calls)
        self.exchanged = {bucket.name: bucket for bucket in program.buckets}
        self.looks: dict[str, list[View]] = {}
        """Every way in which library calls and outputs look at a buffer."""
        for view in _all_views(program):
            self.looks.setdefault(view.buffer, []).append(view)

    # --- text ---

    def text(self) -> str:
        self._call()
        loops = sum(isinstance(step, Loop) for step in self.program.steps)
        externs = sum(isinstance(step, Extern) for step in self.program.steps)
        head = f'"""{loops} kernel calls, {externs} library calls, arena of {self.program.arena_bytes} bytes."""'
        prepared = [f"    {name} = {expression}" for expression, name in self.prepared.items()]
        body = [f"        {line}" for line in self.lines]
        lines = [head, "", *_IMPORTS, "", ""]
        lines += self._sizes()
        lines += [f"def make({', '.join(('run', *map(self.name, self.sources)))}):"]
        lines += [*prepared, "", "    def call(args, buckets=None, sync=False):", *body, "", "    return call", ""]
        return "\n".join(lines)

    def _sizes(self) -> list[str]:
        """Functions that read the sizes off the arguments, and tell the memory needed."""
        if not self.sources:
            return []
        names = ", ".join(map(self.name, self.sources))
        lines = ["def sizes(args):"]
        for symbol, source in self.sources.items():
            given = f"args[{self.program.inputs.index(source.input)}]"
            lines.append(f"    {self.name(symbol)} = {self._value(source, given)}")
        lines += [f"    return ({names},)", "", "", f"def arena_bytes({names}):"]
        return [*lines, f"    return {self._index(self.program.arena_bytes)}", "", ""]

    def _value(self, source: Source, given: str) -> str:
        """What a size is worth, `given` being its input."""
        text = {"value": given, "shape": f"{given}.shape[{source.dim}]", "stride": f"{given}.stride({source.dim})"}
        value = text[source.what]
        if source.rest != as_index(0):
            value = f"({value} - ({self._index(source.rest)}))"
        return value if source.factor == as_index(1) else f"{value} // ({self._index(source.factor)})"

    def once(self, expression: str, prefix: str) -> str:
        """The name of a value that `make` computes."""
        if expression not in self.prepared:
            self.prepared[expression] = f"_{prefix}{len(self.prepared)}"
        return self.prepared[expression]

    def _prepared(self, expression: str, prefix: str, sizes: Iterable[Size]) -> str:
        """As `once`, for what depends on `sizes`: worked out in the call if one is known only there."""
        if any(not self.late.isdisjoint(as_index(size).variables) for size in sizes):
            return expression
        return self.once(expression, prefix)

    def name(self, buffer: str) -> str:
        """A Python name for a buffer or a size symbol."""
        if buffer not in self.names:
            name = re.sub(r"\W", "_", buffer)
            name = f"b{name}" if not name or name[0] == "_" or name[0].isdigit() else name
            while name in _TAKEN or name in self.names.values():
                name += "_"
            self.names[buffer] = name
        return self.names[buffer]

    # --- the call ---

    def _call(self) -> None:
        self._inputs()
        for bucket in self.program.buckets:
            if bucket.kind == "all_reduce":
                self.lines.append(f"{self._memory(bucket.name)} = buckets.acquire({bucket.name!r})")
        calls = iter(self.calls)
        dying: dict[int, list[str]] = {}
        for name, position in self.last.items():
            dying.setdefault(position, []).append(name)
        for position, step in enumerate(self.program.steps):
            if not isinstance(step, Loop):
                self._launch()
            if position in self.products:
                self._product(step, self.products[position])
            else:
                self._step(step, calls)
            if self.waiting:
                self.dying += dying.get(position, [])
            else:
                self._drop(dying.get(position, []))
        self._launch()
        outputs = ", ".join(self._output(output) for output in self.program.outputs)
        self.lines.append(f"return [{outputs}]")

    def _inputs(self) -> None:
        names = [self.name(name) for name in self.program.inputs]
        if names:
            self.lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        if self.on_gpu:
            self._check_alignment()
        self.lines.append("args.clear()")
        for symbol, source in self.early.items():
            if symbol not in self.program.inputs:
                self.lines.append(f"{self.name(symbol)} = {self._value(source, self.name(source.input))}")
        self._drop([name for name in self.program.inputs if name in self.table and name not in self.last])

    def _check_alignment(self) -> None:
        """Kernels were made for addresses of whole 16 bytes; the caller's tensors may be slices that are not."""
        used = [name for name in self.program.inputs if name in self.in_kernels and self.table[name].device != "cpu"]
        pointers = [self._pointer(name) for name in used]
        if pointers:
            written = {name for step in self.program.steps for name in step.writes}
            places = tuple(place for place, name in enumerate(self.program.inputs) if name in written)
            self.lines += [
                f"if ({' | '.join(pointers)}) & 15:",
                f"    return run.realigned(call, args, {places!r}, buckets, sync)",
            ]
        self.lines.append("stream = run.stream()")

    def _drop(self, buffers: list[str]) -> None:
        """Release tensors after their last use, so that their memory can be used again."""
        kept = self.outputs | self.late  # a size that a call has told is used under its own name to the end
        held = [b for b in buffers if b in self.allocated and b not in kept and b in self.table]
        if held:
            self.lines.append(f"del {', '.join(map(self.name, held))}")

    def _step(self, step: Step, calls: Any) -> None:
        match step:
            case Loop():
                self._loop(step, next(calls))
            case Extern():
                self._extern(step)
            case Collective("all_reduce"):
                memory = self._memory(step.bucket)
                self.lines += ["if sync:", f"    buckets.start({step.bucket!r}, {memory})"]
            case Collective(kind):
                self._exchange(kind, self.exchanged[step.bucket])
            case Wait():
                self._wait(step.bucket)

    def _exchange(self, kind: str, bucket: Bucket) -> None:
        """Start gathering or reducing units, each as one flat tensor."""
        for name in bucket.holders:
            self._ensure(name)
        whole = [View(name, (size,), (1,)) for name, size in zip(bucket.holders, bucket.sizes, strict=True)]
        tensors = ", ".join(map(self._view, whole))
        self.lines.append(f"buckets.{_STARTS[kind]}({bucket.name!r}, [{tensors}])")

    def _wait(self, name: str) -> None:
        kind = self.exchanged[name].kind
        if kind == "all_reduce":
            self.lines += ["if sync:", f"    buckets.wait({name!r}, {self._memory(name)})"]
        else:
            self.lines.append(f"buckets.{_WAITS[kind]}({name!r})")

    # --- memory ---

    def _memory(self, bucket: str) -> str:
        return "_bucket_" + re.sub(r"\W", "_", bucket)

    def _bucket_of(self, buffer: Buffer) -> str | None:
        return (buffer.storage or "").removeprefix("bucket:") if (buffer.storage or "").startswith("bucket:") else None

    def _placed(self, name: str) -> Buffer:
        """The buffer that memory planning has placed: this one, or the one that it is a part of."""
        buffer = self.table[name]
        holder = holder_of(buffer)
        return buffer if holder is None else self.table[holder]

    def _within(self, name: str) -> Size:
        """Bytes from the start of the placed buffer to this one."""
        buffer = self.table[name]
        return 0 if holder_of(buffer) is None else buffer.offset

    def _ensure(self, name: str) -> None:
        """Allocate an escaping buffer before the first step that writes it."""
        buffer = self._placed(name)
        if buffer.name != name:
            self._ensure(buffer.name)
            return
        if name in self.hosts:
            self._inherit(self.hosts[name])
            return
        if name in self.allocated or buffer.storage == "arena" or self._bucket_of(buffer) is not None:
            return
        self._make_room(buffer)
        self.allocated.add(name)
        shape, strides = self._tuple(buffer.shape), self._tuple(buffer.strides)
        layout = f"torch.{buffer.dtype}, {shape}, {strides}"
        late = any(not self.late.isdisjoint(as_index(size).variables) for size in (*buffer.shape, *buffer.strides))
        recycle = self.recycle and buffer.device == "cpu" and not late
        if recycle and not isinstance(buffer.extent, int):
            self.lines.append(f"{self.name(name)} = {self.once(f'run.recycled({name!r}, {layout})', 'new')}()")
            return
        if recycle and buffer.nbytes >= RECYCLE_BYTES:
            self.lines.append(f"{self.name(name)} = {self.once(f'run.fresh({layout})  # {name}', 'new')}()")
            return
        if buffer.device in _QUICK:
            made = f"{_QUICK[buffer.device]}({shape}, {strides}, torch.{buffer.dtype})"
        else:
            made = f"empty_strided({shape}, {strides}, dtype=torch.{buffer.dtype}, device={buffer.device!r})"
        self.lines.append(f"{self.name(name)} = {made}")

    def _make_room(self, buffer: Buffer) -> None:
        """Before a large allocation on a GPU: start the waiting kernels if memory as large is released behind them."""
        if not self.waiting or buffer.device == "cpu" or _known_bytes(buffer) < ROOM_BYTES:
            return
        freed = (_known_bytes(self.table[b]) for b in self.dying if b in self.allocated and b not in self.outputs)
        if sum(freed) >= ROOM_BYTES:
            self._launch()

    def _inherit(self, host: str) -> None:
        """See that others may lie in a buffer's memory from now on: nobody else must be able to see it."""
        if self.table[host].storage == "out":
            self._ensure(host)
        elif host not in self.inherited:
            self.inherited.add(host)
            self.lines.append(f"{self.name(host)} = run.inherit({self.name(host)})")
            self.pointers.discard(f"_p_{self.name(host)}")  # it may be a copy

    def _pointer(self, name: str) -> str:
        """The address of a buffer, for a kernel."""
        buffer = self._placed(name)
        if buffer.name != name:
            within = self._within(name)
            return self._pointer(buffer.name) + (f" + {within}" if within else "")
        if name in self.hosts:
            pointer = self._pointer(self.hosts[name])
            return f"{pointer} + {buffer.offset}" if buffer.offset else pointer
        if buffer.storage == "arena":
            at = as_size(as_index(buffer.offset) + as_index(self._within(name)))
            return self.once(f"run.address + {self._index(at)}", "at")
        if buffer.name != name:
            within = self._within(name)
            return self._pointer(buffer.name) + (f" + {within}" if within else "")
        bucket = self._bucket_of(buffer)
        pointer = f"_p_{self.name(name)}" if bucket is None else f"_p{self._memory(bucket)}"
        if pointer not in self.pointers:
            self.pointers.add(pointer)
            source = self.name(name) if bucket is None else f"{self._memory(bucket)}.flat"
            self.lines.append(f"{pointer} = {source}.data_ptr()")
        return pointer if bucket is None or not buffer.offset else f"{pointer} + {buffer.offset}"

    def _loop(self, loop: Loop, kernel: KernelSource) -> None:
        for name in sorted(loop.writes):
            self._ensure(name)
        if kernel.launches:
            given = [self._place(name) for name in kernel.arguments]
            numbers = (*map(self.name, kernel.sizes), *kernel.numbers)
            self.waiting.append((kernel, given + [f"run.number({number})" for number in numbers]))
            return
        pointers = [self._pointer(name) for name in kernel.arguments]
        sizes = [self.name(symbol) for symbol in kernel.sizes]
        counts = ", ".join(map(str, (len(pointers), len(sizes)) if sizes else (len(pointers),)))
        function = self.once(f"run.kernel({kernel.name!r}, {counts})", "k")
        call = f"{function}({', '.join([*pointers, *sizes])})"
        if loop.origin:
            self.lines.append(f"# {', '.join(loop.origin)}")
        if kernel.checked:
            self.lines += [f"if {call}:", "    run.division_by_zero()"]
        else:
            self.lines.append(call)

    def _product(self, step: Step, product: Product) -> None:
        """A matrix product by a kernel of ours, which takes sizes and strides as numbers in memory."""
        for name in sorted(step.writes):
            self._ensure(name)
        sizes = self._prepared(f"run.numbers({', '.join(map(self._index, product.sizes))})", "n", product.sizes)
        pointers = [sizes, *(self._address(view) if view else "None" for view in product.views)]
        function = self.once(f"run.kernel({product.kernel.name!r}, {len(pointers)})", "k")
        origin = step.origin if isinstance(step, Extern) else ()
        if origin:
            self.lines.append(f"# {', '.join(origin)}")
        self.lines.append(f"{function}({', '.join(pointers)})")

    def _address(self, view: View) -> str:
        """Where a view begins."""
        pointer, buffer = self._pointer(view.buffer), self.table[view.buffer]
        if as_index(view.offset) == as_index(0):
            return pointer
        return f"{pointer} + {self._index(as_index(view.offset) * ITEMSIZE[buffer.dtype])}"

    # --- launches ---

    def _place(self, name: str) -> str:
        """A kernel's argument in a launch table: an address in the arena, or the name of one known at each call."""
        buffer = self._placed(name)
        if buffer.storage != "arena":
            return self._pointer(name)
        return f"run.at({self._index(as_size(as_index(buffer.offset) + as_index(self._within(name))))})"

    def _launch(self) -> None:
        """Start the waiting kernels, then release what only they needed."""
        if self.waiting:
            given = {a: None for _, addresses in self.waiting for a in addresses if not a.startswith("run.")}
            slots = {address: str(place) for place, address in enumerate(given)}
            lines = []
            for kernel, addresses in self.waiting:
                lines += [f"# {', '.join(kernel.origin)}"] if kernel.origin else []
                for launch in kernel.launches:
                    chosen = [slots.get(addresses[n], addresses[n]) for n in launch.arguments]
                    arguments = f"({', '.join(chosen)},)"
                    if launch.grid != 0:
                        grid = self._index(launch.grid)
                        lines.append(f"({kernel.name!r}, {launch.function!r}, {grid}, {arguments}),")
            table = "".join(f"\n        {line}" for line in lines)
            run = self.once(f"run.launches({len(slots)}, [{table}\n    ])", "launch")
            self.lines.append(f"{run}({', '.join(['stream', *slots])})")
        self.waiting = []
        self._drop(self.dying)
        self.dying = []

    # --- tensors ---

    def _tuple(self, sizes: Sequence[Size]) -> str:
        items = [self._index(size) for size in sizes]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    def _index(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        terms = []
        for monomial, coefficient in size.terms:
            factors = [self._atom(atom) for atom in monomial]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            terms.append(" * ".join(factors))
        return " + ".join(terms) or "0"

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var(name):
                return self.name(name)
            case Extreme(kind, left, right):
                return f"{kind}({self._index(left)}, {self._index(right)})"
            case Div(base, divisor):
                return f"(({self._index(base)}) // ({self._index(divisor)}))"
            case Mod(base, divisor):
                return f"(({self._index(base)}) % ({self._index(divisor)}))"

    def _view(self, view: View, fresh: bool = False, written: bool = False) -> str:
        """An expression for a tensor; `fresh` where it is handed to the caller, who may keep it.

        `written` where the library may write to it: autograd's count of changes to the caller's tensor must show that.
        """
        buffer = self._placed(view.buffer)
        if buffer.name != view.buffer:
            start = floordiv(as_index(self._within(view.buffer)), ITEMSIZE[buffer.dtype], {})
            view = replace(view, buffer=buffer.name, offset=as_size(as_index(view.offset) + start))
        shape, strides = self._tuple(view.shape), self._tuple(view.strides)
        if buffer.storage == "arena":
            assert not fresh, f"output {view.buffer} lies in the arena"
            at = self._index(as_size(as_index(buffer.offset) + as_index(view.offset) * ITEMSIZE[buffer.dtype]))
            text = f"run.view(torch.{buffer.dtype}, {shape}, {strides}, {at})"
            return self._prepared(text, "v", (*view.shape, *view.strides, view.offset))
        bucket = self._bucket_of(buffer)
        if bucket is not None:
            assert isinstance(buffer.offset, int), f"{view.buffer} has no fixed place in its bucket"
            at = self._index(as_index(view.offset) + buffer.offset // ITEMSIZE[buffer.dtype])
            flat = self._memory(bucket)
            if fresh:
                return f"as_strided({flat}.flat, {shape}, {strides}, {at})"
            return f"run.bucket_view({flat}, {view.buffer!r}, {shape}, {strides}, {at})"
        if view.buffer in self.hosts:
            return self._view_in_host(view, shape, strides)
        name = self.name(view.buffer)
        if (
            _same(view.shape, buffer.shape)
            and _same(view.strides, buffer.strides)
            and as_index(view.offset) == as_index(0)
        ):
            return name
        if buffer.storage == "out" and fresh and self._is_shown_once(view.buffer):
            # no view of another tensor, which would keep that one: a backward may take the memory of what is saved
            return f"look({name}, {shape}, {strides}, {self._index(view.offset)})"
        if buffer.storage == "out" and fresh:
            return f"as_strided({name}, {shape}, {strides}, {self._index(view.offset)})"
        if not fresh and not written:
            return f"look({name}, {shape}, {strides}, {self._index(view.offset)})"
        offset = "" if as_index(view.offset) == as_index(0) else f" + {self._index(view.offset)}"
        return f"as_strided({name}, {shape}, {strides}, {name}.storage_offset(){offset})"

    def _is_shown_once(self, name: str) -> bool:
        return sum(isinstance(output, View) and output.buffer == name for output in self.program.outputs) == 1

    def _view_in_host(self, view: View, shape: str, strides: str) -> str:
        """A tensor in another buffer's memory."""
        buffer, host = self.table[view.buffer], self.table[self.hosts[view.buffer]]
        assert isinstance(buffer.offset, int), f"{buffer.name} has no fixed place in {host.name}"
        name, itemsize = self.name(host.name), ITEMSIZE[buffer.dtype]
        if host.dtype != buffer.dtype:
            at = self._index(as_index(view.offset) * itemsize + buffer.offset)
            return f"run.within({name}, torch.{buffer.dtype}, {shape}, {strides}, {at})"
        at = self._index(as_index(view.offset) + buffer.offset // itemsize)
        if at == "0" and _same(view.shape, host.shape) and _same(view.strides, host.strides):
            return name
        return f"look({name}, {shape}, {strides}, {at})"

    def _output(self, output: View | Index | int | float | bool | None) -> str:
        match output:
            case View():
                return self._view(output, fresh=True)
            case Index():
                return self._index(output)
            case float():
                return f"float({str(output)!r})"  # also inf and nan
            case _:
                return repr(output)

    # --- library calls ---

    def _argument(self, arg: Arg, written: bool = False) -> str:
        match arg:
            case View():
                return self._view(arg, written=written)
            case Index():
                return self._index(arg)
            case Literally(text):
                return text
            case tuple():
                return f"[{', '.join(self._argument(item, written) for item in arg)}]"
            case float():
                return repr(arg) if abs(arg) < float("inf") else f"float({str(arg)!r})"
            case _:
                return repr(arg)

    def _extern(self, step: Extern) -> None:
        if step.mode == "mutate":
            for out in filter(None, step.outs):
                self._ensure(out)
        written = step.mode == "mutate"
        arguments = [self._argument(arg, written) for arg in step.args]
        arguments += [f"{name}={self._argument(arg, written)}" for name, arg in step.kwargs]
        if step.origin:
            self.lines.append(f"# {', '.join(step.origin)}")
        if step.mode == "out":
            op, names = out_overload(step.op)
            for result, keyword_ in zip(step.outs, names, strict=True):
                assert result is not None, f"{step.op} drops a result that it is to write"
                self._ensure(result)
                whole = View(result, self.table[result].shape, self.table[result].strides)
                arguments.append(f"{keyword_}={self._view(whole)}")
            self.lines.append(f"{self.once(_function(op), 'op')}({', '.join(arguments)})")
            return
        found = _function(step.op) if in_torch(step.op) else f"run.function({step.op!r})"
        call = f"{self.once(found, 'op')}({', '.join(arguments)})"
        if step.mode == "mutate" or not any(step.outs):
            self.lines.append(call)
            return
        targets = [self.name(out) if out is not None else "_" for out in step.outs]
        single = len(targets) == 1 and returns_one_tensor(step.op)
        self.lines.append(f"{targets[0] if single else '(' + ', '.join(targets) + ',)'} = {call}")
        if "_" in targets:
            self.lines.append("del _")
        for out in filter(None, step.outs):
            self.allocated.add(out)
            self._learn(out)
            self._fit(out)
            if out not in self.last:
                self._drop([out])

    def _learn(self, name: str) -> None:
        """Sizes that a library result tells."""
        for dim, size in enumerate(self.table[name].shape):
            found = [symbol for symbol in as_index(size).variables if symbol in self.late and symbol not in self.learnt]
            if len(found) == 1 and as_index(size) == var(found[0]):
                self.learnt.add(found[0])
                self.lines.append(f"{self.name(found[0])} = {self.name(name)}.shape[{dim}]")

    def _fit(self, name: str) -> None:
        """Kernels rely on the strides that tracing gave a library result; bring it to these should it differ."""
        buffer = self.table[name]
        whole = View(name, buffer.shape, buffer.strides)
        if name in self.in_kernels or any(view != whole for view in self.looks.get(name, ())):
            strides = self._tuple(buffer.strides)
            if not all(isinstance(stride, int) for stride in buffer.strides):
                strides = self._prepared(strides, "strides", buffer.strides)
            self.lines += [
                f"if {self.name(name)}.stride() != {strides}:",
                f"    {self.name(name)} = run.fit({self.name(name)}, {strides})",
            ]


def _same(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(as_index(x) == as_index(y) for x, y in zip(a, b, strict=True))


def _views(step: Extern) -> list[View]:
    return [view for arg in (*step.args, *(value for _, value in step.kwargs)) for view in views_of(arg)]


def _all_views(program: Program) -> Iterator[View]:
    for step in program.steps:
        if isinstance(step, Extern):
            yield from _views(step)
    yield from (output for output in program.outputs if isinstance(output, View))


def _known_bytes(buffer: Buffer) -> int:
    """Its size; 0 where that is not known yet."""
    return buffer.nbytes if isinstance(buffer.extent, int) else 0


def _is_lodged(buffer: Buffer) -> bool:
    return (buffer.storage or "").startswith(LODGED)


def _last_uses(program: Program, hosts: Mapping[str, str]) -> dict[str, int]:
    """The last step that touches each buffer, or another one in its memory."""
    touched = ((position, step.reads | step.writes) for position, step in enumerate(program.steps))
    return {n: at for at, names in touched for n in sorted(names.union(hosts[n] for n in names if n in hosts))}


# --- schemas ----------------------------------------------------------------------------------------------------------


def resolve(op: str) -> Any:
    """The overload that a name such as `aten.mm.default` stands for."""
    return functools.reduce(getattr, op.split("."), torch.ops)


def _function(op: str) -> str:
    """What to call for an overload."""
    return _PYTHON.get(op, f"entry(torch.ops.{op})")


def in_torch(op: str) -> bool:
    """Whether an op is in `torch.ops`; the others are checks of ours and Python's own functions on numbers."""
    return op.split(".", 1)[0] not in ("dcompile", "operator", "math", "builtins", "torch")


@functools.cache
def returns_one_tensor(op: str) -> bool:
    """Whether a call returns a tensor (or a number, as aten.sym_numel does) rather than a tuple or a list of them."""
    schema = getattr(resolve(op), "_schema", None) if in_torch(op) else None
    return schema is None or (len(schema.returns) == 1 and not str(schema.returns[0].type).startswith("List["))


@functools.cache
def out_overload(op: str) -> tuple[str, tuple[str, ...]]:
    """The out= overload of an op, and the names of its out arguments."""
    function = resolve(op)
    outs = tuple(a.name for a in function._schema.arguments if a.is_out)
    if outs:
        return op, outs
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments]
    packet, _ = op.rsplit(".", 1)
    for overload in resolve(packet).overloads():
        arguments = getattr(resolve(packet), overload)._schema.arguments
        outs = tuple(a.name for a in arguments if a.is_out)
        if outs and [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted:
            return f"{packet}.{overload}", outs
    raise AssertionError(f"{op} has no out= overload: lowering must not choose mode out for it")
