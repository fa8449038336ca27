"""What a backward gets of its forward lies as its kernels expect, or is copied to where it does.

Autograd hands over an input of the forward as it is by now: whoever gives it other memory (`p.data = p.data.t()`,
`module.double()`) changes its strides or dtype, and its count of changes does not show it. Hooks for saved tensors may
return what lies in any order (`save_on_cpu` with pinned memory). Eager's operators ask each tensor how it lies; kernels
of ours were compiled for one layout.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from dcompile.compat.guards import like_these

Layout: TypeAlias = "tuple[torch.dtype, tuple[int, ...], tuple[int, ...], str, bool]"
"""Of a tensor: dtype, shape, strides and type of the device; and whether the program writes to it."""

NOTE = "a backward copied what a hook for saved tensors or a new `.data` has laid out otherwise than in the forward"


class SavedLayouts:
    """The layouts that one program expects."""

    __slots__ = ("_layouts", "_notes", "check")

    def __init__(self, layouts: tuple[Layout, ...], notes: list[str]) -> None:
        self._layouts, self._notes = layouts, notes
        self.check = self._lie
        """Whether these tensors lie so. Where it says no, `fit` looks more closely."""

    def _lie(self, *tensors: torch.Tensor) -> bool:
        if not all(map(_lies, tensors, self._layouts)):
            return False
        self.check = like_these(tensors) or self._lie
        return True

    def fit(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, copied where they lie otherwise."""
        if self._lie(*tensors):
            return [*tensors]
        if NOTE not in self._notes:
            self._notes.append(NOTE)
        return [x if _lies(x, layout) else _copy(x, layout) for x, layout in zip(tensors, self._layouts, strict=True)]


def _lies(x: torch.Tensor, layout: Layout) -> bool:
    """Strides along dimensions of one element, and of nothing, do not matter."""
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
