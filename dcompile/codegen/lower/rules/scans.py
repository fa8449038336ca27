"""Rules for cumulative operations: rows over the other dimensions, with the scanned one inside each row.

They accumulate in the dtype and in the order of ATen's kernels, one element after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, from_view
from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Rule
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.views import reshape
from dcompile.device_traits import traits_of
from dcompile.ir.index import Index, flatten
from dcompile.ir.nodes import Ref, Store
from dcompile.ir.ops import DTYPES

Build = Callable[[Body, Ref, Index], tuple[Ref, ...]]
"""From the element and its position along the scanned dimension to the element's results."""


def accumulator(dtype: str, device: str) -> str:
    """Return the dtype in which ATen accumulates `dtype`."""
    if DTYPES[dtype] != "float":
        return "int64"
    return (
        "float64"
        if dtype == "float64" or (dtype == "float32" and traits_of(device).aten.sums_in_float64)
        else "float32"
    )


def _scan_dim(
    low: Lowering, values: Sequence[torch.Tensor], x: LazyTensor, dim: int, build: Build
) -> tuple[LazyTensor, ...]:
    """Add one loop that scans `x` along `dim` and stores every result."""
    shape = x.shape or (1,)
    x = reshape(x, shape)
    rank = len(shape)
    inner = dim % rank
    outer = [d for d in range(rank) if d != inner]
    body, element, coords = low.trace_over(x, outer, [inner])
    stores, results = [], []
    for value, ref in zip(values, build(body, element, coords[inner]), strict=True):
        dtype = dtype_name(value.dtype)
        view = low.buffer(shape, dtype, strides_of(value) or (1,))
        stores.append(Store(view.buffer, flatten(coords, view.strides), to_dtype(body, ref, dtype)))
        results.append(reshape(from_view(view, dtype), shape_of(value)))
    low.loop(tuple(shape[d] for d in outer), (shape[inner],), body, stores)
    return tuple(results)


def _lower_cumulative(op: str) -> Callable[..., LazyTensor]:
    """Make the rule of a cumulative sum or product, of elements in the result's dtype."""

    def rule(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, **_: Any) -> LazyTensor:
        dtype = dtype_name(value.dtype)

        def build(body: Body, ref: Ref, _: Index) -> tuple[Ref, ...]:
            element = to_dtype(body, to_dtype(body, ref, dtype), accumulator(dtype, low.device))
            return (body.scan(op, element),)

        return _scan_dim(low, [value], x, dim, build)[0]

    return rule


def _extreme(op: str) -> Callable[..., tuple[LazyTensor, ...]]:
    """Make the rule of (values, indices): the index of the last of equal values, and of every NaN."""

    def rule(low: Lowering, value: Sequence[torch.Tensor], /, x: LazyTensor, dim: int) -> tuple[LazyTensor, ...]:
        def build(body: Body, ref: Ref, position: Index) -> tuple[Ref, ...]:
            compute = "float32" if x.dtype in ("bfloat16", "float16") else x.dtype
            element = to_dtype(body, ref, compute)
            best = body.scan(op, element)
            found = body.apply("eq", element, best)
            if DTYPES[compute] == "float":
                found = body.apply("or", found, body.apply("isnan", element))
            place = body.apply("where", found, body.index(position), body.const(0, "int64"))
            return best, body.scan("max", place)

        return _scan_dim(low, value, x, dim, build)

    return rule


RULES: dict[str, Rule] = {
    "aten.cumsum.default": Rule(_lower_cumulative("sum"), recompute=False),
    "aten.cumprod.default": Rule(_lower_cumulative("prod"), recompute=False),
    "aten.logcumsumexp.default": Rule(_lower_cumulative("logsumexp"), recompute=False),
    "aten.cummax.default": Rule(_extreme("max"), recompute=False),
    "aten.cummin.default": Rule(_extreme("min"), recompute=False),
}
