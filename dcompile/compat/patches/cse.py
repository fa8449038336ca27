"""The partitioner's search for common subexpressions, without all of inductor behind it.

It takes two helpers of a few lines from inductor's pattern matcher, whose import brings 183 modules: 0.72 s of CPU time
in each process that trains, of a Llama block's 2.5 s from the first use of the compiler to the first step's end.
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
"""Names of functions that change something, where no schema says so; torch's own pattern."""


@contextlib.contextmanager
def regions_without_inductor() -> Iterator[None]:
    """While graphs are partitioned, number the regions between changes here, unless inductor is loaded anyway."""
    from torch._functorch import partitioners

    own: Any = getattr(partitioners, "fx_graph_cse", None)
    if own is None:
        yield
        return

    def search(graph: Any, **how: Any) -> Any:  # 2.14 says what else tells nodes apart
        if HOME in sys.modules:
            return own(graph, **how)
        try:
            with _standing_in():
                return own(graph, **how)
        except ImportError:  # a torch that takes other helpers from there
            return own(graph, **how)

    with unittest.mock.patch.object(partitioners, "fx_graph_cse", search):
        yield


@contextlib.contextmanager
def _standing_in() -> Iterator[None]:
    """The two helpers in place of the module; nothing else runs meanwhile that could import it."""
    module: Any = types.ModuleType(HOME)
    module.compute_mutation_region_ids = number_regions
    module.same_mutation_regions = in_same_region
    sys.modules[HOME] = module
    try:
        yield
    finally:
        del sys.modules[HOME]


def number_regions(graph: Any) -> None:
    """Note with each node how many changes there are up to it."""
    number = 0
    for node in graph.nodes:
        number += changes(node)
        node.meta["mutation_region_id"] = number


def in_same_region(one: Any, other: Any) -> bool:
    return bool(one.meta["mutation_region_id"] == other.meta["mutation_region_id"])


def changes(node: Any) -> bool:
    """Whether a node changes something, its arguments or a state."""
    import torch
    from torch._higher_order_ops.auto_functionalize import AutoFunctionalized

    target = node.target
    if isinstance(target, torch._ops.OpOverload) and str(target) != "inductor.resize_storage_bytes_.default":
        return bool(target._schema.is_mutable)
    if isinstance(target, AutoFunctionalized):
        return False
    name = {"call_function": getattr(target, "__name__", ""), "call_method": target}.get(node.op, "")
    return bool(CHANGING.search(name)) or node.kwargs.get("out") is not None
