"""FlexAttention in training on a GPU: gradients against float64's. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dcompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The .grad attribute"),
]
LENGTH = 1024


def masks():
    documents = (torch.arange(LENGTH) // 300).cuda()
    return {
        "window": lambda b, h, q, k: (q >= k) & (q - k < 256),
        "document": lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
    }


@pytest.mark.parametrize("kind", ["window", "document", "alibi"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("width", [64, 128])
def test_training_is_as_near_to_float64_as_eagers(kind, groups, width):
    torch.manual_seed(0)
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    keeps = masks().get(kind, lambda b, h, q, k: q >= k)
    mask = create_block_mask(keeps, None, None, LENGTH, LENGTH, device="cuda")

    def function(q, k, v, slopes):
        score = (lambda s, b, h, i, j: s + slopes[h] * (j - i)) if kind == "alibi" else None
        found = flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=groups > 1)
        return (found.float() * 2 + 1).square().mean()

    inputs = [torch.randn(2, heads, LENGTH, width, device="cuda") for heads in (4, 4 // groups, 4 // groups)]
    wide = [*(tensor.double().requires_grad_() for tensor in inputs), slopes.detach().double().requires_grad_()]
    short = [*(tensor.bfloat16().requires_grad_() for tensor in inputs), slopes]
    call = dcompile.compile(function, options={"receipt": False})

    def gradients(function, inputs):
        used = inputs if kind == "alibi" else inputs[:3]
        return torch.autograd.grad(function(*inputs), used)

    exact, eager, ours = gradients(function, wide), gradients(function, short), gradients(call, short)
    for found, theirs, true in zip(ours, eager, exact, strict=True):
        assert (found - true).abs().max() <= 3 * (theirs - true).abs().max() + 1e-3 * true.abs().max()
    receipt = dcompile.receipt(call)
    notes = [note for note in receipt.notes if "flex" in note]
    if kind == "alibi":  # the slopes' gradient
        assert [note.partition(":")[0] for note in notes] == ["flex_attention_backward is left to TorchInductor"] or (
            len(notes) == 2 and notes[1] == "flex_attention_backward runs as TorchInductor's kernel"
        )
    else:
        assert not notes and not receipt.fallbacks
