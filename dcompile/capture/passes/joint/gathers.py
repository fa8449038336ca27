"""Read less in gathers, and compute their gradients by gathers where no two positions are equal.

A gather reads memory. torch upsamples 16-bit images as float32, and rounds the gathered values, so a wider copy, of
twice the bytes, would have to be written first. Widening is exact, so the gather reads the 16-bit image instead.

Experts get their rows sorted by expert, `x[order // copies]`, and return results in the inverse order. To autograd,
both are gathers of arbitrary rows, possibly repeated. Their gradient scatters and adds rows: on GPUs a buffer of zeros
and atomic additions. If the positions are a permutation, as `sort` returns it, each row has a position of its own. The
gradient is then a gather by the inverse permutation, which fuses into pointwise kernels.

Guarantees: the same values, up to the order in which the copies of one row are summed.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.inserted_calls import insert_call
from dcompile.capture.passes.joint.layouts import GATHERS
from dcompile.passes import PassReport

aten = torch.ops.aten

WIDE = (torch.float32, torch.float64)


def narrow_gathers(gm: GraphModule) -> PassReport:
    """Make gathers read the 16-bit source of a widened tensor, if all users round the result back."""
    changed = 0
    for gather in [node for node in gm.graph.nodes if node.op == "call_function" and node.target in GATHERS]:
        source = _widened_source(gather.args[0])
        if source is None or not all(_narrows(user, source) for user in gather.users):
            continue
        gather.update_arg(0, source)
        gather.meta["val"] = gather.meta["val"].to(source.meta["val"].dtype)
        for user in list(gather.users):
            user.replace_all_uses_with(gather)
            gm.graph.erase_node(user)
        changed += 1
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return PassReport(changed)


def _widened_source(node: Any) -> Node | None:
    """Return the 16-bit source of which `node` is a wider copy, or None."""
    if not _is_plain_cast(node) or node.meta["val"].dtype not in WIDE:
        return None
    source = node.args[0]
    return source if source.meta["val"].dtype in (torch.float16, torch.bfloat16) else None


def _narrows(node: Node, source: Node) -> bool:
    return _is_plain_cast(node) and node.meta["val"].dtype == source.meta["val"].dtype


def _is_plain_cast(node: Any) -> bool:
    """Is a node a copy that differs only in its dtype?"""
    if not (isinstance(node, Node) and node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}):
        return False
    value, before = node.meta.get("val"), node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    return value.stride() == before.stride()


SORTS = frozenset((aten.sort.default, aten.sort.stable))
ZEROS = frozenset((aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default))
FULL = frozenset((aten.full.default, aten.full_like.default, aten.new_full.default))


def gather_permutation_gradients(joint: GraphModule) -> PassReport:
    """Replace scatter-adds to permuted positions in a joint graph by gathers, in place."""
    count = 0
    for node in joint.graph.find_nodes(op="call_function", target=aten.index_put.default):
        if _adds_rows_to_zeros(node) and (found := _permuted_sum(node)) is not None:
            _gather(joint, node, *found)
            count += 1
    if count:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return PassReport(count)


def _adds_rows_to_zeros(node: Node) -> bool:
    if len(node.args) < 4 or node.args[3] is not True:
        return False
    table, indices, values = node.args[:3]
    if not isinstance(table, Node) or not isinstance(values, Node) or not _are_zeros(table):
        return False
    return isinstance(indices, list | tuple) and len(indices) == 1 and isinstance(indices[0], Node)


def _are_zeros(node: Node) -> bool:
    if node.target in FULL:
        return len(node.args) > 1 and bool(node.args[-1] == 0)
    return node.target in ZEROS


def _permuted_sum(node: Node) -> tuple[Node, int] | None:
    """Return (permutation, copies) of a scatter-add to positions permutation // copies, or None."""
    position: Any = node.args[1][0]  # type: ignore[index]
    copies: Any = 1
    if (
        position.target == aten.div.Tensor_mode and position.kwargs.get("rounding_mode") == "floor"
    ) or position.target == aten.floor_divide.default:
        position, copies = position.args
    if not isinstance(position, Node) or not isinstance(copies, int) or copies < 1:
        return None
    if not (_is_order(position) or _inverse_of(position) is not None):
        return None
    rows, values, result = (_shape(part) for part in (position, node.args[2], node))
    fits = len(rows) == 1 and values[:1] == rows and values[1:] == result[1:] and rows[0] == copies * result[0]
    return (position, copies) if fits else None


def _shape(node: Any) -> tuple[int, ...]:
    """Return the sizes of a node's value, or () if some are symbolic."""
    shape = tuple(node.meta["val"].shape)
    return shape if all(isinstance(size, int) for size in shape) else ()


def _is_order(node: Node) -> bool:
    """Is a node the permutation that `sort` returns for a vector?"""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    sort = node.args[0]
    return isinstance(sort, Node) and sort.target in SORTS and len(_shape(node)) == 1


def _inverse_of(node: Node) -> Node | None:
    """Return the permutation whose inverse `node` is (`inverse[order] = arange(n)`), or None."""
    if node.target is not aten.index_put.default or (len(node.args) > 3 and node.args[3]):
        return None
    indices, numbers = node.args[1:3]
    (order,) = indices if isinstance(indices, list | tuple) and len(indices) == 1 else (None,)
    if not isinstance(order, Node) or not isinstance(numbers, Node) or not _is_order(order):
        return None
    counts_up = numbers.target is aten.arange.default and _shape(numbers) == _shape(order) == _shape(node)
    return order if counts_up and numbers.args[0] == _shape(order)[0] else None


def _gather(joint: GraphModule, node: Node, order: Node, copies: int) -> None:
    """Replace a scatter-add by a gather with the inverse of `order`, and a sum over copies."""
    values: Any = node.args[2]
    mode = compat.aot.detect_fake_mode([node.meta["val"]])
    insert = partial(insert_call, joint.graph, mode, origin=node, before=node)
    result = insert(aten.index.Tensor, (values, [_inverse(joint, order, node, mode)]))
    if copies > 1:
        rows = _shape(node)
        result = insert(aten.view.default, (result, [rows[0], copies, *rows[1:]]))
        result = insert(aten.sum.dim_IntList, (result, [1]))
    node.replace_all_uses_with(result)


def _inverse(joint: GraphModule, order: Node, before: Node, mode: Any) -> Node:
    """Return the inverse of a permutation: an existing one that precedes a node, or a new one."""
    known = _inverse_of(order) or next(
        (user for user in order.users if user < before and _inverse_of(user) is order), None
    )
    if known is not None:
        return known
    val = order.meta["val"]
    where = {"dtype": val.dtype, "device": val.device}
    insert = partial(insert_call, joint.graph, mode, origin=order)
    numbers = insert(aten.arange.default, (val.shape[0],), after=order, kwargs=where)
    room = insert(aten.empty.memory_format, ([val.shape[0]],), after=numbers, kwargs=where)
    return insert(aten.index_put.default, (room, [order], numbers), after=room)
