"""Look up a graph's trace in the cache, or record it while AOTAutograd traces, and store it on success.

A cached trace has AOTAutograd's metadata, the traced graphs, and facts that capture has found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from dcompile.capture.trace_cache.graph_record import graph_of, graph_record
from dcompile.collectives.contract import TraceStore
from dcompile.compat import aot_trace
from dcompile.compat.tensors import real_tensors
from dcompile.compat.trace_records import NotKeepable, Record
from dcompile.compat.trace_symbols import SizeSymbols
from dcompile.logs import report


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts that capture has found about a graph, apart from the graphs themselves."""

    gradients: tuple[tuple[int, int], ...] = ()
    """Gradients: (position among the backward's outputs, position among the graph's inputs)."""
    results: int = 0
    """Number of the forward's outputs before the saved tensors."""
    may_lack: bool = False
    """Whether the backward may run without tangents of unused results."""
    shapes_kept: tuple[int, ...] = ()
    without_gradients: tuple[int, ...] = ()
    """Positions of results that are views made under `torch.no_grad()`."""
    notes: tuple[str, ...] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """Records of a trace, as the cache stores them. `backward` is None for an inference graph."""

    metadata: Record
    forward: Record
    backward: Record
    facts: TraceFacts
    guards: Record
    """Guards on symbolic sizes that tracing has added."""

    def to_text(self) -> str:
        """Return the records as JSON."""
        parts = {"metadata": self.metadata, "forward": self.forward, "backward": self.backward, "guards": self.guards}
        return json.dumps(parts | {"facts": dataclasses.asdict(self.facts)}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class KeptTrace:
    """Trace from the cache, in the form that AOTAutograd's compilers receive."""

    metadata: Any
    forward: GraphModule
    """The forward graph, or the inference graph."""
    backward: GraphModule | None
    facts: TraceFacts


def kept_trace(text: str, symbols: SizeSymbols) -> KeptTrace | str:
    """Rebuild a trace from text, in the capture's fake tensor mode, and add its guards to the compilation.

    If the guards do not hold, return their text instead. Raises NotKeepable for damaged text.
    """
    try:
        found = json.loads(text)
        if not symbols.satisfy(found["guards"]):
            return json.dumps(found["guards"])
        symbols.add_guards(found["guards"])
        with real_tensors(), symbols.adding_no_guards():
            backward, facts = found["backward"], _facts(found["facts"])
            return KeptTrace(
                aot_trace.metadata_of(found["metadata"], symbols),
                graph_of(found["forward"], symbols, None if backward is None else facts.results),
                None if backward is None else graph_of(backward, symbols, is_backward=True),
                facts,
            )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise NotKeepable(f"{type(error).__name__}: {error}") from error


def _facts(found: Mapping[str, Any]) -> TraceFacts:
    gradients = tuple((place, position) for place, position in found["gradients"])
    lists = {name: tuple(found[name]) for name in ("shapes_kept", "without_gradients", "notes")}
    return TraceFacts(gradients, found["results"], found["may_lack"], fallbacks=found["fallbacks"], **lists)


MAX_VARIANTS = 8
"""Maximum number of traces of one graph that differ in their guards on symbolic sizes."""


class GraphTrace:
    """The trace of one Dynamo graph. `key` computes its cache key. A trace that cannot be cached has an objection.

    A trace whose guards do not hold for the sizes at hand is passed over. The next one's key follows from these guards.
    """

    def __init__(self, store: TraceStore | None, key: Callable[[SizeSymbols], str]) -> None:
        self.objection = ""
        """Why the graph is traced at each start; empty if traces are not cached at all."""
        self.cached: KeptTrace | None = None
        self._store, self._key = store, ""
        self._metadata = aot_trace.TracedMetadata()
        self._graphs: tuple[Record, Record, Record] | None = None
        self._facts = TraceFacts()
        self._symbols = SizeSymbols(aot_trace.tracing_mode())
        if store is None:
            return
        try:
            if not aot_trace.can_replay() or aot_trace.tracing_mode() is None:
                raise NotKeepable("AOTAutograd is called in a way that is not known")
            self._find(store, key(self._symbols))
        except NotKeepable as reason:
            self.objection = str(reason)

    def _find(self, store: TraceStore, key: str) -> None:
        """Read the first trace whose guards hold. A damaged entry is reported, and overwritten later.

        Raises NotKeepable if no further trace of this graph may be kept.
        """
        for _ in range(MAX_VARIANTS):
            text = store.find_trace(key)
            try:
                found = None if text is None else kept_trace(text, self._symbols)
            except NotKeepable as reason:
                report(logging.WARNING, f"a cached trace is damaged ({reason}); tracing it again")
                found = None
            if not isinstance(found, str):
                self._key, self.cached = key, found
                return
            key = hashlib.sha256(f"{key} without {found}".encode()).hexdigest()
        raise NotKeepable(f"{MAX_VARIANTS} traces are kept, each with guards on sizes that do not hold here")

    @property
    def is_noted(self) -> bool:
        """Whether the trace that AOTAutograd makes now will be cached."""
        return bool(self._key) and self.cached is None

    def recording(self) -> AbstractContextManager[None]:
        """Record AOTAutograd's work on the graph. Each use drops an earlier record."""
        self._metadata, self._graphs = aot_trace.TracedMetadata(), None
        return aot_trace.recording_metadata(self._metadata, self._symbols)

    def note_graphs(self, forward: GraphModule, backward: GraphModule | None, facts: TraceFacts) -> None:
        """Record the graphs before the compilers change them."""
        if not self.is_noted:
            return
        try:
            first = graph_record(forward, self._symbols)
            second = None if backward is None else graph_record(backward, self._symbols)
            self._graphs = first, second, self._symbols.added_guards()
            self._facts = facts
        except NotKeepable as reason:
            self.objection = str(reason)

    def refuse(self, reason: str) -> None:
        """Do not cache the trace, because the graph will run in another form."""
        self.objection, self._graphs = reason, None

    def keep(self, facts: Callable[[TraceFacts], TraceFacts]) -> None:
        """Store the trace after compilation has succeeded, with the facts found since."""
        if not self.is_noted or self._store is None:
            return
        self.objection = self.objection or self._metadata.objection
        if self._graphs is None or self.objection:
            self.objection = self.objection or "AOTAutograd has cut it in a way that is not known"
            return
        forward, backward, guards = self._graphs
        record = TraceRecord(self._metadata.record, forward, backward, facts(self._facts), guards)
        self._store.put_trace(self._key, record.to_text())
        self._graphs, self._symbols = None, SizeSymbols(None)  # which hold what tracing has made
