"""Embedding bags in parts against eager: empty bags, padding, weights of rows, the end given or not."""

from __future__ import annotations

import pytest
import torch

from dcompile.codegen.lower.decompositions import embedding_bag

aten = torch.ops.aten
INDICES = torch.tensor([1, 2, 4, 5, 4, 3])


@pytest.mark.parametrize("mode", [embedding_bag.SUM, embedding_bag.MEAN])
@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("offsets", [[0, 2, 2], [0, 0, 6, 6], [0]])
def test_bags_and_their_gradient(mode: int, padding: int, offsets: list[int]) -> None:
    weight, start = torch.randn(7, 3), torch.tensor(offsets)
    for samples in (None, torch.rand(6)) if mode == embedding_bag.SUM else (None,):
        for last in (False, True):
            given = (weight, INDICES, start, False, mode, False, samples, last, padding)
            if last and offsets[-1] != 6:
                continue
            (expected, *beside), ours = aten._embedding_bag(*given), embedding_bag.embedding_bag(*given)
            torch.testing.assert_close(ours, (expected, *beside))
            grad = torch.randn_like(expected)
            leaf, factor = (
                weight.clone().requires_grad_(),
                None if samples is None else samples.clone().requires_grad_(),
            )
            out = aten._embedding_bag(leaf, INDICES, start, False, mode, False, factor, last, padding)[0]
            wanted = [leaf] if factor is None else [leaf, factor]
            theirs = torch.autograd.grad(out, wanted, grad)
            rest = (INDICES, start, *ours[1:], 7, False, mode, False, samples, padding)
            torch.testing.assert_close(embedding_bag.embedding_bag_backward(grad, *rest), theirs[0])
            short = (weight, INDICES.int(), start.int(), *given[3:])
            torch.testing.assert_close(embedding_bag.embedding_bag(*short)[1:], aten._embedding_bag(*short)[1:])
            if factor is not None:
                rows = embedding_bag.sample_weights_backward(grad, weight, INDICES, start, ours[1], mode, padding)
                torch.testing.assert_close(rows, theirs[1])


def test_what_is_left_to_the_library() -> None:
    given = (torch.randn(7, 3), INDICES, torch.tensor([0, 2]))
    assert embedding_bag.embedding_bag(*given, False, embedding_bag.MAX) is NotImplemented
    assert embedding_bag.embedding_bag(*given, False, embedding_bag.SUM, True) is NotImplemented
