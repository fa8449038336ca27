"""Optimizers whose numbers change at each step, compiled: few programs, and eager's parameters."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import dcompile

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "NAdam": {},
    "AdamW": {"foreach": True},
    "Adagrad": {},
    "Adadelta": {},
}


def trained(name, schedule, dtype, compiles):
    torch.manual_seed(0)
    shapes = ((5,), (4, 3)) if "foreach" in OPTIMIZERS[name] else ((4, 3),)  # else each is traced by itself
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    optimizer = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name])
    scheduler = schedule(optimizer)
    step = dcompile.compile(optimizer.step, options={"receipt": False}) if compiles else optimizer.step
    for _ in range(12):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        step()
        scheduler.step()
    return parameters, step


def falling(optimizer):
    return ExponentialLR(optimizer, 0.9)


def cycling(optimizer):
    """Learning rate and momentum (of Adam, the first beta) at each step."""
    return OneCycleLR(optimizer, 0.01, total_steps=13)


@pytest.mark.parametrize(
    ("name", "schedule"),
    # one cycle changes the learning rate, too; the others have no momentum that it could change
    [(name, cycling if name in ("SGD", "AdamW", "NAdam") else falling) for name in OPTIMIZERS],
)
def test_a_schedule_takes_a_few_programs(name, schedule):
    torch._dynamo.reset()
    expected, _ = trained(name, schedule, torch.float32, compiles=False)
    found, step = trained(name, schedule, torch.float32, compiles=True)
    torch.testing.assert_close(found, expected)
    if torch.__version__ >= "2.13":  # 2.11 does not take the negative of a symbol for an operand
        assert len(step._dcompile_entry.model.graphs) <= 4  # without state, with it, and once numbers are symbols


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_rounds_where_eager_does(dtype):
    """Which has the factor of a sum in 16 bits on CPUs, a learning rate of 0.1 as 0.1001: as a constant or a symbol."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    for op in (torch.add, torch.sub):
        compiled = dcompile.compile(lambda x, y, a, op=op: op(x, y, alpha=-a), options={"receipt": False})
        for factor in (0.1, 0.09, 0.081, 0.0729):
            x, y = torch.randn(4096).to(dtype), torch.randn(4096).to(dtype)
            other = compiled(x, y, factor) != op(x, y, alpha=-factor)
            assert other.sum() <= 8  # eager rounds once where the processor multiplies and adds at once


@pytest.mark.parametrize("start", [0.2, 0.7])
def test_each_operation_with_a_factor_that_changes(start):
    def function(x, y, z, factor):
        total = torch.add(x, y, alpha=factor), torch.sub(x, y, alpha=factor), torch.full_like(x, factor)
        return *total, x.addcmul(y, z, value=factor), x.addcdiv(y, z, value=factor), x.lerp(y, factor), factor**z

    torch._dynamo.reset()
    compiled = dcompile.compile(function, options={"receipt": False})
    torch.manual_seed(0)
    for number in range(5):
        x, y, z = torch.randn(7), torch.randn(7), torch.rand(7) + 0.5
        factor = start + 0.03 * number
        torch.testing.assert_close(compiled(x, y, z, factor), function(x, y, z, factor))
    assert len(compiled._dcompile_entry.model.graphs) == 2
