"""Kernels and memory in the host program: runs of kernels as one call, allocated buffers, and the last use of each.

A run of kernels between library calls is driven by a table, which is prepared once. It lists the kernels and the
sources of their arguments. Known addresses are in it, and each call fills in the others. An optimizer's 64 kernels on
16 small tensors take 0.93 of the time.

Allocated are results, large buffers, and those that others are stored in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.codegen.emit.target import Kernels, KernelSource
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Size, as_index
from dcompile.ir.nodes import Collective, Extern, Loop, Program, View


def all_views(program: Program) -> Iterator[View]:
    for step in program.steps:
        call = step.call if isinstance(step, Collective) else step
        if isinstance(call, Extern):
            yield from call.views
    yield from (output for output in program.outputs if isinstance(output, View))


def known_bytes(buffer: Buffer) -> int:
    """Return the size of a buffer, or 0 where it is symbolic."""
    return buffer.nbytes if isinstance(buffer.extent, int) else 0


def last_uses(program: Program, calls: Iterable[KernelSource], hosts: Mapping[str, str]) -> dict[str, int]:
    """Return the last step that touches each buffer, or another buffer in its memory.

    A kernel may include the work of earlier loops, so it touches all of its arguments.
    """
    given = iter(calls)
    touched = (
        (position, step.reads | step.writes | frozenset(next(given).arguments if isinstance(step, Loop) else ()))
        for position, step in enumerate(program.steps)
    )
    return {n: at for at, names in touched for n in sorted(names.union(hosts[n] for n in names if n in hosts))}


ROOM_BYTES = 1 << 24
"""Bytes that batching GPU kernels may hold longer: a launch takes about 3 us."""
CPU_ROOM_BYTES = 1 << 16
"""The same for kernels on CPUs, and the size assumed for memory of unknown size: a call takes about as long."""


class LaunchBatch:
    """Collects the kernels of a run, and the tensors released after it."""

    def __init__(self, program: Program, kernels: Kernels, text: HostExpressions) -> None:
        self.text, self.lines = text, text.lines
        self.allocated: set[str] = set(program.inputs)
        self.outputs = program.returned
        self.shown = frozenset(text.hosts[name] for name in self.outputs if name in text.hosts)
        """Donor buffers whose memory holds results."""
        self.waiting: list[tuple[KernelSource, list[str]]] = []
        """Kernels of the current run: all kernels of a CPU program, or the GPU kernels with their arguments."""
        self.dying: list[str] = []
        """Tensors to be released after them."""
        self.on_gpu = any(kernel.launches for kernel in kernels.sources)

    def add(self, kernel: KernelSource) -> None:
        """Add a kernel to the run. On a CPU the run may stay a single call.

        A CPU kernel that may fail is a call of its own, whose line names its place in the user's program.
        """
        if not self.on_gpu and (kernel.checked or (self.waiting and self.waiting[-1][0].checked)):
            self.launch()
        self.waiting.append((kernel, self.named(kernel) if self.on_gpu else []))

    def drop(self, buffers: list[str]) -> None:
        """Release tensors after their last use, so that their memory can be reused."""
        ours = [b for b in buffers if b in self.allocated and b in self.text.table]
        # a size defined by a call is used under its own name until the end
        held = [b for b in ours if b not in self.outputs and b not in self.text.late]
        names = [
            *map(self.text.name, held),
            *(self.text.room(b) for b in held if b in self.text.inherited and b not in self.shown),
        ]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    def make_room(self, buffer: Buffer) -> None:
        """Launch the run before a large allocation if as much memory is released after it."""
        if not self.waiting or (self.on_gpu and buffer.device == "cpu"):
            return
        room = ROOM_BYTES if self.on_gpu else CPU_ROOM_BYTES
        freed = (self._weight(self.text.table[b]) for b in self.dying if b in self.allocated and b not in self.outputs)
        if self._weight(buffer) >= room and sum(freed) >= room:
            self.launch()

    def _weight(self, buffer: Buffer) -> int:
        known = isinstance(buffer.extent, int) or self.on_gpu
        return known_bytes(buffer) if known else CPU_ROOM_BYTES

    def launch(self) -> None:
        """Launch the run, then release the tensors that only it needed."""
        waiting, self.waiting = self.waiting, []
        if self.on_gpu and waiting:
            self._launch_on_gpu(waiting)
        elif len(waiting) == 1:
            self.call_kernel(waiting[0][0])
        elif waiting:
            self._call_kernels([kernel for kernel, _ in waiting])
        self.drop(self.dying)
        self.dying = []

    # --- CPUs ---

    def call_kernel(self, kernel: KernelSource) -> None:
        """Call one kernel by itself."""
        given = [*map(self.text.pointer, kernel.arguments), *map(self.text.name, kernel.sizes)]
        function = self.text.once(f"run.kernel({kernel.name!r}, {len(given)})", "k")
        self.lines += [f"# {', '.join(kernel.origin)}"] if kernel.origin else []
        call = f"{function}({', '.join(given)})"
        self.lines += [f"if failed := {call}:", "    run.failed(failed)"] if kernel.checked else [call]

    def _call_kernels(self, kernels: list[KernelSource]) -> None:
        named = [self.named(kernel) for kernel in kernels]
        slots = _slots(named)
        rows = []
        for kernel, names in zip(kernels, named, strict=True):
            rows += [f"# {', '.join(kernel.origin)}"] if kernel.origin else []
            rows.append(f"({kernel.name!r}, ({', '.join(slots.get(name, name) for name in names)},)),")
        run = self.text.once(f"run.calls({len(slots)}, [{_lines(rows)}\n    ])", "launch")
        self.lines.append(f"{run}({', '.join(slots)})")

    # --- GPUs ---

    def arguments_of(self, kernel: KernelSource) -> tuple[str, list[str]]:
        """Return a kernel's arguments in a launch table of its own, and what each call gives."""
        names = self.named(kernel)
        slots = _slots([names])
        return "".join(f"{slots.get(name, name)}, " for name in names).rstrip(), list(slots)

    def _launch_on_gpu(self, kernels: list[tuple[KernelSource, list[str]]]) -> None:
        run, values = self.launch_call(kernels)
        self.lines.append(f"{run}({', '.join(values)})")

    def launch_call(self, kernels: list[tuple[KernelSource, list[str]]]) -> tuple[str, list[str]]:
        """Return the function that launches kernels with these arguments, and what each call gives it."""
        slots, rows = _slots(names for _, names in kernels), list[str]()
        for kernel, names in kernels:
            rows += [f"# {', '.join(kernel.origin)}"] if kernel.origin else []
            for launch in kernel.launches:
                chosen = [slots.get(names[n], names[n]) for n in launch.arguments]
                arguments = f"({', '.join(chosen)},)"
                if launch.grid != 0:
                    grid = self._grid(launch.grid, slots)
                    rows.append(f"({kernel.name!r}, {launch.function!r}, {grid}, {arguments}),")
        run = self.text.once(f"run.launches({len(slots)}, [{_lines(rows)}\n    ])", "launch")
        return run, ["stream", *slots]

    def named(self, kernel: KernelSource) -> list[str]:
        """Return the names of a kernel's arguments."""
        given = [self.text.place(name) for name in kernel.arguments]
        given += [self._prepared_size(symbol) for symbol in kernel.sizes]
        return given + [f"run.number({number})" for number in kernel.numbers]

    def _prepared_size(self, symbol: str) -> str:
        """Return a size symbol in a launch table: a number known in advance, or the name of one known at each call."""
        return self.text.name(symbol) if symbol in self.text.late else f"run.number({self.text.name(symbol)})"

    def _grid(self, grid: Size, slots: dict[str, str]) -> str:
        """Return a number of programs in a launch table; one known only at the call becomes an argument of the call."""
        text = self.text.index(grid)
        if self.text.late.isdisjoint(as_index(grid).variables):
            return text
        return f"run.grid({slots.setdefault(text, str(len(slots)))})"


def _slots(named: Iterable[list[str]]) -> dict[str, str]:
    """Return the distinct arguments of a call -> their positions."""
    given = {name: None for names in named for name in names if not name.startswith("run.")}
    return {name: str(place) for place, name in enumerate(given)}


def _lines(rows: list[str]) -> str:
    return "".join(f"\n        {row}" for row in rows)


MIN_RECYCLED_BYTES = 1 << 18
"""Bytes from which a result reuses the memory of an earlier call's result. Fresh pages of a large allocation cost up to
three times as much as a memory-bound kernel."""
_QUICK = {"cpu": "empty_cpu", "cuda": "empty_cuda"}


class HostBuffers:
    """Writes the statements that allocate. `recycle`: whether results' memory is kept for the next call.

    `offloaded`: buffers in host memory that copies from the device fill.
    """

    def __init__(
        self,
        table: Mapping[str, Buffer],
        text: HostExpressions,
        batch: LaunchBatch,
        recycle: bool,
        offloaded: Set[str] = frozenset(),
    ) -> None:
        self.table, self.text, self.batch, self.recycle = table, text, batch, recycle
        self.offloaded = offloaded
        self.lines = text.lines

    def ensure(self, name: str) -> None:
        """Allocate an escaping buffer before the first step that writes it."""
        buffer = self.text.placed(name)
        if buffer.name != name:
            self.ensure(buffer.name)
            return
        if name in self.text.hosts:
            self._inherit(self.text.hosts[name])
            return
        if name in self.batch.allocated or buffer.storage == "arena" or buffer.bucket is not None:
            return
        self.batch.make_room(buffer)
        self.batch.allocated.add(name)
        shape, strides = self.text.tuple_of(buffer.shape), self.text.tuple_of(buffer.strides)
        layout = f"torch.{buffer.dtype}, {shape}, {strides}"
        if name in self.offloaded:
            self.lines.append(f"{self.text.name(name)} = {self.text.once(f'run.host_memory({layout})', 'new')}()")
            return
        late = any(not self.text.late.isdisjoint(as_index(size).variables) for size in (*buffer.shape, *buffer.strides))
        recycle = self.recycle and buffer.device == "cpu" and not late and name in self.batch.outputs
        if recycle and not isinstance(buffer.extent, int):
            new = self.text.once(f"run.recycled({name!r}, {layout})", "new")
            self.lines.append(f"{self.text.name(name)} = {new}()")
            return
        if recycle and buffer.nbytes >= MIN_RECYCLED_BYTES:
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
            self.ensure(host)
        elif host not in self.text.inherited:
            self.text.inherited.add(host)
            self.lines.append(f"{self.text.room(host)} = run.inherit({self.text.name(host)})")
