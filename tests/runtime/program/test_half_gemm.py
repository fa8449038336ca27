"""Products of 16-bit matrices by blocks in float32, as on processors without instructions for them."""

import pytest
import torch
from torch import nn

import dcompile
from dcompile.compat import tensors
from dcompile.runtime.program import half_gemm


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request, monkeypatch):
    monkeypatch.setattr(tensors, "slow_products", lambda: frozenset([torch.bfloat16, torch.float16]))
    return request.param


@pytest.fixture
def small(monkeypatch):
    """Many blocks in small matrices."""
    monkeypatch.setattr(half_gemm, "MIN_BLOCK_SIDE", 8)


def assert_rounded_once(found, exact, dtype):
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps * 1.01, atol=1e-6)


@pytest.mark.parametrize("sizes", [(5, 7, 9), (8, 16, 8), (20, 50, 33), (1, 40, 17), (3, 1, 2), (0, 4, 5), (6, 0, 5)])
@pytest.mark.parametrize("turned", [False, True])
def test_two_matrices(small, dtype, sizes, turned):
    m, k, n = sizes
    torch.manual_seed(0)
    a, b, added = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype), torch.randn(n, dtype=dtype)
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    wide = a.double() @ b.double()
    call = half_gemm.product("aten.mm.out", torch.mm)
    assert_rounded_once(call(a, b, out=torch.empty(m, n, dtype=dtype)), wide, dtype)
    call = half_gemm.product("aten.addmm.out", torch.addmm)
    out = torch.empty(n, m, dtype=dtype).t()
    assert_rounded_once(call(added, a, b, beta=0.5, alpha=2, out=out), added.double() / 2 + 2 * wide, dtype)
    held = torch.randn(m, n, dtype=dtype)
    exact = held.double() + wide
    assert_rounded_once(call(held, a, b, out=held), exact, dtype)


def test_what_is_added_may_be_nan_where_it_is_not(small, dtype):
    a, b, out = torch.ones(9, 3, dtype=dtype), torch.ones(3, 9, dtype=dtype), torch.full((9, 9), torch.nan, dtype=dtype)
    assert (half_gemm.addmm(out, a, b, beta=0, out=out) == 3).all()


@pytest.mark.parametrize("sizes", [(5, 3, 4, 6), (2, 20, 20, 20), (7, 1, 5, 1), (0, 2, 3, 4)])
def test_many_matrices(small, dtype, sizes):
    count, m, k, n = sizes
    torch.manual_seed(0)
    a, b = torch.randn(count, m, k, dtype=dtype), torch.randn(count, n, k, dtype=dtype).transpose(1, 2)
    wide, out = a.double() @ b.double(), torch.empty(count, m, n, dtype=dtype)
    assert_rounded_once(half_gemm.product("aten.bmm.out", torch.bmm)(a, b, out=out), wide, dtype)
    added = torch.randn(count, 1, n, dtype=dtype)
    call = half_gemm.product("aten.baddbmm.out", torch.baddbmm)
    assert_rounded_once(call(added, a, b, alpha=0.5, out=out), added.double() + wide / 2, dtype)


def test_no_more_is_taken_than_a_few_blocks(dtype):
    """Of matrices that are many blocks in each of their three dimensions."""
    side = 2 * half_gemm.MAX_BLOCK_SIDE
    a, b = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)
    out = torch.empty(side, side, dtype=dtype)
    with torch.profiler.profile(profile_memory=True) as profile:
        half_gemm.mm(a, b, out=out)
    taken = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for nbytes in taken:
        now += nbytes
        most = max(most, now)
    assert 0 < most <= max(3 * a.nbytes / half_gemm.MAX_BLOCK_FRACTION, 12 * half_gemm.MIN_BLOCK_SIDE**2)


def test_float32_and_processors_that_have_instructions_are_left_alone(dtype, monkeypatch):
    def entry(*args, out):
        called.append(out.dtype)
        return torch.mm(*args, out=out)

    called = []
    wide = torch.eye(3)
    half_gemm.product("aten.mm.out", entry)(wide, wide, out=torch.empty(3, 3))
    assert called == [torch.float32]
    monkeypatch.setattr(tensors, "slow_products", frozenset)
    assert half_gemm.product("aten.mm.out", entry) is entry


def test_a_model_trains_as_in_eager(small, dtype, monkeypatch):
    torch._dynamo.reset()
    calls, original = [], half_gemm.addmm
    monkeypatch.setattr(half_gemm, "addmm", lambda *args, **how: calls.append(1) or original(*args, **how))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).to(dtype)
    x = torch.randn(12, 24, dtype=dtype)
    expected = [model(x), *torch.autograd.grad(model(x).float().square().sum(), model.parameters())]
    compiled = dcompile.compile(model, options={"receipt": False})
    found = [compiled(x), *torch.autograd.grad(compiled(x).float().square().sum(), model.parameters())]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert len(calls) >= 3  # those that add nothing
    calls.clear()
    torch._dynamo.reset()
    exact = dcompile.compile(model, options={"receipt": False, "kernels": "aten"})
    torch.testing.assert_close(exact(x), expected[0], rtol=0, atol=0)
    assert not calls, "ATen's kernels are ATen's"
