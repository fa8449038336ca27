"""A receipt names parameters whose newest gradient is not finite, and steps do nothing for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dcompile
from dcompile.explain import health
from dcompile.explain.health import MAX_NAMED

LINE = "gradients that are infinite or no number: "


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = list[str]()
    monkeypatch.setattr(health, "report", lambda _, text: found.append(text))
    return found


class Logs(nn.Module):
    """Of zeros, the second layer's gradient is infinite; the first layer's is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.apart = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).log().sum() + self.apart(x.clamp(1, 2)).sum()


def zero(model: Logs) -> None:
    with torch.no_grad():
        for parameter in (*model.first.parameters(), *model.second.parameters()):
            parameter.zero_()


def noted(model: Any) -> list[str]:
    return [note for note in dcompile.receipt(model).notes if note.startswith(LINE)]


def test_finite_gradients_have_no_line(messages: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    dcompile.compile(model, options={"receipt": False})
    model(torch.ones(2, 3)).sum().backward()
    assert not noted(model) and not messages


def test_gradients_that_are_not_finite_are_named(messages: list[str]) -> None:
    model = Logs()
    zero(model)
    dcompile.compile(model, options={"receipt": False})
    model(torch.ones(2, 3)).backward()
    (line,) = noted(model)
    assert line == LINE + "first.weight, first.bias, second.weight, second.bias"
    assert messages == [f"rank 0: {line}"]
    assert noted(model) == [line] and len(messages) == 1, "one warning"
    model.zero_grad()
    assert not noted(model)


def test_many_are_counted(messages: list[str]) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    dcompile.compile(model, options={"receipt": False})
    (model(torch.ones(2, 2)).sum() * float("inf")).backward()
    (line,) = noted(model)
    assert line.count("weight") == MAX_NAMED / 2 and line.endswith("and 4 more")
    assert messages == [f"rank 0: {line}"]


@pytest.mark.parametrize("how", ["clips", "scales", "both"])
def test_gradients_that_an_update_has_used_are_named(how: str, messages: list[str]) -> None:
    """By what the program of backward and update measures: norms, or GradScaler's check."""
    model = Logs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dcompile.compile(model, optimizer=optimizer, options={"receipt": False})
    scaler = torch.amp.GradScaler("cpu", enabled=how != "clips")
    for number in range(4):
        if number == 3:
            assert not noted(model)
            zero(model)
        else:
            with torch.no_grad():
                model.second.bias.fill_(9.0)
        scaler.scale(model(torch.ones(2, 3) / 8)).backward()
        scaler.unscale_(optimizer)
        if how != "scales":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert "the updates of" in str(dcompile.receipt(model)), dcompile.receipt(model)
    assert noted(model) == [LINE + "first.weight, first.bias, second.weight, second.bias"]


def test_a_receipt_leaves_a_backward_waiting() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dcompile.compile(model, optimizer=optimizer, options={"receipt": False})
    for _ in range(4):
        model(torch.ones(2, 3)).sum().backward()
        assert not noted(model)
        optimizer.step()
        optimizer.zero_grad()
    assert "the updates of 3 steps ran in the backward's program" in str(dcompile.receipt(model))
