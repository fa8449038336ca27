"""Rules for operations along dimensions: reductions, softmax and normalizations, and cumulative operations.

A loop has rows over the other dimensions, and inside each row those that are reduced or scanned. Softmax, layer
normalization and their gradients are one loop each. Cumulative operations accumulate in the dtype and in the order of
ATen's kernels, one element after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, from_view
from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.views import reshape
from dcompile.codegen.lower.symbolic.strides import Shape, variables
from dcompile.compat.size_expressions import Inexpressible
from dcompile.device_traits import traits_of
from dcompile.ir.index import Index, Size, flatten, size_product
from dcompile.ir.nodes import Ref, Store
from dcompile.ir.ops import DTYPES

Build = Callable[[Body, Ref, Size], tuple[Ref, ...]]
"""From the element and the number of reduced elements to the results of the row."""


def dims_of(x: LazyTensor, dim: Any) -> tuple[int, ...]:
    """Return the reduced dimensions, sorted; None and [] mean all."""
    rank = len(x.shape)
    if dim is None or dim == []:
        return tuple(range(rank))
    dims = [dim] if isinstance(dim, int) else dim
    return tuple(sorted({d % rank for d in dims})) if rank else ()


def reduce_dims(
    low: Lowering, values: Sequence[torch.Tensor | None], x: LazyTensor, dim: Any, build: Build
) -> tuple[LazyTensor | None, ...]:
    """Add one loop that reduces `x` over `dim` and stores every result with users."""
    inner_dims = dims_of(x, dim)
    outer_dims = tuple(d for d in range(len(x.shape)) if d not in inner_dims)
    body, element, _ = low.trace_over(x, outer_dims, inner_dims)
    outer: Shape = tuple(x.shape[d] for d in outer_dims)
    inner: Shape = tuple(x.shape[d] for d in inner_dims)
    count = size_product(inner)
    stores: list[Store] = []
    results: list[LazyTensor | None] = []
    for value, ref in zip(values, build(body, element, count), strict=True):
        if value is None:
            results.append(None)
            continue
        dtype = dtype_name(value.dtype)
        view = low.buffer(shape_of(value), dtype)
        kept = [s for s, size in zip(view.strides, view.shape, strict=True) if size != 1]
        place = flatten([i for i, size in zip(variables("i", outer), outer, strict=True) if size != 1], kept)
        stores.append(Store(view.buffer, place, to_dtype(body, ref, dtype)))
        results.append(from_view(view, dtype))
    if stores:
        low.loop(outer, inner, body, stores)
    return tuple(results)


def _one(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any, build: Callable[[Body, Ref, Size], Ref]
) -> LazyTensor:
    (result,) = reduce_dims(low, (value,), x, dim, lambda body, ref, count: (build(body, ref, count),))
    assert result is not None
    return result


def _reduce(op: str, *, result: str = "", in_result: bool = False) -> Callable[..., LazyTensor]:
    """Make the rule of a reduction to a value of dtype `result`, of elements in their own dtype or in the result's.

    16-bit floats are reduced in float32; "any" and "all" reduce truth values.
    """

    def rule(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *_: Any, **__: Any) -> LazyTensor:
        compute = opmath(dtype_name(value.dtype) if in_result else x.dtype)

        def build(body: Body, ref: Ref, _: Size) -> Ref:
            element = body.cast(ref, "bool") if op in ("any", "all") else to_dtype(body, ref, compute)
            return body.reduce(op, element, result or None)

        return _one(low, value, x, dim, build)

    return rule


def _mean(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *_: Any, **__: Any) -> LazyTensor:
    compute = opmath(dtype_name(value.dtype))

    def build(body: Body, ref: Ref, count: Size) -> Ref:
        return divide_sum(body, body.reduce("sum", to_dtype(body, ref, compute)), count)

    return _one(low, value, x, dim, build)


def divide_sum(body: Body, ref: Ref, count: Size | float) -> Ref:
    return body.apply("div", ref, body.const(count, body.dtype(ref)))


def _with_position(op: str) -> Callable[..., tuple[LazyTensor | None, ...]]:
    """Make the rule of (values, indices) along one dimension."""

    def rule(
        low: Lowering, value: Sequence[torch.Tensor], /, x: LazyTensor, dim: int, *_: Any
    ) -> tuple[LazyTensor | None, ...]:
        compute = opmath(x.dtype)

        def build(body: Body, ref: Ref, _: Size) -> tuple[Ref, ...]:
            element = to_dtype(body, ref, compute)
            return body.reduce(op, element), body.reduce(f"arg{op}", element, "int64")

        return reduce_dims(low, value, x, dim, build)

    return rule


def moments(body: Body, ref: Ref, count: Size, correction: float, compute: str) -> tuple[Ref, Ref]:
    """Return (variance, mean) in two passes: the exact mean comes first, so that `compute` suffices as precision."""
    element = to_dtype(body, ref, compute)
    mean = divide_sum(body, body.reduce("sum", element), count)
    difference = body.apply("sub", element, mean)
    squares = body.reduce("sum", body.apply("mul", difference, difference))
    if not isinstance(count, Index):
        return divide_sum(body, squares, max(count - correction, 0)), mean
    left = body.apply("sub", body.const(count, compute), body.const(correction, compute))
    return body.apply("div", squares, body.apply("max", left, body.const(0, compute))), mean


def _var(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *, correction: Any = None, keepdim: Any = 0
) -> LazyTensor:
    compute, by = opmath(x.dtype), 1 if correction is None else correction
    return _one(low, value, x, dim, lambda body, ref, count: moments(body, ref, count, by, compute)[0])


def _std(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *, correction: Any = None, keepdim: Any = 0
) -> LazyTensor:
    # the variance of numbers beyond 1e19 overflows float32, its root does not: ATen's CPU kernel computes in double
    compute, by = (
        "float64" if low.traits.aten.sums_in_float64 else opmath(x.dtype),
        1 if correction is None else correction,
    )

    def build(body: Body, ref: Ref, count: Size) -> Ref:
        return body.apply("sqrt", moments(body, ref, count, by, compute)[0])

    return _one(low, value, x, dim, build)


def _var_mean(
    low: Lowering, value: Any, /, x: LazyTensor, dim: Any = None, *, correction: Any = None, keepdim: Any = False
) -> tuple[LazyTensor | None, ...]:
    compute, by = opmath(x.dtype), 1 if correction is None else correction
    return reduce_dims(low, value, x, dim, lambda body, ref, count: moments(body, ref, count, by, compute))


def _logsumexp(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any, *_: Any) -> LazyTensor:
    compute = opmath(dtype_name(value.dtype))

    def build(body: Body, ref: Ref, _: Size) -> Ref:
        element = to_dtype(body, ref, compute)
        top = finite(body, body.reduce("max", element))
        total = body.reduce("sum", body.apply("exp", body.apply("sub", element, top)))
        return body.apply("add", body.apply("log", total), top)

    return _one(low, value, x, dim, build)


def finite(body: Body, ref: Ref) -> Ref:
    """Replace infinities by 0, so that inf - inf does not occur in infinite rows."""
    return body.apply("where", body.apply("isinf", ref), body.const(0, body.dtype(ref)), ref)


def _norm(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, order: float = 2, dim: Any = None, *_: Any, **__: Any
) -> Result:
    if not isinstance(order, int | float):
        raise Inexpressible("a norm of symbolic order")
    compute = opmath(dtype_name(value.dtype))

    def build(body: Body, ref: Ref, _: Size) -> Ref:
        element = to_dtype(body, ref, compute)
        if order == 0:
            nonzero = body.apply("ne", element, body.const(0, compute))
            return body.reduce("sum", body.cast(nonzero, compute))
        if order == 2:
            return body.apply("sqrt", body.reduce("sum", body.apply("mul", element, element)))
        size = body.apply("abs", element)
        if order in (1, math.inf, -math.inf):
            return body.reduce({1: "sum", math.inf: "max", -math.inf: "min"}[order], size)
        total = body.reduce("sum", body.apply("pow", size, body.const(order, compute)))
        return body.apply("pow", total, body.const(1 / order, compute))

    return _one(low, value, x, dim, build)


def _overloads(name: str, rule: Callable[..., Any], *overloads: str) -> dict[str, Rule]:
    return {f"aten.{name}.{overload}": Rule(rule, recompute=False, decomposed=name == "sum") for overload in overloads}


RowBuild = Callable[..., Ref]


def _by_row(
    low: Lowering, value: torch.Tensor, /, tensors: Sequence[LazyTensor], dim: int, compute: str, build: RowBuild
) -> Result:
    """Add a loop over rows along `dim` of equally shaped tensors that stores one result for each element."""
    shape = tensors[0].shape or (1,)
    tensors = [reshape(tensor, shape) for tensor in tensors]
    rank = len(shape)
    inner = dim % rank
    body, first, coords = low.trace_over(tensors[0], [d for d in range(rank) if d != inner], [inner])
    refs = [first, *(body.trace(tensor, coords) for tensor in tensors[1:])]
    result = to_dtype(body, build(body, *(to_dtype(body, ref, compute) for ref in refs)), dtype_name(value.dtype))
    strides = strides_of(value) or (1,)
    view = low.buffer(shape, dtype_name(value.dtype), strides)
    outer = tuple(size for d, size in enumerate(shape) if d != inner)
    low.loop(outer, (shape[inner],), body, [Store(view.buffer, flatten(coords, view.strides), result)])
    return reshape(from_view(view, dtype_name(value.dtype)), shape_of(value))


def _shifted_logits(body: Body, x: Ref) -> Ref:
    return body.apply("sub", x, body.reduce("max", x))


def _softmax(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, half_to_float: bool) -> Result:
    def build(body: Body, x: Ref) -> Ref:
        exp = body.apply("exp", _shifted_logits(body, x))
        return body.apply("div", exp, body.reduce("sum", exp))

    # eager accepts integers only without elements
    compute = opmath(x.dtype) if value.dtype.is_floating_point else "float32"
    return _by_row(low, value, [x], dim, compute, build)


def _log_softmax(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, half_to_float: bool) -> Result:
    def build(body: Body, x: Ref) -> Ref:
        shifted = _shifted_logits(body, x)
        return body.apply("sub", shifted, body.apply("log", body.reduce("sum", body.apply("exp", shifted))))

    return _by_row(low, value, [x], dim, opmath(x.dtype), build)


def _softmax_backward(
    low: Lowering, value: torch.Tensor, /, grad: LazyTensor, y: LazyTensor, dim: int, dtype: Any
) -> Result:
    def build(body: Body, grad: Ref, y: Ref) -> Ref:
        total = body.reduce("sum", body.apply("mul", grad, y))
        return body.apply("mul", body.apply("sub", grad, total), y)

    return _by_row(low, value, [grad, y], dim, opmath(grad.dtype), build)


def _log_softmax_backward(
    low: Lowering, value: torch.Tensor, /, grad: LazyTensor, y: LazyTensor, dim: int, dtype: Any
) -> Result:
    def build(body: Body, grad: Ref, y: Ref) -> Ref:
        return body.apply("sub", grad, body.apply("mul", body.apply("exp", y), body.reduce("sum", grad)))

    return _by_row(low, value, [grad, y], dim, opmath(grad.dtype), build)


def _layer_norm(
    low: Lowering,
    value: Any,
    /,
    x: LazyTensor,
    normalized: Sequence[int],
    weight: LazyTensor | None,
    bias: LazyTensor | None,
    eps: float,
) -> tuple[LazyTensor, ...]:
    """Return (output, mean, 1 / standard deviation)."""
    rank, first = len(x.shape), len(x.shape) - len(normalized)
    compute = opmath(x.dtype)
    body, element, coords = low.trace_over(x, range(first), range(first, rank))
    count = size_product(x.shape[first:])
    variance, mean = moments(body, element, count, 0, compute)
    scale = body.apply("rsqrt", body.apply("add", variance, body.const(eps, compute)))
    y = body.apply("mul", body.apply("sub", to_dtype(body, element, compute), mean), scale)
    for op, operand in (("mul", weight), ("add", bias)):
        if operand is not None:
            y = body.apply(op, y, to_dtype(body, body.trace(broadcast(operand, x.shape), coords), compute))
    stores, results = [], []
    for result, ref in zip(value, (y, mean, scale), strict=True):
        dtype = dtype_name(result.dtype)
        view = low.buffer(shape_of(result), dtype)
        kept = [c if size != 1 else 0 for c, size in zip(coords, view.shape, strict=True)]
        stores.append(Store(view.buffer, flatten(kept, view.strides), to_dtype(body, ref, dtype)))
        results.append(from_view(view, dtype))
    low.loop(x.shape[:first], x.shape[first:], body, stores)
    return tuple(results)


ScanBuild = Callable[[Body, Ref, Index], tuple[Ref, ...]]
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
    low: Lowering, values: Sequence[torch.Tensor], x: LazyTensor, dim: int, build: ScanBuild
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


def _running_extreme(op: str) -> Callable[..., tuple[LazyTensor, ...]]:
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
    **_overloads("sum", _reduce("sum", in_result=True), "default", "dim_IntList"),
    **_overloads("prod", _reduce("prod", in_result=True), "dim_int", "default"),
    **_overloads("mean", _mean, "default", "dim"),
    **_overloads("amax", _reduce("max"), "default"),
    **_overloads("amin", _reduce("min"), "default"),
    **_overloads("max", _reduce("max"), "default"),
    **_overloads("min", _reduce("min"), "default"),
    **_overloads("max", _with_position("max"), "dim"),
    **_overloads("min", _with_position("min"), "dim"),
    **_overloads("argmax", _reduce("argmax", result="int64"), "default"),
    **_overloads("argmin", _reduce("argmin", result="int64"), "default"),
    **_overloads("any", _reduce("any"), "default", "dim", "dims"),
    **_overloads("all", _reduce("all"), "default", "dim", "dims"),
    **_overloads("var", _var, "correction"),
    **_overloads("std", _std, "correction"),
    **_overloads("var_mean", _var_mean, "correction"),
    **_overloads("logsumexp", _logsumexp, "default"),
    **_overloads("linalg_vector_norm", _norm, "default"),
    "aten._softmax.default": Rule(_softmax, recompute=False),
    "aten._log_softmax.default": Rule(_log_softmax, recompute=False),
    "aten._softmax_backward_data.default": Rule(_softmax_backward, recompute=False),
    "aten._log_softmax_backward_data.default": Rule(_log_softmax_backward, recompute=False),
    "aten.native_layer_norm.default": Rule(_layer_norm, recompute=False),
    "aten.cumsum.default": Rule(_lower_cumulative("sum"), recompute=False),
    "aten.cumprod.default": Rule(_lower_cumulative("prod"), recompute=False),
    "aten.logcumsumexp.default": Rule(_lower_cumulative("logsumexp"), recompute=False),
    "aten.cummax.default": Rule(_running_extreme("max"), recompute=False),
    "aten.cummin.default": Rule(_running_extreme("min"), recompute=False),
}
