"""Run the partitioner's common subexpression elimination without importing TorchInductor.

It uses two small helpers of inductor's pattern matcher, whose import loads 183 modules. The import costs 0.72 s of CPU
time in each process that trains. A Llama block takes 2.5 s from the compiler's first use to the first step's end.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
import unittest.mock
from collections.abc import Iterator
from typing import Any

HOME = "torch._inductor.pattern_matcher"
CHANGING = re.compile(r"(?<!_)(_$|_[.]|(\b|_)(set|enter|exit|seed)(\b|_))(?!_)")
"""Names of functions that mutate something, where no schema says so: torch's own pattern."""


@contextlib.contextmanager
def regions_without_inductor() -> Iterator[None]:
    """Number the regions between mutations here while graphs are partitioned, unless inductor is loaded anyway."""
    from torch._functorch import partitioners

    own: Any = getattr(partitioners, "fx_graph_cse", None)
    if own is None:
        yield
        return

    def search(graph: Any, **how: Any) -> Any:  # 2.14 passes further criteria
        if HOME in sys.modules:
            return own(graph, **how)
        try:
            with _standing_in():
                return own(graph, **how)
        except ImportError:  # a torch that needs other helpers of that module
            return own(graph, **how)

    with unittest.mock.patch.object(partitioners, "fx_graph_cse", search):
        yield


@contextlib.contextmanager
def _standing_in() -> Iterator[None]:
    """Put the two helpers in place of the module. No other code that could import it runs in this context."""
    module: Any = types.ModuleType(HOME)
    module.compute_mutation_region_ids = number_regions
    module.same_mutation_regions = in_same_region
    sys.modules[HOME] = module
    try:
        yield
    finally:
        del sys.modules[HOME]


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
    import torch
    from torch._higher_order_ops.auto_functionalize import AutoFunctionalized

    target = node.target
    if isinstance(target, torch._ops.OpOverload) and str(target) != "inductor.resize_storage_bytes_.default":
        return bool(target._schema.is_mutable)
    if isinstance(target, AutoFunctionalized):
        return False
    name = {"call_function": getattr(target, "__name__", ""), "call_method": target}.get(node.op, "")
    return bool(CHANGING.search(name)) or node.kwargs.get("out") is not None
