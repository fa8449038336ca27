"""Gradients of `interpolate`: each element of the input sums the window of results that read it.

Along a dimension, result o has the source s(o) in the input. Element i is read with a weight that depends on s(o) - i
alone, and is 0 from a distance on, the reach. So its readers are neighbours: fewer than 2 * reach / step results, where
step is the distance of neighbouring results' sources. Dimensions are summed one after another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

CUBIC = -0.75
"""Parameter of ATen's cubic convolution (Keys, 1981)."""


@dataclass(frozen=True)
class Kernel:
    """How a mode of `interpolate` weights the elements near a source.

    `reach`: distance from which on weights are 0, in elements of the input. `clamps`: sources lie within the input, or
    else elements beyond its ends are those at its ends. `weigh`: distances (at least float32) -> weights.
    """

    reach: float
    clamps: bool
    weigh: Callable[[torch.Tensor], torch.Tensor]


def _linear(distance: torch.Tensor) -> torch.Tensor:
    return (1 - distance.abs()).clamp(min=0)


def _cubic(distance: torch.Tensor) -> torch.Tensor:
    x = distance.abs()
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    far = ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


LINEAR, BICUBIC = Kernel(1, True, _linear), Kernel(2, False, _cubic)
KERNELS: dict[str, Kernel | None] = {
    "nearest": None, "nearest-exact": None, "linear": LINEAR, "bilinear": LINEAR, "trilinear": LINEAR,
    "bicubic": BICUBIC,
}  # fmt: skip
"""Mode -> kernel. None: a result reads one element, whose position ATen rounds down."""


def input_gradient(
    gradient: torch.Tensor, sizes: Sequence[int], factor: Any, mode: str, *, align_corners: bool
) -> torch.Tensor:
    """Return the gradient of `interpolate`'s input, (n, c, *sizes) in at least float32.

    `gradient`: that of the result, (n, c, *new sizes). `factor`: the scale factor that the user gave, if ATen uses it.
    """
    kernel = KERNELS[mode]
    new = gradient.shape[2:]
    if kernel is None and _are_whole_blocks(sizes, new, factor):
        return _block_sums(gradient, sizes)
    readers = _nearest_readers if kernel is None else functools.partial(_readers, kernel)
    shift = 0.0 if align_corners or mode == "nearest" else 0.5
    found = gradient
    for place, step in enumerate(steps(sizes, new, factor, align_corners=align_corners)):
        dim = place - len(sizes)
        found = _window_sums(found, dim, readers(sizes[place], step, new[place], shift, found))
    return found


def steps(before: Sequence[int], after: Sequence[int], factor: Any, *, align_corners: bool) -> list[float]:
    """Return the distance of neighbouring results in the input, for each dimension, as ATen computes it.

    `factor`: the scale factor that the user gave, if ATen uses it; a number, or one for each dimension.
    """
    factors = factor if isinstance(factor, (tuple, list)) else [factor] * len(before)
    found = []
    for old, new, given in zip(before, after, factors, strict=True):
        if align_corners:
            found.append((old - 1) / (new - 1) if new > 1 else 0.0)
        else:
            found.append(1 / given if given else old / new)
    return found


# --- copies of whole blocks -------------------------------------------------------------------------------------------


def _are_whole_blocks(before: Sequence[int], after: Sequence[int], factor: Any) -> bool:
    """Return whether elements are copied 1, 2, 4, 8, ... times along each dimension: such steps are never rounded."""
    found = zip(before, after, steps(before, after, factor, align_corners=False), strict=True)
    return all(new % old == 0 and step == old / new and math.frexp(step)[0] == 0.5 for old, new, step in found)


def _block_sums(gradient: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return sums (n, c, *sizes) over blocks of `gradient`, (n, c, *multiples of sizes), in its order of dimensions."""
    strides = gradient.stride()
    order = sorted(range(gradient.dim()), key=lambda dim: -strides[dim])
    blocks = gradient.permute(order)
    inside: list[int] = []
    for place, dim in enumerate(order):
        if dim >= 2:
            blocks = torch.unflatten(blocks, place + len(inside), (sizes[dim - 2], -1))
            inside.append(place + len(inside) + 1)
    sums = blocks.sum(inside, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return sums.permute([order.index(dim) for dim in range(gradient.dim())])


# --- windows ----------------------------------------------------------------------------------------------------------


def _readers(
    kernel: Kernel, size: int, step: float, results: int, shift: float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results that may read each of `size` elements, and their weights: both (size, window).

    The source of o is (o + shift) * step - shift.
    """
    count = min(results, math.ceil(2 * kernel.reach / step - 1e-9)) if step else results
    each, numbers = _candidates(size, count, like)
    if count < results:
        numbers = numbers + (((each - kernel.reach + shift) / step - shift).floor() + 1).to(torch.int64)
    sources = (numbers.to(each.dtype) + shift) * step - shift
    if kernel.clamps:
        sources = sources.clamp(0, size - 1)
    weights = kernel.weigh(sources - each)
    if not kernel.clamps:
        beyond = range(1, int(kernel.reach) + 1)
        first = torch.stack([kernel.weigh(sources + far) for far in beyond]).sum(0)
        last = torch.stack([kernel.weigh(sources - (size - 1) - far) for far in beyond]).sum(0)
        weights = weights + torch.where(each == 0, first, 0) + torch.where(each == size - 1, last, 0)
    return numbers, torch.where((numbers >= 0) & (numbers < results), weights, 0)


def _nearest_readers(
    size: int, step: float, results: int, shift: float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results that may read each of `size` elements, and 1 or 0: both (size, window).

    ATen rounds (o + shift) * step down, computed in float32. So there is a candidate more at each end.
    """
    count = min(results, math.ceil(1 / step - 1e-9) + 2)
    each, numbers = _candidates(size, count, like)
    if count < results:
        numbers = numbers + ((each / step - shift).ceil() - 1).to(torch.int64)
    sources = ((numbers.to(torch.float32) + shift) * step).to(torch.int64).clamp(max=size - 1)
    read = (sources == each) & (numbers >= 0) & (numbers < results)
    return numbers, read.to(each.dtype)


def _candidates(size: int, count: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements' numbers (size, 1) in at least float32, and 0 to `count` for each: (size, count)."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    each = torch.arange(size, device=like.device).to(dtype).unsqueeze(1)
    return each, torch.arange(count, device=like.device).expand(size, count)


def _window_sums(gradient: torch.Tensor, dim: int, readers: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return sums over windows of `gradient` along `dim` (negative), weighted, in the weights' dtype."""
    numbers, weights = readers
    behind = -1 - dim
    places = [None] * (gradient.dim() + dim) + [numbers.clamp(0, gradient.shape[dim] - 1)]
    read: torch.Tensor = aten._unsafe_index.Tensor(gradient, places)  # inside, so nothing is checked
    return (read.to(weights.dtype) * weights.view(*weights.shape, *[1] * behind)).sum(-1 - behind)
