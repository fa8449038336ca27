"""Loops that multiply a tensor by one number, which may turn out to be 1: in its own memory nothing is to be done then.

So backwards of losses begin whose gradient was made with them (`capture/ahead.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dcompile.codegen.emit.nest import Nest
from dcompile.ir.nodes import Apply, Load, Ref


@dataclass(frozen=True, slots=True)
class Scaling:
    """The loads of a tensor, which is stored at the same places, and of the number that it is multiplied by."""

    tensor: Load
    number: Ref


def scaling_of(nest: Nest) -> Scaling | None:
    """What a loop multiplies by what, if that is all that it does."""
    if len(nest.stores) != 1:
        return None
    (store,) = nest.stores
    product = nest.body[_uncast(nest, store.value)]
    if store.mode != "set" or not isinstance(product, Apply) or product.op != "mul":
        return None
    for tensor, number in (product.args, product.args[::-1]):
        loaded, factor = nest.body[_uncast(nest, tensor)], nest.body[_uncast(nest, number)]
        if not (isinstance(loaded, Load) and isinstance(factor, Load)) or loaded.mask is not None:
            continue
        if loaded.index == store.index and loaded.buffer != store.buffer and not factor.index.variables:
            return Scaling(loaded, _uncast(nest, number))
    return None


def _uncast(nest: Nest, ref: Ref) -> Ref:
    value = nest.body[ref]
    return _uncast(nest, value.args[0]) if isinstance(value, Apply) and value.op == "cast" else ref
