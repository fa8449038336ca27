"""What the partitioner knows of operations, who finds its minimum cut, and how it finds common subexpressions.

Its common subexpression elimination uses two small helpers of inductor's pattern matcher, whose import loads 183
modules. The import costs 0.72 s of CPU time in each process that trains. A Llama block takes 2.5 s from the compiler's
first use to the first step's end. So the helpers are written here.
"""

from __future__ import annotations

import contextlib
import dataclasses
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


def more_fusible_ops(fusible: frozenset[Any], recomputable: frozenset[Any]) -> contextlib.AbstractContextManager[Any]:
    """While graphs are partitioned, count these overload packets among those that loops hold, or compute again."""
    from torch._functorch import partitioners

    parts = _views_of_parts()

    def extended(found: Any) -> Any:
        return dataclasses.replace(
            found,
            fusible_ops=found.fusible_ops | fusible,
            recomputable_ops=found.recomputable_ops | recomputable,
            view_ops=found.view_ops - parts,
        )

    return replaced_attribute(partitioners, "get_default_op_list", lambda own: lambda: extended(own()))


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
