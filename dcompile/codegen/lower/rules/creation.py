"""Rules for tensors without tensor inputs: constants and ranges stay expressions until they must be stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, constant, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import is_dense
from dcompile.ir.index import Index, Size
from dcompile.ir.nodes import Ref
from dcompile.ir.ops import DTYPES


def _filled(value: torch.Tensor, number: Any) -> Result:
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    if isinstance(number, LazyTensor):
        source = broadcast(number, shape)
        return make_lazy(
            shape, dtype, lambda body, coords: to_dtype(body, body.trace(source, coords), dtype), (source,)
        )
    if isinstance(number, complex):
        return NotImplemented
    if isinstance(number, Index):
        return make_lazy(shape, dtype, lambda body, _: to_dtype(body, body.index(number), dtype), ())
    return constant(number, shape, dtype)


def _zeros(_: Lowering, value: torch.Tensor, /, *__: Any, **___: Any) -> Result:
    return _filled(value, 0)


def _strided(low: Lowering, value: torch.Tensor, /, *_: Any, **__: Any) -> Result:
    """Leave tensors with gaps or overlapping elements to the library, since no loop can write them."""
    return _zeros(low, value) if is_dense(shape_of(value), strides_of(value)) else NotImplemented


def _ones(_: Lowering, value: torch.Tensor, /, *__: Any, **___: Any) -> Result:
    return _filled(value, 1)


def _full(_: Lowering, value: torch.Tensor, /, __: Any, number: Any, **___: Any) -> Result:
    return _filled(value, number)


def _new_full(_: Lowering, value: torch.Tensor, /, __: Any, ___: Any, number: Any, **____: Any) -> Result:
    return _filled(value, number)


def _scalar_tensor(_: Lowering, value: torch.Tensor, /, number: Any, **__: Any) -> Result:
    return _filled(value, number)


def arithmetic(value: torch.Tensor, start: Size | float, step: Size | float) -> LazyTensor:
    """Return start + n * step, in 64 bits as eager computes it."""
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    whole = DTYPES[dtype] != "float"

    def at(body: Body, coords: Coords) -> Ref:
        if whole:
            return to_dtype(body, body.index(coords[0] * _whole(step) + _whole(start)), dtype)
        count = body.cast(body.index(coords[0]), "float64")
        scaled = body.apply("mul", count, body.const(step, "float64"))
        return to_dtype(body, body.apply("add", scaled, body.const(start, "float64")), dtype)

    return make_lazy(shape, dtype, at, ())


def _whole(number: Size | float) -> Size:
    return number if isinstance(number, Index) else int(number)


def _arange(_: Lowering, value: torch.Tensor, /, end: Size | float, **__: Any) -> LazyTensor:
    return arithmetic(value, 0, 1)


def _arange_start(
    _: Lowering, value: torch.Tensor, /, start: Size | float, end: Size | float, step: Size | float = 1, **__: Any
) -> LazyTensor:
    return arithmetic(value, start, step)


def _iota(_: Lowering, value: torch.Tensor, /, length: Size, *, start: Size, step: Size, **__: Any) -> LazyTensor:
    return replace(arithmetic(value, start, step), ops=0)  # a number of its coordinate: part of the reader's address


_EMPTY = ("empty.memory_format", "new_empty.default", "empty_permuted.default")

RULES: dict[str, Rule] = {
    # uninitialized memory may hold anything: zero is free while it is an expression
    **{f"aten.{name}": Rule(_zeros) for name in _EMPTY},
    "aten.empty_like.default": Rule(_zeros, decomposed=True),
    **{f"aten.{name}.default": Rule(_strided) for name in ("empty_strided", "new_empty_strided")},
    **{f"aten.{name}.default": Rule(_zeros) for name in ("zeros_like", "new_zeros", "_efficientzerotensor")},
    **{f"aten.{name}.default": Rule(_ones) for name in ("ones_like", "new_ones")},
    "aten.zeros.default": Rule(_zeros, decomposed=True),
    "aten.ones.default": Rule(_ones, decomposed=True),
    "aten.full.default": Rule(_full),
    "aten.full_like.default": Rule(_full),
    "aten.fill.Scalar": Rule(_full),
    "aten.fill.Tensor": Rule(_full),
    "aten.new_full.default": Rule(_new_full),
    "aten.scalar_tensor.default": Rule(_scalar_tensor),
    "prims.scalar_tensor.default": Rule(_scalar_tensor),
    "aten.arange.default": Rule(_arange),
    "aten.arange.start": Rule(_arange_start),
    "aten.arange.start_step": Rule(_arange_start),
    "prims.iota.default": Rule(_iota),
}
