"""Results that look at an input: `x.mul_(2); return x[: len(x) // 2]`.

AOTAutograd hands out a view of the input itself. Where the way to it has symbols in it, it asks what the graph returned
how that view lies. Of an input that the graph changes, traced graphs return a look at the new values, which begin at 0
and may lie in another order than the input: with any backend of torch 2.11 to 2.13, the rows of a slice then come from
the front of what was sliced. And a look that counts from where a storage begins is a copy, which begins at 0 as well,
where the graph reads it too: so that the returned one is a look of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from dcompile import compat


def return_input_views(gm: Any, aliases: Mapping[int, int]) -> None:
    """Have a graph return looks at its own inputs for these results: position of a result -> of the input.

    Guarantees: whatever else the graph returns, and does. What is in those results is read by nobody.
    """
    if not aliases:
        return
    placeholders, output = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node()
    changes = _changes(gm, placeholders)
    written = {copy.args[0]: copy.args[1] for copy in changes} | compat.aot.returned_changes(gm)
    # behind what changes its input, a look that is a call of the library's would seem to read what is gone
    before = changes[0] if changes else output
    results, left = list(output.args[0]), set[Any]()
    for place, number in aliases.items():
        start = placeholders[number]
        way = _way(results[place], written[start]) if start in written else _absolute_views(results[place], start)
        if way:
            results[place] = _replay_views(gm, start, way, before)
            left.update(way)
    output.args = (tuple(results),)
    for node in reversed(gm.graph.nodes):
        if node in left and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def _changes(gm: Any, placeholders: list[Any]) -> list[Any]:
    """Nodes that write to inputs, which functionalization puts behind all others."""
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [copy for copy in copies if copy.args[0] in placeholders]


def _way(result: Any, start: Any, counted: bool = False) -> list[Any]:
    """The views that lead from a node to a result, in order; none if it is no view of that node.

    An offset of `as_strided` counts from where memory begins, which new values have to themselves: such views are
    `counted` on the way from an input that keeps its values.
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


def _absolute_views(result: Any, start: Any) -> list[Any]:
    """The views that lead from an input to a result, if one counts from the storage's start and others read one."""
    way = _way(result, start, counted=True)
    return way if any(map(compat.storage_offsets.has_offset, way)) and any(len(view.users) > 1 for view in way) else []


def _replay_views(gm: Any, start: Any, way: list[Any], before: Any) -> Any:
    """The same views of another node."""
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
