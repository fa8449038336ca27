"""Symbolic sizes on a GPU: one graph serves every size in kernels of ours, launched and replayed, as eager does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcompile
from tests.dynamic import late_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
]
SIZES = ((3, 5), (6, 300), (33, 64), (2, 1500))


def rms_norm(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


FUNCTIONS = {
    "rms norm": (rms_norm, lambda b, t: [(b, t, 96), (96,)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (100,), w, b), lambda b, t: [(b, t, 100), (100,), (100,)]),
    "softmax over a symbol": (lambda x: (x * 2).softmax(-1), lambda b, t: [(b, 4, t)]),
    "masked scores": (lambda x: x.tril().log_softmax(-1), lambda b, t: [(b, t, t)]),
    "swiglu": (lambda a, b: F.silu(a) * b, lambda b, t: [(b, t, 256), (b, t, 256)]),
    "bias gelu": (lambda x, b: F.gelu(x + b, approximate="tanh"), lambda b, t: [(b, t, 384), (384,)]),
    "heads": (lambda x: x.view(*x.shape[:2], 4, 16).transpose(1, 2).contiguous().tanh(), lambda b, t: [(b, t, 64)]),
    "transpose": (lambda x: (x.transpose(1, 2) * 2).contiguous(), lambda b, t: [(b, t, 48)]),
    "sum": (lambda x: (x * x).sum(), lambda b, t: [(b, t, 30)]),
    "mean over a symbol": (lambda x: x.exp().mean(1), lambda b, t: [(b, t, 40)]),
    "columns": (lambda x, b: (x + b).relu(), lambda b, t: [(b, t, 1024), (t, 1024)]),
    "cat": (lambda a, b: torch.cat([a, b * 2], 1).sin(), lambda b, t: [(b, t, 30), (b, 7, 30)]),
    "outer": (lambda a, b: (a[:, None] * b[None, :]).tanh(), lambda b, t: [(b,), (t,)]),
    "largest": (lambda x: x.amax((0, 1)) + x.argmax(1).to(x.dtype).mean(), lambda b, t: [(b, t, 20)]),
    "running sum": (lambda x: x.cumsum(1), lambda b, t: [(b, t, 8)]),
    "pieces": (lambda x: torch.cat(x.split(16, -1)[::-1], -1)[:, 1:] + 1, lambda b, t: [(b, t, 64)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_gradients(name, dtype):
    function, shapes = FUNCTIONS[name]
    call = torch.compile(function, backend="dcompile", dynamic=True, fullgraph=True, options={"receipt": False})
    for b, t in SIZES:
        inputs = [torch.randn(shape, dtype=dtype).cuda().requires_grad_() for shape in shapes(b, t)]
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        copies = [x.detach().clone().requires_grad_() for x in inputs]
        seed = torch.randn(function(*inputs).shape, dtype=dtype).cuda()
        answers = []
        for run, given in ((function, inputs), (call, copies), (function, doubles)):
            result = run(*given)
            answers.append([result.detach(), *torch.autograd.grad(result, given, seed.to(result.dtype))])
        for eagers, ours, exact in zip(*answers, strict=True):
            assert ours.dtype == eagers.dtype and ours.stride() == eagers.stride()
            allowed, off = (float((value.double() - exact).abs().max()) for value in (eagers, ours))
            tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
            assert off <= 1.5 * allowed + tolerance * float(exact.abs().max()), (b, t, off, allowed)
    receipt = dcompile.receipt(call)
    assert receipt.kernels and receipt.graphs == 1 and not receipt.notes, str(receipt)


class Tagger(nn.Module):
    """Embedding, attention, normalisation and a head: lengths and batches vary."""

    def __init__(self, width=64, words=50):
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens)
        q, k, v = self.qkv(self.norm(x)).view(*tokens.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))
        return F.cross_entropy(self.head(F.gelu(x)).flatten(0, 1), tokens.flatten())


def train(model, call, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_training_at_many_lengths_with_a_ragged_last_batch(dynamic, graphs):
    eager = Tagger().cuda()
    ours = copy.deepcopy(eager)
    options = {"receipt": False, "triton.cudagraphs": graphs}
    call = torch.compile(ours, backend="dcompile", dynamic=dynamic, options=options)
    shapes = [(8, 20), (8, 33), (8, 16), (3, 20)] * (3 if graphs else 1)
    batches = [torch.randint(0, 50, shape).cuda() for shape in shapes]
    want = train(eager, eager, batches)
    assert train(ours, call, batches) == pytest.approx(want, rel=1e-4)
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    receipt = dcompile.receipt(call)
    assert receipt.kernels and not [note for note in receipt.notes if "ATen" in note], str(receipt)
    if graphs:
        assert receipt.replays >= 8, str(receipt)


def test_an_empty_batch_launches_nothing_that_has_nothing_to_do():
    call = torch.compile(lambda x: (x * 2).relu(), backend="dcompile", dynamic=True, options={"receipt": False})
    for rows in (5, 0, 7):
        x = torch.randn(rows, 6).cuda()
        torch.testing.assert_close(call(x), (x * 2).relu())


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", late_cases.FUNCTIONS)
def test_sizes_that_depend_on_values(name, dynamic):
    wrong, receipt = late_cases.problem(late_cases.FUNCTIONS[name], "cuda", dynamic)
    assert not wrong, wrong
    assert receipt.kernels and not any("runs on ATen kernels" in note for note in receipt.notes), str(receipt)


def test_a_graph_with_such_sizes_is_not_recorded_and_the_receipt_says_so():
    wrong, receipt = late_cases.problem(late_cases.counted, "cuda", None, **{"triton.cudagraphs": True})
    assert not wrong, wrong
    assert any(
        "runs without a CUDA graph" in note and "nonzero waits for the size" in note for note in receipt.notes
    ), str(receipt)
