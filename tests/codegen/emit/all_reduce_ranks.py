"""Ranks that sum tensors by the one-shot kernel, as processes on shared memory in place of GPUs.

`python -m tests.codegen.emit.all_reduce_ranks` prints JSON: what is wrong with each case, or "". It takes
TRITON_INTERPRET=1, chosen before Triton is imported.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable

import numpy as np
import torch

from dcompile.codegen.emit.target import AllReduceKernel
from dcompile.codegen.emit.triton import one_shot_all_reduce
from dcompile.machine_model import MAX_ONE_SHOT_BYTES
from tests.codegen.emit import interpreted, reduced_rows
from tests.codegen.emit.all_kernels import kernels_of

CALLS = 3
"""In a row: the third writes where the first has read."""
CASES = {
    "two": (2, "float32", 200), "three": (3, "bfloat16", 256 + 6), "float16": (2, "float16", 10),
}  # fmt: skip
"""Name -> ranks, dtype, elements."""
ROW_CASES = {
    "residual and RMSNorm": (2, "rms", 1, 256, "bfloat16", False),
    "LayerNorm of masked rows": (2, "layer", 2, 100, "float16", False),
    "addition, and the sum itself": (2, "add", 3, 90, "float32", True),
}
"""Name -> ranks, kind of loop, rows, their length, dtype, whether the sum is read later."""


def shared(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that forks see at the same address."""
    nbytes = count * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=dtype, count=count)


def operand(rank: int, call: int, dtype: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + rank)
    return torch.randn(count, generator=generator).to(getattr(torch, dtype))


def total(ranks: int, call: int, dtype: str, count: int) -> torch.Tensor:
    """The sum in the order of ranks, rounded once."""
    return sum(operand(rank, call, dtype, count).float() for rank in range(ranks)).to(getattr(torch, dtype))


class Rank:
    """A rank's launches of one kernel."""

    def __init__(self, kernel: AllReduceKernel, rank: int, addresses: torch.Tensor) -> None:
        source = kernel.source
        self.function = getattr(interpreted._module(source.name, source.text), source.launches[0].function)
        self.words, self.warps, self.rank, self.addresses = kernel.words, source.launches[0].warps, rank, addresses
        self.calls, self.ended = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def launch(self, values: torch.Tensor, *given: torch.Tensor) -> None:
        words = values.view(-1).view(torch.int32)
        exchanged = (words, self.addresses, self.calls, self.ended, words.numel(), self.rank, len(self.addresses))
        with np.errstate(all="ignore"):
            self.function[(-(-words.numel() // self.words),)](*given, *exchanged, num_warps=self.warps)


def on_ranks(ranks: int, run: Callable[[int, torch.Tensor], None]) -> str:
    """Run a function of a rank and the inboxes' addresses in a process for each rank; return what failed."""
    boxes = [shared(ranks * 2 * MAX_ONE_SHOT_BYTES // 4, torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([box.data_ptr() for box in boxes])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                run(rank, addresses)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    return f"ranks {failed} failed" if failed else ""


def problem(ranks: int, dtype: str, count: int) -> str:
    """What is wrong with a case; empty if nothing."""
    results = shared(ranks * CALLS * count, torch.float32).view(ranks, CALLS, count)
    kernel = AllReduceKernel(one_shot_all_reduce.source(dtype), one_shot_all_reduce.BLOCK)

    def run(rank: int, addresses: torch.Tensor) -> None:
        launches = Rank(kernel, rank, addresses)
        for call in range(CALLS):
            values = operand(rank, call, dtype, count)
            launches.launch(values)
            results[rank, call] = values.float()

    failed = on_ranks(ranks, run)
    for call in range(CALLS):
        want = total(ranks, call, dtype, count).float()
        for rank in range(ranks):
            if not torch.equal(results[rank, call], want):
                failed = failed or f"call {call}, rank {rank}: off by {(results[rank, call] - want).abs().max()}"
    return failed


def row_problem(ranks: int, kind: str, rows: int, depth: int, dtype: str, keeps_sum: bool) -> str:
    """What is wrong with a kernel that ends with a loop; empty if nothing."""
    program = reduced_rows.program(kind, rows, depth, dtype, keeps_sum=keeps_sum)
    kernel = kernels_of(program).all_reduces["p"]
    results = shared(ranks * CALLS * 3 * rows * depth, torch.float32).view(ranks, CALLS, 3, rows, depth)
    generator = torch.Generator().manual_seed(7)
    kept = {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype))
            for name, shape in (("r", (rows, depth)), ("w", (depth,)))}  # fmt: skip

    def run(rank: int, addresses: torch.Tensor) -> None:
        launches = Rank(kernel, rank, addresses)
        for call in range(CALLS):
            p = operand(rank, call, dtype, rows * depth).view(rows, depth)
            memory = {**kept, "h": torch.zeros_like(p), "y": torch.zeros_like(p)}
            launches.launch(p, *(memory[name] for name in kernel.source.arguments))
            results[rank, call] = torch.stack((memory["h"], memory["y"], p)).float()

    if failed := on_ranks(ranks, run):
        return failed
    for call in range(CALLS):
        p = total(ranks, call, dtype, rows * depth).view(rows, depth)
        want = torch.stack((*reduced_rows.expected(kind, p, kept["r"], kept["w"]), p)).float()
        got = results[0, call]
        if any(not torch.equal(results[rank, call, :2], got[:2]) for rank in range(ranks)):
            return f"call {call}: ranks differ"
        compared = slice(0, 3 if keeps_sum else 2)
        if not torch.allclose(got[compared], want[compared], rtol=0.01 if dtype != "float32" else 1e-5, atol=1e-5):
            return f"call {call}: off by {(got - want).abs().amax((1, 2))}"
    return ""


def main() -> None:
    found = {name: problem(*case) for name, case in CASES.items()}
    found |= {name: row_problem(*case) for name, case in ROW_CASES.items()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
