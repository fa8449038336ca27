"""Random numbers in AOTAutograd's graphs: skip unused counter states, and find the operators that draw numbers.

Under gradient checkpointing, the partitioner saves the generator's state for each recomputed operator that may draw,
attention among them. It calls the operator through a higher-order operator, of which nothing is known. Attention
without dropout draws nothing.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def no_unread_counters() -> Iterator[None]:
    """Create no states of random-number counters while graphs are traced, since nothing reads them unless they are set.

    They are six fake tensors before and six after each trace: a tenth of the time of compiling a small graph.
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
    """Skip the generator's state while graphs are partitioned, where an operator draws nothing."""
    from torch._functorch import partitioners

    own: Any = getattr(partitioners, "functionalize_rng_ops", None)
    if own is None:
        yield
        return

    def functionalize(joint: Any, forward: Any, backward: Any, *rest: Any) -> tuple[Any, Any]:
        for node in joint.graph.nodes:  # this graph is not used any more: its nodes were copied to the other two
            if draws_nothing(node):
                node.meta.pop("recompute", None)
        if not partitioners.has_recomputable_rng_ops(joint):
            return forward, backward
        found: tuple[Any, Any] = own(joint, forward, backward, *rest)
        return found

    with unittest.mock.patch.object(partitioners, "functionalize_rng_ops", functionalize):
        yield


def is_drawn_again(node: Any) -> bool:
    """Whether a node of a joint graph draws random numbers and must be recomputed in the backward."""
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
