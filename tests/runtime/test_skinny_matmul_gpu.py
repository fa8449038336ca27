"""Products of few rows on a GPU: values against eager's, choices of max_autotune, and CUDA graphs. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dcompile
from dcompile.compiler import autotune
from tests.codegen.emit.skinny import biased_gelu, gated, of_integers, plain, residual

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
WIDTH, INNER = 1024, 1536
CASES = {
    "plain": (plain, [(INNER, WIDTH)]),
    "bias and gelu": (biased_gelu, [(INNER, WIDTH), (INNER,)]),
    "residual": (lambda x, w: residual(x, w, x), [(WIDTH, WIDTH)]),
    "gated": (gated, [(INNER, WIDTH), (INNER, WIDTH)]),
}


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    torch.manual_seed(0)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").div(8).to(dtype)


def compiled(function, **options):
    return dcompile.compile(function, options={"receipt": False, **options})


def check(call, function, args):
    """As far from float64 as eager, up to what rounding in another place may add."""
    exact = function(*(arg.double() if arg.is_floating_point() else arg for arg in args))
    off, allowed = ((f(*args).double() - exact).norm() / exact.norm() for f in (call, function))
    assert off <= 1.1 * allowed + 1e-4


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [2, 3, 8, 11, 16])
def test_values(rows, name, dtype):
    function, shapes = CASES[name]
    args = [randn(rows, WIDTH, dtype=dtype), *(randn(*shape, dtype=dtype) for shape in shapes)]
    call = compiled(function)
    check(call, function, args)
    again = [call(*args) for _ in range(3)]
    assert all(torch.equal(again[0], other) for other in again[1:]), "one order of summation"
    receipt = dcompile.receipt(call)
    assert receipt.library_calls == 0, "cuBLAS multiplies"


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 8])
def test_integers_are_cast_while_they_are_multiplied(rows):
    args = randn(rows, WIDTH), torch.randint(-128, 128, (INNER, WIDTH), dtype=torch.int8, device="cuda"), randn(INNER)
    call = compiled(of_integers)
    check(call, lambda x, w, s: torch.mm(x, w.to(x.dtype).t()) * s.to(x.dtype), args)
    assert dcompile.receipt(call).library_calls == 0


@torch.no_grad()
def test_a_chain_starts_early_and_reads_what_was_written():
    """Each kernel asks for its weights while the one before it ends, and waits before it reads that one's results."""
    weights = [randn(WIDTH, WIDTH) for _ in range(12)]

    def chain(x):
        for weight in weights:
            x = F.rms_norm(x + F.linear(x, weight), (WIDTH,))
        return x

    call = compiled(chain, **{"triton.cudagraphs": True})
    for _ in range(6):
        x = randn(8, WIDTH)
        check(call, lambda x: chain_of(x, weights), [x])
    assert dcompile.receipt(call).replays > 0


def chain_of(x, weights):
    for weight in weights:
        x = F.rms_norm(x + F.linear(x, weight.to(x.dtype)), (WIDTH,))
    return x


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 3, -1, None], ids=["usual", "another tile", "wide", "library"])
@pytest.mark.parametrize("name", ["residual", "gated"])
def test_what_max_autotune_may_choose(name, place, monkeypatch):
    def fastest(contest, usual, launcher, device):
        with autotune.without_user_modes(device):  # a graph is being traced with fake tensors
            calls = autotune.contest_calls(contest, autotune.make_copies(contest, device), launcher, 0)
            for call in calls.values():
                call()
        assert None in calls and usual in calls and len(calls) >= 8, "all candidates run"
        return None if place is None else [*contest.rivals][place]

    monkeypatch.setattr(autotune, "fastest_tile", fastest)
    function, shapes = CASES[name]
    args = [randn(4, WIDTH), *(randn(*shape) for shape in shapes)]
    call = compiled(function, max_autotune=True)
    check(call, function, args)
    (note,) = [note for note in dcompile.receipt(call).notes if "products of few rows" in note]
    assert ("by the library" in note) == (place is None)


@torch.no_grad()
def test_tiles_are_chosen_by_measuring():
    args = randn(8, 4096), randn(4096, 4096)
    before = torch.cuda.get_rng_state()
    call = compiled(plain, max_autotune=True)
    check(call, plain, args)
    assert torch.equal(before, torch.cuda.get_rng_state()), "measuring draws from no generator of the user's"
    assert any("8x4096x4096 by" in note for note in dcompile.receipt(call).notes)


def test_training_with_few_rows():
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER), torch.nn.GELU(), torch.nn.Linear(INNER, WIDTH))
    model.to("cuda", torch.bfloat16)
    x = randn(6, WIDTH).requires_grad_()
    want = torch.autograd.grad(model(x).float().square().sum(), [x, *model.parameters()])
    call = dcompile.compile(model, options={"receipt": False})
    got = torch.autograd.grad(call(x).float().square().sum(), [x, *model.parameters()])
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()
