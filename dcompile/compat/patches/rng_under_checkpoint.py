"""Random numbers in AOTAutograd's graphs: no states of counters that nobody reads, and which operators draw any.

Gradient checkpointing around operators that may draw: the partitioner has the generator's state saved for each such
operator that the backward runs again, attention among them, and calls it through an operator on functions, of which
nothing is known. Attention without dropout draws nothing.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def no_unread_counters() -> Iterator[None]:
    """While graphs are traced, make no states of counters of random numbers, which nothing reads unless they are set.

    Six fake tensors before and six after each trace: a tenth of the time that compiling a small graph takes.
    """
    import torch._functorch.config as config
    from torch._decomp import decompositions_for_rng

    tracker = getattr(decompositions_for_rng, "PhiloxStateTracker", None)
    if not hasattr(tracker, "reset") or getattr(config, "functionalize_rng_ops", True):
        yield
        return
    with unittest.mock.patch.object(tracker, "reset", lambda: None):
        yield


@contextlib.contextmanager
def states_of_what_draws() -> Iterator[None]:
    """While graphs are partitioned, leave the generator's state out where an operator draws nothing."""
    from torch._functorch import partitioners

    own: Any = getattr(partitioners, "functionalize_rng_ops", None)
    if own is None:
        yield
        return

    def functionalize(joint: Any, forward: Any, backward: Any, *rest: Any) -> tuple[Any, Any]:
        for node in joint.graph.nodes:  # this graph is not used any more: its nodes were copied into the two
            if draws_nothing(node):
                node.meta.pop("recompute", None)
        if not partitioners.has_recomputable_rng_ops(joint):
            return forward, backward
        found: tuple[Any, Any] = own(joint, forward, backward, *rest)
        return found

    with unittest.mock.patch.object(partitioners, "functionalize_rng_ops", functionalize):
        yield


def is_drawn_again(node: Any) -> bool:
    """Whether a node of a joint graph draws random numbers and is one that the backward has to run again."""
    import torch
    from torch._functorch import partitioners

    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return seeded and partitioners.must_recompute(node) and not draws_nothing(node)


def draws_nothing(node: Any) -> bool:
    """Whether a node is attention without dropout."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) == 0)
    return False
