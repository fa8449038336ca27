"""A tensor of more than 2**31 elements: python -m tests.ops.large. It takes 5 GB, so `make ops-sweep` runs it alone."""

from __future__ import annotations

import torch

import dcompile

COUNT = 2**31 + 64
MARKS = {0: 1, 2**31 - 1: 2, 2**31: 3, COUNT - 61: 5, COUNT - 1: 4}
"""Position -> value; all other elements are 0, so that what eager would give needs no second large tensor."""


def step(x: torch.Tensor, where: torch.Tensor) -> list[torch.Tensor]:
    """Elements, sums over all and over columns, a slice, and positions computed at run time."""
    rows = x.view(COUNT // 64, 64)
    return [x + 1, x.sum(), rows.sum(0), rows[-2:].t() * 2, x[where]]


def main() -> None:
    """Raises AssertionError if compiled results are wrong anywhere."""
    x = torch.zeros(COUNT, dtype=torch.int8)
    where, values = torch.tensor([*MARKS]), torch.tensor([*MARKS.values()], dtype=torch.int8)
    x[where] = values
    compiled = dcompile.compile(step, fullgraph=True, dynamic=False, options={"receipt": False})
    more, total, columns, last, found = compiled(x, where)
    receipt = dcompile.receipt(compiled)
    assert receipt.kernels and not receipt.fallbacks, str(receipt)
    assert torch.equal(more[where], values + 1) and torch.equal(more[-128:], x[-128:] + 1)
    more -= 1
    assert torch.equal(more, x)
    expected = torch.zeros(64, dtype=torch.int64).index_add(0, where % 64, values.long())
    assert total.item() == sum(MARKS.values()) and torch.equal(columns, expected)
    assert torch.equal(last, x.view(-1, 64)[-2:].t() * 2) and torch.equal(found, values)
    print(f"{COUNT} elements: right, in {receipt.kernel_calls} kernels")


if __name__ == "__main__":
    main()
