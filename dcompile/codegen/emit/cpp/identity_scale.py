"""Skip loops that multiply a tensor by a number that equals 1 at run time, if the result overwrites the tensor.

A loss's backward starts with such a loop where the forward computed its gradient
(`capture/passes/dynamo/loss_gradient_in_forward.py`).
"""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.plan import NestPlan, Scaling
from dcompile.codegen.nest.loop_nest import Nest
from dcompile.ir.nodes import Apply, Load, Ref

_WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
"""Dtypes that hold every value of a dtype, so that a cast there and back changes nothing."""


def skip_identity_scale(plan: NestPlan) -> NestPlan:
    """Return at once where a tensor would be multiplied by 1 in its own memory."""
    scaling = find_scaling(plan.nest)
    return replace(plan, scaling=scaling) if scaling else plan


def find_scaling(nest: Nest) -> Scaling | None:
    """Return a loop's tensor and factor, if it only multiplies them and a factor of 1 changes no element."""
    if len(nest.stores) != 1 or nest.stores[0].mode != "set":
        return None
    (store,) = nest.stores
    at, after = _uncast(nest, store.value)
    product = nest.body[at]
    if not isinstance(product, Apply) or product.op != "mul":
        return None
    for tensor, number in (product.args, product.args[::-1]):
        (source, before), (factor, _) = _uncast(nest, tensor), _uncast(nest, number)
        loaded, by = nest.body[source], nest.body[factor]
        if not (isinstance(loaded, Load) and isinstance(by, Load) and loaded.mask is by.mask is None):
            continue
        exact = {loaded.dtype, *_WIDER.get(loaded.dtype, ())}.issuperset((*before, product.dtype, *after))
        exact = exact and nest.body[store.value].dtype == loaded.dtype
        if exact and loaded.index == store.index and loaded.buffer != store.buffer and not by.index.variables:
            return Scaling(loaded, factor)
    return None


def _uncast(nest: Nest, ref: Ref) -> tuple[Ref, tuple[str, ...]]:
    """Return the value before casts, if there are any, and their dtypes."""
    value = nest.body[ref]
    if not isinstance(value, Apply) or value.op != "cast":
        return ref, ()
    source, dtypes = _uncast(nest, value.args[0])
    return source, (*dtypes, value.dtype)
