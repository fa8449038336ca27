"""Gradients of a backward that has not run yet: what `.grad` holds between `loss.backward()` and `optimizer.step()`.

A backward can run together with the update only if nothing reads or changes a gradient in between. So `.grad` gets a
tensor without memory. What is done with it runs the backward first, and then happens to the real gradient. Three things
do not: asking for shape or dtype; the 2-norm, which a program computes beside the gradients; and multiplication by one
factor, which the update does as it reads the gradient. So `clip_grad_norm_` costs no pass over memory. This is lazy
evaluation, as in LazyTensor (Suhan et al., 2021).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from dcompile import compat

aten = torch.ops.aten
METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_sparse", "requires_grad", "is_leaf",
        "grad_fn", "_version",
    )
) | {  # fmt: skip
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.is_contiguous,
}  # fmt: skip
"""What can be asked of a gradient before it is computed."""
class GradientSource(Protocol):
    """Where pending gradients come from."""

    def value(self, gradient: PendingGradient) -> torch.Tensor:
        """Compute a gradient now, and show it in its parameter's `.grad`. Raises DcompileError if an update used it."""

    def norm(self, gradient: PendingGradient) -> torch.Tensor:
        """Return a gradient's 2-norm, without its factor."""

    def scales(self, gradient: PendingGradient) -> bool:
        """Can the update multiply a gradient, which is not to be computed for that?"""


class PendingGradient(torch.Tensor):
    """A gradient that `source` computes at the first use of its value; it has its parameter's shape and layout."""

    source: GradientSource
    parameter: Callable[[], Any]
    """Weak reference to the parameter."""
    computed: torch.Tensor | None
    """The gradient without its factor, once a backward has run without the update."""
    computed_norm: torch.Tensor | None
    factor: torch.Tensor | None
    """A 0-dimensional tensor that the gradient is to be multiplied by."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, source: GradientSource) -> PendingGradient:
        """Make the gradient of one parameter."""
        made: PendingGradient = compat.tensors.without_memory(cls, parameter)
        made.parameter, made.source = weakref.ref(parameter), source
        return made.renewed()

    def renewed(self) -> PendingGradient:
        """Return it as a gradient that is not computed."""
        self.computed = self.computed_norm = self.factor = None
        return self

    def __repr__(self, **_: Any) -> str:
        return f"PendingGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LATER and not kwargs:
            result = LATER[func](*args)
            if result is not NotImplemented:
                return result
        if func not in METADATA:
            args, kwargs = _values((args, kwargs or {}))
        with compat.tensors.as_plain():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:  # as `.grad` is set or copied
            return args[0]
        if (understood := LATER.get(func)) is not None and not kwargs:
            result = understood(*args)
            if result is not NotImplemented:
                return result
        args, kwargs = _values((args, kwargs or {}))
        return func(*args, **kwargs)


def _values(arguments: Any) -> Any:
    """Replace pending gradients among arguments by real ones."""
    return tree_map_only(PendingGradient, lambda gradient: gradient.source.value(gradient), arguments)


def _norm(gradient: Any, order: float = 2, *others: Any) -> Any:
    if order != 2 or any(others):
        return NotImplemented
    norm = gradient.source.norm(gradient)
    return norm if gradient.factor is None else norm * gradient.factor


def _multiply(gradient: Any, factor: Any) -> Any:
    known = isinstance(gradient, PendingGradient) and isinstance(factor, torch.Tensor) and factor.ndim == 0
    if not known or gradient.factor is not None or not gradient.source.scales(gradient):
        return NotImplemented
    gradient.factor = factor
    return gradient


def _norms(gradients: Sequence[Any], order: float = 2, *others: Any) -> Any:
    if order != 2 or any(others) or not all(isinstance(gradient, PendingGradient) for gradient in gradients):
        return NotImplemented
    return [_norm(gradient) for gradient in gradients]


LATER: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm,
    aten.linalg_vector_norm.default: _norm,
    torch.Tensor.mul_: _multiply,
    aten.mul_.Tensor: _multiply,
    torch._foreach_norm: _norms,
    aten._foreach_norm.Scalar: _norms,
}
"""Functions and operations that need no gradient's value yet; NotImplemented where these arguments do."""
