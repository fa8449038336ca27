"""The kernel that casts a shard to 8-bit floats on GPUs with instructions for it. Importing this imports Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 4
"""Elements and warps of a program: each thread reads 16 bytes at a time, eight times for float32."""
KINDS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def scale_and_cast(  # type: ignore[no-untyped-def]  # noqa: ANN201
    target,  # noqa: ANN001
    source,  # noqa: ANN001
    scale,  # noqa: ANN001
    numel,  # noqa: ANN001
    limit: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    """Write `numel` elements of `source` times the scale, cast to `kind`, as the bytes `target`."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    number = tl.load(source + at, mask=at < numel, other=0.0).to(tl.float32) * tl.load(scale)
    clamped = tl.minimum(tl.maximum(number, -limit), limit)
    number = tl.where(number == number, clamped, number)  # NaN stays, as in ATen
    tl.store(target + at, number.to(kind).to(tl.uint8, bitcast=True), mask=at < numel)


def cast(target: torch.Tensor, source: torch.Tensor, scale: torch.Tensor) -> None:
    """Write a flat tensor times a scale of shape () to one of 8-bit floats, on the current stream of its GPU."""
    if not target.numel():
        return
    kernel: Any = scale_and_cast
    limit = torch.finfo(target.dtype).max
    with torch.cuda.device(target.device):
        kernel[(triton.cdiv(target.numel(), BLOCK),)](
            target.view(torch.uint8), source, scale, target.numel(), limit, KINDS[target.dtype], BLOCK, num_warps=WARPS
        )
