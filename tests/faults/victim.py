"""Two training steps of a small model, compiled, against the same in eager. Prints one JSON line, if it gets there."""

import copy
import json
import sys

import torch

import dcompile
from benchmarks.common import worst_of


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
    expected = copy.deepcopy(model)
    dcompile.compile(model, fullgraph=True)
    found: list[float] = []
    for _ in range(2):
        x = torch.randn(4, 8)
        y, z = model(x), expected(x)
        y.exp().sum().backward(), z.exp().sum().backward()
        pairs = [(y, z), *((p.grad, q.grad) for p, q in zip(model.parameters(), expected.parameters(), strict=True))]
        found += (float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
    worst, receipt = worst_of(found), dcompile.receipt(model)
    result = {"worst": worst, "built": receipt.built, "cache_hits": receipt.cache_hits, "kernels": receipt.kernels}
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
