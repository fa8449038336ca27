"""Random numbers as loops: what the operators compute, and what the numbers of each distribution look like."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.passes.joint.rng_keys import assign_rng_keys
from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Extern
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run
from tests.codegen.lower.test_ops import BF16, BOOL, F16, F32, F64, I32, I64, check

ours = torch.ops.dcompile_random
CPU = torch.device("cpu")
KEY = torch.tensor([-1234567890123456789])
N = 40_000


def drawn(function: Callable[..., Any], *args: torch.Tensor, fallback_random: bool = False) -> Any:
    """What a function that draws random numbers gives when lowered, under a fixed seed, interpreted."""
    decompositions = table(fallback_random=fallback_random)
    functional = torch.func.functionalize(lambda *a: function(*a), remove="mutations")
    gm = make_fx(functional, decomposition_table=decompositions, tracing_mode="fake")(*args)
    assign_rng_keys(gm)
    lowered = lower(gm, "op")
    verify(lowered.program)
    calls = [step.op for step in lowered.program.steps if isinstance(step, Extern)]
    if not fallback_random:
        assert calls in ([], ["aten.randint.low"]), calls
    torch.manual_seed(3)
    expected = function(*args)
    torch.manual_seed(3)
    (result,) = run(lowered.program, lowered.constants, list(args))
    assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
    if fallback_random:
        assert torch.equal(result, expected)
    return result


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_loops_compute_what_the_operators_compute(dtype: torch.dtype) -> None:
    for draw in (0, 5):
        check(lambda k, d=draw: ours.uniform([6, 50], dtype, CPU, key=k, draw=d), KEY, bitwise=True)
        check(lambda k, d=draw: ours.normal([6, 50], dtype, CPU, key=k, draw=d), KEY)


def test_loops_compute_what_the_operators_compute_of_bits() -> None:
    for p in (0.0, 1e-12, 0.3, 0.999, 1.0):
        check(lambda k, p=p: ours.less([7, 90], p, CPU, key=k, draw=2), KEY, bitwise=True)
    for count in (32, 63):
        check(lambda k, c=count: ours.bits([7, 90], c, CPU, key=k, draw=2), KEY, bitwise=True)


def distance(values: torch.Tensor, share: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Kolmogorov and Smirnov's: between the empirical distribution function and `share`, times the root of n."""
    ordered = values.double().flatten().sort().values
    n = len(ordered)
    expected, ranks = share(ordered), torch.arange(n, dtype=F64)
    return max(float((expected - ranks / n).max()), float(((ranks + 1) / n - expected).max())) * math.sqrt(n)


def normal_share(x: torch.Tensor) -> torch.Tensor:
    return torch.erfc(-x / math.sqrt(2)) / 2


CONTINUOUS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "rand": (lambda: torch.rand(N), lambda x: x),
    "rand float64": (lambda: torch.rand(N, dtype=F64), lambda x: x),
    "randn": (lambda: torch.randn(N), normal_share),
    "randn float64": (lambda: torch.randn(N, dtype=F64), normal_share),
    "uniform_": (lambda: torch.empty(N).uniform_(-2, 6), lambda x: (x + 2) / 8),
    "normal_": (lambda: torch.empty(N).normal_(5, 3), lambda x: normal_share((x - 5) / 3)),
    "exponential_": (lambda: torch.empty(N).exponential_(2), lambda x: 1 - torch.exp(-2 * x)),
    "cauchy_": (lambda: torch.empty(N).cauchy_(1, 2), lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
    "log_normal_": (lambda: torch.empty(N).log_normal_(1, 0.5), lambda x: normal_share((x.log() - 1) / 0.5)),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(name: str) -> None:
    make, share = CONTINUOUS[name]
    values = drawn(make)
    assert distance(values, share) < 1.95, "the statistic of one draw in a thousand is larger"
    assert len(values.unique()) > 0.99 * N


DISCRETE: dict[str, tuple[Callable[[], torch.Tensor], dict[float, float]]] = {
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), {0: 0.7, 1: 0.3}),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.2)), {0: 0.8, 1: 0.2}),
    "bernoulli of integers": (lambda: torch.empty(N, dtype=I64).bernoulli_(0.9), {0: 0.1, 1: 0.9}),
    "randint": (lambda: torch.randint(-2, 3, (N,)), dict.fromkeys(range(-2, 3), 0.2)),
    "randint int32": (lambda: torch.randint(4, (N,), dtype=I32), dict.fromkeys(range(4), 0.25)),
    "random_": (lambda: torch.empty(N, dtype=I64).random_(1, 6), dict.fromkeys(range(1, 6), 0.2)),
    "geometric_": (lambda: torch.empty(N).geometric_(0.5).clamp(max=4), {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.125}),
    "rand of 8 bits": (lambda: torch.rand(N, dtype=BF16) * 4 // 1, dict.fromkeys(range(4), 0.25)),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_distributions(name: str) -> None:
    make, shares = DISCRETE[name]
    values = drawn(make).double()
    for value, share in shares.items():
        expected = math.sqrt(share * (1 - share) / N)
        assert abs(float((values == value).double().mean()) - share) < 4 * expected
    assert set(values.unique().tolist()) == set(shares)


def test_wide_integers_fill_their_range() -> None:
    values = drawn(lambda: torch.randint(-(2**40), 2**41, (N,))).double()
    assert distance(values, lambda x: (x + 2**40) / (3 * 2**40)) < 1.95


def test_neighbours_and_draws_are_independent() -> None:
    def pair() -> torch.Tensor:
        return torch.stack([torch.randn(200, 200), torch.randn(200, 200)])

    first, second = drawn(pair).double()
    for other in (second, first.t(), first.roll(1, 0), first.roll(1, 1), second.roll(1, 1)):
        correlation = float((first * other).mean())
        assert abs(correlation) < 4 / 200


def test_layouts_follow_eager_and_numbers_follow_positions() -> None:
    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert torch.equal(drawn(torch.rand_like, x), drawn(torch.rand_like, x.contiguous()))
    drawn(lambda x: x.clone().normal_(), x.permute(1, 0, 2, 3))
    drawn(torch.rand_like, torch.empty(3, 1).expand(3, 4))
    drawn(lambda x: torch.randn_like(x, dtype=F64), x)


def test_the_ends_of_the_range() -> None:
    ones = torch.ones(100, 100)
    assert drawn(lambda x: torch.bernoulli(x), ones).all()
    assert not drawn(lambda x: torch.bernoulli(1 - x), ones).any()
    assert drawn(lambda: torch.empty(1000).bernoulli_(1.0)).all()
    assert not drawn(lambda: torch.empty(1000).bernoulli_(0.0)).any()
    assert float(drawn(lambda: torch.empty(N).exponential_()).min()) > 0
    halves = drawn(lambda: torch.rand(N, dtype=F16))
    assert halves.min() >= 0 and halves.max() < 1


def test_fallback_random_draws_eagers_bits() -> None:
    x = torch.rand(100)
    for function in (torch.rand_like, torch.bernoulli, torch.randn_like, lambda x: x.clone().exponential_()):
        drawn(function, x, fallback_random=True)
    drawn(lambda x: torch.nn.functional.dropout(x, 0.5), x, fallback_random=True)


def test_without_a_key_the_operator_draws_one() -> None:
    torch.manual_seed(0)
    first, second = (ours.uniform([100], F32, CPU) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(first, ours.uniform([100], F32, CPU)) and not torch.equal(first, second)
    assert ours.less([10], 0.5, CPU).dtype == BOOL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_python_draws_in_a_forward(dtype) -> None:
    compiled = dcompile.compile(lambda x: x * random.uniform(0.5, 2) + random.randint(0, 3), options={"receipt": False})
    x = torch.ones(3, dtype=dtype)
    random.seed(0)
    found = [compiled(x) for _ in range(3)]
    random.seed(0)
    for value in found:
        torch.testing.assert_close(value, x * random.uniform(0.5, 2) + random.randint(0, 3), rtol=1e-7, atol=0)


@pytest.mark.parametrize("number", [np.float32(1.5), np.float64(1.5), np.int32(3), 1.5, 3])
def test_numbers_that_are_given(number) -> None:
    compiled = dcompile.compile(lambda x, k: x * k + k, options={"receipt": False})
    assert compiled(torch.ones(3), number).tolist() == [2 * number] * 3
