"""Sides of FlexAttention's blocks that are symbols."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dcompile
from dcompile.capture.passes.dynamo.block_sizes import BLOCK_MASK, specialize_block_sizes
from dcompile.compat.flex import SIDES
from tests.pass_inputs.graphs import sparse_attention


def test_sides_become_numbers_with_a_guard():
    gm = sparse_attention(64)
    (side,) = [node.meta["example_value"] for node in gm.graph.nodes if "example_value" in node.meta]
    assert specialize_block_sizes(gm).changes == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    assert call.args[BLOCK_MASK][SIDES] == (64, 64)
    assert len(side.node.shape_env.guards) == 1, "another side is another graph"
    assert specialize_block_sizes(gm).changes == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_other_sides_and_lengths_give_eagers_results():
    def causal(b, h, q, k):
        return q >= k

    compiled = dcompile.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), dynamic=True, options={"receipt": False}
    )
    for length, side in ((256, 64), (384, 64), (256, 128)):
        mask = create_block_mask(causal, None, None, length, length, device="cpu", BLOCK_SIZE=side)
        q, k, v = (torch.randn(2, 2, length, 16) for _ in range(3))
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v, mask), flex_attention(q, k, v, block_mask=mask))
