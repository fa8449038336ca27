"""Grouped matmuls as torch operators: groups of a matrix's rows, each multiplied by its own matrix.

`torch.ops.dcompile_grouped` has two pairs. `mm` and `outer` take the groups' offsets on their device, and call
PyTorch's grouped GEMM: on GPUs, the host does not wait. `mm_each` and `outer_each` take offsets on the CPU, as `ends`
copies them. They call one matmul for each group with rows, for dtypes and layouts that the grouped GEMM does not
support. `offsets` are running totals of the groups' sizes, as in `torch.nn.functional.grouped_mm`: group g has the rows
from offsets[g - 1] to offsets[g].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from dcompile.operators.own_operators import Functions, define_operators

NAMESPACE = "dcompile_grouped"
ALIGNMENT_BYTES = 16
"""Bytes of which strides must be multiples for the grouped GEMM."""
MIN_CAPABILITY = (8, 0)
"""Lowest compute capability for which PyTorch has a grouped GEMM."""
CPU_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))

_SCHEMAS = (
    "ends(Tensor offsets) -> Tensor",
    "mm(Tensor input, Tensor weight, Tensor offsets) -> Tensor",
    "outer(Tensor left, Tensor right, Tensor offsets) -> Tensor",
    "mm_each(Tensor input, Tensor weight, Tensor ends) -> Tensor",
    "outer_each(Tensor left, Tensor right, Tensor ends) -> Tensor",
)


def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """(rows, out) of (rows, in) @ (groups, in, out): each row times the matrix of its group; differentiable.

    Rows after the last group are 0. Where PyTorch's grouped GEMM runs, which skips them, they are undefined.
    """
    if has_grouped_gemm(input, weight):
        return _ops().mm(input, weight, offsets)  # type: ignore[no-any-return]
    return _ops().mm_each(input, weight, _ops().ends(offsets))  # type: ignore[no-any-return]


def autocast_grouped_mm(input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`grouped_mm` in autocast's dtype where autocast is on, like linear layers; eager keeps the weight's dtype."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype == torch.float32:
        dtype = torch.get_autocast_dtype(kind)
        input, weight = input.to(dtype), weight.to(dtype)
    return grouped_mm(input, weight, offsets)


def has_grouped_gemm(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch's grouped GEMM supports these operands, forward and backward, without waiting for the host."""
    if input.dtype != weight.dtype or not _has_rows_or_columns(weight):
        return False
    wide = ALIGNMENT_BYTES // weight.element_size()
    if any(not isinstance(size, int) or size % wide or not size for size in weight.shape[1:]):
        return False
    if weight.device.type == "cuda":
        return weight.dtype == torch.bfloat16 and _is_capable(weight.device)
    return weight.device.type == "cpu" and weight.dtype in CPU_DTYPES


def _has_rows_or_columns(weight: torch.Tensor) -> bool:
    """Whether each group's matrix is row-major or column-major, without gaps."""
    _, height, width = weight.shape
    return tuple(weight.stride()[1:]) in ((width, 1), (1, height))


def _is_capable(device: torch.device) -> bool:
    """Whether a device has a grouped GEMM. Without a GPU, graphs are only planned, for GPUs that dcompile supports."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


# --- what the operators do --------------------------------------------------------------------------------------------


def _ends(offsets: torch.Tensor) -> torch.Tensor:
    return offsets.to("cpu", torch.int64, copy=True)


def _mm(input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return functional.grouped_mm(_by_rows(input), weight, offs=offsets)


def _outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return functional.grouped_mm(_by_rows(left).t(), _by_rows(right), offs=offsets)


def _by_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Make a matrix suitable for the grouped GEMM: gradients may be expanded, and rows may be unaligned."""
    step = matrix.stride(0) * matrix.element_size()
    plain = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and step % ALIGNMENT_BYTES == 0
    aligned = plain and matrix.data_ptr() % ALIGNMENT_BYTES == 0
    return matrix if aligned else matrix.clone(memory_format=torch.contiguous_format)


def _mm_each(input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    result = input.new_empty(input.shape[0], weight.shape[2])
    sizes = _sizes(ends, input.shape[0])
    parts = (torch.split_with_sizes(tensor, sizes) for tensor in (input, result))
    for rows, out, matrix in zip(*parts, (*weight.unbind(), None), strict=True):
        if matrix is None:
            out.zero_()
        elif out.shape[0]:
            torch.mm(rows, matrix, out=out)
    return result


def _outer_each(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    result = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    sizes = _sizes(ends, left.shape[0])
    parts = torch.split_with_sizes(left.t(), sizes, 1), torch.split_with_sizes(right, sizes)
    for rows, others, out in zip(*parts, result.unbind(), strict=False):
        if others.shape[0]:
            torch.mm(rows, others, out=out)
        else:
            out.zero_()
    return result


def _sizes(ends: torch.Tensor, rows: int) -> list[int]:
    """Number of rows of each group, and of those after the last group."""
    marks = [0, *ends.tolist(), rows]
    return [end - start for start, end in pairwise(marks)]


# --- what tracing and autograd know of them ---------------------------------------------------------------------------


def _empty_ends(offsets: torch.Tensor) -> torch.Tensor:
    return torch.empty(offsets.shape, dtype=torch.int64, device="cpu")


def _empty_mm(input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


def _empty_outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(mm: str, outer: str) -> Any:
    """Backward of one pair's `mm`."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        input, weight, offsets = ctx.saved_tensors
        by_input = by_weight = None
        if ctx.needs_input_grad[0]:
            by_input = getattr(_ops(), mm)(grad, weight.transpose(1, 2), offsets)
        if ctx.needs_input_grad[1]:
            # stored like the weight: a parameter's gradient takes its strides without a copy
            if weight.stride(1) == 1 and weight.stride(2) != 1:
                by_weight = getattr(_ops(), outer)(grad, input, offsets).transpose(1, 2)
            else:
                by_weight = getattr(_ops(), outer)(input, grad, offsets)
        return by_input, by_weight, None

    return backward


def _register() -> torch.library.Library:
    functions: dict[str, Functions] = {
        "ends": (_ends, _empty_ends), "mm": (_mm, _empty_mm), "outer": (_outer, _empty_outer),
        "mm_each": (_mm_each, _empty_mm), "outer_each": (_outer_each, _empty_outer),
    }  # fmt: skip
    library = define_operators(NAMESPACE, _SCHEMAS, functions)
    for mm, outer in (("mm", "outer"), ("mm_each", "outer_each")):
        torch.library.register_autograd(f"{NAMESPACE}::{mm}", _backward(mm, outer), setup_context=_save, lib=library)
    return library


def _ops() -> Any:
    return torch.ops.dcompile_grouped


_LIBRARY = _register()
"""Library of the operators, which exist as long as this object."""
