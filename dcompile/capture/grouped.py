"""Attention on keys and values that were repeated for groups of queries: kernels of GPUs do that by themselves.

Where a model has fewer heads of keys than of queries, its code repeats them, or asks `scaled_dot_product_attention` to
share them (`enable_gqa`). Hugging Face's models ask when they see no mask, and repeat while they are traced, since they
have made one then. Repeated tensors are written, kept for the backward, and their gradients written and added up.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.causal import ATTENTION, MASK, argument, changes, shape_of

GROUPED = "enable_gqa"
WIDEST = 128
"""Elements of a head, up to which every kernel that shares keys exists; one that does not would be slow."""
_RESHAPES = ("reshape", "view", "contiguous", "clone")


def share_repeated_heads(gm: GraphModule, on: str = "cuda") -> list[str]:
    """Have attention share heads of keys and values that the graph repeats, where a kernel of CUDA's does it.

    `on` is the kind of device that stands for GPUs: another one where a graph is only planned. Returns a line for
    people if anything changed; the graph is changed in place. Relies on: constant masks are gone. Gradients of a key's
    copies are added up inside the kernel, without rounding each of them before.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not ATTENTION or not _has_kernel(node, on):
            continue
        query, key, value = (argument(node, place, name) for place, name in enumerate(("query", "key", "value")))
        heads = shape_of(query)[1]
        key, value = _once(key, heads), _once(value, heads)
        if key is not None and value is not None and shape_of(key)[1] == shape_of(value)[1] < heads:
            _share(node, key, value)
            count += 1
    if count:
        gm.recompile()
        return [f"{count} attention calls were given keys and values repeated for groups of queries; they share them"]
    return []


def _has_kernel(node: Node, on: str) -> bool:
    """Whether attention shares heads without falling back to matrix products: 16 bits, no mask, heads that fit."""
    values = [argument(node, place, name) for place, name in enumerate(("query", "key", "value"))]
    if argument(node, MASK, "attn_mask") is not None or node.kwargs.get(GROUPED):
        return False
    if not all(isinstance(value, Node) and len(shape_of(value)) == 4 for value in values):
        return False
    sizes = [size for value in values for size in shape_of(value)]
    example = values[0].meta["example_value"]
    return (
        all(isinstance(size, int) for size in sizes)
        and example.device.type == on
        and example.dtype in (torch.float16, torch.bfloat16)
        and shape_of(values[0])[3] == shape_of(values[1])[3] == shape_of(values[2])[3]
        and shape_of(values[0])[3] % 8 == 0
        and shape_of(values[0])[3] <= WIDEST
        and compat.tensors.has_flash_attention()
    )


def _once(node: Any, heads: int) -> Node | None:
    """What `node` repeats: of shape (batch, fewer heads, length, width), each head as often as the next one, in a row.

    The forms are repeat_interleave, and a new dimension behind the heads that is expanded and merged into them. Shapes
    say the rest: there is one way to merge (b, h, r, n, d) into (b, h * r, n, d) by a reshape.
    """
    if not isinstance(node, Node) or shape_of(node)[1] != heads:
        return None
    merged = node
    while _is(merged, *_RESHAPES):
        inner = merged.args[0]
        if not isinstance(inner, Node):
            return None
        merged = inner
    source = _interleaved(merged) if _is(merged, "repeat_interleave") else _expanded(merged)
    if source is None or _repeated(source, heads) != shape_of(node) or _is_changed(node, source):
        return None
    return source


def _repeated(source: Node, heads: int) -> tuple[int, ...]:
    batch, _, *rest = shape_of(source)
    return (batch, heads, *rest)


def _is_changed(node: Node, source: Node) -> bool:
    """Whether something writes into the source, or what is made of it on the way to `node`."""
    while True:
        if any(changes(user) for user in node.users):
            return True
        if node is source:
            return False
        node = node.all_input_nodes[0]


def _expanded(node: Node) -> Node | None:
    """(batch, heads, length, width) that this node expands to (batch, heads, copies, length, width)."""
    if not _is(node, "expand") or len(shape_of(node)) != 5:
        return None
    batch, heads, _, length, width = shape_of(node)
    apart = node.args[0]
    if not isinstance(apart, Node) or shape_of(apart) != (batch, heads, 1, length, width):
        return None
    source = apart.args[0] if _adds_third_dimension(apart) else None
    return source if isinstance(source, Node) and shape_of(source) == (batch, heads, length, width) else None


def _interleaved(node: Node) -> Node | None:
    source, repeats, dim = (argument(node, place, name) for place, name in enumerate(("input", "repeats", "dim")))
    if not isinstance(source, Node) or not isinstance(repeats, int) or dim not in (1, -3) or len(shape_of(source)) != 4:
        return None
    return source


def _is(node: Node, *names: str) -> bool:
    if node.op == "call_method":
        return node.target in names
    return node.op == "call_function" and getattr(node.target, "__name__", "") in names


def _adds_third_dimension(node: Node) -> bool:
    if _is(node, "unsqueeze"):
        return argument(node, 1, "dim") in (2, -3)
    index: Any = node.args[1] if node.target is operator.getitem else None
    every = slice(None, None, None)
    if not isinstance(index, tuple) or index[:3] != (every, every, None):
        return False
    return all(part in (every, ...) for part in index[3:])


def _share(node: Node, key: Node, value: Node) -> None:
    before = list(node.all_input_nodes)
    args, kwargs = list(node.args), dict(node.kwargs)
    for place, (name, shared) in enumerate((("key", key), ("value", value)), 1):
        if len(args) > place:
            args[place] = shared
        else:
            kwargs[name] = shared
    node.args, node.kwargs = tuple(args), {**kwargs, GROUPED: True}
    for unused in before:
        while not unused.users and unused not in (key, value) and unused.all_input_nodes:
            (following,) = unused.all_input_nodes
            node.graph.erase_node(unused)
            unused = following
