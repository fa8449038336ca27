"""FlexAttention in models on CPUs, where a loop over blocks computes it: values, gradients, lengths and caches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

import dcompile

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings(
        "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute", "ignore:return_lse is"
    ),
]
LOOP = {
    f"{name} runs as a loop over the blocks that its mask leaves"
    for name in ("flex_attention", "flex_attention_backward")
}


@pytest.fixture
def may_train(monkeypatch):
    """PyTorch trains FlexAttention on GPUs alone, and refuses queries that need a gradient on CPUs."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


class Block(nn.Module):
    """A transformer block with slopes that are learned, fewer heads of keys, and a soft cap."""

    def __init__(self, kind, width=32, heads=4, shared=2):
        super().__init__()
        self.kind, self.heads, self.shared = kind, heads, shared
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.project = nn.Linear(width, width + 2 * width * shared // heads)
        self.slopes = nn.Parameter(torch.rand(heads))

    def score(self, score, b, h, q, k):
        if self.kind == "alibi":
            scaled = self.slopes * 0.5
            return score + scaled[h] * (k - q)
        return 5 * torch.tanh(score / 5)

    def forward(self, x, mask):
        batch, length, width = x.shape
        parts = self.project(self.norm(x)).view(batch, length, -1, width // self.heads).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.shared, self.shared], 1)
        found = flex.flex_attention(q, k, v, score_mod=self.score, block_mask=mask, enable_gqa=True)
        return x + self.out(found.transpose(1, 2).reshape(x.shape))


def masks(kind, length):
    documents = torch.arange(length) // 170
    keeps = {
        "alibi": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 60),
        "document": lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
    }
    return flex.create_block_mask(keeps[kind], None, None, length, length, device="cpu")


def trained(call, layers, x, mask):
    used = [x, *(p for name, p in layers.named_parameters() if "slopes" not in name or layers[0].kind == "alibi")]
    loss = call(x, mask).float().square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, used)]


@pytest.mark.usefixtures("may_train")
@pytest.mark.parametrize("kind", ["alibi", "window", "document"])
def test_training(kind):
    torch.manual_seed(0)
    layers = nn.Sequential(Block(kind), Block(kind))
    x, mask = torch.randn(2, 300, 32, requires_grad=True), masks(kind, 300)

    def function(x, mask):
        for layer in layers:
            x = layer(x, mask)
        return x

    call = dcompile.compile(function, options={"receipt": False})
    found = trained(call, layers, x, mask)
    for mine, theirs in zip(found, trained(function, layers, x, mask), strict=True):
        torch.testing.assert_close(mine, theirs)
    receipt = dcompile.receipt(call)
    assert {note for note in receipt.notes if "flex" in note} == LOOP
    assert dict(receipt.fallbacks) == {"dcompile.call flex_attention": 2, "dcompile.call flex_attention_backward": 2}


@pytest.mark.usefixtures("may_train")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_through_the_logsumexp(dtype):
    """It is traced as float32, whatever the queries are; eager math returned float64 to kernels that read float32."""
    mask = masks("window", 300)

    def function(q, k, v):
        out, total = flex.flex_attention(q, k, v, block_mask=mask, return_lse=True)
        return out.square().sum() + (total * 3 + 1).sin().sum().to(dtype), total * 2

    inputs = [torch.randn(1, 2, 300, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    call = dcompile.compile(function, options={"receipt": False})
    (found, total), (expected, true) = call(*inputs), function(*inputs)
    torch.testing.assert_close(total, true.float())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("may_train")
@pytest.mark.parametrize("is_masked", [True, False])
def test_lengths_are_sizes(is_masked):
    """One program for all of them: a mask for each, or none."""

    def function(x, slopes, mask):
        found = flex.flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + slopes[h] * (q - k), block_mask=mask)
        return (found * 2).tanh()

    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    call = dcompile.compile(function, options={"receipt": False}, dynamic=True)
    for length in (300, 520, 1000):
        x = torch.randn(1, 2, length, 16, dtype=torch.float64, requires_grad=True)
        mask = masks("window", length) if is_masked else None
        pairs = [
            torch.autograd.grad(call(x, slopes, mask).sum(), [x, slopes]),
            torch.autograd.grad(function(x, slopes, mask).sum(), [x, slopes]),
        ]
        for mine, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(mine, theirs)
    receipt = dcompile.receipt(call)
    assert {note for note in receipt.notes if "flex" in note} == LOOP and receipt.graphs == 1


def test_a_score_function_alone_may_learn():
    """PyTorch allows this on CPUs: queries, keys and values that need no gradient."""
    bias = torch.randn(2, 300, requires_grad=True)
    x, mask = torch.randn(1, 2, 300, 16), masks("window", 300)

    def function(x, bias):
        scaled = bias * 2
        return flex.flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + scaled[h, q - k], block_mask=mask).sin()

    call = dcompile.compile(function, options={"receipt": False})
    (found,), (expected,) = (torch.autograd.grad(f(x, bias).sum(), [bias]) for f in (call, function))
    torch.testing.assert_close(found, expected)


def test_a_captured_tensor_that_was_computed_has_its_gradient_in_eager_math_too(monkeypatch):
    monkeypatch.setattr(dcompile.operators.flex_ops, "loop_of", lambda *_: "tests")
    test_a_score_function_alone_may_learn()


@pytest.mark.usefixtures("may_train")
def test_a_warm_start_is_from_the_caches(tmp_path):
    mask, options = masks("window", 300), {"receipt": False, "cache_dir": str(tmp_path), "verify": False}
    x = torch.randn(1, 2, 300, 16, requires_grad=True)
    bias = torch.randn(300, requires_grad=True)

    def function(x):
        return flex.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + bias[j], block_mask=mask) + 1

    expected = torch.autograd.grad(function(x).sum(), [x, bias])
    for start in range(2):
        torch._dynamo.reset()
        call = dcompile.compile(function, options=options)
        for mine, theirs in zip(torch.autograd.grad(call(x).sum(), [x, bias]), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        receipt = dcompile.receipt(call)
        assert (receipt.graphs_cached, receipt.graphs_uncacheable, receipt.traces_cached) == (2 * start, 0, start)
        assert not receipt.traces_uncacheable
        assert {note for note in receipt.notes if "flex" in note} == LOOP


@pytest.mark.usefixtures("may_train")
@pytest.mark.parametrize("by_loop", [True, False])
@pytest.mark.parametrize("backend", ["TRITON", "FLASH"])
def test_a_kernel_that_is_not_there_is_named_and_its_logarithms_are_natural(monkeypatch, backend, by_loop):
    """Of FlashAttention's kernel TorchDynamo expects natural logarithms, of all others those of base 2."""
    if not by_loop:
        monkeypatch.setattr(dcompile.operators.flex_ops, "loop_of", lambda *_: "tests")
    mask = masks("window", 140)

    def function(q, k, v, options):
        out, total = flex.flex_attention(q, k, v, block_mask=mask, return_lse=True, kernel_options=options)
        return out.square().sum() + (total * 3 + 1).sin().sum(), total

    inputs = [torch.randn(1, 2, 140, 16, requires_grad=True) for _ in range(3)]
    call = dcompile.compile(function, options={"receipt": False})
    (found, total), (expected, true) = call(*inputs, {"BACKEND": backend}), function(*inputs, None)
    torch.testing.assert_close(total, true)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    notes = [note for note in dcompile.receipt(call).notes if "flex_attention" in note]
    words = "without its kernel's BACKEND" if by_loop else "computes all scores, as in eager mode"
    assert len(notes) == 2 and all(words in note for note in notes)
