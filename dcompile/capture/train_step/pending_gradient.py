"""Gradients of a backward that has not run yet: what `.grad` holds between `loss.backward()` and `optimizer.step()`.

A backward can run together with the update only if nothing reads or changes a gradient in between. So `.grad` gets a
tensor without memory. Whatever is done with it, except asking for its shape, runs the backward first, and then happens
to the real gradient. This is lazy evaluation as in LazyTensor (Suhan et al., 2021), of one value of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dcompile.errors import DcompileError

KNOWN = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "requires_grad", "is_leaf", "grad_fn")
) | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex}
"""What can be asked of a gradient before it is computed."""


class PendingGradient(torch.Tensor):
    """A gradient of a backward that runs at the first use of its value.

    It has the shape, dtype, device and strides of `parameter`. `run` runs the backward and returns the real gradient,
    or raises DcompileError if an update has consumed it.
    """

    compute: Callable[[PendingGradient], torch.Tensor]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, compute: Callable[[PendingGradient], torch.Tensor]) -> PendingGradient:
        """Make the gradient of one parameter."""
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            layout=parameter.layout,
        )
        made.compute = compute
        return made

    def __repr__(self, **_: Any) -> str:
        return f"PendingGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = _computed((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # setting or copying `.grad` reads no value
            return args[0]
        args, kwargs = _computed((args, kwargs or {}))
        return func(*args, **kwargs)


def _computed(values: Any) -> Any:
    """Replace pending gradients in a structure by real ones."""
    return tree_map_only(PendingGradient, lambda gradient: gradient.compute(gradient), values)
