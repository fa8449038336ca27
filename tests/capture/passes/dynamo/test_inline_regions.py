"""Regions are put where they are called (inline_regions.py), and what cannot be is left as it is."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dcompile.capture.passes.dynamo.inline_regions import inline_checkpoints, inline_nested_regions
from tests.capture.passes.dynamo.test_higher_order_bodies import rewritten


@torch.compiler.nested_compile_region
def pair(q, factor):
    return q.sin() * factor, q.transpose(0, 1).exp()


def regions(q, flag):
    for factor in (q[0].sum(), q[1].sum()):
        q = pair(*pair(q, factor)[:1], factor)[1].transpose(0, 1)
    return q


def on_condition(q, flag):
    return torch.cond(flag, lambda q: pair(q, q.sum())[0], lambda q: q.clone(), (q,))


def checkpointed(q, flag):
    for _ in range(2):
        q = checkpoint(lambda q: pair(q, q.sum())[0].exp(), q, use_reentrant=False)
    return q


def selective(q, flag):
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    q = checkpoint(torch.exp, q, use_reentrant=False)
    return checkpoint(torch.exp, q, use_reentrant=False, context_fn=contexts)


def nested(q, flag):
    return checkpoint(lambda q: checkpoint(torch.exp, q, use_reentrant=False), q, use_reentrant=False)


def names(nest):
    """Operators on graphs that are called."""
    return [call.node.target.__name__ for call in nest.calls]


@pytest.mark.parametrize(("function", "left"), [(regions, []), (on_condition, ["cond"]), (checkpointed, [])])
@pytest.mark.parametrize("dynamic", [False, True])
def test_regions_become_a_part_of_the_graph_that_calls_them(function, left, dynamic):
    nest, _ = rewritten(function, inline_nested_regions, inline_checkpoints, dynamic=dynamic)
    assert names(nest) == left


def test_values_of_a_region_that_is_called_twice_are_apart():
    nest, _ = rewritten(regions, inline_nested_regions)
    sines = [node.meta["example_value"] for node in nest.nodes() if node.target == "sin"]
    products = [node.meta["example_value"] for node in nest.nodes() if str(node.target).endswith("mul>")]
    assert len({value.untyped_storage()._cdata for value in (*sines, *products)}) == len(sines) + len(products) >= 4
    views = [node for node in nest.nodes() if node.target == "transpose"]
    memory = [node.meta["example_value"].untyped_storage()._cdata for node in views]
    of = [node.args[0].meta["example_value"].untyped_storage()._cdata for node in views]
    assert memory == of


@pytest.mark.parametrize(("function", "count"), [(selective, 2), (nested, 2)])
def test_checkpoints_are_left_where_their_numbers_would_be_compared_with_others(function, count):
    nest, _ = rewritten(function, inline_checkpoints)
    assert names(nest) == ["tag_activation_checkpoint"] * count


def test_operations_of_checkpoints_are_marked():
    nest, _ = rewritten(checkpointed, inline_nested_regions, inline_checkpoints)
    marks = [node.meta.get("ac_graph_id") for node in nest.nodes() if node.target == "exp"]
    assert marks == [1, 1, 2, 2]
