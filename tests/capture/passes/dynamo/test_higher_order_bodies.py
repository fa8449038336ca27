"""Rewrites reach the bodies of higher-order operators, and what a body needs no more is no longer given to it."""

import operator
from functools import partial

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dcompile.capture.passes.dynamo import attention_masks
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION
from dcompile.capture.passes.dynamo.decode_attention import decompose_decode_attention
from dcompile.capture.passes.dynamo.grouped_query_attention import use_grouped_query_attention
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs, placeholders
from dcompile.codegen.lower.elements import ElementTracer
from tests.traits import change_cpu

S = 6


def recognize_causal_masks(gm):
    return attention_masks.recognize_causal_masks(gm, ElementTracer)


def causal(q):
    position = torch.arange(q.shape[-2])
    return position[None] <= position[:, None]


def checkpointed(q, flag):
    mask = causal(q)
    for _ in range(2):
        q = checkpoint(lambda q: attention(q, q, q, attn_mask=mask), q, use_reentrant=False)
    return q


def reentrant(q, flag):
    mask = causal(q)
    return checkpoint(lambda q: attention(q, q, q, attn_mask=mask), q, use_reentrant=True)


def selective(q, flag):
    mask = causal(q)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(lambda q: attention(q, q, q, attn_mask=mask), q, use_reentrant=False, context_fn=contexts)


def nested(q, flag):
    mask = causal(q)

    def inner(q):
        return checkpoint(lambda q: attention(q, q, q, attn_mask=mask), q, use_reentrant=False)

    return checkpoint(inner, q, use_reentrant=False)


def on_condition(q, flag):
    mask = causal(q)
    return torch.cond(
        flag, lambda q: attention(q, q, q, attn_mask=mask), lambda q: attention(q, q * 2, q, attn_mask=mask), (q,)
    )


def scanned(q, flag):
    mask = causal(q)

    def step(carried, x):
        carried = attention(carried, x, x, attn_mask=mask)
        return carried, carried.clone()

    return scan(step, q, torch.stack([q, q]))[1]


def for_each(q, flag):
    mask = causal(q)
    return mapped(lambda x: attention(x, x, x, attn_mask=mask), torch.stack([q, q]))


def looped(q, flag):
    mask = causal(q)
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, q: i < 3, lambda i, q: (i + 1, attention(q, q, q, attn_mask=mask)), (start, q))[1]


@torch.compiler.nested_compile_region
def region(q, mask):
    return attention(q, q, q, attn_mask=mask)


def in_regions(q, flag):
    mask = causal(q)
    return region(region(q, mask), mask)


def rewritten(function, *passes, dynamic=False):
    """The nest of graphs after the passes, which computes as before, and their notes."""
    seen = []

    def backend(gm, _inputs):
        notes = [note for rewrite in passes for note in rewrite(gm).notes]
        nest = NestedGraphs(gm)
        for graph in nest.graphs:
            graph.graph.lint()
        seen.append((nest, notes))
        return gm.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    q, flag = torch.randn(2, 3, S, 8), torch.tensor(True)
    expected = function(q, flag)
    torch.testing.assert_close(torch.compile(function, backend=backend, dynamic=dynamic)(q, flag), expected)
    return seen[0]


def calls_in(nest):
    return [node for node in nest.nodes() if node.target is ATTENTION]


EAGER_WARNS = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
ALL = [checkpointed, selective, nested, on_condition, scanned, for_each, looped, in_regions]
ALL.append(pytest.param(reentrant, marks=EAGER_WARNS))


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_masks_that_are_made_outside_are_replaced_and_no_longer_given(function):
    nest, notes = rewritten(function, recognize_causal_masks)
    calls = calls_in(nest)
    assert calls and all((c.kwargs["attn_mask"], c.kwargs["is_causal"]) == (None, True) for c in calls)
    assert notes[0].startswith(f"for speed: {len(calls)} attention calls")
    shapes = [node.meta["example_value"].shape for body in nest.graphs for node in placeholders(body)]
    assert (S, S) not in shapes, "a body is still given the mask"
    assert not any(node.target is torch.arange for node in nest.nodes()), "the mask is still made"
    for call in nest.calls:
        assert call.places() is None or len(call.places()) == len(placeholders(call.bodies[0]))


def test_sizes_inside_may_be_symbols():
    nest, _ = rewritten(checkpointed, recognize_causal_masks, dynamic=True)
    assert [call.kwargs["is_causal"] for call in calls_in(nest)] == [True, True]


def test_a_mask_that_one_branch_reads_otherwise_is_still_given():
    def function(q, flag):
        mask = causal(q)
        return torch.cond(flag, lambda q: attention(q, q, q, attn_mask=mask), lambda q: q * mask[0, 0], (q,))

    nest, _ = rewritten(function, recognize_causal_masks)
    (call,) = calls_in(nest)
    assert call.kwargs["is_causal"] is True
    assert len(nest.calls[0].node.args[3]) == 2


def test_a_region_of_several_masks_keeps_its_own():
    def function(q, flag):
        return region(region(q, causal(q)), torch.ones_like(causal(q)).tril(1))

    nest, notes = rewritten(function, recognize_causal_masks)
    assert [call.kwargs["attn_mask"].op for call in calls_in(nest)] == ["placeholder"] and notes == []


def test_what_a_body_changes_in_place_is_not_known():
    def function(q, flag):
        mask = torch.ones(S, S, dtype=torch.bool).tril()

        def body(q):
            mask[2:].logical_not_()
            return q * 2

        q = checkpoint(body, q, use_reentrant=False)
        return attention(q, q, q, attn_mask=mask)

    nest, notes = rewritten(function, recognize_causal_masks)
    assert calls_in(nest)[0].kwargs["attn_mask"] is not None and notes == []


def test_a_body_that_is_carried_a_mask_keeps_it():
    def function(q, flag):
        def step(mask, x):
            return mask.logical_not(), attention(x, x, x, attn_mask=mask)

        return scan(step, causal(q), torch.stack([q, q]))[1]

    nest, notes = rewritten(function, recognize_causal_masks)
    assert calls_in(nest)[0].kwargs["attn_mask"] is not None and notes == []


def on_gpu(nest, dtype=torch.bfloat16):
    """The graphs' values, as if they were on a GPU."""
    for node in nest.nodes():
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            with FakeTensorMode():
                node.meta["example_value"] = torch.empty(value.shape, dtype=dtype, device="cuda")


def repeated_inside(q, flag):
    def body(q, k):
        k = k[:, :, None].expand(2, 1, 3, S, 8).reshape(2, 3, S, 8)
        return attention(q, k, k)

    return checkpoint(body, q, q[:, :1], use_reentrant=False)


def repeated_outside(q, flag):
    k = q[:, :1].unsqueeze(2).expand(-1, -1, 3, -1, -1).reshape(2, 3, S, 8)
    return checkpoint(lambda q, k: attention(q, k, k), q, k, use_reentrant=False)


def repeated_outside_of_two(q, flag):
    k = q[:, :1].repeat_interleave(3, dim=1)

    def outer(q, k):
        return checkpoint(lambda q, k: attention(q, k, k * 1), q, k, use_reentrant=False) + checkpoint(
            lambda q, k: attention(q, k, k), q, k, use_reentrant=False
        )

    return checkpoint(outer, q, k, use_reentrant=False)


@pytest.mark.parametrize("function", [repeated_inside, repeated_outside], ids=lambda f: f.__name__)
def test_repeated_heads_are_shared_inside(function):
    def share(gm):
        on_gpu(NestedGraphs(gm))
        return use_grouped_query_attention(gm)

    nest, notes = rewritten(function, share)
    (call,) = calls_in(nest)
    assert call.kwargs["enable_gqa"] is True and len(notes) == 1
    names = {str(node.target) for node in nest.nodes()}
    assert names.isdisjoint({"expand", "repeat_interleave", "reshape"}), "keys are still repeated"


def test_repeated_heads_are_brought_in_through_two_bodies():
    def share(gm):
        on_gpu(NestedGraphs(gm))
        return use_grouped_query_attention(gm)

    nest, notes = rewritten(repeated_outside_of_two, share)
    assert [call.kwargs.get("enable_gqa") for call in calls_in(nest)].count(True) == 1 and len(notes) == 1


def test_single_queries_are_written_out_inside(monkeypatch):
    change_cpu(monkeypatch, splits_single_query=False)

    def function(q, flag):
        return torch.cond(flag, lambda q: attention(q[:, :, :1], q, q), lambda q: q[:, :, :1] * 2, (q,))

    nest, notes = rewritten(function, decompose_decode_attention)
    assert calls_in(nest) == [] and len(notes) == 1


def test_operands_are_found_through_every_call():
    nest, _ = rewritten(in_regions)
    body = nest.graphs[1]
    first, mask = placeholders(body)
    assert [node.target for node in nest.sources(mask)] == [operator.le] * 2
    assert len({*nest.sources(first)}) == 2
    assert nest.sources(placeholders(nest.graphs[0])[0]) is None, "nobody knows what the captured graph is given"
