"""The table that AOTAutograd traces with: whose rules are ours."""

from __future__ import annotations

import pytest
import torch

from dcompile.codegen.lower.decompositions import table

LOSSES = ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_means_over_nothing_are_nothing(name: str) -> None:
    """torch's own rules divide by a count of 0."""
    rule = table.table()[getattr(torch.ops.aten, name).default]
    last = () if name == "mse_loss_backward" else (1.0,)
    for shape in ((0, 3), (2, 3)):
        x, y, grad = torch.randn(shape), torch.randn(shape), torch.tensor(2.0)
        expected = getattr(torch.ops.aten, name)(grad, x, y, 1, *last)
        torch.testing.assert_close(rule(grad, x, y, 1, *last), expected)


def test_each_caller_has_a_table_of_its_own() -> None:
    table.table().clear()
    assert len(table.table()) > 100
    assert table.table(fallback_random=True).keys() <= table.table().keys()
