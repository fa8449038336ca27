"""Watch how TorchDynamo traces one call of a module: which operations, names, inputs, guards and effects come of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from dcompile.compat.layer_calls.call_key import CallArguments, is_plain_fake, realized, traits
from dcompile.compat.layer_calls.guard_match import (
    GuardedLayer,
    Values,
    Within,
    guard_type,
    hook_keys,
    is_about_hook,
    unguarded_tables,
    watched_guards,
)
from dcompile.compat.patches.on_demand import CREATED, RENAMED, watched_tracing


class NotRepeatable(Exception):
    """Why a call cannot stand for others."""


@dataclass(frozen=True)
class TensorFacts:
    """Facts of a traced value, as they were when its call ended: later operations may change it in place."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    requires_grad: bool
    memory: int
    nbytes: Any


@dataclass
class CallRecord:
    """What came of a call, for copies of it."""

    arguments: CallArguments
    module: torch.nn.Module
    layer: GuardedLayer
    stack_depth: int
    """Number of modules around the call."""
    stack_name: str
    """The module's name in records of the modules around an operation, as the call begins."""
    named_by: Any
    """Source that such records name the module by from this call on, through which it was read again; else None."""
    calls_of_names: dict[str, int]
    """Names of modules -> how often the call called each."""
    log: list[tuple[str, Node, str]] = field(default_factory=list)
    """What happened to nodes, in order: (CREATED, node, its first name) or (RENAMED, node, the wanted name)."""
    metas: dict[Node, dict[str, Any]] = field(default_factory=dict)
    """Operations -> their metadata."""
    facts: dict[Node, Any] = field(default_factory=dict)
    """Operations -> facts of their values."""
    inputs: dict[Node, Any] = field(default_factory=dict)
    """Inputs of the graph that belong to the layer -> their sources."""
    bodies: dict[Node, GraphModule] = field(default_factory=dict)
    """Operations that are names of checkpointed regions -> these."""
    operands: dict[Node, Node] = field(default_factory=dict)
    """Inputs of regions -> what the regions' calls give for them."""
    held: dict[Node, Any] = field(default_factory=dict)
    """Other inputs and operations from before the call, not among its arguments -> memory of their values."""
    result: Any = None
    """Result of the call."""
    results: dict[Node, tuple[Any, ...]] = field(default_factory=dict)
    """Operations whose values the call returns -> traits of these."""
    named: dict[Node, bool] = field(default_factory=dict)
    """The same operations -> whether a variable of the model has given its name."""
    changes: int = 0
    """Number of changed objects when the call ended."""

    @property
    def tensors(self) -> list[Node]:
        """Nodes of the arguments."""
        return [*self.arguments.nodes]


class Recorder:
    """One call while it is traced."""

    def __init__(self, translator: Any, variable: Any, layer: Any, arguments: CallArguments) -> None:
        self._translator, self._variable, self._arguments = translator, variable, arguments
        self._within = Within(layer)
        self._stack_name, self._stack_source = stack_name(variable), variable.get_nn_module_stack_source()
        self._graph: Graph = translator.output.current_tracer.graph
        self._last = next(iter(reversed(self._graph.nodes)), None)
        self._before = set(self._graph.nodes)
        self._counts = _counts(translator)
        self._named = dict(translator.num_calls)
        self._regions = {*translator.output.nn_modules}
        self._versions = {
            node: value._version for node in self._before if is_plain_fake(value := node.meta.get("example_value"))
        }
        self._log: list[tuple[str, Node, str]] = []
        self._added: list[Any] = []
        self._changed: str | None = None

    def changed(self, variable: Any, reachable: bool) -> None:
        """Take note that the call changes an object; `reachable`: from objects that were there before tracing."""
        if reachable or any(variable is other for other in self._arguments.containers + self._arguments.tensors):
            self._changed = f"it changes a {type(variable).__name__}"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the call."""
        with watched_guards(self._translator) as self._added, watched_tracing(self._graph, self._log, self._assume):
            yield

    def _assume(self) -> None:
        self._changed = "it takes a result as constant, of which no guard asks"

    def record(self, result: Any, changes: int) -> CallRecord:
        """What came of the call. Raises NotRepeatable."""
        self._check()
        values = Values(self._translator)
        try:
            unread = unguarded_tables(self._variable.value)
            layer = GuardedLayer.of(self._translator, self._within, values, unread)
        except LookupError as error:
            raise NotRepeatable(f"a guard is on {error}") from error
        layer.hook_guards = self._outside()
        made = CallRecord(
            self._arguments,
            self._variable.value,
            layer,
            len(self._translator.nn_module_stack),
            self._stack_name,
            None if (now := self._variable.get_nn_module_stack_source()) is self._stack_source else now,
            self._called(),
            self._log,
            result=result,
            changes=changes,
        )
        self._collect(made)
        _check_result(made)
        return made

    def _check(self) -> None:
        if self._changed is not None:
            raise NotRepeatable(self._changed)
        for guard in self._outside():
            if not is_about_hook(guard, hook_keys(self._variable.value)):
                raise NotRepeatable(f"it adds a guard on {guard.originating_source.name} ({guard_type(guard)})")
        counts = _counts(self._translator)
        if counts != self._counts:
            names = [name for name, count in counts.items() if count != self._counts[name]]
            raise NotRepeatable(f"it changes {', '.join(names)}")
        for node, version in self._versions.items():
            if node.meta["example_value"]._version != version:
                raise NotRepeatable("it writes to a tensor from outside")

    def _outside(self) -> list[Any]:
        """New guards on what does not belong to the layer."""
        return [guard for guard in self._added if not self._within(guard.originating_source)]

    def _called(self) -> dict[str, int]:
        now = self._translator.num_calls
        return {name: now[name] - self._named.get(name, 0) for name in now if now[name] != self._named.get(name, 0)}

    def _collect(self, made: CallRecord) -> None:
        """Sort nodes: operations of the call, inputs of the layer, and what comes from elsewhere."""
        operations = [*_since(self._graph, self._last)]
        created = [node for event, node, _ in self._log if event == CREATED]
        alive = {*self._graph.nodes}
        if operations != [node for node in created if node in alive and node.op != "placeholder"]:
            raise NotRepeatable("it adds operations elsewhere in the graph")
        for node in created:
            if node.op == "placeholder":
                made.inputs[node] = self._input_source(node)
        regions = {node.target: node for node in operations if node.op == "get_attr"}
        if regions.keys() != self._translator.output.nn_modules.keys() - self._regions:
            raise NotRepeatable("it adds modules to the graph")
        for node in operations:
            if node.op == "get_attr":
                made.bodies[node] = self._translator.output.nn_modules[node.target]
                made.metas[node] = dict(node.meta)
                continue
            if node.target is _checkpoint():
                _collect_region(made, node)
            made.metas[node], made.facts[node] = dict(node.meta), _facts(node)
            for other in node.all_input_nodes:
                if other in self._before and other not in self._arguments.nodes:
                    self._collect_held(made, other)
        ours = made.metas.keys() | made.inputs.keys() | self._arguments.nodes.keys()
        if any(event == RENAMED and node not in ours for event, node, _ in self._log):
            raise NotRepeatable("it names a value from outside")

    def _collect_held(self, made: CallRecord, node: Node) -> None:
        source = getattr(node.meta.get("grapharg"), "source", None)
        if source is not None and self._within(source):
            made.inputs[node] = self._input_source(node)
            return
        value: Any = node.meta.get("example_value")
        made.held[node] = value.untyped_storage() if is_plain_fake(value) else None

    def _input_source(self, node: Node) -> Any:
        source: Any = getattr(node.meta.get("grapharg"), "source", None)
        value: Any = node.meta.get("example_value")
        if source is None or not self._within(source) or not is_plain_fake(value):
            raise NotRepeatable("an input of the graph is no tensor of the layer's own")
        if not all(type(size) is int for size in (*value.shape, *value.stride())):
            raise NotRepeatable("a tensor of the layer has sizes that change")
        return source


def stack_name(variable: Any) -> str:
    """Name of a module in the records of modules around an operation."""
    import re

    name = variable.get_nn_module_stack_source().name
    name = name() if callable(name) else name
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def _counts(translator: Any) -> dict[str, Any]:
    """Sizes of the tables that Dynamo keeps while it traces, and that copies of a call do not add to."""
    output, effects, shapes = translator.output, translator.output.side_effects, translator.output.shape_env
    tables = {
        "random numbers": output.random_calls,
        "globals": output.installed_globals,
        "cleanups": output.cleanups,
        "bytecode before the graph": getattr(output, "pregraph_bytecode", ()),
        "backward state": output.backward_state,
        "tensors saved for backward": effects.save_for_backward,
        "hooks of tensors": effects.tensor_hooks,
        "guards on sizes": shapes.guards,
        "replaced sizes": shapes.replacements,
        "sizes": shapes.var_to_range,
        "sizes that depend on data": shapes.pending_fresh_unbacked_symbols,
        "checks at run time": shapes.deferred_runtime_asserts,
    }
    return {name: len(table) for name, table in tables.items()}


def _since(graph: Graph, last: Node | None) -> Iterator[Node]:
    """Operations of a graph after a node."""
    found = last is None
    for node in graph.nodes:
        if found and node.op != "placeholder":
            yield node
        found |= node is last


def _checkpoint() -> Any:
    """Operator that calls a region which is computed again in the backward."""
    return torch.ops.higher_order.tag_activation_checkpoint


def _collect_region(made: CallRecord, call: Node) -> None:
    """Take the facts of a checkpointed region, which is called once. Raises NotRepeatable."""
    name, *operands = call.args
    assert isinstance(name, Node)
    inner: Graph = made.bodies[name].graph
    inputs = inner.find_nodes(op="placeholder")
    if len(name.users) != 1 or len(inputs) != len(operands):
        raise NotRepeatable("a checkpointed region is called in an unknown way")
    for node, operand in zip(inputs, operands, strict=True):
        if not isinstance(operand, Node) or node.target != operand.name:
            raise NotRepeatable("an input of a checkpointed region has a name of its own")
        made.operands[node] = operand
    for node in inner.nodes:
        if node.op not in ("placeholder", "output"):
            made.facts[node] = _facts(node)


def _facts(node: Node) -> Any:
    """Facts of an operation's value. Raises NotRepeatable for values that copies cannot have."""
    if node.op not in ("call_function", "call_method"):
        raise NotRepeatable(f"it has a node {node.op}")
    if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not _checkpoint():
        raise NotRepeatable(f"it has {node.target}")
    if "unbacked_bindings" in node.meta:
        raise NotRepeatable("a size depends on data")
    if "example_value" not in node.meta:
        raise NotRepeatable(f"it calls {node.target}, which returns no tensor")
    value = node.meta["example_value"]
    return value if type(value) is torch.Size else pytree.tree_map(_of_value, value)  # pytree makes a tuple of sizes


def _of_value(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.SymInt | torch.SymBool):
        return value  # an expression over sizes that calls have in common
    if not is_plain_fake(value) or value._version or value.is_inference():
        raise NotRepeatable("it has a value that is written to, or is no plain tensor")
    memory = value.untyped_storage()
    return TensorFacts(
        value.dtype,
        value.device,
        tuple(value.shape),
        tuple(value.stride()),
        value.storage_offset(),
        value.requires_grad,
        int(memory._cdata),
        memory.nbytes(),
    )


def result_traits(value: Any) -> tuple[Any, ...]:
    """All of a result that tracing can see when it goes on."""
    return *traits(value), value._is_view()


def _check_result(made: CallRecord) -> None:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.tensor import TensorVariable

    todo = [made.result]
    while todo:
        variable = realized(todo.pop())
        if type(variable) is TupleVariable:
            todo += variable.items
        elif type(variable) is TensorVariable:
            node = variable.proxy.node
            if node in made.metas:
                made.results[node], made.named[node] = result_traits(node.meta["example_value"]), variable._is_name_set
            elif node not in made.arguments.nodes:
                raise NotRepeatable("it returns a tensor from outside")
        elif type(variable) is not ConstantVariable:
            raise NotRepeatable(f"it returns a {type(variable).__name__}")
