"""Cache of AOTAutograd's traces: forward and backward of a Dynamo graph, keyed by everything that tracing reads.

A graph's trace is looked up in the cache, or recorded while AOTAutograd traces, and stored on success. It has
AOTAutograd's metadata, the traced graphs, and facts that capture has found. The traced graphs are JSON: nodes with
names, arguments, fake tensors and metadata of later stages. Tensors that share memory share it again. Metadata that no
stage after partitioning reads is dropped.

The key of a trace is the SHA-256 of a text of everything that AOTAutograd and its passes read. The text holds versions,
settings of dcompile and torch, and the adapter's additions to a trace. It holds the inputs (shapes, strides, dtypes,
devices, gradients, shared memory). A symbolic size is an expression of numbered symbols, of which the text holds ranges
and guards, and no values. It holds the captured graph with its subgraphs, constants and function names. A graph may
call only functions of torch and dcompile: other code is not part of the text, so such a graph has no key. The text
leaves out names of modules and inputs, and source lines. Messages and comments may name those of the model that was
traced first.

Functions of the key return text, or raise NotKeepable for what text cannot identify.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import hashlib
import json
import logging
import math
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dcompile.capture.passes.run_passes import DONATED
from dcompile.capture.warm_start.records import (
    RecordReader,
    RecordWriter,
    constant_of,
    constant_record,
    node_numbers,
    op_name,
    target_name,
    target_of,
    value_of,
    value_record,
)
from dcompile.capture.warm_start.size_symbols import DATA_DEPENDENT, Record, SizeSymbols, is_symbolic
from dcompile.collectives.contract import TraceStore
from dcompile.compat import aot_trace, groups
from dcompile.compat.aot import lazy_graph_module
from dcompile.compat.dynamo import holds_graphs
from dcompile.compat.process_state import NotKeepable, code_roots, global_state
from dcompile.compat.tensors import is_operator, plain_tensor_types, real_tensors, storage_key, viewed_tensor
from dcompile.config import Config
from dcompile.logs import report
from dcompile.toolchain import own_source, own_version


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
    peaks: tuple[int, int] | None = None
    """Bytes that a memory plan predicts: see `memory_budget.Peaks`."""


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
    peaks = None if found["peaks"] is None else tuple(map(int, found["peaks"]))
    return TraceFacts(
        gradients,
        found["results"],
        found["may_have_absent_grads"],
        fallbacks=found["fallbacks"],
        peaks=peaks,  # type: ignore[arg-type]  # two numbers
        **lists,
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


# --- keys -------------------------------------------------------------------------------------------------------------


FORMAT = 3
"""Version of the entries' format. It is part of each key."""
_ELSEWHERE = frozenset(
    (
        "receipt", "progress", "log", "dump", "trace_enabled", "trace_graph_diagram", "verify", "cache_dir",
        "cache_size_gib", "share_artifacts", "compile_timeout_s", "precompiled",
    )
)  # fmt: skip
"""Settings that do not affect a trace, such as output directories."""
_KEY_MARKS = ("custom", "recompute", "ac_graph_id")
"""Keys of node metadata that tracing reads."""
_TRACED_BODIES = frozenset(
    (
        "tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "autograd_function_apply", "invoke_subgraph",
        "flex_attention",
    )
)  # fmt: skip
"""Higher-order operators of torch that only call subgraphs of the captured graph."""
LARGEST_HELD = 1 << 16
"""Maximum bytes of a constant tensor whose values are part of a key."""
_PLAIN_MODULES = (builtins, operator, math)


def trace_key(
    gm: GraphModule, inputs: Sequence[Any], config: Config, facts: Sequence[str], symbols: SizeSymbols
) -> str:
    """Return a trace's cache key. `facts`: lines that an adapter adds. It numbers `symbols`. Raises NotKeepable."""
    if config.backend is not None and config.backend.cache_objection:
        raise NotKeepable(config.backend.cache_objection)
    check_apart(inputs, symbols)
    graph = _GraphText(symbols)
    given = (graph.input(value) for value in inputs)
    lines = (*_environment(config), *global_state(), *facts, *given, *graph.lines(gm, "graph"), *symbols.facts())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _environment(config: Config) -> Iterator[str]:
    yield f"trace {FORMAT}"
    yield f"dcompile {own_version()} {own_source()}"
    yield f"torch {torch.__version__} {torch.version.git_version} python {sys.version_info[:3]} {sys.platform}"
    for option in dataclasses.fields(config):
        if option.metadata and option.name not in _ELSEWHERE:
            yield f"{option.name}={getattr(config, option.name)}"


class _GraphText:
    """Text of a captured graph, its inputs and its subgraphs."""

    def __init__(self, symbols: SizeSymbols) -> None:
        self._symbols = symbols
        self._storages: dict[int, int] = {}

    def input(self, value: Any) -> str:
        """Return the line of an input."""
        if isinstance(value, torch.Tensor):
            return f"input {tensor_text(value, self._storages, self._symbols)}{device_text(value.device)}"
        if type(value) in (int, float, bool, str):
            return f"input {value!r}"
        if isinstance(value, torch.SymInt):
            return f"input {self._symbols.text(value)}"
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise NotKeepable(f"an input is a symbolic {'float' if isinstance(value, torch.SymFloat) else 'bool'}")
        raise NotKeepable(f"an input is a {type(value).__name__}")

    def lines(self, gm: GraphModule, name: str) -> Iterator[str]:
        """Yield a line for each node, with numbers instead of names."""
        check_captured(gm)
        numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
        yield f"{name} begins"
        for node in gm.graph.nodes:
            args, kwargs = _text(node.args, numbers), _text(node.kwargs, numbers)
            marks = [f"{mark}={_text(node.meta[mark], numbers)}" for mark in _KEY_MARKS if mark in node.meta]
            value = "" if node.op == "output" else result_text(node.meta.get("example_value"), self._symbols)
            yield " ".join((node.op, self._target(node), args, kwargs, value, *marks))
            if node.op == "get_attr":
                yield from self._held(operator.attrgetter(str(node.target))(gm), f"{name}.{numbers[node]}")
        yield f"{name} ends"

    def _target(self, node: Node) -> str:
        if node.op == "call_function":
            return callable_text(node.target)
        if node.op == "call_method":
            return f".{node.target}"
        if node.op == "call_module":
            raise NotKeepable("it calls a module, whose code is not in the graph")
        return static_mark(node)

    def _held(self, value: Any, name: str) -> Iterator[str]:
        """Yield lines for an attribute: a subgraph, or a small tensor whose values tracing may read."""
        if isinstance(value, GraphModule):
            yield from self.lines(value, name)
            return
        if not isinstance(value, torch.Tensor):
            raise NotKeepable(f"it holds a {type(value).__name__}")
        yield f"{name} {tensor_text(value, self._storages, self._symbols)} {numbers_digest(value)}"


def _text(value: Any, numbers: dict[Node, int]) -> str:
    """Return an argument's text. Raises NotKeepable for values without a distinguishing text."""
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex):
        return repr(value)
    if isinstance(value, str):
        group = groups.group_by_name(value) if dist.is_initialized() else None
        return repr(value) if group is None else f"{value!r} of {group.size()} ranks"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format | torch.device):
        return f"{type(value).__name__} {value}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_text(k, numbers)}:{_text(v, numbers)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        opening = "[" if isinstance(value, list) else "("
        return f"{opening}{','.join(_text(item, numbers) for item in value)},"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, enum.Enum) and type(value).__module__.startswith("torch"):
        return f"{type(value).__name__}.{value.name}"
    if callable(value):
        return callable_text(value)
    raise NotKeepable(f"it holds a {type(value).__name__}")


# --- texts of called code and of tensors ------------------------------------------------------------------------------


def callable_text(target: Any, within: tuple[Any, ...] = ()) -> str:
    """Return the name of a call target whose code versions identify. Raises NotKeepable.

    `within`: functions whose closures hold it. One that holds itself, as decorators make them, is entered once.
    """
    if is_operator(target):
        return op_name(target)
    if holds_graphs(target):
        called = str(target.name())  # type: ignore[no-untyped-call, unused-ignore]
        if called not in _TRACED_BODIES:
            raise NotKeepable(f"it has {called}, an operator on functions")
        return called
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is not None and (_is_builtin(target) or _is_plain_function(target) or _is_plain_class(target)):
        owner = getattr(target, "__self__", None)
        of = f" of {owner.__name__}" if isinstance(owner, type | types.ModuleType) else ""
        cells = () if any(target is holder for holder in within) else getattr(target, "__closure__", None) or ()
        held = [_cell_text(cell, (*within, target)) for cell in cells]
        return " ".join((f"{getattr(target, '__module__', None)}.{name}{of}", *held))
    where = f"{getattr(target, '__module__', '')}.{name}" if name else type(target).__name__
    raise NotKeepable(f"it calls {where}, whose code is not in the graph")


def _is_builtin(target: Any) -> bool:
    """Whether a function is a C function of torch or Python, bound at most to a module or a class."""
    if isinstance(target, types.MethodDescriptorType | types.WrapperDescriptorType | types.GetSetDescriptorType):
        return target.__objclass__.__module__.startswith(("torch", "builtins"))
    if not isinstance(target, types.BuiltinFunctionType):
        return False
    owner = target.__self__
    if owner is None or owner in _PLAIN_MODULES:
        return True
    if type(owner).__name__.startswith(("PyCapsule", "pybind11_detail_function_record")):  # not bound to an object
        return (target.__module__ or "").startswith("torch._C")
    if isinstance(owner, types.ModuleType):
        return owner.__name__.startswith(("torch", "_operator", "math", "builtins"))
    return isinstance(owner, type) and owner.__module__.startswith(("torch", "builtins"))


def _cell_text(cell: types.CellType, within: tuple[Any, ...]) -> str:
    """Return the text of a closure's value, such as the two functions that `max_pool2d` chooses from."""
    try:
        value = cell.cell_contents
    except ValueError:  # a name without a value yet
        return "unset"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    return callable_text(value, within)


def _is_plain_function(target: Any) -> bool:
    """Whether a function belongs to torch or dcompile, by its module and by its code's file."""
    if not isinstance(target, types.FunctionType):
        return False
    module = target.__module__ or ""
    if not module.startswith(("torch.", "dcompile.")) and module != "torch":
        return False
    return target.__code__.co_filename.startswith(code_roots())


def _is_plain_class(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, type) and (module == "torch" or module.startswith("torch."))


def tensor_text(
    value: torch.Tensor, storages: dict[int, int], symbols: SizeSymbols, whole_of: torch.Tensor | None = None
) -> str:
    """Return an input's or constant's properties that tracing reads. `storages` numbers storages by first use.

    Sizes are those of the fake tensor that will be traced. `whole_of`: the fake tensor of a view of this one. Raises
    NotKeepable for tensor subclasses with their own dispatch.
    """
    if type(value) not in plain_tensor_types():
        raise NotKeepable(f"an input is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized:
        raise NotKeepable(f"an input is {value.layout}")
    number = storages.setdefault(storage_key(value), len(storages))
    known: Any = symbols.fake_of(value) if whole_of is None else whole_of._base
    if known is None:
        raise NotKeepable("a view of memory that the captured graph does not know")
    marks = (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference())
    kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    lies = f"{_layout_text(known, whole_of, symbols)} of {number}"
    base = ""
    if (view := viewed_tensor(value)) is not None:
        of, made = view
        base = f" view of {tensor_text(of, storages, symbols, known)} {made}"
    return f"{kind} {value.dtype} {value.device} {lies} {marks}{base}"


def _layout_text(known: torch.Tensor, whole_of: torch.Tensor | None, symbols: SizeSymbols) -> str:
    """Return the text of a tensor's shape, strides, offset and storage size.

    No guard says how large the memory around a view of symbolic size is, so the text leaves it out.
    """
    if whole_of is not None and is_symbolic(whole_of) and not is_symbolic(known):
        return "any"
    nbytes = known.untyped_storage().nbytes()
    around = "any" if type(nbytes) is int and is_symbolic(known) else symbols.text(nbytes)
    return f"{_sizes_text(known, symbols)} at {symbols.text(known.storage_offset())} in {around}"


def _sizes_text(value: torch.Tensor, symbols: SizeSymbols) -> str:
    """Return the text of a tensor's shape and strides."""
    return " ".join(str([*map(symbols.text, sizes)]) for sizes in (value.shape, value.stride()))


def check_apart(inputs: Sequence[Any], symbols: SizeSymbols) -> None:
    """Refuse inputs of symbolic sizes that share memory with others: whether they overlap depends on the sizes."""
    tensors = [value for value in inputs if type(value) in plain_tensor_types() and value.layout is torch.strided]
    counts = Counter(storage_key(value) for value in tensors)
    shared = (value for value in tensors if counts[storage_key(value)] > 1)
    if any(is_symbolic(symbols.fake_of(value)) for value in shared):
        raise NotKeepable("inputs of symbolic sizes share memory")


def device_text(device: torch.device) -> str:
    """Return the kind of a tensor's GPU, which determines the traced attention."""
    if device.type != "cuda":
        return ""
    if not torch.cuda.is_available():
        raise NotKeepable("its GPU is not there")
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call, unused-ignore]
    return f" {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} cudnn {cudnn}"


def numbers_digest(value: torch.Tensor) -> str:
    """Return the SHA-256 of a small CPU tensor. Raises NotKeepable for others."""
    if value.device.type != "cpu" or value.nbytes > LARGEST_HELD:
        raise NotKeepable(f"it holds a tensor of {value.nbytes} bytes on {value.device}")
    with real_tensors(), torch.no_grad():
        numbers = value.detach().contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
    return hashlib.sha256(bytes(numbers)).hexdigest()


def result_text(value: Any, symbols: SizeSymbols) -> str:
    """Return the text of a captured node's example value. Raises NotKeepable."""
    if isinstance(value, torch.Tensor):
        sizes = _sizes_text(value, symbols)
        return f"{type(value).__name__} {value.dtype} {value.device} {sizes} {value.requires_grad}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return symbols.text(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(result_text(item, symbols) for item in value)}]"
    return type(value).__name__


def check_captured(graph: torch.fx.GraphModule) -> None:
    """Refuse a graph with functions that tracing runs in addition to it. Raises NotKeepable."""
    if "_checkpoint_context_fn" in graph.meta:
        raise NotKeepable("a function says what checkpointing saves (context_fn)")
    if hasattr(graph, "saved_tensors_hooks_pack_0"):
        raise NotKeepable("it has hooks for saved tensors")


def static_mark(placeholder: Any) -> str:
    """Return Dynamo's mark of an input with a static address."""
    return str((placeholder.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type", ""))
