"""Rules for operations on whole rows: softmax, layer normalization and their gradients, one loop each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, from_view
from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.reductions import moments
from dcompile.codegen.lower.rules.views import reshape
from dcompile.ir.index import flatten, size_product
from dcompile.ir.nodes import Ref, Store

Build = Callable[..., Ref]


def _by_row(
    low: Lowering, value: torch.Tensor, /, tensors: Sequence[LazyTensor], dim: int, compute: str, build: Build
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


RULES: dict[str, Rule] = {
    "aten._softmax.default": Rule(_softmax, recompute=False),
    "aten._log_softmax.default": Rule(_log_softmax, recompute=False),
    "aten._softmax_backward_data.default": Rule(_softmax_backward, recompute=False),
    "aten._log_softmax_backward_data.default": Rule(_log_softmax_backward, recompute=False),
    "aten.native_layer_norm.default": Rule(_layer_norm, recompute=False),
}
