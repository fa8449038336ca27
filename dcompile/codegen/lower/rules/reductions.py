"""Rules for reductions: rows over the remaining dimensions, with the reduced ones inside each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, from_view
from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import Shape, variables
from dcompile.compat.size_expressions import Inexpressible
from dcompile.ir.index import Index, Size, flatten, size_product
from dcompile.ir.nodes import Ref, Store

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


def _lower_sum_or_product(op: str) -> Callable[..., LazyTensor]:
    """Make the rule of a sum or product: in the result's dtype, 16-bit floats in float32."""

    def rule(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *_: Any, **__: Any) -> LazyTensor:
        compute = opmath(dtype_name(value.dtype))
        return _one(low, value, x, dim, lambda body, ref, _: body.reduce(op, to_dtype(body, ref, compute)))

    return rule


def _prod_dim(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, *_: Any, **__: Any) -> LazyTensor:
    return _lower_sum_or_product("prod")(low, value, x, dim)


def _prod_all(low: Lowering, value: torch.Tensor, /, x: LazyTensor, **_: Any) -> LazyTensor:
    return _lower_sum_or_product("prod")(low, value, x)


def _mean(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *_: Any, **__: Any) -> LazyTensor:
    compute = opmath(dtype_name(value.dtype))

    def build(body: Body, ref: Ref, count: Size) -> Ref:
        return divide_sum(body, body.reduce("sum", to_dtype(body, ref, compute)), count)

    return _one(low, value, x, dim, build)


def divide_sum(body: Body, ref: Ref, count: Size | float) -> Ref:
    return body.apply("div", ref, body.const(count, body.dtype(ref)))


def _extreme(op: str) -> Callable[..., LazyTensor]:
    def rule(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *_: Any, **__: Any) -> LazyTensor:
        compute = opmath(x.dtype)
        return _one(low, value, x, dim, lambda body, ref, _: body.reduce(op, to_dtype(body, ref, compute)))

    return rule


def _position(op: str) -> Callable[..., LazyTensor]:
    def rule(
        low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int | None = None, *_: Any, **__: Any
    ) -> LazyTensor:
        compute = opmath(x.dtype)
        return _one(low, value, x, dim, lambda body, ref, _: body.reduce(op, to_dtype(body, ref, compute), "int64"))

    return rule


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


def _truth(op: str) -> Callable[..., LazyTensor]:
    def rule(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: Any = None, *_: Any, **__: Any) -> LazyTensor:
        return _one(low, value, x, dim, lambda body, ref, _: body.reduce(op, body.cast(ref, "bool")))

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


RULES: dict[str, Rule] = {
    **_overloads("sum", _lower_sum_or_product("sum"), "default", "dim_IntList"),
    **_overloads("prod", _prod_dim, "dim_int"),
    **_overloads("prod", _prod_all, "default"),
    **_overloads("mean", _mean, "default", "dim"),
    **_overloads("amax", _extreme("max"), "default"),
    **_overloads("amin", _extreme("min"), "default"),
    **_overloads("max", _extreme("max"), "default"),
    **_overloads("min", _extreme("min"), "default"),
    **_overloads("max", _with_position("max"), "dim"),
    **_overloads("min", _with_position("min"), "dim"),
    **_overloads("argmax", _position("argmax"), "default"),
    **_overloads("argmin", _position("argmin"), "default"),
    **_overloads("any", _truth("any"), "default", "dim", "dims"),
    **_overloads("all", _truth("all"), "default", "dim", "dims"),
    **_overloads("var", _var, "correction"),
    **_overloads("std", _std, "correction"),
    **_overloads("var_mean", _var_mean, "correction"),
    **_overloads("logsumexp", _logsumexp, "default"),
    **_overloads("linalg_vector_norm", _norm, "default"),
}
