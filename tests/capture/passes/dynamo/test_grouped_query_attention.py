"""Repeated keys and values are shared by attention on GPUs; whatever is not such a repetition stays."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attention

from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION
from dcompile.capture.passes.dynamo.grouped_query_attention import use_grouped_query_attention
from dcompile.passes import PassReport

B, H, R, N, D = 2, 3, 4, 8, 16


def by_expanding(x):
    """As Hugging Face's models repeat heads."""
    return x[:, :, None, :, :].expand(B, H, R, N, D).reshape(B, H * R, N, D)


def by_unsqueezing(x):
    return x.unsqueeze(2).expand(-1, -1, R, -1, -1).contiguous().view(B, H * R, N, D)


def by_interleaving(x):
    return x.repeat_interleave(R, dim=1)


def tiled(x):
    """The same heads in another order: the first ones again behind the last one."""
    return x[:, None].expand(B, R, H, N, D).reshape(B, H * R, N, D)


def lengthened(x):
    """As many elements, of which positions are repeated and not heads."""
    return x[:, :, :, None, :].expand(B, H, N, R, D).reshape(B, H * R, N, D)


def overwritten(x):
    repeated = by_expanding(x)
    repeated.mul_(2)
    return repeated


def traced(function, dtype=torch.bfloat16, device="cuda", heads=H, **keywords):
    """The graph of attention over `function` of keys and values, as if on a GPU."""
    graph = []

    def backend(gm, inputs):
        graph.append((gm, inputs))
        return gm

    torch._dynamo.reset()
    q, k, v = torch.randn(B, H * R, N, D), torch.randn(B, heads, N, D), torch.randn(B, heads, N, D)
    torch.compile(lambda q, k, v: attention(q, function(k), function(v), **keywords), backend=backend)(q, k, v)
    ((gm, inputs),) = graph
    mode = FakeTensorMode()
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            with mode:
                node.meta["example_value"] = torch.empty(value.shape, dtype=dtype, device=device)
    return gm, inputs


def call_of(gm):
    (node,) = [node for node in gm.graph.nodes if node.target is ATTENTION]
    return node


@pytest.mark.parametrize("function", [by_expanding, by_unsqueezing, by_interleaving])
@pytest.mark.parametrize("causal", [False, True])
def test_repeated_heads_are_shared(function, causal):
    gm, inputs = traced(function, is_causal=causal)
    (before,) = gm(*inputs)
    (note,) = use_grouped_query_attention(gm).notes
    assert note.startswith("for speed: 1 attention calls")
    gm.graph.lint()
    assert call_of(gm).kwargs["enable_gqa"] is True
    assert [node.op for node in gm.graph.nodes].count("placeholder") == 3
    assert len(gm.graph.nodes) == 5, "what repeated them is gone"
    torch.testing.assert_close(gm(*inputs)[0], before)


def test_batches_and_lengths_may_be_symbols():
    notes = []

    def repeated(x):
        batch, _, length, _ = x.shape
        return x[:, :, None].expand(batch, H, R, length, D).reshape(batch, H * R, length, D)

    def backend(gm, _inputs):
        notes.extend(use_grouped_query_attention(gm, planned_for="cuda").notes)
        gm.graph.lint()
        return gm

    torch._dynamo.reset()
    inputs = [torch.randn(B, heads, N, D, dtype=torch.bfloat16) for heads in (H * R, H, H)]
    for value in inputs:
        for dim in (0, 2):
            torch._dynamo.mark_dynamic(value, dim)
    call = torch.compile(lambda q, k, v: attention(q, repeated(k), repeated(v)), backend=backend)
    q, k, v = inputs
    torch.testing.assert_close(call(q, k, v), attention(q, repeated(k), repeated(v)))
    assert len(notes) == 1


@pytest.mark.parametrize("function", [tiled, lengthened, overwritten])
def test_other_repetitions_stay(function):
    gm, _ = traced(function)
    assert use_grouped_query_attention(gm) == PassReport()
    assert "enable_gqa" not in call_of(gm).kwargs


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"device": "cpu"},
        {"attn_mask": torch.zeros(N, N)},
    ],
)
def test_kernels_that_could_not_share_get_them_repeated(changes):
    gm, _ = traced(by_expanding, **changes)
    assert use_grouped_query_attention(gm) == PassReport()


def test_kernels_that_were_switched_off_are_not_counted_on(monkeypatch):
    gm, _ = traced(by_expanding)
    monkeypatch.setattr("dcompile.compat.tensors.has_flash_attention", lambda: False)
    assert use_grouped_query_attention(gm) == PassReport()
