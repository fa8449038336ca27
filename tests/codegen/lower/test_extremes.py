"""Rules at the ends of each dtype, as whole graphs: operations of several parts, and numbers in place of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dcompile
from tests.codegen.emit import extremes

Function = Callable[..., torch.Tensor]

BY_EACH_OTHER: dict[str, Function] = {
    "lcm": torch.lcm, "gcd": torch.gcd, "fmod": torch.fmod, "remainder": torch.remainder, "mul": torch.mul,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "floor": torch.floor_divide, "add": torch.add,
}  # fmt: skip


def pairs(dtype: str, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    known = extremes.operands("gcd" if op in ("lcm", "gcd") else "fmod", dtype)
    return torch.from_numpy(known["x0"]), torch.from_numpy(known["x1"])


def compiled(functions: list[Callable[[], Any]]) -> list[torch.Tensor]:
    """What each gives, all in one graph."""
    torch._dynamo.reset()
    results: list[torch.Tensor] = dcompile.compile(lambda: [function() for function in functions], dynamic=False)()
    return results


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor], names: list[str]) -> None:
    """Dtypes, values, and signs of zeros."""
    for name, got, want in zip(names, found, wanted, strict=True):
        assert got.dtype == want.dtype, name
        assert torch.equal(got.isnan(), want.isnan()), name
        usual = ~want.isnan()
        assert torch.equal(got[usual], want[usual]), name
        assert torch.equal(got[usual].signbit(), want[usual].signbit()), name


# kernels and their meaning have each dtype in tests/codegen/emit/test_extremes.py
@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.full if d in ("int16", "int64") else ()) for d in extremes.INTEGERS]
)
def test_integers_wrap_where_eagers_do(dtype: str) -> None:
    """Products of 8 and 16 bits are C's ints until they are stored, and 255 is no -1."""
    functions: dict[str, Callable[[], torch.Tensor]] = {}
    for name, op in BY_EACH_OTHER.items():
        a, b = pairs(dtype, name)
        functions[name] = lambda op=op, a=a, b=b: op(a, b)  # type: ignore[misc]
        if name in ("lcm", "gcd"):
            continue
        every = torch.from_numpy(extremes.numbers(dtype))[1:]
        for number in every.tolist():
            if number:
                functions[f"{name} {number}"] = lambda op=op, a=every, n=number: op(a, n)  # type: ignore[misc]
    assert_same(compiled([*functions.values()]), [f() for f in functions.values()], [*functions])


ZEROS = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.3, -0.3, 5.0, -5.0, torch.inf, -torch.inf, torch.nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_zeros_have_eagers_signs(dtype: torch.dtype) -> None:
    """Also where a number is the divisor, which is not rounded to the tensor's dtype."""
    a, b = (side.flatten().to(dtype) for side in torch.meshgrid(ZEROS, ZEROS, indexing="ij"))
    x = torch.cat([ZEROS, torch.tensor([0.001, -0.001])]).to(dtype)
    functions: dict[str, Callable[[], torch.Tensor]] = {
        "floor": lambda: torch.div(a, b, rounding_mode="floor"),
        "floor_divide": lambda: torch.floor_divide(a, b),
        "trunc": lambda: torch.div(a, b, rounding_mode="trunc"),
        "minimum": lambda: torch.minimum(a, b),
        "maximum": lambda: torch.maximum(a, b),
        "zeros of tanh": lambda: torch.tanh(x[:2]),
        "zeros of expm1": lambda: torch.expm1(x[:2]),
        "zeros of elu": lambda: torch.nn.functional.elu(x[:2]),
        "roots": lambda: x[:2] ** 0.5,
        "roots of infinities": lambda: x[8:10] ** 0.5,
        "reciprocal roots": lambda: x[8:10] ** -0.5,
    }
    for number in (0.001, 1e38, 2.0, float("inf"), -0.0):
        functions[f"floor {number}"] = lambda n=number: x // n  # type: ignore[misc]
        functions[f"trunc {number}"] = lambda n=number: torch.div(x, n, rounding_mode="trunc")  # type: ignore[misc]
    assert_same(compiled([*functions.values()]), [f() for f in functions.values()], [*functions])
