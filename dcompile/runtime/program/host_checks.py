"""Functions that host programs call besides ATen's, mostly checks of values that are known only at run time."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from dcompile.compat.tensors import assert_on_device, copy_all
from dcompile.errors import DcompileError
from dcompile.ir.index import element_span
from dcompile.ir.library_ops import COPY_EACH

# define operators that host programs call
from dcompile.operators import (
    attention_ops,  # noqa: F401
)


def check_bounds(positions: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Raise IndexError, as eager does, unless low <= position < high for every one. Return a copy of `positions`.

    The memory plan takes a library call's result for memory of its own. But `positions` may be stored in an arena
    buffer that is reused from here on, or in an input that a later step writes.
    """
    if positions.numel() and positions.is_cuda:
        inside = ((positions >= low) & (positions < high)).all()
        assert_on_device(inside, f"index out of bounds: positions must be from {low} to {high - 1}")
    elif positions.numel():
        smallest, largest = (int(value) for value in torch.aminmax(positions))
        if smallest < low or largest >= high:
            wrong = smallest if smallest < low else largest
            raise IndexError(f"index {wrong} is out of bounds: positions must be from {low} to {high - 1}")
    if not positions.numel():
        return positions
    if positions.is_contiguous():
        return positions.clone()
    # keep its strides, with the zeros of expanded dimensions, since kernels were made for them
    extent = element_span(positions.shape, positions.stride())
    return positions.as_strided((extent,), (1,)).clone().as_strided(positions.shape, positions.stride())


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call an op whose arguments have no text (graphs, dictionaries): lowering binds them into `function`."""
    return function(*args)


def region(made: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Call another compiler's code for a region of the graph; `values` is emptied."""
    return made(values)


def set_data(tensor: torch.Tensor, source: torch.Tensor, copies: bool) -> None:
    """`tensor.data = source`; with `copies`, of a copy, because `source` is in memory that the program reuses."""
    tensor.set_(source.clone() if copies else source)  # type: ignore[call-overload, unused-ignore]


def differs(tensor: torch.Tensor, wanted: tuple[tuple[int, ...], torch.dtype], origin: str) -> NoReturn:
    """Raise DcompileError: a custom operator's result differs from its fake implementation."""
    shape, dtype = wanted
    raise DcompileError(
        f"dcompile: {origin} returned shape {tuple(tensor.shape)}, {tensor.dtype}, where its fake implementation says "
        f"shape {shape}, {dtype}. Correct the one that is wrong: torch.library.opcheck(op, args) compares them"
    )


def check_number(found: int, wanted: int, origin: str) -> None:
    """Raise RuntimeError unless a tensor's element is the number that `torch._check` states, as kernels assume."""
    if found != wanted:
        raise RuntimeError(
            f"Runtime assertion failed: {origin} gave {found}, where the program says, by torch._check or a guard, "
            f"that it is {wanted}. Correct the check, or the input"
        )


def unlike(tensor: torch.Tensor, wanted: tuple[int, ...], origin: str) -> NoReturn:
    """Raise RuntimeError: a data-dependent size differs from the one that `torch._check` states."""
    raise RuntimeError(
        f"Runtime assertion failed: {origin} returned shape {tuple(tensor.shape)}, where the program says, by "
        f"torch._check or a guard, that it is {wanted}. Correct the check, or the input"
    )


def lay_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copy a tensor to these strides. Raises RuntimeError where two elements would share an address."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


_OWN: Mapping[str, Callable[..., Any]] = {
    "dcompile.check_bounds": check_bounds,
    "dcompile.call": call,
    "dcompile.region": region,
    "dcompile.check_number": check_number,
    COPY_EACH: copy_all,
    "dcompile.lay_out": lay_out,
    "dcompile.set_data": set_data,
}
_MODULES: Mapping[str, Any] = {"operator": operator, "math": math, "builtins": builtins, "torch": torch}


def function(op: str) -> Callable[..., Any]:
    """Function for an op outside of `torch.ops`: one of this module's, or a function of Python or torch on numbers."""
    if op in _OWN:
        return _OWN[op]
    module, name = op.split(".", 1)
    return getattr(_MODULES[module], name)  # type: ignore[no-any-return]
