"""Dynamo's backend: what is converted at the boundary of a graph, and the wrappers around its compiled form.

Sharded parameters enter in the gathered layout, DTensors as plain tensors.

Modules may compute with a function of the gathered tensor: shards of columns are concatenated, and tensor parallelism
makes a DTensor. The graph then applies this function as its first step, and autograd differentiates it. AOTAutograd
would split DTensors itself, but then it needs a DTensor for each gradient, while programs reduce gradients and return
none. A DTensor made inside the graph leaves only plain operations when it is traced, including the collectives of its
placements. For a DTensor that the graph returns, the graph returns the local tensor, and the caller makes the DTensor.
Device meshes become constants of the graph.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import FallBackToStock
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.aliasing.input_memory import as_traced, watched_inputs
from dcompile.capture.aliasing.output_views import view_without_gradients
from dcompile.capture.captured_graph import CapturedGraph, CaptureMode
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.graph_programs import SHARDED, GraphPrograms
from dcompile.logs import dump
from dcompile.passes import Row

Compiled = Callable[..., Any]
COPIED = "an input that is marked as the negative of its memory is copied in, and back where it was changed"
COPIES_IN, COPIES_BACK = "input marked as negative, copied", "input marked as negative, copied back"
"""Names of the receipt's counts: inputs copied in each call, and copies back in all calls so far."""

Convert = Callable[[Any], Any]


RUN = CaptureMode(GraphPrograms)
"""Programs run in this process."""


class Backend:
    """Backend that Dynamo calls with each graph of one compiled model.

    Dynamo never drops a backend, so this one has only a weak reference to the model.
    """

    def __init__(self, model: CompiledModel, mode: CaptureMode = RUN) -> None:
        self._model = weakref.ref(model)
        self._mode = mode
        self.__name__ = "dcompile"

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile a graph; see `pipeline.GRAPH_WRAPPERS` for what stands around the result."""
        model = self._model()
        assert model is not None, "a compiled model was collected while Dynamo compiled for it"
        if self._mode.needs_data and model.services.needs_data and compat.dynamo.have_no_data(example_inputs):
            return gm  # type: ignore[no-any-return]
        captured, flat_inputs, lists = with_flat_inputs(gm, example_inputs)
        inputs, plain = with_plain_tensors(captured, flat_inputs)
        gm, inputs, boundary = with_plain_boundary(captured, inputs, model.adapter)
        graph = CapturedGraph(model, inputs, self._mode)
        compiled = graph.compile(gm, inputs)
        around = WrapperRequest(graph, captured, example_inputs, flat_inputs, lists, plain, boundary)
        return wrap(compiled, around, model.services.compiler.graph_passes().wrappers)


@dataclass(frozen=True)
class GraphBoundary:
    """Conversions from Dynamo's arguments and results to those of a compiled graph with plain inputs and outputs."""

    kept: tuple[int, ...] = ()
    """Positions of the inputs that remain."""
    inputs: Mapping[int, Convert] | None = None
    """Position of an input -> function to its replacement; None if the graph is unchanged."""
    outputs: Mapping[int, Convert] | None = None
    """Position of an output -> function from it to a DTensor."""
    copies: tuple[int, ...] = ()
    """Positions of inputs that are replaced by copies; a copy that the graph has changed is copied back."""
    more: tuple[torch.Tensor, ...] = ()
    """Inputs behind the others, which Dynamo does not know."""

    def around(self, compiled: Compiled, counted: Counter[str]) -> Compiled:
        """Return `compiled` as Dynamo calls it. Copies back are counted."""
        if self.inputs is None or self.outputs is None:
            return compiled
        steps = [(position, self.inputs.get(position)) for position in self.kept]
        outputs, copies = self.outputs, [(self.kept.index(position), position) for position in self.copies]
        more = self.more

        def call(*args: Any) -> Any:
            given = [args[n] if convert is None else convert(args[n]) for n, convert in steps]
            results = compiled(*given, *more)
            for place, position in copies:
                if given[place]._version:
                    args[position].copy_(given[place])
                    counted[COPIES_BACK] += 1
            if not outputs:
                return results
            return [outputs[n](result) if n in outputs else result for n, result in enumerate(results)]

        return compat.dynamo.no_dynamo(call, "a compiled graph")


def with_flat_inputs(gm: Any, inputs: Sequence[Any]) -> tuple[Any, Sequence[Any], FlattenedLists]:
    """Return a graph that takes each tensor of a list as an input, its inputs, and the conversion of arguments.

    Compiled autograd passes a backward's saved tensors in one list, which is emptied when the graph starts.
    """
    lists = {position: len(value) for position, value in enumerate(inputs) if isinstance(value, list)}
    if not lists:
        return gm, inputs, FlattenedLists()
    gm = _copy_graph(gm)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if position in lists:
            _unpack(gm, node, inputs[position])
    gm.recompile()
    return gm, _flatten_lists(inputs), FlattenedLists(tuple(lists))


def _unpack(gm: Any, node: Any, values: Sequence[Any]) -> None:
    """Replace the placeholder of a list by one for each of its elements."""
    with gm.graph.inserting_before(node):
        elements = [gm.graph.placeholder(f"{node.name}_{number}") for number in range(len(values))]
    for element, value in zip(elements, values, strict=True):
        element.meta["example_value"] = value
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(user.args[1], int):
            element = elements[user.args[1]]
            element.meta.update(user.meta)
            user.replace_all_uses_with(element)
            gm.graph.erase_node(user)
        else:
            user.args = torch.fx.map_arg(user.args, lambda arg: elements if arg is node else arg)
            user.kwargs = torch.fx.map_arg(user.kwargs, lambda arg: elements if arg is node else arg)
    gm.graph.erase_node(node)


def _flatten_lists(values: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat.extend(value) if isinstance(value, list) else flat.append(value)
    return flat


@dataclass(frozen=True)
class FlattenedLists:
    """Conversion of lists in Dynamo's arguments to their elements."""

    lists: tuple[int, ...] = ()
    """Positions of the lists, which are emptied so that saved tensors are freed after their last use."""

    def around(self, compiled: Compiled) -> Compiled:
        """Return `compiled` as Dynamo calls it, with lists."""
        if not self.lists:
            return compiled

        def call(*args: Any) -> Any:
            flat = _flatten_lists(args)
            for position in self.lists:
                args[position].clear()
            return compiled(*flat)

        return compat.dynamo.no_dynamo(call, "a compiled graph")


def with_plain_tensors(gm: Any, inputs: Sequence[Any]) -> tuple[Sequence[Any], GraphBoundary]:
    """Return inputs as plain tensors, without subclasses that define no operators (an image's), and their conversion.

    Dynamo has traced what these subclasses define for functions (`__torch_function__`). torch checks a custom
    operator's first call, and the check raises on such subclasses. A tensor with the negative bit (`z.conj().imag`) is
    replaced by a copy without it, since kernels read memory. Dynamo guards on the bit. A tensor that a collective still
    receives, as tensor parallelism passes to a layer compiled by itself, is waited for: AOTAutograd would do that, but
    leave out its gradient.
    """
    classes: dict[int, Convert] = {n: _plain for n, value in enumerate(inputs) if compat.tensors.is_relabelled(value)}
    classes |= {n: compat.tensors.received for n, value in enumerate(inputs) if compat.tensors.is_received_later(value)}
    marked = {n: _clear_marks for n, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.is_neg()}
    found = classes | marked
    if not found:
        return inputs, GraphBoundary()
    plain = list(inputs)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if position in found:
            plain[position] = _without_mark(node.meta["example_value"])
    return plain, GraphBoundary(tuple(range(len(inputs))), found, {}, tuple(marked))


def with_plain_boundary(
    gm: Any, inputs: Sequence[Any], adapter: PlainAdapter
) -> tuple[Any, Sequence[Any], GraphBoundary]:
    """Return a graph with plain tensors in place of DTensors at its boundary, its inputs, and their conversion.

    `gm` is returned as it is if all parameters are used in the gathered layout. Meshes become constants, since Dynamo
    guards on them. Raises FallBackToStock if the size of a DTensor at the boundary is symbolic.
    """
    parameters = _parameters(inputs, adapter)
    if not parameters:
        return gm, inputs, GraphBoundary()
    gm = _copy_graph(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    plain, convert = dict(enumerate(inputs)), dict[int, Convert]()
    more = {position: _more_inputs(gm, sent) for position, (*_, sent) in parameters.items()}
    last = gm.graph.find_nodes(op="placeholder")[-1]
    for position, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        if position in parameters:
            plain[position], make, _ = parameters[position]
            convert[position] = _always(plain[position])
            _make(gm, node, last, make, plain[position], more[position])
        elif compat.tensors.is_dtensor(value):
            make = compat.tensors.dtensor_like(_fixed_dtensor(node, "takes"))
            plain[position] = compat.aot.fake_input(_to_local(value))
            convert[position] = _to_local
            _make(gm, node, last, make, plain[position])
    for position, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        if compat.tensors.is_mesh(value):
            del plain[position]
            _hold(gm, node, f"mesh{position}", value)
    outputs = _take_outputs_apart(gm)
    gm.recompile()
    sent = tuple(tensor for *_, tensors in parameters.values() for tensor in tensors)
    return gm, [*plain.values(), *sent], GraphBoundary(tuple(plain), convert, outputs, more=sent)


@dataclass(frozen=True, slots=True)
class WrapperRequest:
    """What the wrappers around one compiled graph know: the graph as captured, its inputs, and their conversions."""

    graph: CapturedGraph
    """The graph, after its compilation."""
    captured: Any
    """Dynamo's graph with flat inputs."""
    inputs: Sequence[Any]
    """Dynamo's inputs at capture."""
    flat_inputs: Sequence[Any]
    """The same without lists."""
    lists: FlattenedLists
    plain: GraphBoundary
    """From tensors of subclasses and negative tensors to plain tensors."""
    boundary: GraphBoundary
    """From DTensors and sharded parameters to plain tensors."""


def watch_replaced_parameters(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Send gradients to the parameter objects that the module has now."""
    graph = around.graph
    watched: Compiled = graph.sync.watch_parameters(compiled, graph.params)
    return watched


def save_in_program(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Keep the hooks of `save_on_cpu` from what a program saves, where it offloads that itself."""
    if not around.graph.saves_on_host:
        return compiled

    def saving(*args: Any) -> Any:
        with compat.hooks.no_saved_hooks():
            return compiled(*args)

    return saving


def leave_gradients_absent(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Let the backward get None for absent gradients, if its program allows that."""
    facts, own = around.graph.facts, around.graph.results.own
    if not facts.may_have_absent_grads or not own:
        return compiled
    position, shown, none = own[0], facts.shapes_kept, MappingProxyType[int, Any]({})

    def leaving(*args: Any) -> Any:
        results = compiled(*args)
        shapes = {index: results[index].shape for index in shown} if shown else none
        compat.aot.leave_absent(results[position], shapes)
        return results

    return leaving


def wait_for_step(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Let a forward wait for the update that `train_step` makes behind it."""
    graph, step = around.graph, around.graph.model.step
    forward = graph.late_forward
    if step is None or forward is None:
        return compiled
    if around.boundary.inputs is not None:
        forward.objection = SHARDED

    def waiting(*args: Any) -> Any:
        may_wait = step.forwards.may_wait
        pending = step.defer_forward(forward, compiled, args) if may_wait else None
        results = compiled(*args) if pending is None else pending
        if may_wait and pending is None:
            step.forwards.note_results(forward, results)
        return results

    return waiting


def view_results_without_gradients(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Make results that are views made under `torch.no_grad()` such views again, and keep Dynamo out of all above."""
    seen = around.graph.facts.without_gradients
    hidden: Compiled = compat.dynamo.no_dynamo(view_without_gradients(compiled, seen), "a compiled graph")
    return hidden


def convert_distributed_tensors(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Take DTensors and sharded parameters apart, and make DTensors of results."""
    return around.boundary.around(compiled, around.graph.fallbacks)


def convert_subclasses(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Pass plain tensors in place of subclasses without operators and of tensors with the negative bit."""
    graph, copies = around.graph, around.plain.copies
    if copies:
        graph.notes.append(COPIED)
        graph.fallbacks[COPIES_IN] = len(copies)
    return around.plain.around(compiled, graph.fallbacks)


def run_new_overlaps_eagerly(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Run the captured graph itself where arguments share memory otherwise than at capture."""
    graph = around.graph
    if not (
        graph.mode.needs_data and graph.model.services.needs_data
    ):  # without memory there are no addresses to compare
        return compiled
    watched = watched_inputs(around.captured, around.flat_inputs, graph.changed)
    return as_traced(compiled, around.captured, watched, graph.fallbacks, graph.adapter.synchronizes)


def flatten_lists(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Pass the elements of lists, which are emptied, so that saved tensors are freed after their last use."""
    return around.lists.around(compiled)


def check_eager_regions(compiled: Compiled, around: WrapperRequest) -> Compiled:
    """Check what sharded parameters went through since the graph before: eager code between graphs may gather them."""
    regions = around.graph.model.eager_regions
    return compiled if regions is None else regions.around(compiled, around.inputs)


def wrap(compiled: Compiled, around: WrapperRequest, rows: Sequence[Row]) -> Compiled:
    """Return a compiled graph as Dynamo calls it: in all wrappers that it needs, the first one innermost.

    The names of these are dumped, the outermost first.
    """
    applied = list[str]()
    for row in rows:
        inner, compiled = compiled, row.run(compiled, around)
        if compiled is not inner:
            applied.append(row.name)
    lines = [f"{number}. {name}" for number, name in enumerate([*reversed(applied), "the compiled graph"], 1)]
    dump(around.graph.model.settings.config, f"graph{around.graph.number}/wrappers.txt", "\n".join(lines) + "\n")
    return compiled


_Made: TypeAlias = tuple[torch.nn.Parameter, Callable[..., Any], tuple[torch.Tensor, ...]]
"""(gathered parameter, function from it to what modules compute with, more that the function takes)."""


def _parameters(inputs: Sequence[Any], adapter: PlainAdapter) -> dict[int, _Made]:
    """Return position of an input -> the gathered parameter, and how the input is made of it, where they differ."""
    found: dict[int, _Made] = {}
    for position, value in enumerate(inputs):
        number = adapter.number_of(value) if isinstance(value, torch.nn.Parameter) else None
        if number is not None:
            make = adapter.made_of(number)
            if make is not None:
                found[position] = adapter.virtual(number), make, adapter.sent_of(number)
    return found


def _copy_graph(gm: Any) -> Any:
    """Copy a graph module, since Dynamo reads the arguments of its calls from its own graph.

    Subgraphs of higher-order operators are shared.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = torch.fx.GraphModule(gm, graph)  # copies the attributes that the graph refers to, so it must be complete
    copy.meta = gm.meta
    return copy


def _fixed_dtensor(node: Any, what: str) -> Any:
    """Return a node's DTensor. Raises FallBackToStock if its size is symbolic."""
    value = node.meta["example_value"]
    if not compat.sizes.is_fixed(value):
        raise FallBackToStock(f"the model {what} a DTensor of symbolic size")
    return value


def _more_inputs(gm: Any, values: Sequence[torch.Tensor]) -> list[Any]:
    """Append placeholders of these values to a graph."""
    found = []
    for value in values:
        *others, last = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_after(last):
            node = gm.graph.placeholder(f"sent{len(others)}")
        node.meta["example_value"] = compat.aot.fake_input(value)
        found.append(node)
    return found


def _make(
    gm: Any, node: Any, last: Any, make: Callable[..., Any], given: torch.Tensor, more: Sequence[Any] = ()
) -> None:
    """Compute a placeholder's old value inside the graph, from its new one, `given`, and from `more` inputs."""
    with gm.graph.inserting_after(last):
        made = gm.graph.call_function(make, (node, *more))
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    made.meta["example_value"] = node.meta["example_value"]
    node.meta["example_value"] = compat.aot.fake_input(given)


def _hold(gm: Any, node: Any, name: str, value: Any) -> None:
    """Make an input a constant of the graph."""
    setattr(gm, name, value)
    with gm.graph.inserting_before(node):
        constant = gm.graph.create_node("get_attr", name)  # get_attr() warns of all but parameters and modules
    node.replace_all_uses_with(constant)
    gm.graph.erase_node(node)


def _take_outputs_apart(gm: Any) -> dict[int, Convert]:
    """Make the graph return local tensors; return position of an output -> function from it to the DTensor."""
    output = gm.graph.output_node()
    results, found = list(output.args[0]), dict[int, Convert]()
    for position, node in enumerate(results):
        value: Any = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        if compat.tensors.is_dtensor(value):
            found[position] = compat.tensors.dtensor_like(_fixed_dtensor(node, "returns"))
            with gm.graph.inserting_before(output):
                results[position] = gm.graph.call_method("to_local", (node,))
            results[position].meta["example_value"] = value.to_local()
    output.args = (tuple(results),)
    return found


def _always(value: Any) -> Convert:
    return lambda _: value


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.as_subclass(torch.Tensor)


def _clear_marks(value: torch.Tensor) -> torch.Tensor:
    return _plain(value).resolve_neg()


def _without_mark(fake: torch.Tensor) -> Any:
    if compat.tensors.is_received_later(fake):
        return compat.tensors.as_if_received(fake)
    return fake.detach().resolve_neg().requires_grad_(fake.requires_grad) if fake.is_neg() else fake


def _to_local(value: Any) -> Any:
    local = value.to_local()
    return compat.tensors.received(local) if compat.tensors.is_received_later(local) else local
