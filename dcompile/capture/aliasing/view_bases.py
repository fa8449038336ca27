"""The tensor that several inputs of a graph look at, as AOTAutograd passes it in their place.

It does so where one of the inputs changes. Dynamo guards on how the inputs lie, and on nothing of what they look at:
`a.t_()` behind a graph break gives that other strides from call to call. ATen's operators ask a tensor how it lies;
kernels of ours were compiled for the strides of the first call, and would write to the places of other elements (under
inductor it is an AssertionError).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcompile import compat

Boxed = Callable[[list[Any]], list[Any]]


def with_bases_as_traced(gm: Any, run: Boxed) -> Boxed:
    """`run`, which gets such tensors as they lay when `gm` was traced: the same memory, looked at in the same way."""
    bases = tuple(
        (position, tuple(value.shape), value.stride())
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if compat.aot.is_base_of_inputs(node) and compat.sizes.is_fixed(value := node.meta["val"])
    )
    if not bases:
        return run

    def running(args: list[Any]) -> list[Any]:
        for position, shape, strides in bases:
            base = args[position]
            if base.stride() != strides or base.shape != shape:
                args[position] = base.as_strided(shape, strides)
        return run(args)

    return running
