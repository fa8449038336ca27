"""FlexAttention as a call of its own: alone it computes the same, and what stands around it is in our kernels."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex

import dcompile
from dcompile import compat
from dcompile.codegen.lower.lower import lower
from dcompile.codegen.lower.opaque_calls import FlexCall, flex_calls
from dcompile.compat import inductor
from dcompile.operators import flex_masks, flex_ops

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:The .grad attribute"),
]


@pytest.fixture
def calls(monkeypatch):
    """The graphs of calls that TorchInductor would compile; they run as they are."""
    found = []

    def compiled(node, fixed):
        found.append(inductor._graph_of_one(node, fixed))
        return found[-1]

    monkeypatch.setattr(inductor, "compiled_flex", compiled)
    return found


CAUSAL = "{q + -1*k ? yes : no}"


def windowed(length):
    return flex.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 20), None, None, length, length, device="cpu")


def test_forward_and_backward_are_calls_alone_and_the_rest_is_ours(calls, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # torch trains it on GPUs alone
    mask, bias, layer = windowed(128), torch.randn(2, 128, requires_grad=True), torch.nn.Linear(16, 96)

    def function(x):
        q, k, v = torch.tanh(layer(x)).view(2, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
        found = flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, j], block_mask=mask)
        return (found * 2).square().mean()

    x = torch.randn(2, 128, 16, requires_grad=True)
    inputs = [x, bias, *layer.parameters()]
    call = dcompile.compile(function, options={"receipt": False})
    for found, expected in zip(
        torch.autograd.grad(call(x), inputs), torch.autograd.grad(function(x), inputs), strict=True
    ):
        torch.testing.assert_close(found, expected)
    receipt = dcompile.receipt(call)
    expected = {"dcompile.call flex_attention": 1, "dcompile.call flex_attention_backward": 1}
    assert dict(receipt.fallbacks) == expected and receipt.kernel_calls > 0
    assert any("flex_attention_backward runs as TorchInductor's kernel" in note for note in receipt.notes)
    assert [str(node.target) for gm in calls for node in gm.graph.nodes if inductor.is_flex(node.target)] == [
        *inductor.FLEX
    ]


def test_without_a_kernel_a_loop_runs_on_cpus_and_the_receipt_says_so():
    mask = windowed(64)
    call = dcompile.compile(lambda x: flex.flex_attention(x, x, x, block_mask=mask) + 1, options={"receipt": False})
    x = torch.randn(1, 2, 64, 16)
    torch.testing.assert_close(call(x), flex.flex_attention(x, x, x, block_mask=mask) + 1)
    receipt = dcompile.receipt(call)
    assert "flex_attention runs as a loop over the blocks that its mask leaves" in receipt.notes
    assert receipt.fallbacks == {"dcompile.call flex_attention": 1}


def test_without_a_loop_eager_forms_run_and_the_receipt_says_so(monkeypatch):
    monkeypatch.setattr(flex_ops, "loop_of", lambda *_: "tests")
    mask = windowed(64)
    call = dcompile.compile(lambda x: flex.flex_attention(x, x, x, block_mask=mask) + 1, options={"receipt": False})
    x = torch.randn(1, 2, 64, 16)
    torch.testing.assert_close(call(x), flex.flex_attention(x, x, x, block_mask=mask) + 1)
    receipt = dcompile.receipt(call)
    assert any("flex_attention computes all scores" in note for note in receipt.notes)
    assert receipt.fallbacks == {"flex_attention left to eager math: no loop for tests": 1}


def test_programs_are_kept_and_calls_are_built_when_they_are_loaded(calls, monkeypatch, tmp_path):
    """Lowering compiles nothing: each start builds the calls of its programs, also of those in the cache.

    What one start could compile, another may have to leave to eager math, and count.
    """
    mask, options = windowed(64), {"receipt": False, "cache_dir": str(tmp_path), "verify": False}
    slope = torch.tensor(0.5)
    x = torch.randn(1, 2, 64, 16)

    def function(x):
        return flex.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s - slope * (i - j), block_mask=mask) + 1

    expected = function(x)
    for start in range(2):
        torch._dynamo.reset()
        call = dcompile.compile(function, options=options)
        torch.testing.assert_close(call(x), expected)
        receipt = dcompile.receipt(call)
        assert (receipt.graphs_cached, receipt.traces_cached, receipt.graphs_uncacheable) == (start, start, 0)
        assert [note for note in receipt.notes if "flex" in note] == ["flex_attention runs as TorchInductor's kernel"]
        assert len(calls) == start + 1 and dict(receipt.fallbacks) == {"dcompile.call flex_attention": 1}
    monkeypatch.setattr(inductor, "compiled_flex", lambda *_: "no kernel here")
    monkeypatch.setattr(compat.flex, "is_on_cpu", lambda _: False)
    torch._dynamo.reset()
    call = dcompile.compile(function, options=options)
    torch.testing.assert_close(call(x), expected)
    receipt = dcompile.receipt(call)
    assert receipt.graphs_cached == 1 and receipt.fallbacks == {"flex_attention left to eager math: no kernel here": 1}


def test_equal_calls_share_a_kernel(calls):
    mask = windowed(64)

    def function(x):
        for scale in (0.25, 0.25, 0.5):
            x = flex.flex_attention(x, x, x, block_mask=mask, scale=scale) + 1
        return x

    call = dcompile.compile(function, options={"receipt": False})
    x = torch.randn(1, 2, 64, 16)
    torch.testing.assert_close(call(x), function(x))
    assert len(calls) == 2


def test_lowering_builds_nothing(calls):
    def function(x):
        tables = flex_masks.block_tables(x, x, [], [], CAUSAL)
        return flex_masks.attend_in_blocks(x, x, x, [], [], tables, CAUSAL, 0.25) + 1

    graph = make_fx(function, tracing_mode="fake")(torch.randn(1, 2, 64, 16))
    (name, call), *_ = [item for item in lower(graph, "flex").constants.items() if isinstance(item[1], FlexCall)]
    assert not calls and [*flex_calls(graph, [name])] == [name] and not flex_calls(graph, ["other"])
    assert call.build() == flex_calls(graph, [name])[name].build() == "" and len(calls) == 2
