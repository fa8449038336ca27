"""dcompile's own decompositions: where torch has none, or one whose strides or shapes differ from eager's.

Group norms on GPUs whose groups exceed one program read their input once for its statistics. Parts of a few elements of
each channel have their own mean and variance. Their kernel reads adjacent memory, whether channels or pixels. The
groups' statistics follow from them (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
sample variances", 1979). torch's decomposition reads a group as a row, once for each statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dcompile import compat
from dcompile.device_traits import traits_of

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Return op to decomposition, for AOTAutograd."""
    return {
        aten.bmm.default: bmm,
        aten.cat.default: cat,
        aten.channel_shuffle.default: channel_shuffle,
        aten.native_channel_shuffle.default: channel_shuffle,
        aten.index_fill.int_Scalar: index_fill,
        aten.index_fill.int_Tensor: index_fill,
        aten.pixel_shuffle.default: pixel_shuffle,
        aten.pixel_unshuffle.default: pixel_unshuffle,
        aten.put.default: put_at_positions,
        aten.take.default: take,
        aten._softmax_backward_data.default: partial(softmax_backward, aten._softmax_backward_data.default),
        aten._log_softmax_backward_data.default: partial(softmax_backward, aten._log_softmax_backward_data.default),
        aten.tril_indices.default: tril_indices,
        aten.triu_indices.default: triu_indices,
        aten.rrelu_with_noise_functional.default: rrelu,
        aten.reflection_pad1d_backward.default: reflection_pad_backward,
        aten.reflection_pad2d_backward.default: reflection_pad_backward,
        aten.reflection_pad3d_backward.default: reflection_pad_backward,
        aten.replication_pad1d_backward.default: replication_pad_backward,
        aten.replication_pad2d_backward.default: replication_pad_backward,
        aten.replication_pad3d_backward.default: replication_pad_backward,
        aten._weight_norm_interface.default: weight_norm,
        aten._weight_norm_interface_backward.default: weight_norm_backward,
    }


def bmm(x: Tensor, y: Tensor) -> Any:
    """Turn matmuls of inner size 1, such as rotary angles, into elementwise products, which need not be saved."""
    if not (x.is_floating_point() and compat.sizes.is_known_one(x.shape[-1])):
        return NotImplemented
    product = x * y
    return product if compat.sizes.is_known_contiguous(product) else product.contiguous()


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Turn a concatenation of copies of one tensor, such as rotary angles, into a repeat, which may be recomputed."""
    first, *others = tensors
    same = bool(others) and all(other is first for other in others)
    if not -first.dim() <= dim < first.dim():
        return NotImplemented  # for tensors of shape (0,) eager mode accepts any dimension
    if not same or compat.aot.suggest_memory_format(first) != torch.contiguous_format:
        return NotImplemented
    times = [1] * first.dim()
    times[dim] = len(tensors)
    return first.repeat(times)


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Interleave the channels of `groups` groups; layout as in eager: like `x` on the CPU, row-major on GPUs."""
    if compat.sizes.is_known_empty(x):
        return x.clone()
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return split.transpose(1, 2).reshape(x.shape).clone(memory_format=_layout(x))


def _layout(x: Tensor) -> torch.memory_format:
    keeps = traits_of(x.device.type).aten.keeps_image_layout
    return compat.aot.suggest_memory_format(x) if keeps else torch.contiguous_format


def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """Fill the slices at `index` of dimension `dim` with `value`, a number or a tensor of one; layout as of `x`.

    torch 2.11's decomposition sets the layout by an in-place copy, which AOTAutograd refuses.
    """
    if x.dim() == 0:
        return index_fill(x.unsqueeze(0), 0, index, value).squeeze(0).clone()
    dim = dim % x.dim()
    order = compat.aot.dimensions_by_stride(x)
    moved, at = x.permute(order), order.index(dim)
    filled = value.to(x.dtype) if isinstance(value, Tensor) else x.new_full((), value)
    slices = filled.expand(*moved.shape[:at], index.numel(), *moved.shape[at + 1 :])
    result: Tensor = aten.index_copy(moved, at, index, slices)
    return result.permute([order.index(d) for d in range(x.dim())])


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Turn channels into squares of `factor` x `factor`; layout as in eager: like `x` on the CPU, row-major on GPUs."""
    *lead, channels, height, width = x.shape
    n, kept = len(lead), channels // factor**2
    split = x.reshape(*lead, kept, factor, factor, height, width)
    moved = split.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return moved.reshape(*lead, kept, height * factor, width * factor).clone(memory_format=_layout(x))


def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """Turn every `factor` x `factor` square into channels; an empty tensor keeps its shape, as in eager on the CPU."""
    if compat.sizes.is_known_empty(x) and traits_of(x.device.type).aten.keeps_empty_shape:
        return x.clone()
    *lead, channels, height, width = x.shape
    n = len(lead)
    split = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    moved = split.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    shape = (*lead, channels * factor**2, height // factor, width // factor)
    return moved.reshape(shape).clone(memory_format=compat.aot.suggest_memory_format(x))


def put_at_positions(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write at positions of the flattened tensor."""
    flat = aten.index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    result: Tensor = aten.copy(torch.empty_like(x), flat.reshape(x.shape))
    return result


def take(x: Tensor, index: Tensor) -> Tensor:
    """Read at positions of the flattened tensor."""
    found: Tensor = aten.index(x.reshape(-1), [index.reshape(-1)])
    return found.reshape(index.shape)


def fitting_slices(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torch's decomposition of index_add, which would broadcast slices where eager refuses."""

    def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, **more: Any) -> Tensor:
        if x.dim() and source.dim():
            shapes = [(*t.shape[: dim % t.dim()], *t.shape[dim % t.dim() + 1 :]) for t in (x, source)]
            if shapes[0] != shapes[1]:
                raise RuntimeError(f"index_add: source {tuple(source.shape)} does not fit {tuple(x.shape)} along {dim}")
        return rule(x, dim, index, source, **more)

    return index_add


def laid_out_as_input(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torch's decomposition; on the CPU the result is channels-last if the input is, as in eager."""

    def laid_out(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = rule(x, *args, **kwargs)
        return result.contiguous(memory_format=_layout(x))

    return laid_out


def replication_pad(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torch's decomposition, which on CPUs serves channels-last images only: others have a rule (`concat.py`).

    torch 2.11's returns channels first.
    """

    def padded(x: Tensor, padding: Sequence[int]) -> Tensor:
        if not traits_of(x.device.type).aten.keeps_image_layout or compat.sizes.is_known_empty(x):
            return rule(x, padding)
        layout = compat.aot.suggest_memory_format(x)
        rows = layout == torch.contiguous_format
        return NotImplemented if rows else rule(x, padding).contiguous(memory_format=layout)

    return padded


def replication_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Add gradients beyond an edge to the edge."""
    return _unpadded(grad, x, padding, lambda at, last: at.clamp(0, last))


def reflection_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Add gradients of mirrored elements to their sources."""
    return _unpadded(grad, x, padding, lambda at, last: last - (last - at.abs()).abs())


def _unpadded(grad: Tensor, x: Tensor, padding: Sequence[int], place: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum the gradients of each element's copies, one dimension after another."""
    for n in range(len(padding) // 2):
        dim, before = x.dim() - 1 - n, padding[2 * n]
        places = place(torch.arange(grad.shape[dim], device=grad.device) - before, x.shape[dim] - 1)
        total = grad.new_zeros((*grad.shape[:dim], x.shape[dim], *grad.shape[dim + 1 :]))
        grad = total.index_add(dim, places, grad)
    return grad


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of computation for results that are rounded once: float32 for 16 bits."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Return (v * (g / norms), norms), rounded once as by ATen's kernel; norms are over all dims of v but `dim`."""
    wide = v.to(compute_dtype(v))
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    norms = torch.linalg.vector_norm(wide, 2, others, keepdim=True) if others else wide.abs()
    rounds = v.dtype != torch.bfloat16 and traits_of(v.device.type).aten.rounds_norms
    kept = norms.to(g.dtype) if rounds else norms
    return (wide * (g.to(wide.dtype) / norms)).to(v.dtype), kept


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of v and g, where w = v * (g / norms) and norms are over all dims of v but `dim`."""
    compute = compute_dtype(v)
    wide, into, scale, length = v.to(compute), grad.to(compute), g.to(compute), norms.to(compute)
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = into * wide
    along = along.sum(others, keepdim=True) if others else along
    of_v = (into - wide * (along / (length * length))) * (scale / length)
    return of_v.to(v.dtype), (along / length).to(g.dtype)


def tril_indices(row: int, col: int, offset: int = 0, **how: Any) -> Any:
    """Return (2, count): rows and columns of the elements on and below a diagonal, row by row."""
    if not all(isinstance(size, int) for size in (row, col, offset)):
        return NotImplemented
    positions, dtype = torch.arange(_count_below(row, col, offset), device=how.get("device")), how.get("dtype")
    return torch.stack(_places_below(positions, row, col, offset)).to(torch.int64 if dtype is None else dtype)


def triu_indices(row: int, col: int, offset: int = 0, **how: Any) -> Any:
    """Return (2, count): elements on and above a diagonal, which are those below one from the opposite corner."""
    if not all(isinstance(size, int) for size in (row, col, offset)):
        return NotImplemented
    turned, dtype = col - row - offset, how.get("dtype")
    count = _count_below(row, col, turned)
    i, j = _places_below(count - 1 - torch.arange(count, device=how.get("device")), row, col, turned)
    return torch.stack((row - 1 - i, col - 1 - j)).to(torch.int64 if dtype is None else dtype)


def _steps(row: int, col: int, offset: int) -> tuple[int, int, int, int]:
    """Return (empty rows, elements of the next row, rows with one more element each, elements in those)."""
    empty = min(max(0, -offset), row)
    first = min(max(empty + offset + 1, 0), col)
    rising = min(row - empty, col - first)
    return empty, first, rising, rising * first + rising * (rising - 1) // 2


def _count_below(row: int, col: int, offset: int) -> int:
    empty, _, rising, risen = _steps(row, col, offset)
    return risen + (row - empty - rising) * col


def _places_below(position: Tensor, row: int, col: int, offset: int) -> tuple[Tensor, Tensor]:
    """Return row and column of the elements on and below a diagonal at these positions in row-major order."""
    empty, first, rising, risen = _steps(row, col, offset)

    def before(n: Tensor) -> Tensor:
        return n * first + n * (n - 1) // 2

    # a root of before(n) == position, possibly off by one where a double cannot hold the square
    root = ((1.0 - 2 * first) + ((2.0 * first - 1) ** 2 + 8.0 * position.double()).sqrt()) * 0.5
    n = root.floor().long()
    n = torch.where(before(n) > position, n - 1, n)
    n = torch.where(before(n + 1) <= position, n + 1, n)
    full = position - risen
    is_rising = full < 0
    i = torch.where(is_rising, empty + n, empty + rising + full // max(col, 1))
    return i, torch.where(is_rising, position - before(n), full % max(col, 1))


def rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Return (result, noise) outside training, where the slope is the mean of its bounds."""
    return NotImplemented if training else (torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise.clone())


def softmax_backward(op: Any, grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Any:
    """Keep the dtype of `grad` where ATen does, whatever torch's shape function says of the input's `dtype`."""
    if dtype == grad.dtype or traits_of(grad.device.type).aten.rounds_softmax_gradients:
        return NotImplemented
    return op(grad, y, dim, grad.dtype)


MAX_PART, MIN_PART = 32, 8
"""Elements of a channel in a part: with these, 128 threads hold a tile of 64 channels."""
MAX_PERSISTENT_ELEMENTS = 16384
"""Elements of a group that one program holds, so that it reads each once."""


def by_parts(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `rule`, torch's decomposition of `native_group_norm`; on GPUs large groups are computed from parts."""

    def native_group_norm(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, inner: int, groups: int, eps: float
    ) -> Any:
        part = part_of(x, inner, c // groups if groups else 0)
        if not part:
            return rule(x, weight, bias, n, c, inner, groups, eps)
        wide = x.to(compute_dtype(x))
        mean, rstd = _statistics(wide.reshape(n, c, inner // part, part), groups, eps)
        parted = (wide.reshape(n, groups, c // groups, inner) - mean.view(n, groups, 1, 1)) * rstd.view(n, groups, 1, 1)
        found, along = parted.reshape(x.shape), [c, *[1] * (x.dim() - 2)]
        found = found if weight is None else found * weight.view(along)
        found = found if bias is None else found + bias.view(along)
        return found.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)

    return native_group_norm


def part_of(x: Tensor, inner: int, channels: int) -> int:
    """Return the number of elements of a channel in a part; 0 where groups are better read as rows."""
    if (
        not traits_of(x.device.type).many_threads
        or not compat.sizes.is_fixed(x)
        or inner * channels <= MAX_PERSISTENT_ELEMENTS
    ):
        return 0
    return next((size for size in range(MAX_PART, MIN_PART - 1, -1) if inner % size == 0), 0)


def _statistics(parts: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return (means, reciprocal standard deviations), both (n, groups), of parts (n, channels, parts, elements)."""
    n, c, count, _ = parts.shape
    variances, means = torch.var_mean(parts.permute(0, 2, 1, 3), dim=3, correction=0)
    means, variances = (value.view(n, count, groups, c // groups) for value in (means, variances))
    mean = means.mean((1, 3))
    variance = (variances + (means - mean.view(n, 1, groups, 1)).square()).mean((1, 3))
    return mean, torch.rsqrt(variance + eps)
