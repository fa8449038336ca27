"""Compute complex numbers as pairs of real ones where they come from pairs and end as pairs.

Rotary embeddings are often written so: queries are viewed as complex numbers, multiplied by others of length 1, and
viewed as real ones again. Loops have no complex dtype, so each step was a call of ATen's, five kinds of them in
torchtitan's Llama. Here a complex tensor becomes a real one with a last dimension of 2. A product is
`x * re(y) + flip(x) * [-1, 1] * im(y)`, which is one loop and fuses with what surrounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.inserted_calls import insert_call
from dcompile.passes import PassReport

aten = torch.ops.aten
Insert: TypeAlias = Callable[..., Node]

ENDS = (aten.view_as_real.default, aten.view_as_real_copy.default)
"""Calls that turn complex numbers into pairs, in a last dimension."""
VIEWED = (aten.view_as_complex.default, aten.view_as_complex_copy.default)
MADE = (*VIEWED, aten.complex.default, aten.polar.default)
"""Calls that make complex numbers of real ones."""
CONJUGATES = (aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.neg.default, aten.squeeze.default,
        aten.index.Tensor)  # fmt: skip
"""Calls that take pairs as they take complex numbers."""
OF_SHAPE = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
"""Calls whose second argument is a shape."""
OF_DIMENSIONS: Mapping[Any, int] = {
    aten.unsqueeze.default: 1, aten.squeeze.dim: 1, aten.squeeze.dims: 1, aten.transpose.int: 2, aten.slice.Tensor: 1,
    aten.select.int: 1, aten.gather.default: 1, aten.index_select.default: 1, aten.permute.default: 1,
}  # fmt: skip
"""Calls whose arguments after the first are dimensions, and how many of them."""


def pair_complex_numbers(gm: GraphModule) -> PassReport:
    """Replace complex tensors by pairs of real numbers, where every step from pairs to pairs is known.

    Guarantees: products are (ac - bd, ad + bc), as ATen's are; on GPUs, either may contract a product and a sum.
    Relies on: graphs without mutation.
    """
    chosen = _convertible(gm)
    ends = {node for node in gm.graph.nodes if node.target in ENDS and node.args[0] in chosen}
    mode = compat.aot.detect_fake_mode([node.meta["val"] for node in ends]) if ends else None
    if mode is None:
        return PassReport()
    pairs: dict[Node, Node] = {}
    for node in [node for node in gm.graph.nodes if node in chosen or node in ends]:
        if node in ends:
            node.replace_all_uses_with(pairs[node.args[0]])
        else:
            pairs[node] = _pair_of(node, pairs, partial(insert_call, gm.graph, mode, origin=node, before=node))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return PassReport(len(ends))


# --- which ------------------------------------------------------------------------------------------------------------


def _is_complex(value: Any) -> bool:
    found = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(found, complex) or (isinstance(found, torch.Tensor) and found.is_complex())


def _convertible(gm: GraphModule) -> set[Node]:
    """Return complex calls that are known, read known ones or inputs, and are read by known ones or viewed as pairs."""
    known = {*MADE, *CONJUGATES, *SAME, *OF_SHAPE, *OF_DIMENSIONS}
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and _is_complex(node)]
    found = {node for node in calls if node.target in known or _is_arithmetic(node)}
    while wrong := {node for node in found if not _is_surrounded(node, found)}:
        found -= wrong
    return found


def _is_surrounded(node: Node, found: set[Node]) -> bool:
    if node.kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        return False  # which pairs have no memory format for
    given = all(n in found or n.op == "placeholder" or not _is_complex(n) for n in node.all_input_nodes)
    return given and all(user in found or user.target in ENDS for user in node.users)


def _is_arithmetic(node: Node) -> bool:
    """Is it a sum or a difference of complex tensors, or a product with a tensor or a real number?"""
    if node.kwargs or len(node.args) != 2:
        return False
    if node.target is aten.mul.Tensor:
        return not any(isinstance(arg, complex) for arg in node.args)
    both = all(isinstance(arg, Node) and _is_complex(arg) for arg in node.args)
    return node.target in (aten.add.Tensor, aten.sub.Tensor) and both


# --- how --------------------------------------------------------------------------------------------------------------


def _pair_of(node: Node, pairs: Mapping[Node, Node], insert: Insert) -> Node:
    """Insert the calls that compute a complex call's real and imaginary parts, as a last dimension."""

    def pair(value: Any) -> Node:
        return pairs[value] if value in pairs else insert(aten.view_as_real.default, (value,))

    target: Any = node.target
    args: Sequence[Any] = node.args
    if target in VIEWED:
        assert isinstance(args[0], Node)
        return args[0]
    if target is aten.complex.default:
        return insert(aten.stack.default, ([*args], -1))
    if target is aten.polar.default:
        parts = (insert(function, (args[1],)) for function in (aten.cos.default, aten.sin.default))
        return insert(aten.stack.default, ([insert(aten.mul.Tensor, (args[0], part)) for part in parts], -1))
    if target is aten.mul.Tensor:
        return _product(args[0], args[1], pair, insert)
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return insert(target, (pair(args[0]), pair(args[1])))
    whole = pair(args[0])
    if target in CONJUGATES:
        return insert(aten.mul.Tensor, (whole, _signs(1, whole, insert)))
    if target in OF_SHAPE:
        return insert(target, (whole, [*args[1], 2]))
    if target in OF_DIMENSIONS:
        return _along_dimensions(node, whole, insert)
    return insert(target, (whole, *args[1:]), kwargs=node.kwargs)


def _signs(first: int, like: Node, insert: Insert) -> Node:
    """A vector of a sign and the opposite one."""
    how = {"dtype": torch.int64, "device": like.meta["val"].device, "pin_memory": False}
    return insert(aten.arange.start_step, (first, -2 * first, -2 * first), kwargs=how)


def _product(left: Any, right: Any, pair: Callable[[Any], Node], insert: Insert) -> Node:
    if not _is_complex(left):
        left, right = right, left
    whole = pair(left)
    if not isinstance(right, Node):
        return insert(aten.mul.Tensor, (whole, right))
    if not _is_complex(right):
        return insert(aten.mul.Tensor, (whole, insert(aten.unsqueeze.default, (right, -1))))
    other = pair(right)
    if other.meta["val"].dim() > whole.meta["val"].dim():
        whole, other = other, whole
    real, imaginary = (insert(aten.slice.Tensor, (other, -1, place, place + 1)) for place in (0, 1))
    signed = insert(aten.mul.Tensor, (imaginary, _signs(-1, whole, insert)))
    turned = insert(aten.mul.Tensor, (insert(aten.flip.default, (whole, [-1])), signed))
    return insert(aten.add.Tensor, (insert(aten.mul.Tensor, (whole, real)), turned))


def _along_dimensions(node: Node, whole: Node, insert: Insert) -> Node:
    """Apply a call along dimensions of complex numbers to pairs, which have one more after these."""
    target: Any = node.target
    given: Sequence[Any] = node.args
    count, rank = OF_DIMENSIONS[target], whole.meta["val"].dim() - 1

    def shifted(dim: Any) -> Any:
        if isinstance(dim, (list, tuple)):
            return [*map(shifted, dim), *([rank] if target is aten.permute.default else ())]
        return dim - 1 if dim < 0 else dim

    dims, others = [*map(shifted, given[1 : 1 + count])], [*given[1 + count :]]
    if target is aten.gather.default:
        index = others[0]
        ones = [-1] * index.meta["val"].dim()
        others[0] = insert(aten.expand.default, (insert(aten.unsqueeze.default, (index, -1)), [*ones, 2]))
    return insert(target, (whole, *dims, *others), kwargs=node.kwargs)
