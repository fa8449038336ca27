"""Casts shards in Triton's interpreter, or compiles the kernel for a GPU that need not be there.

python -m tests.runtime.communication.cast_in_triton: a line of JSON, from a case to what is wrong, or "". With
TRITON_INTERPRET=1, which Triton reads as it is imported, kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcompile.compat.tensors import scaled_cast
from dcompile.runtime.communication.scaled_cast_kernel import BLOCK, KINDS, WARPS, scale_and_cast

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
NUMEL = BLOCK + 37
CASES = [(source, target) for source in POINTERS for target in KINDS]


SCALE = 4.0


def shard(source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Numbers whose products need no rounding, and some that are too large. Triton's interpreter rounds wrongly."""
    torch.manual_seed(0)
    found = torch.randint(0, 256, (NUMEL,), dtype=torch.uint8).view(target).float() / SCALE
    found[:4] = torch.tensor([0.0, -0.0, 1e30, -1e30])
    smallest = torch.finfo(target).tiny / SCALE
    return torch.where(found.isfinite() & (found.abs() >= smallest), found, 0).to(source)


def interpreted(source: torch.dtype, target: torch.dtype) -> str:
    """Where the kernel's bits are not ATen's."""
    given, scale = shard(source, target), torch.tensor(SCALE)
    made = torch.zeros(NUMEL + 1, dtype=torch.uint8)
    limit = torch.finfo(target).max
    scale_and_cast[(triton.cdiv(NUMEL, BLOCK),)](made, given, scale, NUMEL, limit, KINDS[target], BLOCK)
    off = made[:-1] != scaled_cast(given, scale, target).view(torch.uint8)
    return f"{int(off.sum())} of {NUMEL} differ, first {given[off][:3].tolist()}" if off.any() or made[-1] else ""


def compiled(source: torch.dtype, target: torch.dtype) -> str:
    """Whether code for Hopper converts by its instruction, and moves 16 bytes at a time."""
    kinds = {"target": "*u8", "source": POINTERS[source], "scale": "*fp32", "numel": "i32"}
    fixed = {"limit": torch.finfo(target).max, "kind": KINDS[target], "block": BLOCK}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 3)}
    signature = kinds | dict.fromkeys(fixed, "constexpr")
    text = triton.compile(
        ASTSource(scale_and_cast, signature, fixed, aligned), HOPPER, options={"num_warps": WARPS}
    ).asm["ptx"]  # fmt: skip
    wanted = ("cvt.rn.satfinite", "ld.global.v4")
    return ", ".join(f"no {name}" for name in wanted if name not in text)


if __name__ == "__main__":
    check = interpreted if os.environ.get("TRITON_INTERPRET") == "1" else compiled
    sys.stdout.write(json.dumps({f"{source} {target}": check(source, target) for source, target in CASES}) + "\n")
