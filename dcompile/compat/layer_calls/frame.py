"""Which calls of modules are copied while one frame is traced, from the third call of equal layers on, and the copies.

The first call of a layer finds what layers have in common: functions, settings, tables of the whole model. The second
is recorded. Whatever it has not in common with a third call, that one is traced, as without any of this.

A copy's operations, their names and metadata, inputs of the graph and guards come out as if Dynamo had traced the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dcompile.compat.layer_calls.call_key import CallArguments, describe, is_plain_fake, realized, surroundings, traits
from dcompile.compat.layer_calls.guard_match import (
    ModulePairs,
    Renaming,
    Values,
    differ_in_index,
    holds_for,
    install,
    layer_source,
    told_as,
)
from dcompile.compat.layer_calls.recorder import (
    CallRecord,
    NotRepeatable,
    Recorder,
    TensorFacts,
    result_traits,
    stack_name,
)
from dcompile.compat.patches.on_demand import CREATED
from dcompile.compat.tensors import fake_memory, fake_parameter, fake_tensor, real_tensors, storage_key

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
    from torch._guards import TracingContext

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
