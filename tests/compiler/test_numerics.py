"""What is weaker than stock's bits is named, program by program; `bitwise` has nothing to name on one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import dcompile
from dcompile.codegen.emit.target import Kernels
from dcompile.compiler.numerics import FUNCTIONS, OTHERS, RANKS, SUMS, weaker_than_bitwise
from dcompile.ir.nodes import REGION, Collective, Extern
from dcompile.ir.parse import parse
from dcompile.machine_model import GroupSize

PROGRAM = """
program p(x, n)
  x: float32[6, 16]
  n: int64[6, 16]
  y: float32[6, 16]
  s: float32[6]
  m: float32[6]
  c: int64[6]
loop y [6, 16]
  y[i0, i1] = sqrt(add(tanh(x[i0, i1]), 1.0))
loop s [6, 16]
  s[i0] sum= x[i0, i1]
loop m [6, 16]
  m[i0] max= x[i0, i1]
loop c [6, 16]
  c[i0] sum= n[i0, i1]
return (y, s, m, c)
"""


def test_sums_of_floats_and_approximated_functions_are_named():
    found = weaker_than_bitwise(parse(PROGRAM), Kernels(), {})
    assert found == {SUMS: ["s"], FUNCTIONS: ["tanh"]}, "sqrt, maxima and sums of integers are exact"


@pytest.mark.parametrize(
    ("size", "named"), [(GroupSize(2), False), (GroupSize(4), True), (GroupSize(2, replicas=4), True)]
)
def test_sums_over_more_than_two_ranks_are_named(size, named):
    program = parse(PROGRAM)
    reduced = replace(program, steps=(*program.steps, Collective("all_reduce", "bucket0", "ddp", ("s",))))
    assert weaker_than_bitwise(reduced, Kernels(), {"ddp": size}).get(RANKS, []) == ["ddp"] * named


def test_regions_of_other_compilers_are_named():
    program = parse(PROGRAM)
    region = Extern(REGION, (), (), ("s",), "alloc")
    assert weaker_than_bitwise(replace(program, steps=(region,)), Kernels(), {}) == {OTHERS: [REGION]}


class Mixed(nn.Module):
    """Sums, functions, dropout and an enlarged image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.GroupNorm(2, 4), nn.Dropout(0.3))
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.interpolate(self.layers(x), scale_factor=1.5, mode="bilinear")
        return torch.log_softmax(self.last(y.flatten(2).transpose(1, 2)), -1).logsumexp(1)


def trained(call, model, x):
    torch.manual_seed(1)
    result = call(x)
    result.square().sum().backward()
    return [result.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_gives_stocks_bits_and_random_numbers(dtype):
    torch.compiler.reset()
    models = [Mixed().to(dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = dcompile.compile(models[0], options={"numerics": "bitwise", "receipt": False})
    x = torch.randn(2, 2, 9, 8).to(dtype)
    for ours, stock in zip(trained(compiled, models[0], x), trained(models[1], models[1], x), strict=True):
        assert torch.equal(ours, stock)
    receipt = dcompile.receipt(models[0])
    assert receipt.numerics == "bitwise" and not receipt.weaker and receipt.kernels == 0
