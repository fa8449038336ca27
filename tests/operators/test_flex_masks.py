"""Tables of blocks for FlexAttention, and its results on the CPU, where it computes all scores."""

import pytest
import torch
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as attention

from dcompile.compat.attention import TABLES
from dcompile.ir.index import floordiv, modulo, var
from dcompile.ir.piecewise import Test as Condition
from dcompile.ir.predicate import Predicate
from dcompile.operators import flex_masks
from dcompile.operators.flex_masks import BLOCK
from tests.attention_masks import BATCH, LENGTH, B, K, Q, both, masks, operands

SCALE = 0.3
AT = torch.arange(LENGTH)
EVERY_THIRD = Predicate(Condition(modulo(K, 3, {}) * -1, True, False))
CHUNKS = Predicate(both(floordiv(Q, 90, {}) - floordiv(K, 90, {}), floordiv(K, 90, {}) - floordiv(Q, 90, {})))
END = Predicate(both(K - var("s0") + 100), sizes=("s0",))
CASES = {name: (predicate, reads, [], mask) for name, (predicate, reads, mask) in masks().items()} | {
    "every third": (EVERY_THIRD, [], [], (AT % 3 == 0).expand(LENGTH, LENGTH)),
    "chunks": (CHUNKS, [], [], AT[:, None] // 90 == AT // 90),
    "end": (END, [], [LENGTH], (AT >= LENGTH - 100).expand(LENGTH, LENGTH)),
}


def marked(counts, places, shape):
    """Blocks in a table, as booleans."""
    counts, places = counts.expand(shape[:-1]), places.expand(shape)
    found = torch.zeros(shape, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, shape[:-1])).tolist():
        used = places[*at][: counts[*at]].tolist()
        assert sorted(set(used)) == used
        found[*at, used] = True
    return found


@pytest.mark.parametrize("name", CASES)
def test_tables_hold_every_allowed_pair_and_no_whole_block_too_much(name):
    predicate, reads, sizes, mask = CASES[name]
    q, k, _ = operands()
    tables = dict(zip(TABLES, flex_masks.block_tables(q, k, reads, sizes, str(predicate)), strict=True))
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables.values())
    blocks = -(-LENGTH // BLOCK)
    short = blocks * BLOCK - LENGTH
    padded = pad(mask.expand(BATCH, 1, LENGTH, LENGTH), (0, short, 0, short))
    allowed = padded.view(BATCH, 1, blocks, BLOCK, blocks, BLOCK).sum((3, 5))
    found = {}
    for direction in ("kv", "q"):
        for part in ("", "full_"):
            table = marked(tables[f"{part}{direction}_num_blocks"], tables[f"{part}{direction}_indices"], allowed.shape)
            found[part, direction] = table if direction == "kv" else table.transpose(-2, -1)
    assert torch.equal(found["", "kv"], found["", "q"]) and torch.equal(found["full_", "kv"], found["full_", "q"])
    assert (
        torch.equal(found["full_", "kv"], allowed == BLOCK * BLOCK)
        and not (found["", "kv"] & found["full_", "kv"]).any()
    )
    assert torch.equal(found["", "kv"] | found["full_", "kv"], allowed > 0)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    predicate, reads, sizes, mask = CASES[name]
    inputs = operands()

    def ours(q, k, v):
        tables = flex_masks.block_tables(q, k, reads, sizes, str(predicate))
        return flex_masks.attend_in_blocks(q, k, v, reads, sizes, tables, str(predicate), SCALE)

    expected = attention(*inputs, attn_mask=mask, scale=SCALE)
    found = ours(*inputs)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    for mine, theirs in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_heads_may_be_shared_and_a_batch_may_be_a_variable():
    q, k, v = operands()
    predicate = Predicate(both(var("z0") - K - 1), ((B,),))
    lengths, heads = torch.tensor([100, 300]), q.shape[1]
    k, v = k[:, :1], v[:, :1]
    tables = flex_masks.block_tables(q, k, [lengths], [], str(predicate))
    found = flex_masks.attend_in_blocks(q, k, v, [lengths], [], tables, str(predicate), SCALE)
    mask = lengths[:, None, None, None] > AT
    expected = attention(q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1), attn_mask=mask, scale=SCALE)
    torch.testing.assert_close(found, expected)
