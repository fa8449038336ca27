"""Ranks that sum tensors by the one-shot kernel, as processes on shared memory in place of GPUs.

`python -m tests.codegen.emit.all_reduce_ranks` prints JSON: what is wrong with each case, or "". It takes
TRITON_INTERPRET=1, chosen before Triton is imported.
"""

from __future__ import annotations

import json
import mmap
import os
import sys

import numpy as np
import torch

from dcompile.codegen.emit.triton import one_shot_all_reduce
from dcompile.machine_model import MAX_ONE_SHOT_BYTES
from tests.codegen.emit import interpreted

CALLS = 3
"""In a row: the third writes where the first has read."""
CASES = {
    "two": (2, "float32", 200), "three": (3, "bfloat16", 256 + 6), "float16": (2, "float16", 10),
}  # fmt: skip
"""Name -> ranks, dtype, elements."""
KERNEL_BLOCK = one_shot_all_reduce.BLOCK


def shared(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that forks see at the same address."""
    nbytes = count * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=dtype, count=count)


def operand(rank: int, call: int, dtype: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + rank)
    return torch.randn(count, generator=generator).to(getattr(torch, dtype))


def be_rank(rank: int, ranks: int, dtype: str, count: int, addresses: torch.Tensor, results: torch.Tensor) -> None:
    source = one_shot_all_reduce.source(dtype)
    kernel = getattr(interpreted._module(source.name, source.text), source.launches[0].function)
    calls, ended = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for call in range(CALLS):
        values = operand(rank, call, dtype, count)
        words = values.view(torch.int32)
        grid = -(-words.numel() // KERNEL_BLOCK)
        with np.errstate(all="ignore"):
            kernel[(grid,)](words, addresses, calls, ended, words.numel(), rank, ranks, num_warps=1)
        results[rank, call] = values.float()


def problem(ranks: int, dtype: str, count: int) -> str:
    """What is wrong with a case; empty if nothing."""
    boxes = [shared(ranks * 2 * MAX_ONE_SHOT_BYTES // 4, torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([box.data_ptr() for box in boxes])
    results = shared(ranks * CALLS * count, torch.float32).view(ranks, CALLS, count)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                be_rank(rank, ranks, dtype, count, addresses, results)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    if failed := [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]:
        return f"ranks {failed} failed"
    for call in range(CALLS):
        total = sum(operand(rank, call, dtype, count).float() for rank in range(ranks))
        want = total.to(getattr(torch, dtype)).float()  # in the order of ranks, rounded once
        for rank in range(ranks):
            if not torch.equal(results[rank, call], want):
                return f"call {call}, rank {rank}: off by {(results[rank, call] - want).abs().max()}"
    return ""


def main() -> None:
    sys.stdout.write(json.dumps({name: problem(*case) for name, case in CASES.items()}) + "\n")


if __name__ == "__main__":
    main()
