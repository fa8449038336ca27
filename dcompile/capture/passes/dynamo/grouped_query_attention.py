"""Use grouped-query attention for keys and values that a model repeats: GPU kernels share heads themselves.

If a model has fewer heads of keys than of queries, its code repeats them, or lets `scaled_dot_product_attention` share
them (`enable_gqa`). Hugging Face's models use `enable_gqa` only without a mask. While they are traced, they have made a
mask, and so repeat heads. Repeated tensors are written and saved for the backward, and their gradients are written and
summed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION, MASK, argument, changes, is_call, sizes_of
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.device_traits import traits_of
from dcompile.ir.index import Size
from dcompile.passes import GAIN, PassReport

GROUPED = "enable_gqa"
MAX_HEAD_WIDTH = 128
"""Elements of a head up to which all kernels with shared heads exist; the fallback beyond would be slow."""
_RESHAPES = ("reshape", "view", "contiguous", "clone")
_SLICES, _REPEATS = ("getitem",), ("repeat_interleave",)


@dataclass(frozen=True)
class RepeatedOutside:
    """A body's placeholder whose operands are repeated outside, and the repeated tensor in each call of the body."""

    placeholder: Node
    sources: tuple[Source, ...]


Source: TypeAlias = "Node | RepeatedOutside"


def use_grouped_query_attention(gm: GraphModule, planned_for: str | None = None) -> PassReport:
    """Replace repeated heads of keys and values by shared ones (`enable_gqa`) in a graph and its subgraphs, in place.

    `planned_for`: type of the device whose kernels count, if not the graph's own. The kernel sums gradients of a head's
    copies without rounding each of them. Relies on: causal and full masks have been removed.
    """
    nest, count, repeated = NestedGraphs(gm), 0, list[Node]()
    for node in nest.nodes():
        if node.op != "call_function" or node.target is not ATTENTION or not _has_kernel(node, planned_for):
            continue
        shared = unrepeated(node, nest)
        if shared is not None:
            repeated += [argument(node, place, name) for place, name in ((1, "key"), (2, "value"))]
            share_heads(node, *shared)
            count += 1
    if count:
        erase_repeated(repeated, nest)
        nest.recompile()
        note = f"{count} attention calls were given keys and values repeated for groups of queries; they share them"
        return PassReport(count, (GAIN + note,))
    return PassReport()


def unrepeated(node: Node, nest: NestedGraphs) -> tuple[Node, Node] | None:
    """Return keys and values of an attention call before their heads were repeated; None if they were not.

    They are passed into the body of the call, if they were repeated outside.
    """
    query, *given = (argument(node, place, name) for place, name in enumerate(("query", "key", "value")))
    heads = sizes_of(query)[1]
    key, value = (_once(tensor, heads, nest) for tensor in given)
    if key is None or value is None or not _heads(key) == _heads(value) != heads:
        return None
    return _brought_in(key, nest), _brought_in(value, nest)


def erase_repeated(repeated: list[Node], nest: NestedGraphs) -> None:
    """Erase repeated keys and values that nothing uses any more."""
    nest.erase_unused(repeated, lambda node: is_call(node, *_RESHAPES, "expand", "unsqueeze", *_SLICES, *_REPEATS))


def _has_kernel(node: Node, planned_for: str | None) -> bool:
    """Does a fused attention kernel share heads here? It needs 16-bit dtypes, no mask, and supported head widths."""
    values = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    if argument(node, MASK, "attn_mask") is not None or node.kwargs.get(GROUPED):
        return False
    shapes = [sizes_of(value) for value in values]
    if not all(len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int) for shape in shapes):
        return False
    example, width = values[0].meta["example_value"], shapes[0][3]
    return (
        traits_of(planned_for or example.device.type).aten.shares_attention_heads
        and example.dtype in (torch.float16, torch.bfloat16)
        and all(shape[3] == width for shape in shapes)
        and isinstance(width, int)
        and width % 8 == 0
        and width <= MAX_HEAD_WIDTH
        and compat.tensors.has_flash_attention()
    )


def _once(node: Any, heads: Size, nest: NestedGraphs) -> Source | None:
    """Return the tensor (batch, fewer heads, length, width) whose heads `node` repeats equally often, each in a row.

    The recognized forms are repeat_interleave, and a new dimension after the heads that is expanded and merged into
    them. Shapes decide the rest: a reshape merges (b, h, r, n, d) into (b, h * r, n, d) in only one way.
    """
    if not isinstance(node, Node) or len(sizes_of(node)) != 4 or sizes_of(node)[1] != heads:
        return None
    if node.op == "placeholder":
        return _outside(node, heads, nest)
    merged = node
    while is_call(merged, *_RESHAPES):
        inner = merged.args[0]
        if not isinstance(inner, Node):
            return None
        merged = inner
    source = _is_interleaved(merged) if is_call(merged, *_REPEATS) else expanded_heads(merged)
    if source is None or _repeated_heads(source, heads) != sizes_of(node) or _is_changed(node, source):
        return None
    return source


def _outside(placeholder: Node, heads: Size, nest: NestedGraphs) -> RepeatedOutside | None:
    """Return a body's placeholder with the repeated tensor of each call, or None if calls differ."""
    given, body = nest.sources(placeholder), nest.owner(placeholder)
    calls = nest.calls_of(body)
    if given is None or any(map(changes, placeholder.users)) or any(len(call.bodies) > 1 for call in calls):
        return None
    found = [source for node in given if (source := _once(node, heads, nest)) is not None]
    same = len(found) == len(given) and nest.can_give(body) and len({_heads(source) for source in found}) == 1
    return RepeatedOutside(placeholder, tuple(found)) if same else None


def _heads(source: Source) -> Size:
    return sizes_of(source)[1] if isinstance(source, Node) else _heads(source.sources[0])


def _brought_in(source: Source, nest: NestedGraphs) -> Node:
    """Return the repeated tensor inside the graph that needs it; pass it into bodies."""
    if isinstance(source, Node):
        return source
    operands = [_brought_in(each, nest) for each in source.sources]
    return nest.give(nest.owner(source.placeholder), operands)


def _repeated_heads(source: Node, heads: Size) -> tuple[Size, ...]:
    batch, _, *rest = sizes_of(source)
    return (batch, heads, *rest)


def _is_changed(node: Node, source: Node) -> bool:
    """Does something write to the source, or to a tensor between it and `node`?"""
    while True:
        if any(changes(user) for user in node.users):
            return True
        if node is source:
            return False
        node = node.all_input_nodes[0]


def expanded_heads(node: Any) -> Node | None:
    """Return the tensor (batch, heads, length, width) that a node expands to (batch, heads, copies, length, width)."""
    if not isinstance(node, Node) or not is_call(node, "expand") or len(sizes_of(node)) != 5:
        return None
    batch, heads, _, length, width = sizes_of(node)
    apart = node.args[0]
    if not isinstance(apart, Node) or sizes_of(apart) != (batch, heads, 1, length, width):
        return None
    source = apart.args[0] if _adds_third_dimension(apart) else None
    return source if isinstance(source, Node) and sizes_of(source) == (batch, heads, length, width) else None


def _is_interleaved(node: Node) -> Node | None:
    source, repeats, dim = (argument(node, place, name) for place, name in enumerate(("input", "repeats", "dim")))
    if not isinstance(source, Node) or not isinstance(repeats, int) or dim not in (1, -3) or len(sizes_of(source)) != 4:
        return None
    return source


def _adds_third_dimension(node: Node) -> bool:
    if is_call(node, "unsqueeze"):
        return argument(node, 1, "dim") in (2, -3)
    index: Any = node.args[1] if node.target is operator.getitem else None
    every = slice(None, None, None)
    if not isinstance(index, tuple) or index[:3] != (every, every, None):
        return False
    return all(part in (every, ...) for part in index[3:])


def share_heads(node: Node, key: Node, value: Node) -> None:
    """Give an attention call keys and values with fewer heads than queries, in place."""
    args, kwargs = list(node.args), dict(node.kwargs)
    for place, (name, shared) in enumerate((("key", key), ("value", value)), 1):
        if len(args) > place:
            args[place] = shared
        else:
            kwargs[name] = shared
    node.args, node.kwargs = tuple(args), {**kwargs, GROUPED: True}
