"""One graph's trace: looked up in the cache, or noted while AOTAutograd makes it and kept once that has worked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.fx import GraphModule

from dcompile.capture.trace_cache.graph_record import graph_record
from dcompile.capture.trace_cache.traced_graph import KeptTrace, TraceFacts, TraceRecord, kept_trace
from dcompile.collectives.contract import TraceStore
from dcompile.compat import aot_trace
from dcompile.compat.trace_records import NotKeepable, Record
from dcompile.logs import report


class GraphTrace:
    """The trace of one Dynamo graph, of which `key` makes the name. What cannot be kept has an objection."""

    def __init__(self, store: TraceStore | None, key: Callable[[], str]) -> None:
        self.objection = ""
        """Why the graph is traced anew at each start; nothing where traces are not kept at all."""
        self.cached: KeptTrace | None = None
        self._store, self._key = store, ""
        self._metadata = aot_trace.TracedMetadata()
        self._graphs: tuple[Record, Record] | None = None
        self._facts = TraceFacts()
        if store is None:
            return
        try:
            if not aot_trace.can_replay() or aot_trace.tracing_mode() is None:
                raise NotKeepable("AOTAutograd is called in a way that is not known")
            self._key = key()
        except NotKeepable as reason:
            self.objection = str(reason)
            return
        text = store.find_trace(self._key)
        if text is not None:
            self._read(text)

    def _read(self, text: str) -> None:
        """Make graphs of an entry; of one that cannot be read, say so, and it will be written anew."""
        try:
            self.cached = kept_trace(text)
        except NotKeepable as reason:
            report(logging.WARNING, f"a cached trace is damaged ({reason}); tracing it again")

    @property
    def is_noted(self) -> bool:
        """Whether what AOTAutograd traces now is going to be kept."""
        return bool(self._key) and self.cached is None

    def recording(self) -> AbstractContextManager[None]:
        """Around AOTAutograd's work on the graph: it starts anew with each use."""
        self._metadata, self._graphs = aot_trace.TracedMetadata(), None
        return aot_trace.recording_metadata(self._metadata)

    def note_graphs(self, forward: GraphModule, backward: GraphModule | None, facts: TraceFacts) -> None:
        """The graphs as they are handed to compilers, which change them: so they are put into words at once."""
        if not self.is_noted:
            return
        try:
            self._graphs = graph_record(forward), None if backward is None else graph_record(backward)
            self._facts = facts
        except NotKeepable as reason:
            self.objection = str(reason)

    def refuse(self, reason: str) -> None:
        """The graph will not run as it was traced."""
        self.objection, self._graphs = reason, None

    def keep(self, facts: Callable[[TraceFacts], TraceFacts]) -> None:
        """Compiling has worked: keep the trace, with what was found out since."""
        if not self.is_noted or self._store is None:
            return
        self.objection = self.objection or self._metadata.objection
        if self._graphs is None or self.objection:
            self.objection = self.objection or "AOTAutograd has cut it in a way that is not known"
            return
        forward, backward = self._graphs
        record = TraceRecord(self._metadata.record, forward, backward, facts(self._facts))
        self._store.put_trace(self._key, record.to_text())
        self._graphs = None
