"""What the partitioner knows of operations, who finds its minimum cut, and how it finds common subexpressions.

Its common subexpression elimination uses two small helpers of inductor's pattern matcher, whose import loads 183
modules. The import costs 0.72 s of CPU time in each process that trains. A Llama block takes 2.5 s from the compiler's
first use to the first step's end. So the helpers are written here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import AutoFunctionalized

from dcompile.compat.patches.torch_patch import replaced_attribute

PATTERN_MATCHER = "torch._inductor.pattern_matcher"
_CHANGING = re.compile(r"(?<!_)(_$|_[.]|(\b|_)(set|enter|exit|seed)(\b|_))(?!_)")
"""Names of functions that mutate something, where no schema says so: torch's own pattern."""


def minimum_cut_by(minimum_cut: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """While graphs are partitioned, have `minimum_cut` answer in networkx's place, which it is given as well."""
    try:
        import networkx  # type: ignore[import-untyped, unused-ignore]
    except ImportError:  # the partitioner reports that itself
        return contextlib.nullcontext()
    if minimum_cut is None:
        return contextlib.nullcontext()
    own = networkx.minimum_cut

    def cut(graph: Any, source: Any, sink: Any) -> Any:
        return minimum_cut(graph, source, sink, own)

    return unittest.mock.patch.object(networkx, "minimum_cut", cut)  # type: ignore[no-any-return, unused-ignore]


def other_fusible_ops(
    fusible: tuple[frozenset[Any], frozenset[Any]] | None,
) -> contextlib.AbstractContextManager[Any]:
    """While graphs are partitioned, count these overload packets among those that loops hold, or compute again.

    None: operations are kernels, which are neither fused nor free to run again. Views, and arithmetic on sizes, are.
    """
    from torch._functorch import partitioners

    parts = _views_of_parts()

    def extended(found: Any) -> Any:
        if fusible is None:
            sizes = {op for op in found.recomputable_ops if not isinstance(op, torch._ops.OpOverloadPacket)}
            fused, again = found.view_ops, found.view_ops | sizes
        else:
            fused, again = found.fusible_ops | fusible[0], found.recomputable_ops | fusible[1]
        return dataclasses.replace(found, fusible_ops=fused, recomputable_ops=again, view_ops=found.view_ops - parts)

    return replaced_attribute(partitioners, "get_default_op_list", lambda own: lambda: extended(own()))


def saved_values_chosen_by(choose: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """While graphs are partitioned, let `choose` revise which values are saved.

    It gets the joint graph's nodes, those of forward and backward, the values that torch would save without the user's
    checkpoints and with them, and two tests: whether loops hold an operation, and whether it may run again.
    """
    from torch._functorch import partitioners

    if choose is None:
        return contextlib.nullcontext()
    chosen = choose

    def choosing(own: Callable[..., Any]) -> Callable[..., Any]:
        def choose_saved(joint: Any, facts: Any, *rest: Any, **how: Any) -> Any:
            theirs = own(joint, facts, *rest, **how)
            with _without_checkpoints(joint) as marked:
                free = own(joint, facts, *rest, **how) if marked else theirs
            forward, backward = frozenset(facts.required_fw_nodes), frozenset(facts.tangents_closure)
            is_fused = _fusion_test(partitioners.get_default_op_list())
            return chosen(tuple(joint.nodes), forward, backward, tuple(free), tuple(theirs), is_fused, _may_run_again)

        return choose_saved

    return replaced_attribute(partitioners, "choose_saved_values_set", choosing)


@contextlib.contextmanager
def _without_checkpoints(joint: Any) -> Iterator[bool]:
    """Hide the marks of regions that the user checkpoints; yield whether there are any."""
    from torch._functorch import partitioners

    from dcompile.compat.patches.random_numbers import checkpointed_by_user

    asked = [n for n in joint.nodes if partitioners.must_recompute(n) and checkpointed_by_user(n) is not None]
    marks = {node: node.meta.pop("recompute") for node in asked}
    try:
        yield bool(marks)
    finally:
        for node, mark in marks.items():
            node.meta["recompute"] = mark


def _fusion_test(ops: Any) -> Callable[[Any], bool]:
    def is_fused(node: Any) -> bool:
        if node.target is operator.getitem:
            return is_fused(node.args[0])
        return node.op == "call_function" and bool(ops.is_fusible(node) or ops.is_view(node))

    return is_fused


def _may_run_again(node: Any) -> bool:
    """Whether running an operation a second time gives the same values and has no other effect."""
    import torch

    from dcompile.compat.patches.random_numbers import draws

    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator) or changes(node):
        return False
    return not str(node.target).startswith(("_c10d_functional", "c10d")) and not draws(node)


def _views_of_parts() -> frozenset[Any]:
    """Views of a part of a tensor: saving the whole instead may take more memory."""
    aten = torch.ops.aten
    return frozenset((aten.slice, aten.select, aten.split, aten.as_strided))


def regions_without_inductor() -> contextlib.AbstractContextManager[Any]:
    """Number the regions between mutations here while graphs are partitioned, unless inductor is loaded anyway."""
    from torch._functorch import partitioners

    def searching(own: Callable[..., Any]) -> Callable[..., Any]:
        def search(graph: Any, **how: Any) -> Any:  # 2.14 passes further criteria
            if PATTERN_MATCHER in sys.modules:
                return own(graph, **how)
            try:
                with _helpers_without_inductor():
                    return own(graph, **how)
            except ImportError:  # a torch that needs other helpers of that module
                return own(graph, **how)

        return search

    return replaced_attribute(partitioners, "fx_graph_cse", searching)


@contextlib.contextmanager
def _helpers_without_inductor() -> Iterator[None]:
    """Put the two helpers in place of the module. No other code that could import it runs in this context."""
    module: Any = types.ModuleType(PATTERN_MATCHER)
    module.compute_mutation_region_ids = number_regions
    module.same_mutation_regions = in_same_region
    sys.modules[PATTERN_MATCHER] = module
    try:
        yield
    finally:
        del sys.modules[PATTERN_MATCHER]


def number_regions(graph: Any) -> None:
    """Store in each node the number of mutations up to it."""
    number = 0
    for node in graph.nodes:
        number += changes(node)
        node.meta["mutation_region_id"] = number


def in_same_region(one: Any, other: Any) -> bool:
    return bool(one.meta["mutation_region_id"] == other.meta["mutation_region_id"])


def changes(node: Any) -> bool:
    """Whether a node mutates its arguments or a state."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and str(target) != "inductor.resize_storage_bytes_.default":
        return bool(target._schema.is_mutable)
    if isinstance(target, AutoFunctionalized):
        return False
    name = {"call_function": getattr(target, "__name__", ""), "call_method": target}.get(node.op, "")
    return bool(_CHANGING.search(name)) or node.kwargs.get("out") is not None
