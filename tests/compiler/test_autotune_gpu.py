"""Products that end in the loop behind them, on a GPU: values beside eager's, whichever tile is chosen. `-m gpu`."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import dcompile
from dcompile.codegen.emit.triton import matmul_epilogue
from dcompile.codegen.schedule.fusion import matmul_epilogue as fusion_matmul_epilogue
from dcompile.compiler import autotune

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TILES = autotune.tiles(90, 132)


@pytest.fixture(autouse=True)
def reset(monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(autotune, "choose", lambda *_: {})


@pytest.fixture
def of_any_size(monkeypatch):
    monkeypatch.setattr(fusion_matmul_epilogue, "MIN_EPILOGUE_FLOPS", 0)


def choose(monkeypatch, number):
    """Have one of the tiles chosen everywhere, faster or not."""
    monkeypatch.setattr(autotune, "fastest_tile", lambda contest, *_: [*contest.rivals][number % len(contest.rivals)])


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def ended(call):
    return [note for note in dcompile.receipt(call).notes if "end in the loop behind them" in note]


class Gated(torch.nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def layers(act):
    return torch.nn.Sequential(torch.nn.Linear(256, 520), act, torch.nn.Linear(520, 136), act)


MODELS = {
    "relu": lambda: layers(torch.nn.ReLU()),
    "gelu": lambda: layers(torch.nn.GELU()),
    "gated": lambda: Gated(256, 512),
}


@pytest.mark.parametrize("tile", range(len(TILES)))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_trains(name, dtype, tile, monkeypatch, of_any_size):
    choose(monkeypatch, tile)
    model = MODELS[name]().to("cuda", dtype)
    call = dcompile.compile(copy.deepcopy(model), mode="max-autotune-no-cudagraphs")
    own = call if isinstance(call, torch.nn.Module) else model
    for _ in range(3):
        x = randn(200, 256, dtype=dtype)
        results = []
        for function in (model, own):
            function.zero_grad()
            y = function(x)
            y.float().square().mean().backward()
            results.append([y.detach().clone(), *(p.grad.clone() for p in function.parameters())])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    assert any(note.partition("max_autotune: ")[2][0] != "0" for note in ended(call))


@pytest.mark.parametrize("columns", [264, 384, 512])  # of no whole run of columns, of a tile and a half, of whole tiles
@pytest.mark.parametrize("tile", range(len(TILES)))
def test_products_are_rounded_before_the_loop(tile, columns, monkeypatch, of_any_size):
    """Up to the order of summation: factors are integers, whose sums are exact, and products need rounding."""
    choose(monkeypatch, tile)

    def function(x, w, r):
        y = x @ w
        return (y - r) * 3, y

    x, w = (torch.randint(-8, 9, shape, device="cuda").to(torch.bfloat16) for shape in ((300, 520), (520, columns)))
    r = randn(300, columns)
    call = dcompile.compile(function, mode="max-autotune-no-cudagraphs")
    for want, got in zip(function(x, w, r), call(x, w, r), strict=True):
        assert torch.equal(want, got)
    assert any("1 of 1 products end" in note for note in ended(call))


def test_replays_of_a_recording(monkeypatch, of_any_size):
    choose(monkeypatch, 0)
    call = dcompile.compile(lambda x, w, r: (r + x @ w, x * 2), mode="max-autotune")
    w = randn(256, 512)
    for _ in range(5):
        x, r = randn(384, 256), randn(384, 512)
        torch.testing.assert_close(call(x, w, r)[0], r + x @ w, rtol=2e-2, atol=0.3)
    assert dcompile.receipt(call).replays > 0 and ended(call)


def test_what_is_faster_is_chosen_by_measuring():
    """On an H200 a residual of 8192x2048x2048 takes 0.79 of the time so."""
    shapes = (8192, 2048), (2048, 2048), (8192, 2048)
    x, w, r = (randn(*shape) for shape in shapes)
    before = torch.cuda.get_rng_state()
    call = dcompile.compile(lambda x, w, r: r + x @ w, mode="max-autotune-no-cudagraphs")
    torch.testing.assert_close(call(x, w, r), r + x @ w, rtol=2e-2, atol=0.5)
    assert torch.equal(before, torch.cuda.get_rng_state()), "measuring draws from no generator of the user's"
    (note,) = ended(call)
    assert "of 1 products end" in note
    if "H200" in torch.cuda.get_device_name():
        assert "1 of 8192x2048x2048 in add" in note


def test_epilogue_fusion_turns_it_off(monkeypatch, of_any_size):
    monkeypatch.setattr(autotune, "fastest_tile", lambda *_: pytest.fail("it was measured"))
    call = dcompile.compile(lambda x, w, r: r + x @ w, options={"max_autotune": True, "epilogue_fusion": False})
    call(randn(256, 256), randn(256, 256), randn(256, 256))
    assert not ended(call)


def test_a_kernel_that_cannot_be_compiled_is_named(monkeypatch, of_any_size):
    emit = matmul_epilogue.emit

    def broken(*given):
        source = emit(*given)
        return replace(source, name="kbroken", text=source.text.replace("tl.dot", "tl.no"))

    monkeypatch.setattr(matmul_epilogue, "emit", broken)
    call = dcompile.compile(lambda x, w, r: r + x @ w, mode="max-autotune-no-cudagraphs")
    x, w, r = randn(256, 256), randn(256, 256), randn(256, 256)
    torch.testing.assert_close(call(x, w, r), r + x @ w, rtol=2e-2, atol=0.3)
    notes = dcompile.receipt(call).notes
    assert any("kernels to measure failed" in note for note in notes) and any("0 of 1 products" in n for n in notes)
