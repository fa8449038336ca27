"""Cache of AOTAutograd's traces: forward and backward of a Dynamo graph, keyed by everything that tracing reads.

A graph's trace is looked up in the cache, or recorded while AOTAutograd traces, and stored on success. It has
AOTAutograd's metadata, the traced graphs, and facts that capture has found. The traced graphs are JSON: nodes with
names, arguments, fake tensors and metadata of later stages. Tensors that share memory share it again. Metadata that no
stage after partitioning reads is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dcompile.capture.passes.run_passes import DONATED
from dcompile.capture.warm_start.records import (
    RecordReader,
    RecordWriter,
    constant_of,
    constant_record,
    node_numbers,
    target_name,
    target_of,
    value_of,
    value_record,
)
from dcompile.capture.warm_start.size_symbols import DATA_DEPENDENT, Record, SizeSymbols
from dcompile.collectives.contract import TraceStore
from dcompile.compat import aot_trace
from dcompile.compat.aot import lazy_graph_module
from dcompile.compat.process_state import NotKeepable
from dcompile.compat.tensors import real_tensors
from dcompile.logs import report


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts that capture has found about a graph, apart from the graphs themselves."""

    gradients: tuple[tuple[int, int], ...] = ()
    """Gradients: (position among the backward's outputs, position among the graph's inputs)."""
    results: int = 0
    """Number of the forward's outputs before the saved tensors."""
    may_have_absent_grads: bool = False
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
                value_of(found["metadata"], symbols),
                graph_of(found["forward"], symbols, None if backward is None else facts.results),
                None if backward is None else graph_of(backward, symbols, is_backward=True),
                facts,
            )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise NotKeepable(f"{type(error).__name__}: {error}") from error


def _facts(found: Mapping[str, Any]) -> TraceFacts:
    gradients = tuple((place, position) for place, position in found["gradients"])
    lists = {name: tuple(found[name]) for name in ("shapes_kept", "without_gradients", "notes")}
    return TraceFacts(
        gradients, found["results"], found["may_have_absent_grads"], fallbacks=found["fallbacks"], **lists
    )


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
        return aot_trace.recording_metadata(self._metadata, functools.partial(value_record, symbols=self._symbols))

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


# --- graphs as JSON ---------------------------------------------------------------------------------------------------

_OPS = ("placeholder", "get_attr", "call_function", "output")
_VALUES = ("val", "desc", "custom", DONATED, "partitioner_tag", "saved_tensor_with_no_vc_check")
"""Keys of node metadata that later stages read, and whose content is a value."""
_NO_KWARGS: Record = {"d": []}
"""Record of the keyword arguments of most nodes."""
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Keys of node metadata about modules. Of each entry, only the module's path is kept."""


def graph_record(gm: GraphModule, symbols: SizeSymbols) -> Record:
    """Return the record of a graph. Raises NotKeepable."""
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    writer = RecordWriter(symbols, numbers.__getitem__)
    nodes = [_node_record(node, writer) for node in gm.graph.nodes]
    constants = {
        str(node.target): _held_record(operator.attrgetter(str(node.target))(gm), symbols)
        for node in gm.graph.find_nodes(op="get_attr")
    }
    return {"nodes": nodes, "constants": constants} | writer.tables()


def _held_record(value: Any, symbols: SizeSymbols) -> Record:
    """Return the record of an attribute: a graph, as FlexAttention has for its scores, or a small tensor."""
    return {"graph": graph_record(value, symbols)} if isinstance(value, GraphModule) else constant_record(value)


def _node_record(node: Node, writer: RecordWriter) -> Record:
    if node.op not in _OPS:
        raise NotKeepable(f"it has a node of kind {node.op}")
    if node.meta.get("unbacked_bindings"):
        raise NotKeepable(DATA_DEPENDENT)
    target = target_name(node.target) if node.op == "call_function" else str(node.target)
    notes: dict[str, Record] = {key: writer.value(node.meta[key]) for key in _VALUES if node.meta.get(key) is not None}
    for key in _STACKS:
        if node.meta.get(key):
            notes[key] = [writer.text(entry[0]) for entry in node.meta[key].values()]
    if node.meta.get("stack_trace"):
        notes["stack_trace"] = writer.text(node.meta["stack_trace"])
    return [_OPS.index(node.op), node.name, target, writer.value(node.args), writer.value(node.kwargs), notes]


def graph_of(
    record: Mapping[str, Any], symbols: SizeSymbols, results: int | None = None, is_backward: bool = False
) -> GraphModule:
    """Return the graph of a record. Call it outside fake tensor modes. Raises NotKeepable for a damaged record.

    `results`: number of outputs before those that are saved for a backward; None if there are none.
    """
    reader, graph = RecordReader(record, symbols, _boundary(record, results, is_backward)), Graph()
    for kind, name, target, args, kwargs, notes in record["nodes"]:
        op = _OPS[kind]
        called = target_of(target) if op == "call_function" else target
        node = graph.create_node(op, called, name=name)
        if node.name != name:
            raise NotKeepable(f"a node cannot be called {name} again")
        _set_arguments(node, reader.value(args), {} if kwargs == _NO_KWARGS else reader.value(kwargs))
        reader.nodes.append(node)
        node.meta.update(_node_notes(notes, reader))
    root = torch.nn.Module()
    for name, constant in record["constants"].items():
        if "graph" in constant:
            root.add_module(name, graph_of(constant["graph"], symbols))
        else:
            root.register_buffer(name, constant_of(constant), persistent=False)
    # AOTAutograd copies a backward before it is compiled, and torch's deep copy includes all that it holds
    made: GraphModule = lazy_graph_module(root, graph, _copied)
    return made


def _set_arguments(node: Node, args: Any, kwargs: Any) -> None:
    """Give a new node its arguments.

    `create_node` would search them for symbolic numbers. A plain assignment would file the node anew in fx's tables,
    which list nodes by target.
    """
    object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)


def _copied(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph with its own nodes and metadata; values and constants are the same objects."""
    graph, nodes = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        nodes[node] = made = graph.create_node(node.op, node.target, name=node.name)
        kwargs = node.kwargs
        _set_arguments(
            made, map_arg(node.args, nodes.__getitem__), map_arg(kwargs, nodes.__getitem__) if kwargs else kwargs
        )
        made.meta.update(node.meta)
    copied: GraphModule = lazy_graph_module(gm, graph)
    return copied


def _boundary(record: Mapping[str, Any], results: int | None, is_backward: bool) -> set[int]:
    """Return the storages of a graph's inputs and results: later stages ask which of these share memory.

    They ask of saved tensors whether they share it with inputs or results of the forward, or with a gradient.
    """
    nodes = record["nodes"]
    returned = (number for node in nodes if _OPS[node[0]] == "output" for number in _returned(node[3], results))
    given = () if is_backward else (n for n, node in enumerate(nodes) if _OPS[node[0]] == "placeholder")
    values = (nodes[number][5].get("val") for number in {*returned, *given})
    return {record["tensors"][value["x"]][0] for value in values if isinstance(value, dict) and "x" in value}


def _returned(args: Mapping[str, Any], results: int | None) -> Iterator[int]:
    """Yield the numbers of the nodes that a graph returns, before those that are saved."""
    (outputs,) = args["t"]
    if isinstance(outputs, dict):
        outputs = outputs.get("t", [outputs])
    return node_numbers(outputs[:results])


def _node_notes(notes: Mapping[str, Record], reader: RecordReader) -> dict[str, Any]:
    found = {key: reader.value(notes[key]) for key in _VALUES if key in notes}
    for key in _STACKS:
        if key in notes:
            found[key] = {str(n): (reader.text(path), "") for n, path in enumerate(notes[key])}
    if "stack_trace" in notes:
        found["stack_trace"] = reader.text(notes["stack_trace"])
    return found
