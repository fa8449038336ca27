"""Masks that FlexAttention's kernel gets as functions, in training on a GPU: gradients against float64's.

`pytest -m gpu`; about 20 s for each mask and size, most of it in TorchInductor.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import dcompile
from dcompile.capture.passes.dynamo import attention_masks as skipping

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
LENGTH, WINDOW = 1000, 200


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Small calls gain, too, and so do masks that may allow all pairs."""
    monkeypatch.setattr(skipping, "MIN_FLEX_GAIN_US", 0.0)
    monkeypatch.setattr(skipping, "MAX_PART", 2.0)


def positions(q):
    return torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(q.shape[-2], device=q.device)


def window(q, given):
    rows, columns = positions(q)
    return (columns <= rows) & (columns > rows - WINDOW)


def padding(q, given):
    rows, columns = positions(q)
    return (columns <= rows) & (columns < given[:, None, None, None])  # a row of the batch has no key at all


def documents(q, given):
    rows, columns = positions(q)
    numbers = (columns + given[:, None]) // 300
    return (columns <= rows) & (numbers[:, None, :, None] == numbers[:, None, None, :])


def prefix(q, given):
    rows, columns = positions(q)
    return (columns <= rows) | (columns < given[:, None, None, None])


MASKS = {"window": window, "padding": padding, "documents": documents, "prefix": prefix}


def trained(mask):
    def function(q, k, v, given):
        found = attention(q, k, v, attn_mask=mask(q, given))
        return (found.float() * 2 + 1).square().mean()

    return function


def gradients(function, inputs, given):
    return torch.autograd.grad(function(*inputs, given), inputs)


def operands(length, width=64):
    torch.manual_seed(0)
    short = [torch.randn(3, 4, length, width, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    return short, [tensor.detach().double().requires_grad_() for tensor in short]


def near(ours, eager, exact):
    for found, theirs, true in zip(ours, eager, exact, strict=True):
        assert (found - true).abs().max() <= 3 * (theirs - true).abs().max() + 1e-3 * true.abs().max()


def has_kernel(call):
    notes = dcompile.receipt(call).notes
    assert any("FlexAttention's kernel computes them" in note for note in notes)
    assert all("TorchInductor's kernel" in note for note in notes if note.startswith("flex_attention"))


@pytest.mark.parametrize("name", MASKS)
def test_training_is_as_near_to_float64_as_eagers(name):
    function, given = trained(MASKS[name]), torch.tensor([0, 700, 333], device="cuda")
    short, wide = operands(LENGTH)
    call = dcompile.compile(function, options={"receipt": False})
    near(gradients(call, short, given), gradients(function, short, given), gradients(function, wide, given))
    has_kernel(call)
    assert dcompile.receipt(call).graphs_uncacheable == 0


def test_symbolic_lengths_keep_their_mask():
    function, given = trained(window), torch.tensor([0, 700, 333], device="cuda")
    call = dcompile.compile(function, dynamic=None, options={"receipt": False})
    for length in (LENGTH, 640, 1400):
        short, wide = operands(length)
        for tensor in short:
            torch._dynamo.mark_dynamic(tensor, 2)
        near(gradients(call, short, given), gradients(function, short, given), gradients(function, wide, given))
    assert any("since sizes are symbols" in note for note in dcompile.receipt(call).notes)


def test_a_window_in_transformers():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, sliding_window=WINDOW, use_cache=False,
    )  # fmt: skip
    model = MistralForCausalLM(config).cuda().bfloat16()
    ids, ones = torch.randint(512, (2, LENGTH), device="cuda"), torch.ones(2, LENGTH, dtype=torch.int64, device="cuda")
    ones[0, 900:] = 0
    batch = {"input_ids": ids, "attention_mask": ones, "labels": torch.where(ones.bool(), ids, -100)}

    def step(call):
        loss = call(**batch).loss
        return torch.autograd.grad(loss, [*model.parameters()])

    eager = step(model)
    exact = [grad.clone() for grad in step(model.double())]
    model.bfloat16()
    ours = step(dcompile.compile(model, options={"receipt": False}))
    near(ours, eager, exact)
    has_kernel(model)
