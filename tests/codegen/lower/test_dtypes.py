"""Dtypes of which ATen has no kernel, or we none: unsigned integers, and rare functions of float64."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Extern
from tests.codegen.lower.test_ops import check


def rare(x: torch.Tensor) -> torch.Tensor:
    return torch.tan(x) + torch.asin(x) + torch.atan(x) + torch.log10(x)


def test_rare_functions_of_float64_are_left_to_aten() -> None:
    x = torch.linspace(0.1, 0.9, 50)
    check(rare, x)
    check(rare, x.double(), library=4)
    check(lambda x: torch.erfc(x) + torch.lgamma(x) + torch.atan2(x, x * x) + torch.hypot(x, x), x.double(), library=4)


def test_rare_functions_of_float64_are_counted_as_fallbacks() -> None:
    compiled = dcompile.compile(rare)
    x = torch.linspace(0.1, 0.9, 50, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), rare(x))
    assert dcompile.receipt(compiled).fallbacks == {f"aten.{n}.default": 1 for n in ("tan", "asin", "atan", "log10")}


def test_rare_functions_of_float64_are_loops_on_gpus() -> None:
    with FakeTensorMode() as mode:
        gm = make_fx(rare)(torch.empty(50, dtype=torch.float64, device="cuda"))
    with mode:
        program = lower(gm, "graph").program
    assert not any(isinstance(step, Extern) for step in program.steps)


def test_usual_functions_of_float64_are_loops() -> None:
    names = ("exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos", "erf", "asinh", "acosh")
    check(lambda x: sum(getattr(torch, name)(x) for name in names) + x**1.5, torch.linspace(1.1, 3, 50).double())


def test_all_of_unsigned_integers_is_not_asked_by_the_negation_that_aten_lacks() -> None:
    def truths(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.all(), x.all(0), x.all(1, keepdim=True), torch.all(x, (0, 1)), x.any(0), x.bool().all()

    compiled = dcompile.compile(truths, options={"receipt": False})
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        x = torch.tensor([[1, 2, 255], [0, 5, 6]], dtype=dtype)
        for found, expected in zip(compiled(x), truths(x), strict=True):
            assert torch.equal(found, expected) and found.dtype == expected.dtype
