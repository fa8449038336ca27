"""Decompositions of `grid_sample`, forward and backward, into reads, weights and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dcompile.codegen.lower.decompositions.aten import compute_dtype
from dcompile.device_traits import traits_of

aten = torch.ops.aten

_BILINEAR, _ZEROS = 0, 0
"""ATen's numbers of torch.nn.functional's mode="bilinear" and padding_mode="zeros"."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return op to decomposition, for AOTAutograd."""
    return {
        aten.grid_sampler_2d.default: grid_sampler_2d,
        aten.grid_sampler_2d_backward.default: grid_sampler_2d_backward,
    }


def grid_sampler_2d(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    """Map x (n, c, h, w), grid (n, i, j, 2) to (n, c, i, j): interpolate the four pixels around a position, 0 outside.

    16-bit tensors are computed in float32 and rounded once: positions in bfloat16 would be fractions of a pixel off, as
    in ATen.
    """
    if not _is_ours(x, mode, padding):
        return NotImplemented
    image, places = _channels_last(x), grid.to(compute_dtype(x))
    addends = [
        _pixels(image, pixel) * (weight * inside).unsqueeze(-1)
        for pixel, inside, weight, _, _ in _corners(places, x, align_corners)
    ]
    total = addends[0] + addends[1] + addends[2] + addends[3]
    return total.permute(0, 3, 1, 2).contiguous().to(x.dtype)


def grid_sampler_2d_backward(
    grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool, mask: list[bool]
) -> Any:
    """Return (gradient of x, or None; gradient of grid)."""
    if not _is_ours(x, mode, padding):
        return NotImplemented
    compute = compute_dtype(x)
    image, places, grads = _channels_last(x), grid.to(compute), grad.to(compute).permute(0, 2, 3, 1)
    total, across, down = torch.zeros_like(image), torch.zeros_like(grads[..., 0]), torch.zeros_like(grads[..., 0])
    for pixel, inside, weight, towards_column, towards_row in _corners(places, x, align_corners):
        if mask[0]:
            addend = grads * (weight * inside).unsqueeze(-1)
            total = aten.index_put(total, [_batch(pixel), pixel], addend, True)
        along = (_pixels(image, pixel) * grads).sum(-1) * inside
        across, down = across + along * towards_column, down + along * towards_row
    per_column, per_row = (_pixels_per_unit(size, align_corners) for size in (x.shape[3], x.shape[2]))
    of_grid = torch.stack((across * per_column, down * per_row), -1).to(grid.dtype)
    of_image = total.permute(0, 2, 1).reshape(x.shape)
    return of_image.contiguous().to(x.dtype) if mask[0] else None, of_grid


def _is_ours(x: Tensor, mode: int, padding: int) -> bool:
    """Where stores have no order, gradients that meet in a pixel are better left to the library's atomic additions."""
    return (mode, padding) == (_BILINEAR, _ZEROS) and traits_of(x.device.type).ordered_stores


def _channels_last(x: Tensor) -> Tensor:
    """Return (n, pixels, c), without a copy unless rows are not adjacent."""
    return x.flatten(2).permute(0, 2, 1).to(compute_dtype(x))


def _batch(pixel: Tensor) -> Tensor:
    return torch.arange(pixel.shape[0], device=pixel.device).view(-1, 1, 1)


def _pixels(image: Tensor, pixel: Tensor) -> Tensor:
    n, _, c = image.shape
    number = pixel.flatten(1).unsqueeze(-1).expand(n, -1, c)
    return image.gather(1, number).reshape(*pixel.shape, c)


def _pixels_per_unit(size: int, align_corners: bool) -> float:
    return (size - 1) / 2 if align_corners else size / 2


def _corners(grid: Tensor, x: Tensor, align_corners: bool) -> Iterator[tuple[Tensor, ...]]:
    """Yield, for each of the four pixels around a position: number, inside, weight, and the weight's two derivatives.

    The derivatives are along columns and along rows. Pixels outside `x` have number 0. Separate row and column indices,
    read for each channel, took three times as long.
    """
    height, width = x.shape[2], x.shape[3]
    column, row = _place(grid[..., 0], width, align_corners), _place(grid[..., 1], height, align_corners)
    left, top = column.floor(), row.floor()
    for down in (0, 1):
        for right in (0, 1):
            to_column, to_row = (column - left, row - top)
            by_column, by_row = (to_column if right else 1 - to_column), (to_row if down else 1 - to_row)
            at_column, at_row = left + right, top + down
            inside = (at_column >= 0) & (at_column < width) & (at_row >= 0) & (at_row < height)
            number = torch.where(inside, at_row, 0).long() * width + torch.where(inside, at_column, 0).long()
            yield (
                number, inside, by_column * by_row, by_row if right else -by_row, by_column if down else -by_column,
            )  # fmt: skip


def _place(along: Tensor, size: int, align_corners: bool) -> Tensor:
    """Map -1 and 1 to the outer pixels' centres if corners are aligned, otherwise to their outer edges."""
    return (along + 1) / 2 * (size - 1) if align_corners else ((along + 1) * size - 1) / 2
