"""The shortest ways from a host program to a tensor, and to an operator of ATen's."""

from __future__ import annotations

from typing import Any

from dcompile.compat.tensors import direct_call, quick_empty, quick_grad_mode, quick_look

empty_cpu = quick_empty("cpu")
"""empty_cpu(shape, strides, dtype)."""
empty_cuda = quick_empty("cuda")
"""The same on the current GPU."""
look = quick_look()
"""look(tensor, shape, strides, offset): a tensor over the same memory, from `offset` elements behind the given one on.

No view in the eyes of autograd: it has a version counter of its own and keeps the memory alive, not the tensor.
"""
set_grad_enabled = quick_grad_mode()
"""set_grad_enabled(whether): from now on, in this thread."""


def entry(overload: Any) -> Any:
    """What to call for an overload of an operator."""
    return direct_call(overload)
