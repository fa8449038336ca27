"""Random numbers in AOTAutograd's graphs: skip unused counter states, find what draws numbers, and draw them once.

Under gradient checkpointing, the partitioner saves the generator's state for each recomputed operator that may draw,
attention among them. It calls the operator through a higher-order operator, of which nothing is known. Attention
without dropout draws nothing.

For a memory budget, the partitioner recomputes operators that draw without their state.
"""

from __future__ import annotations

import contextlib
import operator
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from dcompile.compat.patches.torch_patch import replaced_attribute

NO_REGION = 1 << 30
"""Number of what `compat.aot.always_recompute` marks, after those of all checkpointed regions."""


def no_unread_counters() -> contextlib.AbstractContextManager[Any]:
    """Create no states of random-number counters while graphs are traced, since nothing reads them unless they are set.

    They are six fake tensors before and six after each trace: a tenth of the time of compiling a small graph.
    """
    import torch._functorch.config as config
    from torch._decomp import decompositions_for_rng

    if getattr(config, "functionalize_rng_ops", True):
        return contextlib.nullcontext()
    tracker = getattr(decompositions_for_rng, "PhiloxStateTracker", None)
    return replaced_attribute(tracker, "reset", lambda _: lambda: None)


def states_of_what_draws() -> contextlib.AbstractContextManager[Any]:
    """Skip the generator's state while graphs are partitioned, where an operator draws nothing."""
    from torch._functorch import partitioners

    def functionalizing(own: Callable[..., Any]) -> Callable[..., Any]:
        def functionalize(joint: Any, forward: Any, backward: Any, *rest: Any) -> Any:
            for node in joint.graph.nodes:  # this graph is not used any more: its nodes were copied to the other two
                if draws_nothing(node):
                    node.meta.pop("recompute", None)
            is_drawn = partitioners.has_recomputable_rng_ops(joint)
            return own(joint, forward, backward, *rest) if is_drawn else (forward, backward)

        return functionalize

    return replaced_attribute(partitioners, "functionalize_rng_ops", functionalizing)


@contextlib.contextmanager
def one_draw_each() -> Iterator[None]:
    """While graphs are partitioned, save for the backward what was drawn, and keep equal calls that draw apart.

    A memory budget may recompute all that no user marks. With a budget of 0 not even marks count, so that the copy of
    an input that the forward changes would be made of the changed one.
    """
    from torch._functorch import compile_utils, partitioners

    choose: Any = getattr(partitioners, "choose_saved_values_set", None)
    merge: Any = getattr(partitioners, "fx_graph_cse", None)
    if choose is None or merge is None:
        yield
        return

    def choose_saved(joint: Any, facts: Any, *rest: Any, **how: Any) -> list[Any]:
        for node in joint.nodes:
            if draws(node) and not partitioners.must_recompute(node):
                never_recompute(node)
        return _with_marked(choose(joint, facts, *rest, **how), facts)

    def merge_equal(graph: Any, **how: Any) -> Any:
        apart = [compile_utils.get_aten_target(node) for node in graph.nodes if draws(node)]
        with unittest.mock.patch.object(compile_utils, "rand_ops", [*compile_utils.rand_ops, *apart]):
            return merge(graph, **how)

    with unittest.mock.patch.multiple(partitioners, choose_saved_values_set=choose_saved, fx_graph_cse=merge_equal):
        yield


def _with_marked(saved: list[Any], facts: Any) -> list[Any]:
    """Return `saved` with all tensors that are marked to be saved, and that the backward would recompute."""
    from torch._functorch import partitioners

    views = partitioners.get_default_op_list()
    # of an operation with several results, only they can be saved
    found = dict.fromkeys(node for node in saved if not isinstance(node.meta.get("val"), (tuple, list)))
    waiting, seen = [*facts.required_bw_nodes], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in found or node in seen:
            continue
        seen.add(node)
        is_marked = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE and node not in facts.tangents_closure
        if is_marked and isinstance(node.meta.get("val"), torch.Tensor) and not views.is_view(node):
            found[node] = None
        else:
            waiting += node.all_input_nodes
    return [*found]


def never_recompute(node: Any) -> None:
    """Force the partitioner to save this node where the backward needs it, or tensors computed from it."""
    parts = (user for user in node.users if user.target is operator.getitem)
    for kept in (node, *parts):
        kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def checkpointed_by_user(node: Any) -> int | None:
    """The number of the region that the user checkpoints, and that a node is in, if it is in one."""
    number: int | None = node.meta.get("ac_graph_id")
    return None if number == NO_REGION else number


def is_drawn_again(node: Any) -> bool:
    """Whether a node of a joint graph draws random numbers and must be recomputed in the backward."""
    from torch._functorch import partitioners

    return partitioners.must_recompute(node) and draws(node, unless_said=False)


def draws(node: Any, unless_said: bool = True) -> bool:
    """Whether a node draws random numbers. `unless_said`: what to believe of custom operators without a tag."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        called = any(_operator_draws(given, unless_said) for given in node.args)
        owner = node.graph.owning_module
        bodies = (getattr(owner, n.target, None) for n in node.all_input_nodes if n.op == "get_attr")
        graphs = (body.graph for body in bodies if isinstance(body, torch.fx.GraphModule))
        return called or any(draws(inner, unless_said) for graph in graphs for inner in graph.nodes)
    if getattr(target, "namespace", None) == "dcompile_random":
        return node.kwargs.get("key") is None
    return _operator_draws(target, unless_said) and not draws_nothing(node)


def _operator_draws(target: Any, unless_said: bool) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    known = target.namespace.lstrip("_").startswith(("aten", "c10d", "dcompile", "inductor", "prim"))
    return torch.Tag.nondeterministic_seeded in target.tags or (unless_said and not known)


def draws_nothing(node: Any) -> bool:
    """Whether a node is attention without dropout."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) == 0)
    return False
