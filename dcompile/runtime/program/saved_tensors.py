"""Check the layouts of saved tensors that a backward receives, and copy those that its kernels cannot read.

Autograd passes an input of the forward in its present state. New memory (`p.data = p.data.t()`, `module.double()`)
changes its strides or dtype without a change of its version counter. Hooks for saved tensors may return any layout
(`save_on_cpu` with pinned memory). Eager's operators read each tensor's strides; compiled kernels expect one layout.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from dcompile.compat.guards import like_these

Layout: TypeAlias = "tuple[torch.dtype, tuple[int, ...], tuple[int, ...], str, bool]"
"""Layout of a tensor: dtype, shape, strides, device type, and whether the program writes to it."""

NOTE = "a backward copied what a hook for saved tensors or a new `.data` has laid out otherwise than in the forward"


class SavedLayouts:
    """Layouts that one program expects."""

    __slots__ = ("_layouts", "_notes", "check")

    def __init__(self, layouts: tuple[Layout, ...], notes: list[str]) -> None:
        self._layouts, self._notes = layouts, notes
        self.check = self._have_layouts
        """Quick check whether tensors have these layouts. If it fails, `fit` compares them in detail."""

    def _have_layouts(self, *tensors: torch.Tensor) -> bool:
        if not all(map(_has_layout, tensors, self._layouts)):
            return False
        self.check = like_these(tensors) or self._have_layouts
        return True

    def fit(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors, with copies of those that have other layouts."""
        if self._have_layouts(*tensors):
            return [*tensors]
        if NOTE not in self._notes:
            self._notes.append(NOTE)
        return [
            x if _has_layout(x, layout) else _copy(x, layout) for x, layout in zip(tensors, self._layouts, strict=True)
        ]


def _has_layout(x: torch.Tensor, layout: Layout) -> bool:
    """Whether a tensor has a layout. Strides of empty tensors and of dimensions with one element are ignored."""
    dtype, shape, strides, device, _ = layout
    if x.dtype != dtype or x.shape != shape or x.device.type != device or x.layout != torch.strided:
        return False
    actual = x.stride()
    if actual == strides or not x.numel():
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, actual, strides, strict=True))


def _copy(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    dtype, shape, strides, device, written = layout
    if x.shape != shape or x.device.type != device or written:
        what = f"{x.dtype} {tuple(x.shape)} on {x.device.type}, not {dtype} {shape} on {device}"
        raise RuntimeError(f"dcompile: what a forward has saved is another tensor in the backward: {what}")
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device).copy_(x)
