"""Recognize causal and full attention masks: `is_causal` replaces a causal mask, and a full one is dropped.

Libraries pass `scaled_dot_product_attention` a mask when they cannot tell whether one is needed. Hugging Face's models
do so while being traced. A kernel with a mask reads it, and computes the whole square of scores, a causal kernel half.
Dynamo's graph shows how the mask is computed. If that is from comparisons of positions, `symbolic_elements` computes
its elements as functions of positions, for any size. The mask is replaced if it is proved to be the lower triangle.
Other masks stay, for example those that depend on an input (padding): `skip_masked_attention` comes next.

In-place changes of constant tensors that a graph makes itself are functionalized first. `mask = full(...);
mask.masked_fill_(hidden, 0)` is a common way to make masks. Later readers of the tensor get the result of the
functional operation, as under AOTAutograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION, CAUSAL, MASK, Changed, argument, shape_of
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
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
from dcompile.ir.piecewise import TooManyCases, Tree, combine, leaves, negate_condition
from dcompile.passes import GAIN, PassReport

_AS_NEW = {"masked_fill_": "masked_fill", "triu_": "triu", "tril_": "tril", "logical_not_": "logical_not"}
"""In-place method -> its functional form, for methods whose result has the tensor's dtype."""
_FILLS = {"fill_": torch.full_like, "zero_": torch.zeros_like}


def change_constants_anew(nest: NestedGraphs, makes: Iterable[str]) -> int:
    """Functionalize such changes in all graphs; return their number. `makes`: names of functions that make constants.

    A tensor's changes stay if another view of its memory exists before the last one.
    """
    makers, count = frozenset(makes), 0
    memory = _by_memory(nest)
    for graph in nest.graphs:
        for node in list(graph.graph.nodes):
            if (
                node.op == "call_function"
                and getattr(node.target, "__name__", "") in makers
                and "out" not in node.kwargs
            ):
                count += _rewritten(node, memory.get(_memory_of(node), []))
    return count


def _by_memory(nest: NestedGraphs) -> dict[Any, list[Node]]:
    """Return memory -> nodes of all graphs whose values are stored there, in order."""
    found: dict[Any, list[Node]] = {}
    for node in nest.nodes():
        if (key := _memory_of(node)) is not None:
            found.setdefault(key, []).append(node)
    return found


def _memory_of(node: Node) -> Any:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not compat.tensors.has_storage(value):
        return None
    return compat.tensors.storage_key(value)


def _rewritten(made: Node, sharing: list[Node]) -> int:
    """Functionalize the changes of one tensor; return their number."""
    changes = [node for node in sharing if _is_change(node)]
    if not changes or any(node.graph is not made.graph for node in changes):
        return 0
    order = {node: place for place, node in enumerate(made.graph.nodes)}
    last = order[changes[-1]]
    own = {made, *changes}
    before = [node for node in sharing if node.graph is made.graph and order[node] < last and node not in own]
    bodies = [user for node in own for user in node.users if compat.dynamo.holds_graphs(user.target)]
    if before or any(node.args[0] not in own for node in changes) or any(order[call] < last for call in bodies):
        return 0
    for change in changes:
        newest = [node for node in own if order[node] < order[change]]
        for node in newest:
            for user in list(node.users):
                if user in order and order[user] > order[change]:
                    user.replace_input_with(node, change)
        _write_anew(change)
    return len(changes)


def _is_change(node: Node) -> bool:
    return node.op == "call_method" and (node.target in _AS_NEW or node.target in _FILLS)


def _write_anew(change: Node) -> None:
    if change.target in _AS_NEW:
        change.target = _AS_NEW[str(change.target)]
        return
    function: Any = _FILLS[str(change.target)]
    change.op, change.target = "call_function", function


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
    return PassReport(sum(done.values()), tuple(GAIN + note for note in notes))


def mask_of(node: Node) -> Node | None:
    """Return the mask of an attention call, if it has one that is not trained."""
    if node.op != "call_function" or node.target is not ATTENTION or argument(node, CAUSAL, "is_causal"):
        return None
    mask = argument(node, MASK, "attn_mask")
    return mask if isinstance(value_of(mask), torch.Tensor) and not value_of(mask).requires_grad else None


def _verdict(mask: Elements | None, node: Node) -> str | None:
    """Return "causal", "full", or None for any other mask, or an unknown one."""
    query, key = (shape_of(argument(node, place, name)) for place, name in ((0, "query"), (1, "key")))
    if mask is None or min(len(query), len(key), len(mask.shape)) < 2:
        return None
    try:
        scores = [*map(size_of, (*query[:-1], key[-2]))]
        allowed = combine(lambda leaf: is_allowed(leaf, mask.dtype), (mask.tree,), mask.ranges)
    except (UnknownElements, TooManyCases):
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


def is_constant(node: Node) -> bool:
    """Does a node compute a tensor without side effects, by an operation that the analysis knows?"""
    made = name_of(node) in RULES or name_of(node) in FROM_NUMBERS
    return is_of_torch(node) and made and "out" not in node.kwargs


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
