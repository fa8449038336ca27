"""Add a broadcast tensor in the kernels that read a matmul, instead of in the matmul, on GPUs.

`baddbmm` and `addmm` take a matrix of the result's size. ATen copies a broadcast tensor there first, such as the biases
of ALiBi, one row for each head, and the GEMM reads that copy. This took 5 of BLOOM's 45 ms (H100). A kernel that reads
the result anyway adds the tensor from a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.inserted_calls import insert_call
from dcompile.capture.passes.joint.saved_values import COPIES, VIEWS
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten
Insert: TypeAlias = Callable[..., Node]

PRODUCTS = {aten.addmm: aten.mm, aten.baddbmm: aten.bmm}
"""Matmul with an addend -> the same without one."""
WIDENED_VIEWS = VIEWS - COPIES - {"aten.as_strided.default"}
"""Views that are the same of a wider tensor."""
FUNCTIONS = (aten._to_copy.default, aten._softmax.default)
"""Loops that take a wider dtype than the one they were traced with. They round their results, as eager does. Others,
such as tanh, amplify sums near 0, of which eager's rounding is smaller."""
ARITHMETIC = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.self, aten.masked_fill.Scalar,
    aten.maximum.default, aten.minimum.default,
)  # fmt: skip
"""Loops whose 16-bit results are widened with their operands. Many are exact in eager, such as adding a mask's zeros:
rounding them would round the sum after all."""


def separate_broadcast_addends(gm: GraphModule) -> PassReport:
    """Add broadcast tensors to matmuls in float32 after them, in place, where only loops read the results.

    Guarantees: no more roundings to 16 bits. The matmul's own result is rounded, and its sum with the tensor is not. A
    sum is further from the exact one than eager's only if the tensor cancels most of it.
    Relies on: loops that keep values of float32 in registers, so wider values take no memory.
    """
    calls = [node for target in PRODUCTS for node in gm.graph.find_nodes(op="call_function", target=target.default)]
    found = [node for node in calls if _copies_addend(node) and _is_read_by_loops(node)]
    mode = compat.aot.detect_fake_mode([node.meta["val"] for node in found]) if found else None
    if mode is None:
        return PassReport()
    insert = partial(insert_call, gm.graph, mode)
    for node in found:
        _widen_readers(mode, insert, node, _insert_sum(insert, node))
        _erase_unread(gm.graph, node)
    gm.recompile()
    return PassReport(len(found))


def _copies_addend(node: Node) -> bool:
    """Is a matmul's addend smaller than its result, and no bias that the GEMM adds in its epilogue?"""
    value, addend = node.meta.get("val"), node.args[0]
    added = addend.meta.get("val") if isinstance(addend, Node) else None
    beta, alpha = _factors(node)
    if not isinstance(value, torch.Tensor) or not isinstance(added, torch.Tensor) or not value.is_floating_point():
        return False
    if not traits_of(value.device.type).aten.copies_broadcast_addends or beta is None or alpha is None or beta == 0:
        return False
    sizes = (1,) * (value.dim() - added.dim()) + tuple(added.shape)
    known_one = compat.sizes.is_known_one
    repeats = [known_one(size) and not known_one(wanted) for size, wanted in zip(sizes, value.shape, strict=True)]
    is_bias = beta == 1 and repeats == [True, False]
    return any(repeats) and not is_bias


def _factors(node: Node) -> tuple[float | None, float | None]:
    """Return a matmul's (beta, alpha), each None if it is symbolic."""
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    return beta if isinstance(beta, (int, float)) else None, alpha if isinstance(alpha, (int, float)) else None


def _is_read_by_loops(node: Node) -> bool:
    """Do only loops read a value, and what is widened with it?"""
    return bool(node.users) and all(
        _is_read_by_loops(user) if _is_widened(user) else _is_loop(user, node) for user in node.users
    )


def _is_widened(user: Node) -> bool:
    """Does a user pass on a wider dtype: as a view, or as arithmetic with a 16-bit result?"""
    value = user.meta.get("val")
    is_narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize == 2
    return str(user.target) in WIDENED_VIEWS or (user.target in ARITHMETIC and is_narrow)


def _is_loop(reader: Node, node: Node) -> bool:
    value = reader.meta.get("val")
    if reader.target not in (*FUNCTIONS, *ARITHMETIC) or not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and value.device == node.meta["val"].device


def _insert_sum(insert: Insert, node: Node) -> Node:
    """Insert a matmul without the addend, and their sum in at least float32; return the sum.

    The GEMM keeps its factor, without which float16 may overflow. With a beta of 0 it does not read the addend.
    """
    addend, *operands = node.args
    assert isinstance(addend, Node)
    beta, alpha = _factors(node)
    target: Any = node.target
    if alpha == 1:
        product = insert(PRODUCTS[target.overloadpacket].default, tuple(operands), node, before=node)
    else:
        product = insert(target, node.args, node, before=node, kwargs={"beta": 0, "alpha": alpha})
    if addend.meta["val"].dtype.itemsize < 4:
        addend = insert(aten._to_copy.default, (addend,), node, before=node, kwargs={"dtype": torch.float32})
    scale = {} if beta == 1 else {"alpha": beta}
    return insert(aten.add.Tensor, (product, addend), node, before=node, kwargs=scale)


def _widen_readers(mode: Any, insert: Insert, old: Node, wide: Node) -> None:
    """Have the readers of a value read a wider one, and round their results to the dtypes that they had."""
    for user in list(old.users):
        if _is_widened(user):
            args = tuple(wide if arg is old else arg for arg in user.args)
            widened = insert(user.target, args, user, before=user, kwargs=user.kwargs)
            _widen_readers(mode, insert, user, widened)
            continue
        dtype = user.meta["val"].dtype
        user.replace_input_with(old, wide)
        if user.target is aten._softmax.default:
            user.update_arg(2, False)  # its float32 input is not 16-bit any more
        with mode:
            args, kwargs = torch.fx.node.map_arg((user.args, user.kwargs), lambda arg: arg.meta["val"])
            user.meta["val"] = user.target(*args, **kwargs)  # type: ignore[operator]
        if user.meta["val"].dtype != dtype:
            readers = list(user.users)
            rounded = insert(aten._to_copy.default, (user,), user, after=user, kwargs={"dtype": dtype})
            for reader in readers:
                reader.replace_input_with(user, rounded)


def _erase_unread(graph: Graph, node: Node) -> None:
    """Erase a value whose readers now read another one, with what was widened."""
    for user in list(node.users):
        _erase_unread(graph, user)
    graph.erase_node(node)
