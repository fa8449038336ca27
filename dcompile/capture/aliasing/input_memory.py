"""Memory of inputs: results that view it, inputs that share it, and graphs that free or allocate it.

`x.mul_(2); return x[: len(x) // 2]`: AOTAutograd returns a view of the input itself. If the view has symbolic sizes, it
takes the view's offset and strides from the graph's result. Of an input that the graph changes, traced graphs return a
view of the new values. These start at offset 0, and their strides may differ from the input's. With any backend of
torch 2.11 to 2.13, the rows of a slice then come from the front of the sliced tensor. A view with an offset from the
start of a storage, which the graph reads as well, is a copy, which starts at 0, too. So the graph returns a separate
view in that case.

If an input changes, AOTAutograd passes a base tensor in place of several inputs that view it. Dynamo guards on shapes
and strides of the inputs, but not of their base. `a.t_()` after a graph break may give the base other strides in
another call. ATen's operators read a tensor's strides. Kernels of dcompile are compiled for the strides of the first
call, and would write to wrong elements (under inductor it is an AssertionError). So the traced strides are restored.

Dynamo does not guard on inputs' addresses either. So a later call with overlapping windows of one tensor would be
computed as if they did not overlap. If the graph changes one of them in place, such a call runs it operator by
operator, as eager does. The check covers pairs of a changed input and another one, unless both are parameters or
buffers: 50 ns an input and call.

`x.untyped_storage().resize_(n)` frees or allocates the memory of an input, as hand-written sharding does. AOTAutograd
traces such a call on the tensor's current value. After a change this is a value of the graph, not the input. If the
value were freed, the copy back to the input would read freed memory, and the input would keep its own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.errors import DcompileError
from dcompile.passes import PassReport


def return_input_views(gm: Any, aliases: Mapping[int, int]) -> None:
    """Make a graph return views of its own inputs for these results. `aliases`: position of a result -> of the input.

    Guarantees: all other results and effects of the graph are the same. Nothing reads the values of these results.
    """
    if not aliases:
        return
    placeholders, output = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node()
    changes = _changes(gm, placeholders)
    written = {copy.args[0]: copy.args[1] for copy in changes} | compat.aot_metadata.returned_changes(gm)
    # after the write to its input, a view that is a library call would seem to read overwritten values
    before = changes[0] if changes else output
    results, left = list(output.args[0]), set[Any]()
    for place, number in aliases.items():
        start = placeholders[number]
        way = _way(results[place], written[start]) if start in written else _absolute_views(results[place], start)
        if way:
            results[place] = _replay_views(gm, start, way, before)
            left.update(way)
        elif compat.aot_metadata.is_base_of_inputs(start) and _changes_dtype(results[place]):
            raise DcompileError(
                "dcompile: a result views an input as another dtype, and the graph changes another input in the same "
                "memory; view it outside of compiled code, or pass a copy"
            )
    output.args = (tuple(results),)
    for node in reversed(gm.graph.nodes):
        if node in left and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def _changes(gm: Any, placeholders: list[Any]) -> list[Any]:
    """Return the nodes that write to inputs; functionalization puts them after all others."""
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [copy for copy in copies if copy.args[0] in placeholders]


def _way(result: Any, start: Any, counted: bool = False) -> list[Any]:
    """Return the chain of views from a node to a result, in order; empty if the result is no view of that node.

    The offset of `as_strided` is relative to the start of the storage, and new values have their own storage. So such
    views are allowed (`counted`) only in a chain from an input that keeps its values.
    """
    way, node = list[Any](), result
    while start is not None and node is not start:
        if node.op != "call_function" or not (node.target is operator.getitem or _is_view(node, counted)):
            return []
        way.append(node)
        node = node.args[0]
    return way[::-1]


def _is_view(node: Any, counted: bool) -> bool:
    return getattr(node.target, "is_view", False) and (counted or not compat.storage_offsets.has_offset(node))


def _changes_dtype(result: Any) -> bool:
    """Is a result a view of other views as another dtype? In a program it is a copy, which has lost their offset."""
    while getattr(result, "op", "") == "call_function" and _is_view(result, counted=True):
        if result.meta["val"].dtype != result.args[0].meta["val"].dtype:
            return True
        result = result.args[0]
    return False


def _absolute_views(result: Any, start: Any) -> list[Any]:
    """Return the chain of views from an input to a result, if the result needs a chain of its own.

    It does if a view's offset is relative to the storage, and a view of the chain has other readers.
    """
    way = _way(result, start, counted=True)
    return way if any(map(compat.storage_offsets.has_offset, way)) and any(len(view.users) > 1 for view in way) else []


def _replay_views(gm: Any, start: Any, way: list[Any], before: Any) -> Any:
    """Apply the same chain of views to another node; return the last one."""
    node = start
    for view in way:
        args = (node, *view.args[1:])
        with gm.graph.inserting_before(before):
            looked = gm.graph.call_function(view.target, args, view.kwargs)
        looked.meta = dict(view.meta)
        values, keywords = torch.fx.map_arg((args, view.kwargs), lambda source: source.meta["val"])
        with compat.aot.detect_fake_mode([start.meta["val"]]):
            looked.meta["val"] = view.target(*values, **keywords)
        node = looked
    return node


Boxed = Callable[[list[Any]], list[Any]]


def with_bases_as_traced(gm: Any, run: Boxed) -> Boxed:
    """Return `run` with base tensors viewed with the shapes and strides that they had when `gm` was traced."""
    bases = tuple(
        (position, tuple(value.shape), value.stride())
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if compat.aot_metadata.is_base_of_inputs(node) and compat.sizes.is_fixed(value := node.meta["val"])
    )
    if not bases:
        return run

    def running(args: list[Any]) -> list[Any]:
        for position, shape, strides in bases:
            base = args[position]
            if base.stride() != strides or base.shape != shape:
                args[position] = base.as_strided(shape, strides)
        return run(args)

    return running


COUNTED = "call with arguments that share memory otherwise than when it was traced, run eagerly"
"""Name of the receipt's count of such calls."""


@dataclass(frozen=True)
class TracedOverlaps:
    """The inputs of a graph that are checked, and how they overlapped when it was traced."""

    positions: tuple[int, ...]
    """Positions among the graph's inputs."""
    changed: frozenset[int]
    """Indices into `positions` of inputs that the graph writes to."""
    chosen: frozenset[int]
    """Indices of inputs that the caller chooses: neither parameters nor buffers."""
    traced: dict[tuple[int, int], int]
    """Indices of two inputs that shared memory at tracing -> bytes from the first to the second."""


def watched_inputs(gm: Any, inputs: Sequence[Any], changed: frozenset[int] | None) -> TracedOverlaps | None:
    """Return the inputs of a graph to check, given those that it changes (None: unknown); None if there is no pair."""
    nodes = gm.graph.find_nodes(op="placeholder")
    plain = [
        n for n, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and not compat.tensors.is_wrapper(value) and value.layout is torch.strided
    ]  # fmt: skip
    chosen = {n for n in plain if not compat.dynamo.is_static_input(nodes[n], inputs[n])}
    written = {n for n in plain if n in changed} if changed is not None else chosen
    # parameters and buffers that do not change are needed only where a caller's input changes
    positions = tuple(sorted(written | chosen)) if not written & chosen else tuple(plain)
    if not written or not chosen or len(positions) < 2:
        return None
    of = {position: place for place, position in enumerate(positions)}
    places = frozenset(of[n] for n in written), frozenset(of[n] for n in chosen)
    return TracedOverlaps(positions, *places, _overlapping_pairs(positions, *places, inputs))


def _overlapping_pairs(
    positions: Sequence[int], changed: frozenset[int], chosen: frozenset[int], values: Sequence[Any]
) -> dict[tuple[int, int], int]:
    """Return relevant pairs whose addresses overlap: indices of both -> bytes from the first to the second."""
    found: dict[tuple[int, int], int] = {}
    spans = []
    for place, position in enumerate(positions):
        value = values[position]
        begin = value.data_ptr()
        if begin and (length := _length(value)):
            spans.append((begin, begin + length, place))
    spans.sort()
    for number, (begin, end, place) in enumerate(spans):
        for other_begin, _, other in spans[number + 1 :]:
            if other_begin >= end:
                break
            if (place in changed or other in changed) and (place in chosen or other in chosen):
                first, second = sorted((place, other))
                found[first, second] = other_begin - begin if first == place else begin - other_begin
    return found


def _length(value: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if value.is_contiguous():
        return value.numel() * value.element_size()
    if not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def as_traced(
    compiled: Callable[..., Any],
    gm: Callable[..., Any],
    watched: TracedOverlaps | None,
    counted: Counter[str],
    has_collectives: bool,
) -> Callable[..., Any]:
    """Return a callable: `compiled` if inputs overlap as at tracing, else the captured graph `gm` itself, counted.

    It raises DcompileError instead of running `gm` if compiled programs reduce gradients (`has_collectives`).
    """
    if watched is None:
        return compiled
    positions, changed, chosen, traced = watched.positions, watched.changed, watched.chosen, watched.traced
    address = torch.Tensor.data_ptr
    known: list[int] = []
    """Addresses of the last call that passed the check."""

    def call(*args: Any) -> Any:
        nonlocal known
        addresses = [address(args[position]) for position in positions]
        if addresses != known:
            if _overlapping_pairs(positions, changed, chosen, args) != traced:
                if has_collectives:
                    raise DcompileError(
                        "dcompile: an argument that the model changes in place shares memory with another one, "
                        "otherwise than in the first call; pass a copy (.clone()) of one of the two"
                    )
                counted[COUNTED] += 1
                return gm(*args)
            known = addresses
        return compiled(*args)

    return compat.dynamo.no_dynamo(call, "a compiled graph")


CHANGES = "aten.copy_.default"
"""The operation that changes an input: AOTAutograd leaves no other in-place operation in a graph."""


def resize_only_inputs(gm: Any) -> PassReport:
    """Make a traced graph resize only the storages of inputs, in place.

    Guarantees: values that are read keep their memory. An input whose value was freed last is freed instead of written.
    Other resizes of values are removed, since new memory has no content until it is written.
    """
    nodes = [node for node in gm.graph.nodes if compat.storage_offsets.resizes(node.target)]
    values = dict.fromkeys(node.args[0] for node in nodes if node.args[0].op != "placeholder")
    returned = set(gm.graph.output_node().all_input_nodes)
    for value in values:
        of_value = [node for node in nodes if node.args[0] is value]
        changes = [user for user in value.users if str(user.target) == CHANGES and user.args[1] is value]
        if value in returned:
            continue  # the caller would see the freed memory: lowering reports that it leaves such graphs to ATen
        if of_value[-1].args[1] == 0:
            for change in changes:
                _free(gm, change)
        for node in of_value:
            gm.graph.erase_node(node)
    if values:
        gm.recompile()
    return PassReport(len(values))


def _free(gm: Any, change: Any) -> None:
    """Replace the write to an input by a resize to 0 bytes."""
    resize = torch.ops.inductor.resize_storage_bytes_.default
    with gm.graph.inserting_before(change):
        freed = gm.graph.call_function(resize, (change.args[0], 0))
    freed.meta |= {key: known for key, known in change.meta.items() if key != "val"}
    freed.meta["val"] = None
    change.replace_all_uses_with(change.args[0])
    gm.graph.erase_node(change)
