"""Which calls of modules are copied while one frame is traced, from the third call of equal layers on, and the copies.

The first call of a layer finds what layers have in common: functions, settings, tables of the whole model. The second
is recorded. Whatever it has not in common with a third call, that one is traced, as without any of this.

A copy's operations, their names and metadata, inputs of the graph and guards come out as if Dynamo had traced the call.

A `Recorder` watches how TorchDynamo traces one call of a module: which operations, names, inputs, guards and effects
come of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dcompile.compat.layer_calls.call_key import CallArguments, describe, is_plain_fake, realized, surroundings, traits
from dcompile.compat.layer_calls.guard_match import (
    GuardedLayer,
    ModulePairs,
    Renaming,
    Values,
    Within,
    differ_in_index,
    guard_type,
    holds_for,
    hook_keys,
    install,
    is_about_hook,
    layer_source,
    told_as,
    unguarded_tables,
    watched_guards,
)
from dcompile.compat.patches.on_demand import CREATED, RENAMED, watched_tracing
from dcompile.compat.tensors import fake_memory, fake_parameter, fake_tensor, real_tensors, storage_key


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


# --- copying ----------------------------------------------------------------------------------------------------------


MAX_RECORDS = 4
"""Kinds of layers of one container: a model may alternate between two kinds of attention, or drop biases."""
MAX_REFUSALS = 3
"""Recordings that find a call to be unfit for copies, before its container is left alone."""

Trace = Callable[..., Any]


@dataclass
class _Container:
    """Calls of a container's layers at one place of the code."""

    records: list[CallRecord] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


class _Attempt:
    """One attempt to trace the frame. Dynamo starts anew where it finds a graph break."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.containers: dict[Any, _Container] = {}
        self.recorder: Recorder | None = None
        self.changes = 0
        """Number of changes of objects that were there before tracing, or that can be reached from such objects."""
        self.reachable: list[Any] = []
        """Variables of changed objects that were there before, and what was stored in them."""
        self.calls = 0
        """Calls that might have been copied."""

    def reaches(self, variable: Any) -> bool:
        """Whether an object was there before tracing, or can be reached from one that was."""
        from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker

        if not isinstance(getattr(variable, "mutation_type", None), AttributeMutationNew | ValueMutationNew):
            return True
        attributes, seen, todo = self.output.side_effects.store_attr_mutations, set[int](), [*self.reachable]

        def see(found: Any) -> None:
            seen.add(id(found))
            todo.extend(attributes.get(found, {}).values())

        visited: dict[int, Any] = {}
        while todo and id(variable) not in seen:
            VariableTracker.visit(see, todo.pop(), visited)
        return id(variable) in seen


class FrameCalls:
    """Calls of modules in a frame."""

    def __init__(self) -> None:
        self._attempt: _Attempt | None = None
        self._copied: list[bool] = []
        """Whether each call was copied in the first attempt. Others must do the same: Dynamo counts traced calls."""
        self._off = False
        self.copies = 0
        """How many calls of the last attempt were copied."""
        self.refusals: list[str] = []
        """Why calls could not stand for others."""

    def call(self, trace: Trace, variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call of a module by `trace`, Dynamo's own function, or copy it."""
        attempt = self._current(translator.output)
        layer = None if self._off or attempt.recorder is not None else _layer(variable, translator)
        if layer is None:
            return trace(variable, translator, args, kwargs)
        place = (layer.base, type(variable.value), _site(translator))
        container = attempt.containers.get(place)
        if container is None:
            attempt.containers[place] = _Container()
        if container is None or len(container.refusals) >= MAX_REFUSALS:
            return trace(variable, translator, args, kwargs)
        arguments = describe(args, kwargs, translator.output.side_effects)
        if arguments is None:
            container.refusals.append("an argument is of an unknown kind")
            return trace(variable, translator, args, kwargs)
        arguments.key = (*arguments.key, surroundings(translator))
        number, attempt.calls = attempt.calls, attempt.calls + 1
        replay = self._replay(container, attempt, variable, translator, layer, arguments)
        copied = False
        if replay is not None:
            try:
                result = replay.run()
                copied = True
            except Differs as reason:
                container.refusals.append(str(reason))
        self._note(number, copied, translator)
        if copied:
            self.copies += 1
            return result
        if len(container.records) >= MAX_RECORDS:
            return trace(variable, translator, args, kwargs)
        recorder = attempt.recorder = Recorder(translator, variable, layer, arguments)
        try:
            with recorder.watching():
                result = trace(variable, translator, args, kwargs)
        finally:
            attempt.recorder = None
        try:
            container.records.append(recorder.record(result, attempt.changes))
        except NotRepeatable as reason:
            container.refusals.append(str(reason))
            self.refusals.append(f"{type(variable.value).__name__}: {reason}")
        return result

    def _current(self, output: Any) -> _Attempt:
        if self._attempt is None or self._attempt.output is not output:
            self._attempt, self.copies = _Attempt(output), 0
        return self._attempt

    def _replay(
        self, container: _Container, attempt: _Attempt, variable: Any, translator: Any, layer: Any, arguments: Any
    ) -> Replay | None:
        """A copy of a recorded call that this call would be traced to."""
        for record in reversed(container.records):
            if (
                record.changes == attempt.changes
                and record.arguments.key == arguments.key
                and differ_in_index(record.layer.source, layer)
            ):
                replay = Replay(record, translator, variable, layer, arguments)
                if replay.check():
                    return replay
        return None

    def _note(self, number: int, copied: bool, translator: Any) -> None:
        """Take note of whether a call is copied. Where another attempt did otherwise, the frame is traced anew."""
        if number == len(self._copied):
            self._copied.append(copied)
        elif self._copied[number] is not copied:
            from torch._dynamo.exc import RestartAnalysis

            self._off = True
            translator.speculation_log.clear()
            raise RestartAnalysis(restart_reason="dcompile: another attempt copied other layers")

    def changed(self, effects: Any, variable: Any, stored: Any = None) -> None:
        """Take note that tracing changes an object; `stored` is what becomes an attribute of it, if anything."""
        attempt = self._attempt
        if attempt is None or attempt.output.side_effects is not effects:
            return
        reachable = attempt.reaches(variable)
        if reachable:
            attempt.changes += 1
            attempt.reachable += [variable, *(() if stored is None else (stored,))]
        if attempt.recorder is not None:
            attempt.recorder.changed(variable, reachable)


def _layer(variable: Any, translator: Any) -> Any:
    """Source of a module whose call may be copied; None for all others."""
    import torch._dynamo.config as config
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    if not isinstance(variable, UnspecializedNNModuleVariable):
        return None
    module: Any = variable.value
    output = translator.output
    if variable.source is None or not module._modules or isinstance(module, torch.fx.GraphModule):
        return None
    if output.export or output.current_tracer.parent is not None or variable.is_state_mutated:
        return None
    if config.use_graph_deduplication or config.track_nodes_for_deduplication or getattr(module, "cls_to_become", None):
        return None
    return layer_source(variable.source)


def _site(translator: Any) -> tuple[Any, ...]:
    """Place in the code of the frame, and of all frames around it that are traced with it."""
    found: list[Any] = []
    while translator is not None:
        found += (translator.f_code, translator.instruction_pointer)
        translator = getattr(translator, "parent", None)
    return tuple(found)


class Differs(Exception):
    """What is different for another call, so that it has to be traced."""


class Replay:
    """A copy of a recorded call, for a call of the module `variable` with source `layer`."""

    def __init__(
        self, record: CallRecord, translator: Any, variable: Any, layer: Any, arguments: CallArguments
    ) -> None:
        self._record, self._translator, self._variable = record, translator, variable
        self._arguments = arguments
        self._tracer = translator.output.current_tracer
        self._values, self._pairs = Values(translator), ModulePairs()
        self._renaming = Renaming(record.layer.source, layer, self._pairs.hook_keys)
        self._nodes: dict[Node, Node] = {}
        self._values_of_copies: dict[Node, Any] = {}
        self._names = record.stack_name, stack_name(variable)
        self._moved: dict[str, tuple[str, tuple[str, type]]] = {}
        """Entries of module stacks, by key: a layer's operations name few modules."""

    def check(self) -> bool:
        """Whether tracing would come to the same. Adds no guard, and nothing to the graph."""
        return (
            len(self._translator.nn_module_stack) == self._record.stack_depth
            and self._pairs.pair(self._record.module, self._variable.value)
            and holds_for(self._record.layer, self._renaming, self._values, self._pairs, self._tracked)
            and self._inputs_are_new()
            and not any(self._translator.num_calls.get(self._name(name), 0) for name in self._record.calls_of_names)
        )

    def _tracked(self, value: Any) -> Any:
        """Source under which Dynamo knows an object, or None."""
        known = self._translator.output.side_effects.id_to_variable.get(id(value))
        return None if known is None else getattr(known, "source", None)

    def _inputs_are_new(self) -> bool:
        """Whether the layer's tensors are no inputs of the graph yet: one that is shared has a name already."""
        known = self._translator.output.input_source_to_var
        sources = [self._renaming.of(source) for source in self._sources()]
        values = [self._values.of(source) for source in sources]
        return len({*map(id, values)}) == len(values) and not any(
            source in known or self._tracked(value) is not None for source, value in zip(sources, values, strict=True)
        )

    def _sources(self) -> list[Any]:
        """Sources of the layer's tensors, in the order of reading."""
        return list(dict.fromkeys((*self._record.inputs.values(), *self._record.layer.tensors())))

    def run(self) -> Any:
        """Add the copy to the graph, and return its result. Raises Differs, before it adds operations."""
        record, translator = self._record, self._translator
        for node, variable in zip(record.tensors, self._arguments.tensors, strict=True):
            self._nodes[node] = variable.proxy.node
        self._add_inputs()
        self._values_of_copies = copied_values(record, self._nodes)
        install(record.layer, self._renaming, self._pairs, translator)
        told_as(record.layer, self._renaming, translator)
        for event, node, name in record.log:
            self._follow(event, node, name)
        for name, count in record.calls_of_names.items():
            translator.num_calls[self._name(name)] = count
        if record.named_by is not None:
            self._variable.set_nn_module_stack_source(self._renaming.of(record.named_by))
        return self._result(record.result, {})

    # --- inputs of the graph ---

    def _add_inputs(self) -> None:
        """Add the layer's tensors as inputs, as Dynamo does when it reads them, and lead operations to them."""
        made: dict[Any, Node] = {}
        by_source = {source: node for node, source in self._record.inputs.items()}
        for source in self._sources():
            made[source] = self._input(self._renaming.of(source), by_source.get(source))
        for node, source in self._record.inputs.items():
            self._nodes[node] = made[source]

    def _input(self, source: Any, like: Node | None) -> Node:
        from torch._dynamo.variables.builder import VariableBuilder

        value = self._values.of(source)
        known = self._plain_fake(value)
        variable = VariableBuilder(self._translator, source)(value)
        del known  # the variable holds it by now
        node: Node = variable.as_proxy().node
        if like is not None:
            old, new = like.meta["example_value"], node.meta["example_value"]
            if not is_plain_fake(new) or traits(old) != traits(new):
                raise Differs("tensors of the layer")
            node.meta.update(self._moved_meta(like, node.name))
        return node

    def _plain_fake(self, value: Any) -> Any:
        """Fake tensor of a parameter, which Dynamo then finds; None for tensors of which it makes its own."""
        from torch._dynamo import config

        mode: Any = self._translator.fake_mode
        return fake_parameter(mode, value) if config.force_parameter_static_shapes else None

    # --- operations ---

    def _follow(self, event: str, node: Node, name: str) -> None:
        """Do with a copy what was done with a node."""
        if node.op == "placeholder" and node not in self._record.arguments.nodes:
            return
        if event == CREATED and node not in self._record.metas:
            self._tracer.graph._graph_namespace.create_name(name, None)  # it was removed; its name is taken
        elif event == CREATED:
            self._copy(node)
        else:
            self._nodes[node]._rename(name)

    def _copy(self, node: Node) -> None:
        if node in self._record.bodies:
            name = self._translator.output.install_subgraph("wrap_body", self._region(self._record.bodies[node]))
            self._nodes[node] = copy = self._tracer.create_node("get_attr", name, (), {}, None, node.type)
            copy.meta.update(self._moved_meta(node, copy.name))
            return
        args, kwargs = map_arg((node.args, node.kwargs), self._counterpart)
        copy = self._tracer.create_node(node.op, node.target, args, kwargs, None, node.type)
        copy.meta.update(self._moved_meta(node, copy.name))  # assigned, fx would file the node anew
        copy.meta["example_value"] = self._values_of_copies[node]
        self._nodes[node] = copy

    def _region(self, body: GraphModule) -> GraphModule:
        """Copy of a checkpointed region. Its inputs have the names of what its call gives for them."""
        graph, nodes, timestamp = Graph(), dict[Node, Node](), self._translator.output.timestamp
        for node in body.graph.nodes:
            operand = self._record.operands.get(node)
            name = node.name if operand is None else self._counterpart(operand).name
            target = node.target if operand is None else name
            args, kwargs = map_arg((node.args, node.kwargs), nodes.__getitem__)
            nodes[node] = copy = graph.create_node(node.op, target, args, kwargs, name, node.type)
            copy.meta.update({**self._moved_meta(node), "creation_timestamp": timestamp})
            if node.op != "output":
                copy.meta["example_value"] = self._values_of_copies[node]
        made = GraphModule({}, graph)
        made.meta |= body.meta
        return made

    def _counterpart(self, node: Node) -> Node:
        return self._nodes.get(node, node)

    def _moved_meta(self, node: Node, name: str | None = None) -> dict[str, Any]:
        """Metadata of a node, with the names of this layer's modules; `name`: what its copy was called at first."""
        record = self._record
        found = dict(record.metas.get(node, node.meta))
        for own in ("example_value", "creation_timestamp", "grapharg", "tensor_dict"):
            found.pop(own, None)
        if "nn_module_stack" in found:
            inner = list(found["nn_module_stack"].items())[record.stack_depth :]
            found["nn_module_stack"] = {**self._translator.nn_module_stack, **dict(map(self._moved_module, inner))}
        if "source_fn_stack" in found:
            *outer, (called, kind) = found["source_fn_stack"]
            found["source_fn_stack"] = [*outer, (name or called, kind)]
        return found

    def _moved_module(self, entry: tuple[str, tuple[str, type]]) -> tuple[str, tuple[str, type]]:
        key, (name, kind) = entry
        if key not in self._moved:
            identity, at, call = key.partition("@")
            module = self._pairs.modules.get(int(identity)) if identity.isdigit() else None
            moved = f"{id(module)}{at}{call}" if module is not None else key
            self._moved[key] = moved, (self._name(name), kind)
        return self._moved[key]

    def _name(self, name: str) -> str:
        """Name of a module in the layer -> name of its counterpart."""
        old, new = self._names
        inside = name == old or (name.startswith(old) and name[len(old)] in ".[")
        return new + name[len(old) :] if inside else name

    # --- the result ---

    def _result(self, result: Any, made: dict[int, Any]) -> Any:
        from torch._dynamo.variables.lists import TupleVariable
        from torch._dynamo.variables.tensor import TensorVariable

        result = realized(result)
        if id(result) not in made:
            if type(result) is TupleVariable:
                made[id(result)] = TupleVariable([self._result(item, made) for item in result.items])
            elif type(result) is TensorVariable:
                made[id(result)] = self._tensor(result)
            else:
                made[id(result)] = result
        return made[id(result)]

    def _tensor(self, variable: Any) -> Any:
        from torch._dynamo.variables.builder import handle_traced_output
        from torch._dynamo.variables.tensor import TensorVariable

        place = self._record.arguments.nodes.get(variable.proxy.node)
        if place is not None:
            return self._arguments.tensors[place]
        node = self._nodes[variable.proxy.node]
        value = node.meta.pop("example_value")
        made: Any = handle_traced_output(value, self._translator, self._tracer.proxy(node), {}, None, TensorVariable)
        made._is_name_set = self._record.named[variable.proxy.node]
        return made


def copied_values(record: CallRecord, nodes: dict[Node, Node]) -> dict[Node, Any]:
    """Fake values for the copies of a call's operations, which share memory as the recorded ones do. Raises Differs.

    `nodes`: arguments and inputs of the recorded call -> those of the other. Results are computed, since tracing goes
    on with them: their history is autograd's. Values inside a call, which nothing outside of it reads, are the recorded
    ones: of a layer without checkpointed regions these are all but the results and what shares memory with them.
    """
    values = {node: copy.meta["example_value"] for node, copy in nodes.items()}
    memory = {int(storage._cdata): storage for storage in record.held.values() if storage is not None}
    memory |= {storage_key(node.meta["example_value"]): value.untyped_storage() for node, value in values.items()}
    mode: Any = TracingContext.get().fake_mode
    regions = {body.graph for body in record.bodies.values()}
    inner = _inner_nodes(record, memory) if not record.bodies else frozenset[Node]()

    def like(facts: TensorFacts) -> Any:
        if facts.memory not in memory:
            memory[facts.memory] = fake_memory(facts.nbytes)
        place = memory[facts.memory], facts.offset, facts.shape, facts.stride
        return fake_tensor(mode, facts.dtype, facts.device, *place).requires_grad_(facts.requires_grad)

    def grown(facts: TensorFacts) -> Any:
        made = like(facts)
        if made.requires_grad:
            with mode:
                made = made.clone()  # no leaf of autograd's
            memory[facts.memory] = made.untyped_storage()
        return made

    with real_tensors():
        for node, facts in record.facts.items():
            if node.graph in regions:
                regions.discard(node.graph)
                _take_operands(node.graph, record, values)
            if node in record.results:
                values[node] = made = _computed_value(node, values, mode)
                if not is_plain_fake(made) or result_traits(made) != record.results[node]:
                    raise Differs("a result")
                memory[facts.memory] = made.untyped_storage()
            elif node in inner:
                values[node] = node.meta["example_value"]
            elif type(facts) is torch.Size:
                values[node] = facts
            elif node.target is torch.ops.higher_order.tag_activation_checkpoint:
                values[node] = pytree.tree_map_only(TensorFacts, grown, facts)
            else:
                values[node] = pytree.tree_map_only(TensorFacts, like, facts)
    return values


def _inner_nodes(record: CallRecord, outside: Collection[int]) -> frozenset[Node]:
    """Operations that share memory neither with anything `outside` nor with a result, nor with what makes a result."""

    def memory_of(node: Node) -> set[int]:
        leaves = pytree.tree_leaves(record.facts.get(node))
        return {item.memory for item in leaves if isinstance(item, TensorFacts)}

    makers = {argument for node in record.results for argument in (node, *node.all_input_nodes)}
    shown = {*outside}.union(*map(memory_of, makers))
    return frozenset(node for node in record.facts if node not in makers and shown.isdisjoint(memory_of(node)))


def _take_operands(region: Graph, record: CallRecord, values: dict[Node, Any]) -> None:
    """Give the inputs of a checkpointed region the values that its call gives for them."""
    for node in region.find_nodes(op="placeholder"):
        operand = record.operands[node]
        values[node] = values[operand] if operand in values else operand.meta["example_value"]


def _computed_value(node: Node, values: dict[Node, Any], mode: Any) -> Any:
    """Value of an operation, computed of copies of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: values[x] if x in values else x.meta["example_value"])
    call: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
    with mode:
        return call(*args, **kwargs)
