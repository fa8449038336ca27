"""The optimizer's update in the backward's program, in the user's own loop: values are eager's."""

import copy
import gc
import sys
import weakref

import pytest
import torch
from torch import nn

import dcompile
from dcompile import compat
from dcompile.capture.entry import find_model
from dcompile.capture.graph_programs import GraphBackward
from dcompile.capture.train_step.optimizer_step import NORMS
from dcompile.errors import DcompileError

BATCH = 8
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW amsgrad fused": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    "Adam with decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "eps": 1e-3, "centered": True, "momentum": 0.5}),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def batches(count, rows=BATCH):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 20, generator=generator) for _ in range(count)]


def loss_of(module, batch):
    return nn.functional.mse_loss(module(batch[:, :16]), batch[:, 16:])


class Twins:
    """The same training eagerly and compiled with its optimizer, step by step."""

    def __init__(self, optimizer="AdamW", **changes):
        kind, settings = OPTIMIZERS[optimizer]
        self.models = [model(), model()]
        self.optimizers = [kind(m.parameters(), **{**settings, **changes}) for m in self.models]
        dcompile.compile(self.models[1], optimizer=self.optimizers[1], options={"receipt": False})

    @property
    def step(self):
        return find_model(self.models[1]).step

    def each(self):
        return zip(self.models, self.optimizers, strict=True)

    def train(self, data, clip=None, accumulate=1, change=lambda module, optimizer: None):
        """Train both; `change` runs between backward and step. Return losses and norms of both."""
        found = []
        for module, optimizer in self.each():
            found.append([])
            for first in range(0, len(data), accumulate):
                losses = []
                for batch in data[first : first + accumulate]:
                    losses.append(loss_of(module, batch) / accumulate)
                    losses[-1].backward()
                norm = nn.utils.clip_grad_norm_(module.parameters(), clip) if clip else 0
                change(module, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                found[-1] += [float(sum(map(torch.Tensor.detach, losses))), float(norm)]
        return found

    def differences(self):
        """Largest differences of parameters, and of the optimizers' states."""
        parameters = zip(*(m.parameters() for m in self.models), strict=True)
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        assert states[0].keys() == states[1].keys()
        pairs = [
            (value, states[1][number][name])
            for number, state in states[0].items()
            for name, value in state.items()
            if value is not None
        ]
        with torch.no_grad():
            return [max((float((a - b).abs().max()) for a, b in each), default=0) for each in (parameters, pairs)]

    def check(self, parameters=1e-6, state=1e-6):
        found = self.differences()
        assert found[0] <= parameters and found[1] <= state, found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_give_eagers_parameters_and_state(name, clip, accumulate):
    twins = Twins(name)
    eager, compiled = twins.train(batches(5 * accumulate), clip, accumulate)
    assert compiled == pytest.approx(eager, abs=2e-6)
    twins.check(state=1e-6 if name != "RMSprop" else 1e-5)
    assert twins.step.joined >= 4, "all but the first"


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum"])
def test_fifty_steps_with_a_scheduler_and_ragged_batches_give_eagers_parameters(name):
    twins = Twins(name)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50) for optimizer in twins.optimizers]
    for number in range(10):
        twins.train([*batches(4), *batches(1, rows=3)], clip=1.0 if number % 2 else None)
        for schedule in schedules:
            schedule.step()
    twins.check(1e-5, 1e-5)
    assert twins.step.joined >= 48


def test_a_learning_rate_changes_without_another_program():
    twins = Twins()
    twins.train(batches(3))
    programs = len(twins.step._programs)
    for number in range(5):
        for _, optimizer in twins.each():
            optimizer.param_groups[0]["lr"] = 0.02 / (number + 1)
        twins.train(batches(1))
    twins.check()
    assert len(twins.step._programs) == programs


def changed_betas(module, optimizer):
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def new_group(module, optimizer):
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.5, "weight_decay": 0.0})


def edited_gradient(module, optimizer):
    module[0].weight.grad.mul_(3).add_(0.1)


def replaced_gradient(module, optimizer):
    module[0].weight.grad = torch.ones_like(module[0].weight)


def dropped_gradient(module, optimizer):
    module[0].weight.grad = None


def replaced_state(module, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 1e-3)


def loaded_state(module, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] += 7
        state["exp_avg_sq"] *= 2
    optimizer.load_state_dict(saved)


def other_memory(module, optimizer):
    with torch.no_grad():
        module[0].bias.data = module[0].bias.data * 2


def frozen_parameter(module, optimizer):
    module[0].bias.requires_grad_(False)
    module[0].bias.grad = None


CHANGES = (
    changed_betas, new_group, edited_gradient, replaced_gradient, dropped_gradient, replaced_state, loaded_state,
    frozen_parameter,
)  # fmt: skip


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_backward_and_step_is_seen(change, clip):
    twins = Twins()
    twins.train(batches(3), clip)
    twins.train(batches(1), clip, change=change)
    twins.check()
    twins.train(batches(3), clip)
    twins.check()


@pytest.mark.parametrize("change", [*CHANGES, other_memory])
def test_a_change_between_steps_is_seen(change):
    if change in (edited_gradient, replaced_gradient, dropped_gradient):
        pytest.skip("there are no gradients between steps")
    twins = Twins()
    twins.train(batches(3))
    for module, optimizer in twins.each():
        change(module, optimizer)
    twins.train(batches(3))
    twins.check()


@pytest.mark.parametrize("kind", ["parameter", "after adding", "step"])
def test_a_hook_that_is_added_later_is_called_and_its_changes_count(kind):
    twins, called = Twins(), [0, 0]
    twins.train(batches(3))
    for number, (module, optimizer) in enumerate(twins.each()):

        def hook(*given, number=number, module=module):
            called[number] += 1
            if kind == "parameter":
                return given[0] * 2
            module[0].bias.grad.mul_(0.5)
            return None

        if kind == "parameter":
            module[0].bias.register_hook(hook)
        elif kind == "after adding":
            module[0].bias.register_post_accumulate_grad_hook(hook)
        else:
            optimizer.register_step_pre_hook(hook)
    twins.train(batches(3))
    twins.check()
    assert called[0] == called[1] == 3


def test_gradients_that_are_read_before_the_step_are_eagers_and_the_step_is_the_same():
    twins = Twins()
    twins.train(batches(2))
    seen = [[], []]
    for number, (module, optimizer) in enumerate(twins.each()):
        for batch in batches(2):
            loss_of(module, batch).backward()
            seen[number] += [p.grad.clone() for p in module.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(seen[1], seen[0], atol=1e-6, rtol=1e-5)
    twins.check()
    assert twins.step.separate["a gradient was read or changed before the step"] == 2


def test_a_gradient_that_an_update_has_consumed_says_so():
    twins = Twins()
    twins.train(batches(2))
    module, optimizer = twins.models[1], twins.optimizers[1]
    loss_of(module, batches(1)[0]).backward()
    optimizer.step()
    assert module[0].weight.grad.shape == module[0].weight.shape
    with pytest.raises(DcompileError, match="call zero_grad"):
        module[0].weight.grad.norm().item()
    with pytest.raises(DcompileError, match="call zero_grad"):
        loss_of(module, batches(1)[0]).backward()
    optimizer.zero_grad()
    loss_of(module, batches(1)[0]).backward()


def test_zero_grad_may_keep_the_gradients_memory():
    twins = Twins()
    for module, optimizer in twins.each():
        for batch in batches(4):
            loss_of(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert all(float(p.grad.abs().max()) == 0 for p in module.parameters())
    twins.check()


def test_gradients_asked_for_by_autograd_are_returned():
    twins = Twins()
    twins.train(batches(3))
    found = []
    for module, _ in twins.each():
        found.append(torch.autograd.grad(loss_of(module, batches(1)[0]), list(module.parameters())))
        assert all(p.grad is None for p in module.parameters())
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)
    for module, optimizer in twins.each():
        loss_of(module, batches(1)[0]).backward(inputs=[module[0].weight])
        optimizer.step()
        optimizer.zero_grad()
    twins.check()


def test_gradients_from_outside_the_model_are_added():
    twins = Twins()
    twins.train(batches(2))
    for module, optimizer in twins.each():
        for batch in batches(3):
            (loss_of(module, batch) + sum(p.square().sum() for p in module.parameters())).backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.check()


def test_a_model_that_is_called_twice_before_the_backward_is_trained_as_eagerly():
    twins = Twins()
    twins.train(batches(2))
    for module, optimizer in twins.each():
        first, second = batches(2)
        (loss_of(module, first) + loss_of(module, second)).backward()
        optimizer.step()
        optimizer.zero_grad()
    twins.check()


def test_an_evaluation_between_backward_and_step_changes_nothing():
    twins = Twins()
    twins.train(batches(2))
    for module, optimizer in twins.each():
        for batch in batches(3):
            loss_of(module, batch).backward()
            with torch.no_grad():
                module(batch[:, :16])
            optimizer.step()
            optimizer.zero_grad()
    twins.check()
    assert twins.step.joined == 4, "TorchDynamo finds no gradients as it compiles the evaluation"


@pytest.mark.parametrize("read", ["before the step", "after the step", "never"])
def test_a_norm_is_eagers_whenever_it_is_read(read):
    twins, found = Twins(), [[], []]
    for number, (module, optimizer) in enumerate(twins.each()):
        for place, batch in enumerate(batches(5)):
            loss_of(module, batch).backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1 * (1 + place))
            found[number] += [float(norm)] if read == "before the step" else []
            optimizer.step()
            found[number] += [float(norm)] if read == "after the step" else []
            optimizer.zero_grad()
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    twins.check()
    assert twins.step.joined == (0 if read == "before the step" else 4)


@pytest.mark.parametrize("how", ["some", "twice", "by hand", "infinity norm", "foreach", "by value"])
def test_other_ways_to_scale_gradients_give_eagers_parameters(how):
    def scale(module, optimizer):
        parameters = list(module.parameters())
        if how == "some":
            nn.utils.clip_grad_norm_(parameters[:2], 0.05)
        elif how == "twice":
            nn.utils.clip_grad_norm_(parameters, 0.5)
            nn.utils.clip_grad_norm_(parameters, 0.05)
        elif how == "by hand":
            total = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.grad.mul_(0.1 / (total + 1e-6))
        elif how == "infinity norm":
            nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=float("inf"))
        elif how == "foreach":
            nn.utils.clip_grad_norm_(parameters, 0.05, foreach=True)
        else:
            nn.utils.clip_grad_value_(parameters, 0.01)

    twins = Twins()
    twins.train(batches(5), change=scale)
    twins.check()


def test_a_scaler_that_meets_infinities_skips_the_step_as_eagerly():
    twins, scales = Twins(), []
    for module, optimizer in twins.each():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for number, batch in enumerate(batches(6)):
            loss = loss_of(module, batch) * (float("inf") if number == 3 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    twins.check()


def test_training_that_is_saved_and_resumed_is_the_one_that_is_not_interrupted():
    twins = Twins()
    twins.train(batches(3), clip=0.5)
    saved = copy.deepcopy((twins.models[1].state_dict(), twins.optimizers[1].state_dict()))
    again = Twins()
    again.models[1].load_state_dict(saved[0])
    again.optimizers[1].load_state_dict(saved[1])
    again.models[0].load_state_dict(twins.models[0].state_dict())
    again.optimizers[0].load_state_dict(copy.deepcopy(twins.optimizers[0].state_dict()))
    for each in (twins, again):
        each.train(batches(3), clip=0.5)
        each.check()
    for mine, other in zip(twins.models[1].parameters(), again.models[1].parameters(), strict=True):
        assert torch.equal(mine, other)
    assert again.step.joined == 2, "after a first step that tells which gradients exist"


def test_groups_with_their_own_settings_and_parameters_without_gradients_follow_eager():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(16, 4), nn.Linear(3, 3), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    twins = Twins.__new__(Twins)
    torch.manual_seed(0)
    first = Partly()
    twins.models = [first, copy.deepcopy(first)]
    twins.optimizers = [
        torch.optim.AdamW(
            [
                {"params": [m.used.weight, *m.unused.parameters()], "weight_decay": 0.3},
                {"params": [m.used.bias], "weight_decay": 0.0, "lr": 0.05},
            ],
            lr=1e-2,
        )
        for m in twins.models
    ]
    dcompile.compile(twins.models[1], optimizer=twins.optimizers[1], options={"receipt": False})
    twins.train(batches(5), clip=0.5)
    twins.check()
    assert twins.step.joined == 4


def test_weights_that_are_averaged_after_each_step_are_the_new_ones():
    twins, averages = Twins(), []
    for module, optimizer in twins.each():
        average = torch.optim.swa_utils.AveragedModel(module)
        for batch in batches(4):
            loss_of(module, batch).backward()
            optimizer.step()
            average.update_parameters(module)
            optimizer.zero_grad()
        averages.append(list(average.module.parameters()))
    torch.testing.assert_close(averages[1], averages[0], atol=1e-6, rtol=1e-5)


def test_parameters_that_a_step_has_changed_cannot_be_used_by_an_older_backward():
    twins = Twins()
    twins.train(batches(2))
    module, optimizer = twins.models[1], twins.optimizers[1]
    old = loss_of(module, batches(1)[0])
    loss_of(module, batches(1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_a_model_that_is_compiled_again_has_one_hook_and_joins_as_before():
    twins = Twins()
    twins.train(batches(2))
    dcompile.compile(twins.models[1], optimizer=twins.optimizers[1], options={"receipt": False})
    twins.train(batches(4))
    twins.check()
    assert twins.step.joined == 3


@pytest.mark.parametrize(("clip", "made"), [(None, 0), (1.0, 5)])
def test_a_step_uses_the_pending_gradients_and_norms_of_the_last_one(monkeypatch, clip, made):
    """Each takes 5 us: two of 150 parameters are more than the rest of the host's step."""
    twins = Twins()
    counts, make = [], compat.tensors.without_memory
    monkeypatch.setattr(compat.tensors, "without_memory", lambda *args: counts.append(args) or make(*args))
    for batch in batches(4):
        counts.clear()
        twins.train([batch], clip=clip)
    assert len(counts) == made, "of five numbers, from the norms to the factor, each is new"
    assert twins.step.joined == 3


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_closure_that_runs_the_backward_is_followed_by_the_update(clip):
    """As Lightning's Trainer gives one, in which it clips, too."""
    twins = Twins()
    for batch in batches(4):
        losses = []
        for module, optimizer in twins.each():

            def closure(module=module, optimizer=optimizer, batch=batch):
                optimizer.zero_grad()
                loss = loss_of(module, batch)
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                return loss

            losses.append(optimizer.step(closure) if clip else optimizer.step(closure=closure))
        torch.testing.assert_close(losses[1], losses[0])
    twins.check()
    assert twins.step.joined == 3 and twins.step.eager.total() == 1


def test_a_norm_that_must_be_finite_is_read_before_the_step():
    twins = Twins()
    for batch in [*batches(3), torch.full((8, 20), torch.inf)]:
        for module, optimizer in twins.each():
            loss_of(module, batch).backward()
            if batch.isinf().any():
                with pytest.raises(RuntimeError, match="non-finite"):
                    nn.utils.clip_grad_norm_(module.parameters(), 0.1, error_if_nonfinite=True)
            else:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1, error_if_nonfinite=True)
                optimizer.step()
            optimizer.zero_grad()
    twins.check()
    assert twins.step.separate[NORMS] == 2 and twins.step.updated == 2


def test_an_optimizer_that_calls_its_closure_repeatedly_steps_by_itself():
    trained = []
    for compiled in (False, True):
        module = model()
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
        if compiled:
            dcompile.compile(module, optimizer=optimizer, options={"receipt": False})
        for batch in batches(2):

            def closure(module=module, optimizer=optimizer, batch=batch):
                optimizer.zero_grad()
                loss = loss_of(module, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        trained.append([p.detach() for p in module.parameters()])
    torch.testing.assert_close(trained[1], trained[0], atol=1e-5, rtol=1e-4)


def test_two_models_of_one_optimizer_are_trained_as_eagerly():
    trained = []
    for compiled in (False, True):
        modules = [model(), model()]
        optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-2)
        if compiled:
            for module in modules:
                dcompile.compile(module, optimizer=optimizer, options={"receipt": False})
        for batch in batches(4):
            (loss_of(modules[0], batch) + loss_of(modules[1], batch * 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach() for module in modules for p in module.parameters()])
    torch.testing.assert_close(trained[1], trained[0], atol=1e-6, rtol=1e-5)


def test_sparse_gradients_are_the_optimizers():
    trained = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if compiled:
            dcompile.compile(module, optimizer=optimizer, options={"receipt": False})
        for _ in range(3):
            module(torch.tensor([[1, 2], [3, 1]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach() for p in module.parameters()])
    torch.testing.assert_close(trained[1], trained[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_an_anomaly_is_found_in_the_backward():
    twins = Twins()
    twins.train(batches(2))
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan"):
        (loss_of(twins.models[1], batches(1)[0]) * float("nan")).backward()


def test_gradients_that_were_read_are_freed_with_zero_grad():
    twins = Twins()
    twins.train(batches(2))
    module, optimizer = twins.models[1], twins.optimizers[1]
    for clip in (False, True):
        loss_of(module, batches(1)[0]).backward()
        if clip:
            float(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        gradient = module[0].weight.grad
        real = weakref.ref(gradient.computed if clip else gradient.detach())
        del gradient
        optimizer.step()
        optimizer.zero_grad()
        assert real() is None


def test_norms_that_the_user_keeps_stay_those_of_their_steps():
    twins, kept = Twins(), [[], []]
    for number, (module, optimizer) in enumerate(twins.each()):
        for batch in batches(4):
            loss_of(module, batch).backward()
            kept[number].append(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
    assert [float(x) for x in kept[1]] == pytest.approx([float(x) for x in kept[0]], rel=1e-5)


@pytest.mark.parametrize("clip", [False, True])
def test_nothing_holds_what_the_program_frees_as_it_runs(monkeypatch, clip):
    counts, run = [], GraphBackward.run_joined

    def counted(self, program, token, inputs):
        tangent = next(place for place, x in enumerate(inputs) if x.shape == (BATCH, 4))
        counts.append(sys.getrefcount(inputs[tangent]))
        return run(self, program, token, inputs)

    monkeypatch.setattr(GraphBackward, "run_joined", counted)
    twins = Twins()
    twins.train(batches(3), clip=0.1 if clip else None)
    assert counts == [2, 2], "the list of inputs, and the question"


def test_a_step_that_fails_to_compile_can_be_made_again(monkeypatch):
    twins = Twins()
    twins.train(batches(2))
    optimizer = twins.optimizers[1]
    optimizer.param_groups[0]["maximize"] = twins.optimizers[0].param_groups[0]["maximize"] = True  # another program
    for each, own in twins.each():
        loss_of(each, batches(1)[0]).backward()
        if own is optimizer:
            with monkeypatch.context() as patch:
                patch.setattr(GraphBackward, "build", lambda *given: (_ for _ in ()).throw(MemoryError("no memory")))
                with pytest.raises(MemoryError, match="no memory"):
                    optimizer.step()
        own.step()
        own.zero_grad()
    twins.check()


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum"])
def test_schedules_of_momentum_and_clipping_compile_nothing_anew(name, schedule):
    twins = Twins(name)
    kinds = {
        "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=20),
        "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3),
    }
    schedules = [kinds[schedule](optimizer) for optimizer in twins.optimizers]
    for number in range(8):
        twins.train(batches(1), clip=0.05 * (number + 1))
        for each in schedules:
            each.step()
    twins.check()
    assert len(twins.step._programs) <= 2, "one alone for the first step, one joined"


def test_a_tensor_that_the_backward_reads_and_that_changes_before_the_step_is_an_error():
    for change in ("input", "parameter", "memory"):
        twins = Twins()
        twins.train(batches(2))
        module, optimizer = twins.models[1], twins.optimizers[1]
        batch = batches(1)[0]
        loss_of(module, batch).backward()
        with torch.no_grad():
            if change == "input":
                batch.fill_(1)
            elif change == "parameter":
                module[3].weight.mul_(0.9)
            else:
                module[3].weight.data = module[3].weight.data * 0.9
        with pytest.raises(DcompileError, match="was changed between"):
            optimizer.step()


def test_norms_that_are_kept_without_clipping_are_eagers():
    twins, kept = Twins(), [[], []]
    for number, (module, optimizer) in enumerate(twins.each()):
        for batch in batches(3):
            loss_of(module, batch).backward()
            kept[number].append(torch.linalg.vector_norm(module[0].weight.grad))
            kept[number].append(nn.utils.get_total_norm([p.grad for p in module.parameters()]))
            module[0].weight.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()
    assert [float(x) for x in kept[1]] == pytest.approx([float(x) for x in kept[0]], rel=1e-5)
    twins.check()


def test_an_evaluation_between_the_step_and_zero_grad_is_compiled():
    twins = Twins()
    for module, optimizer in twins.each():
        for batch in batches(3):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            optimizer.step()
            module.eval()
            with torch.no_grad():
                module(batch[:3, :16])
            module.train()
    twins.check()


def test_a_step_without_gradients_does_nothing():
    twins = Twins()
    twins.train(batches(2))
    before = [p.detach().clone() for p in twins.models[1].parameters()]
    twins.optimizers[1].step()
    assert all(map(torch.equal, before, twins.models[1].parameters()))


@pytest.mark.parametrize("again", [False, True])
def test_assigned_parameters_are_trained_as_eagerly(again):
    twins = Twins()
    twins.train(batches(3))
    for number, module in enumerate(twins.models):
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
        if again:
            twins.optimizers[number] = torch.optim.AdamW(module.parameters(), lr=1e-2)
            if number:
                dcompile.compile(module, optimizer=twins.optimizers[1], options={"receipt": False})
    gc.collect()
    twins.train(batches(3))
    twins.check()


def test_parameters_in_one_memory_are_trained_as_eagerly():
    twins = Twins()
    for module in twins.models:
        flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        start = 0
        for p in module.parameters():
            p.data = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
    twins.train(batches(4), clip=0.1)
    twins.check()
    assert "parameters share memory, or are read as another dtype" in twins.step.separate


def test_two_parameters_with_one_gradient_are_clipped_once():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x + self.a + self.b

    trained = []
    for compiled in (False, True):
        module = Sum()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if compiled:
            dcompile.compile(module, optimizer=optimizer, options={"receipt": False})
        for _ in range(3):
            module(torch.ones(4)).sum().backward()
            float(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.detach() for p in module.parameters()])
    torch.testing.assert_close(trained[1], trained[0])


def test_train_step_that_fails_leaves_the_last_good_state():
    torch.manual_seed(0)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    faults = []

    def loss_fn(module, batch):
        loss = loss_of(module, batch)
        if faults:
            raise faults.pop()
        return loss

    step = dcompile.train_step(module, loss_fn, optimizer, clip_norm=0.5, accumulate=2, options={"receipt": False})
    for fault in (None, None, ValueError("a bad batch"), KeyboardInterrupt()):
        before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        if fault is None:
            assert step(batches(2)).norm is not None
            continue
        faults.append(fault)
        with pytest.raises(type(fault)):
            step(batches(2))
        assert all(p.grad is None for p in module.parameters())
        torch.testing.assert_close(before, (module.state_dict(), optimizer.state_dict()), rtol=0, atol=0)
    assert step([batches(1)[0]] * 2).loss.ndim == 0
    with pytest.raises(DcompileError, match="takes a sequence of 2"):
        step(batches(3))
