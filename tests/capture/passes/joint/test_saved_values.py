"""What a forward saves in place of views that would be copied."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.passes.joint import saved_values
from dcompile.device_traits import traits_of


def gated(x, w):
    """A gate of channels-last images, 20 bytes after the begin of their memory, and channels that no gradient needs."""
    values, gate, rest = torch.conv2d(x, w).split([5, 1, 5], 1)
    return values * gate + rest


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_views_that_are_not_aligned_are_views_of_what_is_saved(device, monkeypatch):
    monkeypatch.setattr(saved_values, "traits_of", lambda _: traits_of(device))
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    w = torch.randn(11, 3, 3, 3, requires_grad=True)
    (want,) = torch.autograd.grad(gated(x, w).sum(), w)
    out = dcompile.compile(gated, options={"receipt": False, "trace_cache": False})(x, w)
    saved = out.grad_fn.saved_tensors
    assert any(tensor.storage_offset() * 4 % 16 for tensor in saved) == (device == "cpu")
    (got,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_views_in_checkpointed_regions_keep_their_region(monkeypatch):
    monkeypatch.setattr(saved_values, "traits_of", lambda _: traits_of("cuda"))
    given = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last), torch.randn(11, 3, 3, 3)
    gm = make_fx(gated, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    views = [node for node in gm.graph.nodes if node.target is operator.getitem]
    for node in views:
        node.meta |= {"recompute": "by its region", "ac_graph_id": 3}
    assert saved_values.recompute_misaligned_views(gm).changes == 0
    assert {node.meta["ac_graph_id"] for node in views} == {3}


@pytest.mark.parametrize("is_sharded", [True, False])
def test_rows_of_a_sharded_table_are_saved(is_sharded):
    """The backward would gather the table for them alone; other tables are there anyway."""
    gm = make_fx(lambda table, places: torch.nn.functional.embedding(places, table).sin())(
        torch.randn(8, 4), torch.tensor([1, 2])
    )
    saved_values.recompute_views(gm, lambda gm: gm.graph.find_nodes(op="placeholder")[: 1 if is_sharded else 0])
    (looked_up,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert ("recompute" in looked_up.meta) == is_sharded
