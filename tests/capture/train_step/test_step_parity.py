"""Joined steps against eager: bit for bit where gradients are equal, in both doors, and through each change."""

import copy
import io

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.entry import find_model
from tests.capture.train_step import own_optimizers
from tests.capture.train_step.own_optimizers import Coupled, Floored, Global, Kahan, Lion, Parts, Reading, Scheduled
from tests.capture.train_step.test_optimizer_step import Twins, batches, loss_of, model

QUIET = {"receipt": False}
SGD = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.3},
)


@pytest.fixture(autouse=True)
def compilers():
    """Kernels in this file: the interpreter of the other tests of capture rounds a product in float64."""
    torch._dynamo.reset()


class Exact(nn.Module):
    """A product whose gradients are its input, to the last bit."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(shape).to(dtype) for shape in ((16, 8), (64,)))

    def forward(self, x):
        return sum((p * x[: p.numel()].view_as(p)).sum() for p in self.parts)


def exact(make, dtype=torch.float32, steps=6):
    """Train eagerly and compiled with equal gradients, and check each bit of parameters and state; return the steps."""
    modules = [Exact(dtype), Exact(dtype)]
    optimizers = [make(module) for module in modules]
    dcompile.compile(modules[1], optimizer=optimizers[1], options=QUIET)
    for x in torch.randn(steps, 128, generator=torch.Generator().manual_seed(1)).to(dtype):
        for module, optimizer in zip(modules, optimizers, strict=True):
            module(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9
    for mine, its in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(mine, its), float((mine - its).detach().abs().max())
        for name, value in optimizers[0].state[mine].items():
            other = optimizers[1].state[its][name]
            assert value is other is None or torch.equal(torch.as_tensor(value), torch.as_tensor(other)), name
    return find_model(modules[1]).step


@pytest.mark.parametrize("settings", SGD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_is_eagers_bit_for_bit_where_gradients_are_equal(settings, dtype):
    for foreach in (False, True):
        step = exact(
            lambda m, foreach=foreach: torch.optim.SGD(m.parameters(), lr=0.1, foreach=foreach, **settings), dtype
        )
        assert step.joined == 5


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_torchs_optimizers_round_parameters_of_16_bits_once_and_are_as_near_to_the_truth_as_eager(name):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    modules = [Exact(torch.float64), Exact(torch.bfloat16), Exact(torch.bfloat16)]
    modules[0].load_state_dict(modules[1].state_dict())
    optimizers = [getattr(torch.optim, name)(m.parameters(), lr=0.1, **settings) for m in modules]
    dcompile.compile(modules[2], optimizer=optimizers[2], options=QUIET)
    for x in torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16():
        for module, optimizer in zip(modules, optimizers, strict=True):
            module(x.to(module.parts[0].dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
    truth, *found = (torch.cat([p.detach().double().flatten() for p in module.parts]) for module in modules)
    eager, joined = ((each - truth).norm() for each in found)
    assert joined <= 1.05 * eager and find_model(modules[2]).step.joined == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Kahan, Lion, Parts, Coupled])
def test_a_users_class_rounds_parameters_of_16_bits_as_eagerly(kind, dtype):
    assert exact(lambda m: kind(m.parameters(), lr=1e-2), dtype).joined == 5


def test_math_of_step_counts_is_followed_by_one_trace():
    step = exact(lambda m: Scheduled(m.parameters(), lr=0.1), torch.float64, steps=14)
    assert step.joined == 13 and len(step._programs) == 1
    assert own_optimizers.math is __import__("math"), "the module's own names stay"


def test_what_math_says_of_a_number_is_the_same_in_all_steps_of_a_trace():
    step = exact(lambda m: Floored(m.parameters(), lr=0.1), steps=10)
    assert step.joined == 9 and len(step._programs) == 3


def test_a_step_that_sets_a_global_variable_or_reads_a_tensor_is_the_optimizers_with_a_reason():
    own_optimizers.STEPS_MADE, twins = 0, Twins()
    twins.models[0] = model()
    for kind, why in (
        (Global, "it sets global variables, such as STEPS_MADE"),
        (Reading, "Reading cannot be traced: "),
    ):
        module = model()
        optimizer = kind(module.parameters(), lr=0.1)
        dcompile.compile(module, optimizer=optimizer, options=QUIET)
        for batch in batches(3):
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        (line,) = (line for line in find_model(module).step.remarks() if "by the optimizer itself" in line)
        assert line.startswith("optimizer: 3 steps by the optimizer itself: ") and why in line
    assert own_optimizers.STEPS_MADE == 3, "once for each step, and not for traces"


def two_groups(kind, module, **settings):
    """An optimizer of two groups; Muon's are of matrices."""
    own = [p for p in module.parameters() if kind is not torch.optim.Muon or p.ndim == 2]
    return kind([{"params": own[:1], "lr": 3e-3}, {"params": own[1:]}], lr=1e-3, **settings)


@pytest.mark.parametrize("name", ["NAdam", "Muon", "RAdam", "Adafactor"])
def test_state_of_several_groups_goes_from_eager_to_compiled_and_back(name):
    def made(compiled):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32, bias=name != "Muon"), nn.GELU(), nn.Linear(32, 4, bias=name != "Muon"))
        optimizer = two_groups(getattr(torch.optim, name), module, weight_decay=0.1)
        if compiled:
            dcompile.compile(module, optimizer=optimizer, options=QUIET)
        return module, optimizer

    def train(module, optimizer, data):
        for batch in data:
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    straight, data = made(False), batches(9)
    train(*straight, data)
    saved = None
    for place, compiled in enumerate((True, False, True)):
        module, optimizer = made(compiled)
        if saved is not None:
            states = torch.load(io.BytesIO(saved), weights_only=True)
            module.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        train(module, optimizer, data[3 * place : 3 * place + 3])
        file = io.BytesIO()
        torch.save([module.state_dict(), optimizer.state_dict()], file)
        saved = file.getvalue()
    assert find_model(module).step.joined == 2
    for expected, found in zip(straight[0].parameters(), module.parameters(), strict=True):
        # Muon's update is computed in bfloat16: see tests/distributed/test_step_parity.py
        assert (expected - found).detach().abs().max() < (1e-6 if name != "Muon" else 1e-4)
    before, after = straight[1].state_dict(), optimizer.state_dict()
    assert [*before["state"]] == [*after["state"]] and before["param_groups"] == after["param_groups"]


# --- changes between two steps


def momentum(module, optimizer):
    optimizer.param_groups[0]["momentum"] = 0.5


def decay(module, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.3


def frozen_layer(module, optimizer):
    module[0].requires_grad_(False)


def replaced_parameter(module, optimizer):
    old, new = module[0].weight, nn.Parameter(torch.full_like(module[0].weight, 0.05))
    module[0].weight = new
    parameters = optimizer.param_groups[0]["params"]
    parameters[:] = [new if p is old else p for p in parameters]
    optimizer.state.pop(old, None)


def loaded_model(module, optimizer):
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


def cleared_state(module, optimizer):
    optimizer.state.clear()


def hook_behind_the_step(module, optimizer):
    optimizer.register_step_post_hook(lambda *_: torch._foreach_mul_([p.detach() for p in module.parameters()], 0.99))


@pytest.mark.parametrize(
    "change",
    [momentum, decay, frozen_layer, replaced_parameter, loaded_model, cleared_state, hook_behind_the_step],
)
def test_a_change_of_settings_parameters_or_state_is_seen(change):
    twins = Twins("SGD with momentum", lr=0.01)
    twins.train(batches(3))
    for each in twins.each():
        change(*each)
    twins.train(batches(3))
    twins.check()
    assert twins.step.joined >= (2 if change is replaced_parameter else 4), twins.step.remarks()


def test_another_dtype_of_the_model_is_seen():
    twins = Twins("SGD")
    twins.train(batches(3))
    for module, _ in twins.each():
        module.to(torch.float64)
    twins.train([batch.double() for batch in batches(3)])
    twins.check()
    assert all(p.dtype is torch.float64 for p in twins.models[1].parameters()) and twins.step.joined == 4


def test_gradients_may_be_cleared_before_the_backward_in_place_of_after_the_step():
    twins = Twins()
    for module, optimizer in twins.each():
        for batch in batches(5):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
    twins.check()
    assert twins.step.joined == 4


def test_fifty_calls_of_train_step_with_a_schedule_and_averaged_weights_are_eagers():
    twins, averages = Twins(), []
    del twins.optimizers[1]
    twins.models[1] = module = model()
    twins.optimizers.append(torch.optim.AdamW(module.parameters(), lr=1e-2))
    step = dcompile.train_step(module, loss_of, twins.optimizers[1], clip_norm=0.3, accumulate=2, options=QUIET)
    for number, (module, optimizer) in enumerate(twins.each()):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=50)
        kept, mean = copy.deepcopy(list(module.parameters())), torch.optim.swa_utils.AveragedModel(module)
        data = [*batches(94), *batches(6, rows=3)]
        for micro in zip(data[::2], data[1::2], strict=True):
            if number:
                step(micro)
            else:
                for batch in micro:
                    (loss_of(module, batch) / 2).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            with torch.no_grad():
                torch._foreach_lerp_(kept, list(module.parameters()), 0.1)
            mean.update_parameters(module)
        averages.append([*kept, *mean.module.parameters()])
    torch.testing.assert_close(averages[1], averages[0], atol=1e-6, rtol=1e-5)
    twins.check()
    assert twins.step.joined == 49, "all but the first"
