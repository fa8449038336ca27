"""States of counters of random numbers are made where somebody counts, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import decompositions_for_rng

import dcompile
from dcompile.compat.patches import rng_under_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_anew")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The states that are made from now on."""
    found: list[Any] = []
    own = decompositions_for_rng.PhiloxState.reset

    def reset(state: Any) -> None:
        found.append(state)
        own(state)

    monkeypatch.setattr(decompositions_for_rng.PhiloxState, "reset", reset)
    return found


def test_a_graph_whose_numbers_nobody_counts_has_no_states(made: list[Any]) -> None:
    draws = dcompile.compile(lambda x: torch.nn.functional.dropout(x.sin(), 0.5) + 1, options={"receipt": False})
    x = torch.ones(100, requires_grad=True)
    y = draws(x)
    y.sum().backward()
    kept = y.detach() != 1
    torch.testing.assert_close(x.grad, torch.where(kept, 2 * x.cos(), torch.zeros(())))
    assert 0 < kept.sum() < 100 and not made


def test_other_backends_and_whoever_counts_have_them(made: list[Any]) -> None:
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    assert made
    made.clear()
    with torch._functorch.config.patch(functionalize_rng_ops=True), rng_under_checkpoint.no_unread_counters():
        decompositions_for_rng.PhiloxStateTracker.reset()
    assert len(made) == 3


def test_a_torch_without_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(decompositions_for_rng, "PhiloxStateTracker")
    with rng_under_checkpoint.no_unread_counters():
        assert not hasattr(decompositions_for_rng, "PhiloxStateTracker")
