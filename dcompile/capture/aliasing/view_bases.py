"""Restore the traced strides of the base tensor that AOTAutograd passes in place of several inputs that view it.

AOTAutograd does so if one of the inputs changes. Dynamo guards on shapes and strides of the inputs, but not of their
base. `a.t_()` after a graph break may give the base other strides in another call. ATen's operators read a tensor's
strides. Kernels of dcompile are compiled for the strides of the first call, and would write to wrong elements (under
inductor it is an AssertionError).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcompile import compat

Boxed = Callable[[list[Any]], list[Any]]


def with_bases_as_traced(gm: Any, run: Boxed) -> Boxed:
    """Return `run` with base tensors viewed with the shapes and strides that they had when `gm` was traced."""
    bases = tuple(
        (position, tuple(value.shape), value.stride())
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if compat.aot_metadata.is_base_of_inputs(node) and compat.sizes.is_fixed(value := node.meta["val"])
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
