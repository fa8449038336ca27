"""Counter states are made where somebody counts; what a forward draws is what its backward uses, at any budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import decompositions_for_rng
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.compat.patches import random_numbers
from tests.graph_backend import cut_by

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


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_a_graph_whose_numbers_nobody_counts_has_no_states(made: list[Any], budget: float) -> None:
    options = {"receipt": False, "activation_memory_budget": budget}
    draws = dcompile.compile(lambda x: F.dropout(x.sin(), 0.5) + 1, options=options)
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
    with torch._functorch.config.patch(functionalize_rng_ops=True), random_numbers.no_unread_counters():
        decompositions_for_rng.PhiloxStateTracker.reset()
    assert len(made) == 3


def test_a_torch_without_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(decompositions_for_rng, "PhiloxStateTracker")
    with random_numbers.no_unread_counters():
        assert not hasattr(decompositions_for_rng, "PhiloxStateTracker")


# --- partitions -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("random_test::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    """An operator that says that it draws."""
    return torch.rand_like(x)


@torch.library.custom_op("random_test::untold", mutates_args=())
def untold(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator that draws, and does not say so; one of its results is used."""
    return torch.rand_like(x), torch.rand_like(x)


@torch.library.custom_op("random_test::fill", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,))
def fill(x: torch.Tensor) -> None:
    """An operator that draws into its argument."""
    x.copy_(torch.rand_like(x))


noise.register_fake(torch.empty_like)
untold.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


def filled(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    fill(y)
    return y


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*[x.view(1, 2, 4, 4)] * 3, dropout_p=0.5).view(4, 8)


def again(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same function, in a checkpoint."""
    return lambda x: checkpoint(function, x, use_reentrant=False)


DRAWING: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "dropout": (
        lambda x: F.dropout(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.3),
        lambda x: F.dropout1d(x, 0.3),
        lambda x: F.rrelu(x, training=True),
        attention,
    ),
    "elements": (
        lambda x: x * torch.rand(8, dtype=x.dtype),
        lambda x: x * torch.rand_like(x),
        lambda x: x + torch.randn_like(x) * x,
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
        lambda x: x * torch.randint(1, 3, x.shape),
        lambda x: x * torch.normal(torch.ones_like(x), 0.5),
        lambda x: F.gumbel_softmax(x),
    ),
    "in place": (
        lambda x: x * torch.empty_like(x).normal_(),
        lambda x: x * torch.empty_like(x).uniform_().add(1),
        lambda x: x * torch.zeros_like(x).exponential_(),
        lambda x: x * torch.zeros_like(x).cauchy_().clamp(1, 2),
        lambda x: x * torch.zeros_like(x).geometric_(0.5),
        lambda x: x * torch.zeros_like(x).log_normal_().clamp(max=2),
    ),
    "of the library": (
        lambda x: x[:, torch.randperm(8)],
        lambda x: x * torch.multinomial(torch.ones(8, dtype=x.dtype), 8, replacement=True).add(1).log(),
        lambda x: x * torch.poisson(torch.ones_like(x)).add(1).log(),
        lambda x: x * torch.binomial(torch.full_like(x, 3), torch.full_like(x, 0.5)).add(1).log(),
        lambda x: x * torch._standard_gamma(torch.ones_like(x)).clamp(0.5, 2),
        lambda x: F.fractional_max_pool2d(x.view(1, 1, 4, 8), 2, output_size=(2, 4)).repeat(1, 1, 2, 2).view(4, 8),
    ),
    "custom": (lambda x: x * noise(x.detach()), lambda x: x * untold(x.detach())[1], lambda x: x * filled(x)),
    "checkpointed": (
        again(lambda x: F.dropout(x.sin(), 0.5)),
        again(lambda x: x.sin() * torch.randperm(8).add(1).log()),
        again(lambda x: x.sin() * noise(x.detach())),
    ),
}


@pytest.mark.parametrize("kind", DRAWING)
@pytest.mark.parametrize(("option", "setting", "keys"), [(0.0, 1.0, True), (1.0, 0.2, False)], ids=str)
def test_a_backward_uses_what_its_forward_drew(option: float, setting: float, keys: bool, kind: str) -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for draw in DRAWING[kind]:
            x = torch.tanh(draw(x) * w) + x
        return x.square().sum()

    x, w, step = (torch.randn(4, 8, dtype=torch.float64) for _ in range(3))
    run = torch.compile(layers, backend=cut_by(option, keys))

    def at(shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        given = (x + shift * step).requires_grad_()
        torch.manual_seed(5)
        return run(given, w), given

    with torch._functorch.config.patch(activation_memory_budget=setting):
        result, given = at(0)
        slope = (torch.autograd.grad(result, given)[0] * step).sum()
        difference = (at(1e-6)[0] - at(-1e-6)[0]).detach() / 2e-6
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draw", [noise, lambda x: untold(x)[0], lambda x: torch.zeros(8).exponential_()])
def test_two_equal_calls_that_draw_are_two_draws(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(8, requires_grad=True)
    run = torch.compile(lambda x: (draw(x.detach()) * x, draw(x.detach()) * x), backend=cut_by(1.0, keys=False))
    first, second = run(x)
    assert not torch.equal(first, second)


def test_without_memory_for_anything_a_changed_input_is_still_copied_before() -> None:
    def count(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        y = x * n.clone()
        n.add_(1)
        return y.sin()

    x, n = torch.rand(4, requires_grad=True), torch.ones(4)
    result = torch.compile(count, backend=cut_by(0.0, keys=True))(x, n)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], x.cos())
