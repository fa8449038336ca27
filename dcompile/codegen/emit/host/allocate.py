"""Memory of buffers that a host program allocates: results, what is large, and what others are stored in."""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.host.batch_launches import LaunchBatch
from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import as_index

MIN_RECYCLED_BYTES = 1 << 18
"""Bytes from which a result reuses the memory of an earlier call's result. Fresh pages of a large allocation cost up to
three times as much as a memory-bound kernel."""
_QUICK = {"cpu": "empty_cpu", "cuda": "empty_cuda"}


class HostBuffers:
    """Writes the statements that allocate. `recycle`: whether results' memory is kept for the next call."""

    def __init__(self, table: Mapping[str, Buffer], text: HostExpressions, batch: LaunchBatch, recycle: bool) -> None:
        self.table, self.text, self.batch, self.recycle = table, text, batch, recycle
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
