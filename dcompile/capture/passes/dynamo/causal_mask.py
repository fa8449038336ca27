"""Recognize causal and full attention masks: `is_causal` replaces a causal mask, and a full one is dropped.

Libraries pass `scaled_dot_product_attention` a mask when they cannot tell whether one is needed. Hugging Face's models
do so while being traced. A kernel with a mask reads it, and computes the whole square of scores, a causal kernel half.
Dynamo's graph shows how the mask is computed. If that is from comparisons of positions, `symbolic_elements` computes
its elements as functions of positions, for any size. The mask is replaced if it is proved to be the lower triangle.
Other masks stay, for example those that depend on an input (padding): `skip_masked_attention` comes next.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.functionalize_constants import change_constants_anew
from dcompile.capture.passes.dynamo.higher_order_bodies import BodyCall, NestedGraphs, placeholders
from dcompile.capture.passes.dynamo.mask_predicates import broadcasts, is_allowed
from dcompile.capture.passes.dynamo.symbolic_elements.analysis import ElementsOf
from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    Elements,
    UnknownElements,
    axis,
    is_of_torch,
    name_of,
    size_of,
    value_of,
)
from dcompile.capture.passes.dynamo.symbolic_elements.rules import FROM_NUMBERS, RULES
from dcompile.ir.index import Index, as_index, var
from dcompile.ir.piecewise import TooManyPieces, Tree, combine, leaves, negate_condition
from dcompile.passes import PassReport

ATTENTION = torch.nn.functional.scaled_dot_product_attention
MASK, CAUSAL = 3, 5
"""Positions of `attn_mask` and `is_causal`."""
INSTEAD = {
    "causal": "the kernel's own causal masking takes its place",
    "full": "it hides nothing, so they run without one",
}
"""Kind of a mask -> text for the receipt on the call without it."""


def recognize_causal_masks(gm: GraphModule) -> PassReport:
    """Rewrite attention calls with a causal or full mask in a Dynamo graph and all its subgraphs, in place.

    Masks without other users are erased, with the nodes that only they need, and as operands of subgraphs.
    """
    nest = NestedGraphs(gm)
    changed = change_constants_anew(nest, FROM_NUMBERS)
    elements = ElementsOf(nest, Changed(nest))
    done: dict[str, int] = {}
    masks: dict[Node, None] = {}
    for node in nest.nodes():
        mask = mask_of(node)
        verdict = None if mask is None else _verdict(elements(mask), node)
        if mask is not None and verdict is not None:
            _rewrite(node, causal=verdict == "causal")
            masks[mask] = None
            done[verdict] = done.get(verdict, 0) + 1
    nest.erase_unused(masks, is_constant)
    if done or changed:
        nest.recompile()
    notes = (f"{n} attention calls were given a {kind} mask as a tensor; {INSTEAD[kind]}" for kind, n in done.items())
    return PassReport(sum(done.values()), tuple(notes))


def mask_of(node: Node) -> Node | None:
    """Return the mask of an attention call, if it has one that is not trained."""
    if node.op != "call_function" or node.target is not ATTENTION or argument(node, CAUSAL, "is_causal"):
        return None
    mask = argument(node, MASK, "attn_mask")
    return mask if isinstance(value_of(mask), torch.Tensor) and not value_of(mask).requires_grad else None


def argument(node: Node, position: int, name: str) -> Any:
    """Return an argument of a call, positional or by name; None if it is missing."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _verdict(mask: Elements | None, node: Node) -> str | None:
    """Return "causal", "full", or None for any other mask, or an unknown one."""
    query, key = (shape_of(argument(node, place, name)) for place, name in ((0, "query"), (1, "key")))
    if mask is None or min(len(query), len(key), len(mask.shape)) < 2:
        return None
    try:
        scores = [*map(size_of, (*query[:-1], key[-2]))]
        allowed = combine(lambda leaf: is_allowed(leaf, mask.dtype), (mask.tree,), mask.ranges)
    except (UnknownElements, TooManyPieces):
        return None
    if not broadcasts(mask.shape, scores):
        return None
    if allowed is True:
        return "full"
    queries, keys = (as_index(0) if mask.shape[dim] == 1 else var(axis(len(mask.shape) + dim)) for dim in (-2, -1))
    return "causal" if list(mask.shape[-2:]) == scores[-2:] and _is_causal(allowed, queries - keys, mask) else None


def _is_causal(allowed: Tree, ahead: Index, mask: Elements) -> bool:
    """Are exactly the keys up to the query's position allowed? `ahead` is the query's position minus the key's."""
    past = leaves(allowed, (ahead,), mask.ranges)
    future = leaves(allowed, (negate_condition(ahead),), mask.ranges)
    return all(leaf is True for leaf in past) and all(leaf is False for leaf in future)


def shape_of(node: Any) -> tuple[Any, ...]:
    """Return the shape of a node's value; () if it is no tensor."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def is_constant(node: Node) -> bool:
    """Does a node compute a tensor without side effects, by an operation that the analysis knows?"""
    made = name_of(node) in RULES or name_of(node) in FROM_NUMBERS
    return is_of_torch(node) and made and "out" not in node.kwargs


class Changed:
    """The tensors in a nest of graphs that some node writes to."""

    def __init__(self, nest: NestedGraphs) -> None:
        self._memory = {key for node in nest.nodes() if changes(node) for key in self._keys(node)}
        for body in reversed(nest.graphs):  # a change of a body's input changes the operand
            for position, node in enumerate(placeholders(body)):
                if not self._memory.isdisjoint(_storages(node)):
                    for call in nest.calls_of(body):
                        self._memory |= self._outside(call, position)

    def _outside(self, call: BodyCall, position: int) -> set[Any]:
        operand = call.operand(position)
        return set(_storages(operand)) if isinstance(operand, Node) else self._keys(call.node)

    def _keys(self, node: Node) -> set[Any]:
        return {key for given in node.all_input_nodes for key in _storages(given)}

    def __call__(self, node: Node) -> bool:
        """Does anything write to a node's memory, also through another view?"""
        return any(map(changes, node.users)) or not self._memory.isdisjoint(_storages(node))


def _storages(node: Node) -> list[Any]:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not compat.tensors.has_storage(value):
        return []
    return [compat.tensors.storage_key(value)]


def changes(node: Node) -> bool:
    """May a node write to its arguments? So do names with a trailing underscore, and the operators of `_IN_PLACE`."""
    name = name_of(node)
    if node.target in (operator.and_, operator.or_, operator.not_):
        return False
    if name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs or "mutation" in name:
        return True
    if node.kwargs.get("inplace") or (str(getattr(node.target, "__module__", "")) == _LAYERS and True in node.args):
        return True
    overloads = getattr(node.target, "overloads", None)
    names = [name for name in overloads() if not name.endswith("out")] if callable(overloads) else []
    ops = [getattr(node.target, name) for name in names] if callable(overloads) else [node.target]
    return any(schema.is_mutable for op in ops if (schema := getattr(op, "_schema", None)) is not None)


_LAYERS = "torch.nn.functional"
"""Module whose functions also take `inplace` as a positional argument: True among their arguments may be it."""
_IN_PLACE = frozenset(
    (
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
)  # fmt: skip


def _rewrite(node: Node, causal: bool) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    if len(args) > MASK:
        args[MASK] = None
    else:
        kwargs["attn_mask"] = None
    if len(args) > CAUSAL:
        args[CAUSAL] = causal
    else:
        kwargs["is_causal"] = causal
    node.args, node.kwargs = tuple(args), kwargs
