"""lowering rule aten.gelu.default, in forward0. Run it as it is, beside bisect_inputs.pt."""

from math import inf, nan
from pathlib import Path

import torch
from torch import device

import dcompile
from dcompile.verify.compare import compare
from dcompile.verify.reference import copied, in_float64


def graph(addmm):
    gelu = torch.ops.aten.gelu.default(addmm)
    addmm = None
    return (gelu,)


inputs = torch.load(Path(__file__).with_name("bisect_inputs.pt"))
with torch.no_grad():
    given = copied(inputs)  # before float64, which would be the copies'
    got = dcompile.compile(graph, options={"receipt": False})(*copied(inputs))
    same = graph(*copied(inputs))
    with in_float64():
        exact = graph(*given)
for place, results in enumerate(zip(got, same, exact)):
    if isinstance(results[0], torch.Tensor):
        print(f"result {place}: {compare(*results) or 'no difference'}")
