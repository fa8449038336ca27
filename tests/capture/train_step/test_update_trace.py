"""Optimizers in the backward's program by a trace of their own step: values and state are eager's."""

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.entry import find_model
from tests.capture.train_step.own_optimizers import Counting, Coupled, Lion


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def matrices(module):
    return [p for p in module.parameters() if p.ndim == 2]


def vectors(module):
    return [p for p in module.parameters() if p.ndim != 2]


OPTIMIZERS = {
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 3}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "own that couples parameters": (Coupled, {"lr": 1e-2}),
    "own that counts": (Counting, {"lr": 1e-2}),
}


def trained(make, steps=8, schedule=False):
    """Train eagerly and compiled; return models, optimizers, and what the compiled steps were."""
    models = [model(), model()]
    optimizers = [make(module) for module in models]
    dcompile.compile(models[1], optimizer=optimizers[1], options={"receipt": False})
    generator = torch.Generator().manual_seed(1)
    for batch in torch.randn(steps, 8, 20, generator=generator):
        for module, optimizer in zip(models, optimizers, strict=True):
            nn.functional.mse_loss(module(batch[:, :16]), batch[:, 16:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                optimizer.param_groups[0]["lr"] *= 0.9
    return models, optimizers, find_model(models[1]).step


def largest_difference(models, optimizers):
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert {n: [*s] for n, s in states[0].items()} == {n: [*s] for n, s in states[1].items()}
    pairs = list(zip(*(module.parameters() for module in models), strict=True))
    pairs += [(x, states[1][n][name]) for n, s in states[0].items() for name, x in s.items() if x is not None]
    for expected, found in pairs:
        assert type(expected) is type(found)
    with torch.no_grad():
        return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eight_steps_with_a_schedule_give_eagers_parameters_and_state(name):
    kind, settings = OPTIMIZERS[name]
    models, optimizers, step = trained(lambda module: kind(module.parameters(), **settings), schedule=True)
    assert largest_difference(models, optimizers) < 1e-6
    assert step.joined == 7 and not step.eager.total() > 1, step.remarks()
    joined = [key for key in step._programs if key[0] != "alone"]
    assert len(joined) == {"RAdam": 2, "ASGD": 3, "Adafactor": 2}.get(name, 1), "one for each phase of the optimizer"
