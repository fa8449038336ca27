"""Grouped queries of one token take keys and values as they are, and give what the repeated ones give."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from dcompile.capture.passes.dynamo import decode_attention
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION
from dcompile.capture.passes.dynamo.decode_attention import attend, decompose_decode_attention
from dcompile.device_traits import CPU, CUDA
from tests.traits import change_cpu

HEADS, TIMES, LENGTH, WIDTH = 2, 3, 10, 8


def inputs(queries=1):
    torch.manual_seed(0)
    query = torch.randn(2, HEADS * TIMES, queries, WIDTH)
    return query, torch.randn(2, HEADS, LENGTH, WIDTH), torch.randn(2, HEADS, LENGTH, WIDTH), torch.arange(LENGTH) < 7


def rewritten(monkeypatch, function, *args):
    """Shapes of the keys that attention written out gets, the number of other attention calls, and the notes."""
    seen = []

    def backend(gm, _inputs):
        notes = [*decompose_decode_attention(gm).notes]
        gm.graph.lint()
        ours = [node.args[1].meta["example_value"].shape for node in gm.graph.nodes if node.target is attend]
        seen.append(([tuple(shape) for shape in ours], sum(node.target is ATTENTION for node in gm.graph.nodes), notes))
        return gm.forward

    torch._dynamo.reset()
    change_cpu(monkeypatch, splits_single_query=False)
    expected = function(*args)
    torch.testing.assert_close(torch.compile(function, backend=backend, dynamic=False)(*args), expected)
    assert len(seen) == 1
    return seen[0]


def repeat(x):
    """As Hugging Face's models do it."""
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, TIMES, length, width).reshape(batch, heads * TIMES, length, width)


def by_index(q, k, v, mask):
    return attention(q, repeat(k), repeat(v), attn_mask=mask[None, None, None], dropout_p=0.0, scale=0.3).transpose(
        1, 2
    )


def by_unsqueeze(q, k, v, mask):
    k, v = (x.unsqueeze(2).expand(-1, -1, TIMES, -1, -1).reshape(q.shape[0], -1, LENGTH, WIDTH) for x in (k, v))
    return attention(q, k, v)


def mask_of_heads(q, k, v, mask):
    return attention(q, repeat(k), repeat(v), mask.expand(2, HEADS * TIMES, 1, LENGTH))


def shared(q, k, v, mask):
    return attention(q, k, v, mask[None], enable_gqa=True)


def other_order(q, k, v, mask):
    return attention(q, k.repeat(1, TIMES, 1, 1), v.repeat(1, TIMES, 1, 1))


def causal(q, k, v, mask):
    return attention(q, repeat(k), repeat(v), is_causal=True)


def plain(q, k, v, mask):
    return attention(q, repeat(k).contiguous(), repeat(v).contiguous())


def added(q, k, v, mask):
    return attention(q, repeat(k), repeat(v), torch.where(mask, 0.5, -torch.inf)[None])


def nothing_allowed(q, k, v, mask):
    return attention(q, repeat(k), repeat(v), (mask & False)[None])


KEYS = (2, HEADS, LENGTH, WIDTH)


@pytest.mark.parametrize("function", [by_index, by_unsqueeze, shared, added, nothing_allowed])
def test_one_query_a_head_is_written_out(monkeypatch, function):
    notes = ["for speed: 1 attention calls of one query a head are written out, as kernels of ours"]
    assert rewritten(monkeypatch, function, *inputs()) == ([KEYS], 0, notes)


def test_keys_and_values_need_not_be_repeated(monkeypatch):
    assert rewritten(monkeypatch, plain, *inputs())[0] == [(2, HEADS * TIMES, LENGTH, WIDTH)]


@pytest.mark.parametrize("function", [mask_of_heads, causal])
def test_other_calls_stay(monkeypatch, function):
    assert rewritten(monkeypatch, function, *inputs()) == ([], 1, [])


def test_an_order_of_heads_that_is_not_ours_is_kept(monkeypatch):
    """Heads repeated in turn are no groups: each has keys of its own then."""
    assert rewritten(monkeypatch, other_order, *inputs())[0] == [(2, HEADS * TIMES, LENGTH, WIDTH)]


def test_several_queries_stay(monkeypatch):
    assert rewritten(monkeypatch, by_index, *inputs(queries=4)) == ([], 1, [])


def test_training_stays(monkeypatch):
    q, *others = inputs()
    assert rewritten(monkeypatch, by_index, q.requires_grad_(), *others) == ([], 1, [])


def test_many_queries_stay(monkeypatch):
    monkeypatch.setattr(decode_attention, "MAX_QUERIES", 2 * HEADS * TIMES - 1)
    assert rewritten(monkeypatch, shared, *inputs()) == ([], 1, [])


def test_many_queries_whose_keys_would_be_repeated_in_memory_are_written_out(monkeypatch):
    monkeypatch.setattr(decode_attention, "MAX_QUERIES", 2 * HEADS * TIMES - 1)
    assert rewritten(monkeypatch, by_index, *inputs())[:2] == ([KEYS], 0)


def test_bfloat16_is_as_close_as_the_librarys():
    q, k, v, mask = inputs()
    exact = by_index(q.double(), k.double(), v.double(), mask)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    ours = attend(q, k, v, mask[None, None, None], 0.3).transpose(1, 2)
    theirs = by_index(q, k, v, mask)
    assert ours.dtype == theirs.dtype
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


def test_what_changes_the_cache_stays(monkeypatch):
    """A call whose result nothing uses, as a cache is written."""

    def function(q, k, v, mask):
        k.index_copy_(2, torch.tensor([1]), torch.ones(2, HEADS, 1, WIDTH))
        return by_index(q, k, v, mask) + k.sum()

    torch._dynamo.reset()
    change_cpu(monkeypatch, splits_single_query=False)
    seen = []

    def backend(gm, _inputs):
        assert decompose_decode_attention(gm).changes
        seen.append([node.target for node in gm.graph.nodes])
        return gm.forward

    first, second = inputs(), inputs()
    torch.testing.assert_close(torch.compile(function, backend=backend)(*first), function(*second))
    torch.testing.assert_close(first[1], second[1])
    assert "index_copy_" in seen[0] and "expand" not in seen[0]


def test_only_where_the_cache_is_on_a_gpu():
    assert not CUDA.aten.splits_single_query and CPU.aten.splits_single_query


def test_an_implementation_of_the_users_choice_keeps_its_calls(monkeypatch):
    name = "current_flash_attention_impl"
    monkeypatch.setattr(torch.nn.attention, name, lambda: "FA3", raising=False)
    shapes, others, notes = rewritten(monkeypatch, by_index, *inputs())
    assert (shapes, others, notes) == ([], 1, ["1 attention calls of one query a head are left to FA3"])
