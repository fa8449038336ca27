"""A memory budget decides what a forward saves: within it, no slower for a larger one, with eager's gradients."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.capture import memory_budget
from dcompile.capture.entry import find_model
from dcompile.capture.memory_budget import MemoryBudget
from dcompile.config import Config, memory_budget_bytes
from dcompile.errors import OptionError
from tests.compat.patches.test_random_numbers import DRAWING
from tests.models.checks import tensors_of
from tests.models.modules import MODULES
from tests.models.zoo import CASES
from tests.subject import IS_DCOMPILE

pytestmark = pytest.mark.skipif(not IS_DCOMPILE, reason="about an option of ours")
SHARES = (1.0, 0.7, 0.4, 0.0)
"""Budgets, as parts of what a step takes that recomputes nothing."""
ATEN = {"receipt": False, "kernels": "aten", "fallback_random": True}
NAMES = [
    "conditional", "gru", "rnn", "cells", "u-net", "u-net-bilinear", "bag-sum", "temporal", "volume", "upscaling",
    "attention", "messages", "normalised", "nested", "in-place", "mixer",
]  # fmt: skip


class Stack(nn.Module):
    """Blocks of a transformer's sizes, each in a checkpoint if `checkpointed`."""

    def __init__(self, layers: int = 4, width: int = 32, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x.square().mean()


def gradients(model: nn.Module, batch: dict[str, torch.Tensor], **options: object) -> dict[str, torch.Tensor]:
    """Gradients of parameters after one step, in eager mode without options."""
    if options:
        dcompile.compile(model, options=options)
    torch.manual_seed(3)
    results = [value for _, value in tensors_of(model(**batch)) if value.requires_grad]
    sum(value.double().square().mean() for value in results).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plan_of(model: nn.Module) -> tuple[tuple[int, int], MemoryBudget]:
    """(predicted peak, peak of the plan that saves the most), and the budget."""
    state = find_model(model)
    assert state is not None and state.budget is not None and state.graphs[0].facts.peaks is not None
    return state.graphs[0].facts.peaks, state.budget


def budget_for(model: nn.Module, share: float, most: int) -> str:
    """A budget that leaves a step `share` of `most` bytes above what exists before it, on a CPU."""
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    allowed = math.ceil(share * most)
    return f"{trained * (1 + memory_budget.STATES_PER_PARAMETER) + allowed + allowed // 64 + 64}B"


def planned(make: object, batch: dict[str, torch.Tensor], share: float, most: int, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    gradients(model, batch, memory_budget=budget_for(model, share, most), **{**ATEN, **options})
    return model


def case(name: str) -> tuple[object, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    if name in MODULES:
        return MODULES[name].make, MODULES[name].batch(2, MODULES[name].lengths[0])
    return CASES[name].make, CASES[name].batch(2, 8)


@pytest.mark.parametrize("name", ["mlp", "resnet", "llama", "bert", *NAMES])
def test_gradients_equal_those_without_a_budget_bit_for_bit(name):
    make, batch = case(name)
    torch.manual_seed(0)
    model = make()
    wanted = gradients(copy.deepcopy(model), batch, **ATEN)
    first = copy.deepcopy(model)
    gradients(first, batch, memory_budget="auto", **ATEN)
    (_, most), _ = plan_of(first)
    peaks = []
    for share in SHARES:
        ours = copy.deepcopy(model)
        found = gradients(ours, batch, memory_budget=budget_for(model, share, most), **ATEN)
        assert found.keys() == wanted.keys()
        for parameter, gradient in found.items():
            assert torch.equal(gradient, wanted[parameter]), (share, parameter)
        peaks.append(plan_of(ours)[0][0])
    assert peaks[0] == most and all(a >= b for a, b in itertools.pairwise(peaks))


@pytest.mark.parametrize("kind", DRAWING)
@pytest.mark.parametrize("share", [0.6, 0.0])
def test_a_backward_uses_what_its_forward_drew(kind, share):
    def layers(x, w):
        for draw in DRAWING[kind]:
            x = torch.tanh(draw(x) * w) + x
        return x.square().sum()

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 8, dtype=torch.float64))

        def forward(self, x):
            return layers(x, self.w)

    torch.manual_seed(2)
    model, x, step = Drawing(), *(torch.randn(4, 8, dtype=torch.float64) for _ in range(2))
    run = dcompile.compile(model, options={"receipt": False, "memory_budget": f"{3 * 4 * 32 + int(share * 4096)}B"})

    def at(shift):
        given = (x + shift * step).requires_grad_()
        torch.manual_seed(5)
        return run(given), given

    result, given = at(0)
    slope = (torch.autograd.grad(result, given)[0] * step).sum()
    difference = (at(1e-6)[0] - at(-1e-6)[0]).detach() / 2e-6
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_plans_are_within_the_budget_and_no_slower_for_a_larger_one(checkpointed):
    batch = {"x": torch.randn(64, 32)}
    first = Stack(checkpointed=checkpointed)
    gradients(first, batch, memory_budget="auto", **ATEN)
    (peak, most), _ = plan_of(first)
    assert peak == most
    seen = []
    for share in (1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3):
        model = planned(lambda: Stack(checkpointed=checkpointed), batch, share, most)
        (peak, _), budget = plan_of(model)
        (note,) = [note for note in dcompile.receipt(model).notes if note.startswith("memory_budget=")]
        assert peak <= budget.allowed_bytes or "no plan is within the budget" in note
        assert ("regions kept" in note) == checkpointed
        seen.append((peak, float(note.split(" ms recomputed")[0].split()[-1])))
    assert len(set(seen)) > 3
    assert all(a[0] >= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(seen))


def test_checkpoints_are_kept_where_memory_allows_it():
    batch = {"x": torch.randn(64, 32)}
    model = Stack(checkpointed=True)
    gradients(model, batch, memory_budget="auto", **ATEN)
    (note,) = [note for note in dcompile.receipt(model).notes if note.startswith("memory_budget=")]
    assert "checkpoints: 4 of 4 regions kept" in note and "0.0 ms recomputed" in note


def test_with_our_kernels_gradients_stay_eagers():
    batch = {"x": torch.randn(64, 32)}
    torch.manual_seed(0)
    model = Stack()
    wanted = gradients(copy.deepcopy(model), batch)
    first = copy.deepcopy(model)
    gradients(first, batch, memory_budget="auto", **ATEN)
    most = plan_of(first)[0][1]
    for share in (0.6, 0.3):
        ours = copy.deepcopy(model)
        found = gradients(ours, batch, memory_budget=budget_for(model, share, most), receipt=False)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-6)


def test_a_traced_plan_is_found_again_at_the_next_start(tmp_path):
    batch = {"x": torch.randn(64, 32)}
    options = {"cache_dir": str(tmp_path), "receipt": False, "memory_budget": "auto"}
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model = Stack(checkpointed=True)
        gradients(model, batch, **options)
        found.append((plan_of(model)[0], dcompile.receipt(model).notes, plan_of(model)[1].plans))
    assert found[0] == found[1] and found[1][2] == [found[1][0]]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_graphs_that_are_not_all_of_a_call_keep_the_users_checkpoints():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x).relu()
            torch._dynamo.graph_break()
            return self.second(x)

    model = Broken()
    gradients(model, {"x": torch.randn(2, 4)}, memory_budget="auto", **ATEN)
    said = [note for note in dcompile.receipt(model).notes if note.startswith("memory_budget=auto does not apply")]
    assert len(said) == 2


# --- the first steps ---


def measured(monkeypatch, peak, predicted=(600, 900), allowed=640, budget_bytes=1000):
    """A budget whose plan was made, after two steps of an optimizer of which the second took `peak` bytes."""
    asked, again, notes = [], [], []
    services = SimpleNamespace(least=lambda group, subject, mine: asked.append((subject, mine)) or mine)
    adapter = SimpleNamespace(note=notes.append)
    model = SimpleNamespace(services=services, adapter=adapter, plan_again=lambda: again.append(1))
    kept = type("Model", (), {})()
    kept.__dict__.update(vars(model))
    budget = MemoryBudget(kept, "auto")
    budget.budget_bytes, budget.allowed_bytes, budget.plans = budget_bytes << 20, allowed << 20, []
    budget.plans.append((predicted[0] << 20, predicted[1] << 20))
    budget._hook = SimpleNamespace(remove=lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak << 20)
    budget.count_step()
    assert not asked
    budget.count_step()
    return budget, len(again), notes, kept


@pytest.mark.parametrize(("peak", "again"), [(995, 0), (1100, 1), (800, 1)])
def test_a_plan_that_missed_is_made_once_more(monkeypatch, peak, again):
    budget, times, notes, _kept = measured(monkeypatch, peak)
    assert times == again == len(notes)
    if again:
        expected = 600 + 1000 - peak
        assert abs((budget.allowed_bytes >> 20) - expected) <= expected / 64 and not budget.plans


def test_a_plan_that_already_saves_the_most_is_not_made_again(monkeypatch):
    assert measured(monkeypatch, 700, predicted=(900, 900))[1] == 0


def test_replanning_captures_the_graph_again_and_frees_the_old_one():
    batch = {"x": torch.randn(64, 32)}
    model = Stack()
    gradients(model, batch, memory_budget="auto", **ATEN)
    state = find_model(model)
    (_, most), budget = plan_of(model)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    budget.allowed_bytes, budget.plans = most * 3 // 4, []
    state.plan_again()
    model.zero_grad()
    model(**batch).double().square().mean().backward()
    assert len(state.graphs) == 1 and plan_of(model)[0][0] <= most * 3 // 4
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted[name])


# --- settings ---


@pytest.mark.parametrize(
    ("given", "nbytes"), [("70GiB", 70 << 30), ("0.5", 50), ("1", 100), ("512 MiB", 512 << 20), ("auto", 0), ("", 0)]
)
def test_budgets_are_sizes_or_parts_of_the_device(given, nbytes):
    assert memory_budget_bytes(given, 100) == nbytes


@pytest.mark.parametrize("given", ["70", "lots", "-1GiB", "0", "1.5", "GiB", "1..2GiB"])
def test_other_budgets_are_errors(given):
    with pytest.raises(OptionError, match="memory_budget"):
        Config.make(options={"memory_budget": given})


def test_two_budgets_contradict_each_other():
    with pytest.raises(OptionError, match="either memory_budget or activation_memory_budget"):
        Config.make(options={"memory_budget": "auto", "activation_memory_budget": 0.5})
