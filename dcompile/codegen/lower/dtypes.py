"""Dtypes in loops: the supported ones, the operations on 8-bit floats, and their saturation as in ATen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.codegen.lower.context import dtype_name
from dcompile.codegen.lower.lazy_tensor import LazyTensor
from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rules.views import RULES as VIEWS
from dcompile.device_traits import traits_of
from dcompile.ir.analysis import is_clamped
from dcompile.ir.float8 import BYTES, MAX_FLOAT8, OPAQUE
from dcompile.ir.nodes import Apply, Ref, View
from dcompile.ir.ops import DTYPES

CONVERSIONS = frozenset((
    "aten.clone.default", "aten._to_copy.default", "aten.lift_fresh_copy.default", "aten.copy.default",
    "prims.convert_element_type.default",
))  # fmt: skip
"""Operations that loops support on 8-bit floats."""


_RARE = (
    "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "atanh", "log2", "log10", "erfc", "lgamma", "hypot",
)  # fmt: skip
FLOAT64_BY_ATEN = frozenset(f"{namespace}.{name}.default" for namespace in ("aten", "prims") for name in _RARE)
"""Functions of float64 for which CPU loops would call libm, one element at a time. ATen's vector code takes 0.2 to
0.75 of that time (docs/lab/constants.md, K13)."""


def fits_a_loop(target: Any, value: Any, args: list[Any], device: str) -> bool:
    """Return whether a loop supports an operation's dtypes; 8-bit floats only if it moves or converts them.

    ATen itself has few other operations on them. Opaque dtypes, which loops treat as bytes, can only be moved.
    """
    if not all(map(_is_held, (value, *args))):
        return False
    if (
        str(target) in FLOAT64_BY_ATEN
        and value.dtype is torch.float64
        and traits_of(device).has_scalar_float64_functions
    ):
        return False
    dtypes = {dtype for item in (value, *args) for dtype in _dtypes_of(item)}
    if not dtypes & BYTES:
        return True
    converted = str(target) in CONVERSIONS and (len(dtypes) == 1 or not dtypes & {*OPAQUE})
    return converted or str(target) in VIEWS


def _is_held(value: Any) -> bool:
    """Return whether all tensors in a value have dtypes that loops support; True without tensors."""
    if isinstance(value, LazyTensor):
        return value.dtype in DTYPES
    if isinstance(value, View):
        return False  # a number computed by a library call
    if isinstance(value, torch.Tensor):
        return dtype_name(value.dtype) in DTYPES and value.layout == torch.strided
    if isinstance(value, complex):
        return False
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_held, value))
    return True


def _dtypes_of(value: Any) -> Iterator[str]:
    """Yield the dtypes of a tensor, or of several."""
    if isinstance(value, LazyTensor):
        yield value.dtype
    elif isinstance(value, torch.Tensor):
        yield dtype_name(value.dtype)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _dtypes_of(item)


def saturate(body: Body, ref: Ref) -> Ref:
    """Clamp a float32 to the range of float8_e4m3fn where ATen's conversion saturates; NaN stays as it is."""
    if not compat.tensors.saturates_float8() or _is_bounded(body, ref):
        return ref
    largest = MAX_FLOAT8["float8_e4m3fn"]
    for limit, beyond in ((largest, "gt"), (-largest, "lt")):
        most = body.const(limit, "float32")
        ref = body.apply("where", body.apply(beyond, ref, most), most, ref)
    return ref


def _is_bounded(body: Body, ref: Ref) -> bool:
    """Return whether a value was a float8_e4m3fn before, or is clamped to the range of one."""
    match body.values[ref]:
        case Apply("cast", (arg,), _):
            wide = DTYPES[body.dtype(arg)] == "float" and body.dtype(arg) != "float64"
            return body.dtype(arg) == "float8_e4m3fn" or (wide and _is_bounded(body, arg))
    return is_clamped(body.values, ref, MAX_FLOAT8["float8_e4m3fn"])
