"""Decompose operations with a changing number, such as a learning rate, so that the program takes it as an input.

Dynamo makes a float symbolic once it has changed, and torch then passes it into the graph as a tensor. Such a tensor
can be an operand of products and sums only. Where it is a factor inside another operation, torch recompiles for each
value up to its limit, and runs eagerly after that. `add` with an `alpha`, which SGD uses, is such an operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from dcompile.device_traits import traits_of

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Dtypes in which eager computes such an operation before it rounds once."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return operations with a factor, decomposed where the factor is a symbol and left whole otherwise."""
    aten = torch.ops.aten
    # Dynamo derives it from `addcmul_` and `addcdiv_`, and defines it at the first use
    late = {torch.ops.prims.fma.default: fma} if hasattr(torch.ops.prims, "fma") else {}
    return late | {
        aten.add.Tensor: add,
        aten.sub.Tensor: sub,
        aten.addcmul.default: addcmul,
        aten.addcdiv.default: addcdiv,
        aten.lerp.Scalar: lerp,
        aten.pow.Scalar: power,
        aten.full_like.default: full_like,
    }


def add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return _with_factor(operator.add, x, y, alpha)


def sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return _with_factor(operator.sub, x, y, alpha)


def _with_factor(op: Callable[[Any, Any], Any], x: Any, y: Any, alpha: Any) -> Any:
    """On CPUs eager rounds the factor, and only the factor, to the 16-bit dtype."""
    low = isinstance(x, torch.Tensor) and x.dtype in _WIDER and traits_of(x.device.type).aten.rounds_factors
    if isinstance(alpha, torch.SymFloat):
        given = _filled(torch.ones((), dtype=x.dtype, device=x.device), alpha) if low else alpha
        return _in_parts(lambda x, y: op(x, y * given), alpha, x, y)
    if not low or not isinstance(alpha, float) or not isinstance(y, torch.Tensor) or y.dtype != x.dtype:
        return NotImplemented
    from dcompile.codegen.lower.loop_builder import as_dtype  # late import: warm starts load no compiler stage

    nearest = as_dtype(alpha, str(x.dtype).removeprefix("torch."))
    whole = {operator.add: torch.add, operator.sub: torch.sub}[op]
    return NotImplemented if nearest == alpha or alpha != alpha else whole(x, y, alpha=nearest)


def addcmul(x: Any, y: Any, z: Any, *, value: Any = 1) -> Any:
    return _in_parts(lambda x, y, z: x + y * value * z, value, x, y, z)


def addcdiv(x: Any, y: Any, z: Any, *, value: Any = 1) -> Any:
    return _in_parts(lambda x, y, z: x + y * value / z, value, x, y, z)


def fma(x: Any, y: Any, z: Any) -> Any:
    factors = [a for a in (x, y) if isinstance(a, torch.SymFloat)]
    if len(factors) != 1:
        return NotImplemented
    return _in_parts(lambda a, z: a * factors[0] + z, factors[0], y if factors[0] is x else x, z)


def lerp(x: Any, end: Any, weight: Any) -> Any:
    is_symbol = isinstance(weight, torch.SymFloat)
    if is_symbol and weight >= 0.5:  # exact at both ends, as in eager
        return _in_parts(lambda x, end: end - (end - x) * (1 - weight), weight, x, end)
    return _in_parts(lambda x, end: x + (end - x) * weight, weight, x, end)


def power(base: Any, x: Any) -> Any:
    return torch.pow(_filled(torch.ones_like(x), base), x) if isinstance(base, torch.SymFloat) else NotImplemented


def full_like(x: Any, value: Any, **keywords: Any) -> Any:
    dtype = keywords.get("dtype") or x.dtype
    if not isinstance(value, torch.SymFloat) or not dtype.is_floating_point:
        return NotImplemented
    return _filled(torch.ones_like(x, **keywords), value)


def _filled(ones: Any, value: Any) -> Any:
    return ones * value


def _in_parts(compute: Callable[..., Any], factor: Any, *operands: Any) -> Any:
    if not isinstance(factor, torch.SymFloat) or not all(isinstance(x, torch.Tensor) for x in operands):
        return NotImplemented
    dtype = operands[0].dtype
    if any(x.dtype != dtype for x in operands):
        return NotImplemented
    wider = _WIDER.get(dtype, dtype)
    return compute(*(x.to(wider) for x in operands)).to(dtype)
