"""Rules 5 to 7 of well-formed programs: what may be read and written when, and pending collectives (see `verify`)."""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.ir.analysis import can_overwrite, runtime_refs
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Wait
from dcompile.ir.symbols import used_symbols
from dcompile.ir.verify_loop import require


class OrderCheck:
    """Check rules 5 to 7, step by step."""

    def __init__(self, program: Program, table: Mapping[str, Buffer]) -> None:
        self.inputs = frozenset(program.inputs) & table.keys()
        self.buckets = {bucket.name: bucket for bucket in program.buckets}
        self.table = table
        self.written = set(self.inputs)
        self.closed: set[str] = set()
        """Buffers that a loop or an out call has written: they may have no second writer."""
        self.in_flight: dict[str, Collective] = {}
        self.landed: set[str] = set()
        self.late = {symbol for step in program.steps if isinstance(step, Extern) for symbol in step.tells}
        """Sizes that no call has defined so far."""

    def advance(self, step: Loop | Extern | Collective | Wait) -> None:
        if isinstance(step, Wait):
            started = self.in_flight.pop(step.bucket, None)
            require(started is not None, f"wait for {step.bucket}, which is not in flight")
            assert started is not None
            same = (set(started.buffers), set(started.sent)) == (set(step.buffers), set(step.sent))
            require(same, f"{step.bucket} was started on other buffers")
            self.landed.add(step.bucket)
            return
        untold = used_symbols(step) & self.late if self.late else None
        require(not untold, f"{', '.join(sorted(untold or ()))} is used before a library call tells it")
        self.late.difference_update(step.tells if isinstance(step, Extern) else ())
        for collective in self.in_flight.values():
            touched = (step.reads | step.writes).intersection(collective.buffers) | step.writes.intersection(
                collective.sent
            )
            require(not touched, f"{', '.join(sorted(touched))} is touched while {collective.bucket} is in flight")
        if isinstance(step, Collective):
            self._start(step)
        elif isinstance(step, Extern) and step.mode == "mutate":
            self._read(step.reads)
        else:
            self._write(step)

    def _read(self, names: frozenset[str]) -> None:
        for name in sorted(names):
            require(name in self.table, f"{name} is unknown")
            require(name in self.written, f"{name} is read before it is written")
            require(not (name in self.inputs and name in self.closed), f"input {name} is read after it is overwritten")

    def _write(self, step: Loop | Extern) -> None:
        own = step.reads & step.writes
        require(own <= self.inputs, f"{', '.join(sorted(own))} is read by the step that writes it")
        self._read(step.reads)
        partly = _partly_written(step)
        require(partly <= self.inputs, f"{', '.join(sorted(partly))} is written in part, and is no input")
        for name in sorted(step.writes):
            require(name not in self.closed, f"{name} has a second writer")
            if isinstance(step, Loop) and name in own:
                require(can_overwrite(step, name, name), f"{step.name} overwrites elements of {name} still to be read")
            if name not in partly:
                self.closed.add(name)
            self.written.add(name)

    def _start(self, step: Collective) -> None:
        for name in sorted(step.reads):
            require(name in self.written, f"{name} is sent before it is written")
        made = step.writes - step.reads
        for name in sorted(made):
            require(name not in self.closed and name not in self.inputs, f"{name} has a second writer")
        self.closed.update(made)
        self.written.update(made)
        again = step.bucket in self.in_flight or step.bucket in self.landed
        require(not again, f"{step.bucket} is started a second time")
        if step.call is None and self.buckets:
            require(step.bucket in self.buckets, f"unknown bucket {step.bucket}")
        self.in_flight[step.bucket] = step

    def finish(self) -> None:
        require(not self.in_flight, f"nothing waits for {', '.join(sorted(self.in_flight))}")


def _partly_written(step: Loop | Extern) -> frozenset[str]:
    """Buffers that a loop writes at a position known only at run time."""
    stores = step.stores if isinstance(step, Loop) else ()
    return frozenset(store.buffer for store in stores if store.mode == "set" and runtime_refs(store.index))
