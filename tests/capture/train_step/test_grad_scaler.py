"""GradScaler's unscaling, check and skipped steps in the backward's program: values are eager's."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.entry import find_model
from dcompile.capture.graph_programs import GraphBackward
from dcompile.capture.train_step import optimizer_state
from dcompile.capture.train_step.optimizer_step import FIRST, NORMS, READ
from tests.capture.train_step.own_optimizers import Counting, Lion
from tests.capture.train_step.test_optimizer_step import batches, loss_of, model

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "own": (Lion, {"lr": 1e-3}),
    "own that counts": (Counting, {"lr": 1e-2}),
}
BAD = (3, 4, 6)
"""Steps whose losses are infinite."""


def state_of(module, optimizer):
    """Parameters and state, counters too."""
    state = optimizer.state_dict()["state"]
    named = {(number, name): torch.as_tensor(x) for number, own in state.items() for name, x in own.items()}
    return {**dict(module.named_parameters()), **named}


def differences(twins):
    first, second = (state_of(module, optimizer) for module, optimizer, _ in twins)
    assert first.keys() == second.keys()
    with torch.no_grad():
        return max(float((value - second[name]).abs().max()) for name, value in first.items())


def pair(name, **settings):
    """(model, optimizer, scaler), eager and compiled."""
    kind, given = OPTIMIZERS[name]
    made = []
    for _ in range(2):
        module = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        made.append((module, kind(module.parameters(), **given, **settings), scaler))
    dcompile.compile(made[1][0], optimizer=made[1][1], options={"receipt": False})
    return made


def train(module, optimizer, scaler, data, bad=BAD, clip=None, unscales=False, accumulate=1, change=None):
    """Train; check that infinite steps change nothing. Return losses, norms and scales. `change`: see `twice`."""
    found = []
    for step in range(len(data) // accumulate):
        before = {name: x.detach().clone() for name, x in state_of(module, optimizer).items()} if step in bad else {}
        for batch in data[step * accumulate : (step + 1) * accumulate]:
            loss = loss_of(module, batch) / accumulate
            scaler.scale(loss * torch.inf if step in bad else loss).backward()
        norm = torch.zeros(())
        if clip or unscales:
            scaler.unscale_(optimizer)
        if clip:
            norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
        if change is not None:
            change(module, optimizer, scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = state_of(module, optimizer)
        assert all(torch.equal(x, after[name]) for name, x in before.items()), "bit for bit"
        found += [float(loss.detach()), scaler.get_scale()] + ([] if step in bad else [float(norm)])
    return found


def check(twins, data, joined, **settings):
    eager, compiled = (train(*each, data, **settings) for each in twins)
    assert compiled == pytest.approx(eager, abs=2e-6, nan_ok=True)
    assert twins[0][2].state_dict() == twins[1][2].state_dict()
    assert differences(twins) <= 1e-6
    step = find_model(twins[1][0]).step
    assert step.joined == joined, step.remarks()
    return step


@pytest.mark.parametrize(
    ("clip", "unscales", "accumulate"), [(None, False, 1), (None, True, 3), (0.05, True, 1), (0.05, True, 3)]
)
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD"])
def test_infinite_steps_are_skipped_and_others_are_eagers(name, clip, unscales, accumulate):
    step = check(pair(name), batches(8 * accumulate), 7, clip=clip, unscales=unscales, accumulate=accumulate)
    assert "optimizer: the updates of 7 steps ran in the backward's program" in step.remarks()


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "own", "own that counts"])
def test_other_optimizers_skip_infinite_steps(name):
    check(pair(name), batches(10), 9, clip=0.05)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "own that counts"])
def test_the_host_counts_a_step_that_the_device_may_skip_two_steps_later(monkeypatch, name):
    """As on a GPU, where reading a number at once would wait for it."""
    reads, started = [], []

    def read_later(number):
        started.append(float(number))
        at = len(started)
        return lambda: reads.append((at, len(started))) or started[at - 1]

    twins, data = pair(name), batches(12)
    monkeypatch.setattr(optimizer_state, "traits_of", lambda kind: SimpleNamespace(is_host=False))
    monkeypatch.setattr(optimizer_state, "_read_later", read_later)
    state_dict = torch.optim.Optimizer.state_dict
    for module, optimizer, scaler in twins:
        for step, batch in enumerate(data):
            scaler.scale(loss_of(module, batch) * (torch.inf if step in BAD else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    step = find_model(twins[1][0]).step
    assert step.joined == 11 and started == [float(at in BAD) for at in range(1, 12)], step.remarks()
    early = [at for at, newest in reads if newest < at + 1]
    # RAdam takes another branch from its sixth step on, so that it must know which step it makes
    assert len(reads) >= 9 and len(early) <= (2 if name == "RAdam" else 0), reads
    assert state_dict(twins[1][1])["state"] and len(reads) == 11, "state_dict() asks for the rest"
    assert differences(twins) <= 1e-6


def test_a_counter_that_is_set_while_a_step_is_not_counted_is_read_again(monkeypatch):
    twins, data = pair("AdamW"), batches(9)
    monkeypatch.setattr(optimizer_state, "traits_of", lambda kind: SimpleNamespace(is_host=False))
    for number, (module, optimizer, scaler) in enumerate(twins):
        for step, batch in enumerate(data):
            scaler.scale(loss_of(module, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 5:
                for state in optimizer.state.values():
                    state["step"] += 10
        assert number == 0 or find_model(module).step.joined == 8
    assert differences(twins) <= 1e-6


def read_gradient(module, optimizer, scaler):
    module[0].weight.grad.abs().max().item()


def edited_gradient(module, optimizer, scaler):
    module[0].weight.grad.mul_(0.5)


def read_check(module, optimizer, scaler):
    assert float(sum(scaler._found_inf_per_device(optimizer).values())) in (0.0, 1.0)


def hooked(module, optimizer, scaler):
    if not hasattr(optimizer, "seen"):
        optimizer.seen = []
        optimizer.register_step_post_hook(lambda *given: optimizer.seen.append(given))


def wrapped(module, optimizer, scaler):
    own = type(optimizer).step
    optimizer.step = lambda *given, **more: own(optimizer, *given, **more)


WATCHED = "the optimizer's step is wrapped, or has hooks, which GradScaler's skipped steps do not call"


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (read_gradient, READ),
        (edited_gradient, READ),
        (read_check, "GradScaler's check was read before the step"),
        (hooked, WATCHED),
        (wrapped, WATCHED),
    ],
)
def test_what_cannot_be_proven_runs_apart_with_a_reason(change, why, clip):
    step = check(pair("AdamW"), batches(5), 0, bad=(3,), clip=clip, unscales=True, change=change)
    assert step.separate[why] == 3, step.remarks()


def test_a_scaler_with_methods_of_its_own_runs_apart():
    class Own(torch.amp.GradScaler):
        def _maybe_opt_step(self, optimizer, *given, **more):
            return super()._maybe_opt_step(optimizer, *given, **more)

    class Renamed(torch.amp.GradScaler):
        pass

    for kind, joined in ((Own, 0), (Renamed, 4)):
        twins = [
            (module, optimizer, kind("cpu", init_scale=2.0**10, growth_interval=2))
            for module, optimizer, _ in pair("AdamW")
        ]
        step = check(twins, batches(5), joined, bad=(3,))
        assert joined or step.separate["Own has its own way to unscale, check or step"] == 3, step.remarks()


@pytest.mark.parametrize("how", ["no step", "by the optimizer", "norm first", "another scaler", "some", "both fused"])
def test_unusual_orders_of_scaler_and_step_are_eagers(how):
    twins = pair("AdamW fused" if how == "both fused" else "AdamW")
    for module, optimizer, scaler in twins:
        other = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step, batch in enumerate(batches(6)):
            scaler.scale(loss_of(module, batch) * (torch.inf if step == 3 and how == "no step" else 1)).backward()
            if how == "no step":
                scaler.unscale_(optimizer)
                scaler.update()
                if step == 3:
                    optimizer.zero_grad()
                optimizer.step()
            elif how == "by the optimizer":
                scaler.unscale_(optimizer)
                optimizer.step()
                scaler.update()
            elif how == "norm first":
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            elif how == "another scaler":
                other.scale(torch.ones(()))
                scaler.unscale_(optimizer)
                other.step(optimizer)
                scaler.update()
                other.update()
            elif how == "some":
                scaler.unscale_(torch.optim.SGD([module[0].weight], lr=1.0))
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.grad_scale = torch.full((), 4.0)  # which torch multiplies by the scaler's
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    assert differences(twins) <= 1e-6
    step = find_model(twins[1][0]).step
    assert step.joined == (5 if how == "both fused" else 0), step.remarks()
    reasons = {
        "no step": "GradScaler's check was read before the step",
        "by the optimizer": "gradients are unscaled, and the step is not GradScaler's",
        "norm first": NORMS,
        "another scaler": "gradients are unscaled twice",
        "some": "gradients are unscaled twice",
    }
    assert how == "both fused" or step.separate[reasons[how]] >= 3, step.remarks()


def test_one_scaler_of_two_models_skips_the_step_of_one():
    scales, trained = [], []
    for compiled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        modules = [model(), model()]
        optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]
        for module, optimizer in zip(modules, optimizers, strict=True):
            if compiled:
                dcompile.compile(module, optimizer=optimizer, options={"receipt": False})
        for step, batch in enumerate(batches(6)):
            for number, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
                loss = loss_of(module, batch) * (torch.inf if step == 3 and number else 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            for optimizer in optimizers:
                optimizer.zero_grad()
        trained.append([x for each in zip(modules, optimizers, strict=True) for x in state_of(*each).values()])
        assert not compiled or [find_model(module).step.joined for module in modules] == [5, 5]
    assert scales[:6] == scales[6:]
    torch.testing.assert_close(trained[1], trained[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.05, 3)])
def test_train_step_unscales_and_skips_in_one_program(clip, accumulate):
    (eager, *others), (module, optimizer, scaler) = pair("AdamW")
    data, now = batches(8 * accumulate), [0]

    def loss_fn(module, batch):
        return loss_of(module, batch) * (torch.inf if now[0] in BAD else 1)

    expected = train(eager, *others, data, clip=clip, accumulate=accumulate)
    step = dcompile.train_step(
        module, loss_fn, optimizer, clip_norm=clip, accumulate=accumulate, scaler=scaler, options={"receipt": False}
    )
    norms = []
    for now[0] in range(8):
        given = data[now[0] * accumulate : (now[0] + 1) * accumulate]
        result = step(given[0] if accumulate == 1 else given)
        norms += [] if now[0] in BAD or not clip else [float(result.norm)]
    assert find_model(module).step.joined == 7
    assert differences([(eager, *others), (module, optimizer, scaler)]) <= 1e-6
    assert scaler.state_dict() == others[1].state_dict()
    assert not clip or norms == pytest.approx(norms_of(expected), abs=2e-6)


def norms_of(found):
    """Norms among the results of `train`."""
    norms, rest = [], list(found)
    for step in range(8):
        del rest[:2]
        norms += [] if step in BAD else [rest.pop(0)]
    return norms


class InTwoDtypes(nn.Module):
    """Parameters in float32 and bfloat16, of which GradScaler unscales one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4, dtype=torch.bfloat16)

    def forward(self, x):
        return self.second(self.first(x).bfloat16()).float()


@pytest.mark.parametrize("way", ["autocast", "two dtypes"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradients_that_overflow_in_float16_and_of_several_dtypes(way, clip):
    """Rounding differs from eager's: the first training is dcompile's, without the optimizer."""
    twins = []
    for joins in (False, True):
        module = model() if way == "autocast" else InTwoDtypes()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        dcompile.compile(module, optimizer=optimizer if joins else None, options={"receipt": False})
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22 if way == "autocast" else 4.0, growth_interval=3)
        twins.append((module, optimizer, scaler))
    scales = [[], []]
    for found, (module, optimizer, scaler) in zip(scales, twins, strict=True):
        for step, batch in enumerate(batches(12)):
            with torch.autocast("cpu", torch.float16, enabled=way == "autocast"):
                loss = loss_of(module, batch)
            scaler.scale(loss * torch.inf if way != "autocast" and step == 3 else loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(scaler.get_scale())
    step = find_model(twins[1][0]).step
    joined = scales[1][-step.joined - 1 :]
    assert scales[0] == scales[1] and any(b < a for a, b in pairwise(joined)), scales
    # 16-bit updates are computed in float32 and rounded once
    assert differences(twins) <= (1e-6 if way == "autocast" else 2e-3)
    # until the first step is made, there is no state
    assert step.joined == (11 if way == "two dtypes" else 6), step.remarks()


def test_training_that_is_saved_after_a_skipped_step_is_resumed():
    (module, optimizer, scaler), again = pair("AdamW")[1], pair("AdamW")[1]
    data = batches(8)
    train(module, optimizer, scaler, data[:4])
    saved = [copy.deepcopy(each.state_dict()) for each in (module, optimizer, scaler)]
    for each, state in zip(again, saved, strict=True):
        each.load_state_dict(state)
    for each in ((module, optimizer, scaler), again):
        train(*each, data[4:], bad=(1,))
    assert differences([(module, optimizer, scaler), again]) == 0 and scaler.state_dict() == again[2].state_dict()


@pytest.mark.parametrize("way", ["step", "unscale_", "train_step"])
@pytest.mark.parametrize("where", ["take", "run_joined"])
def test_a_step_that_is_interrupted_has_not_happened_to_the_scaler_either(monkeypatch, way, where):
    (*eager, scaler), (module, optimizer, own) = pair("AdamW")
    data, original, now = batches(6), getattr(GraphBackward, where), [0]
    clip = None if way == "step" else 0.05
    train(*eager, scaler, [batch for at, batch in enumerate(data) if at != 3], bad=(), clip=clip)

    def fails(*given):
        if now[0] == 3:
            raise KeyboardInterrupt
        return original(*given)

    def make_step(batch):
        own.scale(loss_of(module, batch)).backward()
        if clip:
            own.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        own.step(optimizer)
        own.update()

    monkeypatch.setattr(GraphBackward, where, fails)
    step = make_step
    if way == "train_step":
        step = dcompile.train_step(module, loss_of, optimizer, clip_norm=clip, scaler=own, options={"receipt": False})
    for now[0], batch in enumerate(data):
        try:
            step(batch)
        except KeyboardInterrupt:
            assert now[0] == 3
        optimizer.zero_grad()
    assert differences([(*eager, scaler), (module, optimizer, own)]) <= 1e-6
    assert own.state_dict() == scaler.state_dict() and find_model(module).step.joined == 4


def test_the_first_step_may_be_infinite():
    step = check(pair("AdamW"), batches(4), 2, bad=(0,))
    assert step.eager[FIRST] == 1
