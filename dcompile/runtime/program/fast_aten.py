"""Fastest ways for a host program to create tensors and to call ATen's operators."""

from __future__ import annotations

from typing import Any

from dcompile.compat.autograd import quick_grad_mode
from dcompile.compat.tensors import direct_call, quick_empty, quick_view_function

empty_cpu = quick_empty("cpu")
"""empty_cpu(shape, strides, dtype): allocate a tensor on the CPU."""
empty_cuda = quick_empty("cuda")
"""empty_cuda(shape, strides, dtype): allocate a tensor on the current GPU."""
strided_view = quick_view_function()
"""strided_view(tensor, shape, strides, offset): tensor over the same memory, `offset` elements after its beginning.

Autograd does not see it as a view: it has its own version counter. It keeps the memory alive, but not the tensor.
"""
set_grad_enabled = quick_grad_mode()
"""set_grad_enabled(whether): set grad mode of this thread."""


def entry(overload: Any) -> Any:
    """Callable for an overload of an operator."""
    return direct_call(overload)
