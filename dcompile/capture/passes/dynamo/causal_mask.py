"""Attention masks that hide what comes later, or nothing: `is_causal` takes the place of the one, the other goes.

Libraries hand `scaled_dot_product_attention` a mask when they cannot see whether one is needed, and Hugging Face's
models do so while being traced. A kernel with a mask reads it, and does the whole square where a causal kernel does
half. The graph that Dynamo hands over shows how the mask was made. Where that is from comparisons of positions, its
elements are followed as functions of these (`element_analysis.py`), whatever the size, and the mask is replaced if it
is proved to be the lower triangle. Any other, as one that depends on an input (padding), stays as it is.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.functionalize_constants import change_constants_anew
from dcompile.capture.passes.dynamo.higher_order_bodies import BodyCall, NestedGraphs, placeholders
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
"""What a rewritten call does without its mask, by the mask's kind, for the receipt."""


def recognize_causal_masks(gm: GraphModule) -> PassReport:
    """Rewrite the attention calls of a Dynamo graph whose mask is either causal or full, in all bodies that it holds.

    The graph is changed in place, and the mask goes with what only made it, also from the operands of bodies.
    """
    nest = NestedGraphs(gm)
    changed = change_constants_anew(nest, FROM_NUMBERS)
    elements = ElementsOf(nest, _Changed(nest))
    done: dict[str, int] = {}
    masks: dict[Node, None] = {}
    for node in nest.nodes():
        mask = _mask_of(node)
        verdict = None if mask is None else _verdict(elements(mask), node)
        if mask is not None and verdict is not None:
            _rewrite(node, causal=verdict == "causal")
            masks[mask] = None
            done[verdict] = done.get(verdict, 0) + 1
    nest.erase_unused(masks, _is_constant)
    if done or changed:
        nest.recompile()
    notes = (f"{n} attention calls were given a {kind} mask as a tensor; {INSTEAD[kind]}" for kind, n in done.items())
    return PassReport(sum(done.values()), tuple(notes))


def _mask_of(node: Node) -> Node | None:
    if node.op != "call_function" or node.target is not ATTENTION or argument(node, CAUSAL, "is_causal"):
        return None
    mask = argument(node, MASK, "attn_mask")
    return mask if isinstance(value_of(mask), torch.Tensor) and not value_of(mask).requires_grad else None


def argument(node: Node, position: int, name: str) -> Any:
    """An argument of a call, given by place or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _verdict(mask: Elements | None, node: Node) -> str | None:
    """ "causal", "full", or None: something else, or not known."""
    query, key = (shape_of(argument(node, place, name)) for place, name in ((0, "query"), (1, "key")))
    if mask is None or min(len(query), len(key), len(mask.shape)) < 2:
        return None
    try:
        scores = [*map(size_of, (*query[:-1], key[-2]))]
        allowed = combine(lambda leaf: _is_allowed(leaf, mask.dtype), (mask.tree,), mask.ranges)
    except (UnknownElements, TooManyPieces):
        return None
    # a mask of more dimensions, or larger ones, would make the result larger
    if len(mask.shape) > len(scores) or any(
        size not in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(scores), strict=False)
    ):
        return None
    if allowed is True:
        return "full"
    queries, keys = (as_index(0) if mask.shape[dim] == 1 else var(axis(len(mask.shape) + dim)) for dim in (-2, -1))
    return "causal" if list(mask.shape[-2:]) == scores[-2:] and _is_causal(allowed, queries - keys, mask) else None


def _is_causal(allowed: Tree, ahead: Index, mask: Elements) -> bool:
    """Whether exactly the keys are allowed to which the query is not behind: `ahead` is by how much it is not."""
    past = leaves(allowed, (ahead,), mask.ranges)
    future = leaves(allowed, (negate_condition(ahead),), mask.ranges)
    return all(leaf is True for leaf in past) and all(leaf is False for leaf in future)


def _is_allowed(leaf: Any, dtype: torch.dtype) -> bool:
    """Whether an element of a mask lets attention look. Raises Unknown where it adds something else than 0 or "never".

    "Never" is minus infinity or, as some libraries have it, the least number of the dtype: no finite score makes the
    exponential of either differ from 0, in a row where anything is allowed.
    """
    if isinstance(leaf, bool):
        return leaf
    if not isinstance(leaf, float) or leaf not in (0.0, -math.inf, torch.finfo(dtype).min):
        raise UnknownElements
    return leaf == 0.0


def shape_of(node: Any) -> tuple[Any, ...]:
    """The shape of a node's value; empty if it is no tensor."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _is_constant(node: Node) -> bool:
    """Whether a node only makes a tensor."""
    made = name_of(node) in RULES or name_of(node) in FROM_NUMBERS
    return is_of_torch(node) and made and "out" not in node.kwargs


class _Changed:
    """Which tensors of a nest of graphs something writes to."""

    def __init__(self, nest: NestedGraphs) -> None:
        self._memory = {key for node in nest.nodes() if changes(node) for key in self._keys(node)}
        for body in reversed(nest.graphs):  # what is changed inside is changed outside
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
        """Whether anything writes to a node's memory, be it through another look at it."""
        return any(map(changes, node.users)) or not self._memory.isdisjoint(_storages(node))


def _storages(node: Node) -> list[Any]:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not compat.tensors.has_storage(value):
        return []
    return [compat.tensors.storage_key(value)]


def changes(node: Node) -> bool:
    """Whether a node might write into its arguments. Names that end in an underscore do; operators are listed."""
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
"""Whose functions take `inplace` by place, too: True among their arguments may be that."""
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
