"""Views of inputs: results that view an input, and the base that AOTAutograd passes in place of inputs that view it.

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
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dcompile import compat
from dcompile.errors import DcompileError


def return_input_views(gm: Any, aliases: Mapping[int, int]) -> None:
    """Make a graph return views of its own inputs for these results. `aliases`: position of a result -> of the input.

    Guarantees: all other results and effects of the graph are the same. Nothing reads the values of these results.
    """
    if not aliases:
        return
    placeholders, output = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node()
    changes = _changes(gm, placeholders)
    written = {copy.args[0]: copy.args[1] for copy in changes} | compat.aot_descriptors.returned_changes(gm)
    # after the write to its input, a view that is a library call would seem to read overwritten values
    before = changes[0] if changes else output
    results, left = list(output.args[0]), set[Any]()
    for place, number in aliases.items():
        start = placeholders[number]
        way = _way(results[place], written[start]) if start in written else _absolute_views(results[place], start)
        if way:
            results[place] = _replay_views(gm, start, way, before)
            left.update(way)
        elif compat.aot_descriptors.is_base_of_inputs(start) and _changes_dtype(results[place]):
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
        if compat.aot_descriptors.is_base_of_inputs(node) and compat.sizes.is_fixed(value := node.meta["val"])
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
