"""The hooks of a DeepSpeed engine, here one that stands for it: taken off the module, run around a call."""

import sys
import types

import pytest
import torch

import dcompile
from dcompile import compat
from tests.subject import anew

NAME = "deepspeed.runtime.engine"


class Engine(torch.nn.Module):
    """What DeepSpeed's does to a module: hooks that count."""

    def __init__(self, module):
        super().__init__()
        self.__dict__["module"] = module
        self.before = self.after = 0

        def count_before(module, args, kwargs):
            self.before += 1
            return (args[0] + 1, *args[1:]), kwargs

        def count_after(module, args, output):
            self.after += 1

        count_before.__module__ = count_after.__module__ = NAME
        module.register_forward_pre_hook(count_before, with_kwargs=True)
        module.register_forward_hook(count_after)

    def zero_optimization_stage(self):
        return 1


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, types.SimpleNamespace(DeepSpeedEngine=Engine))
    with anew():
        yield Engine(torch.nn.Linear(4, 4))


def test_hooks_run_around_the_compiled_call_and_are_not_guarded_on(engine):
    module, x = engine.module, torch.ones(2, 4)
    dcompile.compile(engine, options={"receipt": False})
    results = [module(x) for _ in range(4)]
    assert (engine.before, engine.after) == (4, 4)
    for result in results:
        torch.testing.assert_close(result, torch.nn.functional.linear(x + 1, module.weight, module.bias))
    receipt = dcompile.receipt(engine)
    assert (len(receipt.variants), receipt.graphs, receipt.graph_breaks) == (1, 1, 0)
    assert (receipt.adapter, receipt.eligible) == ("zero1", False)
    assert "options={'zero': 'graph'}" in receipt.reasons[0]


def test_users_hooks_stay(engine):
    seen = []
    engine.module.register_forward_hook(lambda module, args, output: seen.append(len(args)))
    taken = compat.deepspeed.hooks_on(engine.module)
    assert taken is not None and taken.engine is engine
    taken.take()
    assert len(engine.module._forward_hooks) == 1 and not engine.module._forward_pre_hooks
    engine.module(torch.ones(2, 4))
    assert seen == [1] and engine.before == 0


def test_hooks_stay_where_the_module_is_compiled_for_another_caller(engine):
    compiled = torch.compile(engine.module, backend="dcompile", options={"receipt": False})
    compiled(torch.ones(2, 4))
    engine.module(torch.ones(2, 4))
    assert (engine.before, engine.after) == (2, 2)
    assert len(engine.module._forward_pre_hooks) == 1


def test_a_module_without_an_engine_has_none():
    assert compat.deepspeed.hooks_on(torch.nn.Linear(2, 2)) is None
    assert not compat.deepspeed.is_engine(torch.nn.Linear(2, 2))


def test_an_engine_that_lacks_names_is_left_to_deepspeed(engine):
    assert "is_gradient_accumulation_boundary" in compat.deepspeed.missing_names(engine)
