"""Convert a traced graph to JSON and back: nodes with names, arguments, fake tensors and metadata of later stages.

Tensors that share memory share it again. Metadata that no stage after partitioning reads is dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dcompile.capture.graph_pass import DONATED
from dcompile.compat.aot import lazy_graph_module
from dcompile.compat.trace_records import (
    NotKeepable,
    Record,
    RecordReader,
    RecordWriter,
    constant_of,
    constant_record,
    node_numbers,
    target_name,
    target_of,
)
from dcompile.compat.trace_symbols import DATA_DEPENDENT, SizeSymbols

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
        node.meta.update(_notes(notes, reader))
    root = torch.nn.Module()
    for name, constant in record["constants"].items():
        if "graph" in constant:
            root.add_module(name, graph_of(constant["graph"], symbols))
        else:
            root.register_buffer(name, constant_of(constant), persistent=False)
    made: GraphModule = lazy_graph_module(root, graph)
    # AOTAutograd copies a backward before it is compiled, with all that it holds; fx makes a class for each module
    type(made).__deepcopy__ = lambda module, _: _copied(module)  # type: ignore[assignment, method-assign, unused-ignore]
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


def _notes(notes: Mapping[str, Record], reader: RecordReader) -> dict[str, Any]:
    found = {key: reader.value(notes[key]) for key in _VALUES if key in notes}
    for key in _STACKS:
        if key in notes:
            found[key] = {str(n): (reader.text(path), "") for n, path in enumerate(notes[key])}
    if "stack_trace" in notes:
        found["stack_trace"] = reader.text(notes["stack_trace"])
    return found
