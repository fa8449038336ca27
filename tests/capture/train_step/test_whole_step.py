"""`train_step` as one program of forward, backward and update: values are those of the forward by itself."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.entry import find_model
from dcompile.capture.train_step.deferred_forward import CHANGED, OTHER, READ, SCALED, PendingResult
from dcompile.capture.train_step.optimizer_step import FORWARD
from dcompile.errors import DcompileError

# Dynamo itself looks at .grad of a non-leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
QUIET = {"receipt": False}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


@pytest.fixture(autouse=True)
def compilers():
    """Kernels in this file, as the bits of both ways are compared."""
    torch._dynamo.reset()


class Net(nn.Module):
    """A model that returns its loss, and what that is made of."""

    def __init__(self, middle=nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), middle(), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x, y):
        found = self.body(x)
        return nn.functional.mse_loss(found, y), found


def batches(count, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 20, generator=generator) for _ in range(count)]


def own_loss(module, batch):
    return module(batch[:, :16], batch[:, 16:])[0]


def read_loss(module, batch):
    """The same loss, behind a look at another result, for which the forward runs."""
    loss, found = module(batch[:, :16], batch[:, 16:])
    found.sum()
    return loss


class Trained:
    """A model, and the steps that train it."""

    def __init__(self, loss_fn=own_loss, optimizer="SGD", middle=nn.Identity, **settings):
        torch.manual_seed(5)  # of random numbers in steps
        kind, given = OPTIMIZERS[optimizer]
        self.module = Net(middle)
        self.optimizer = kind(self.module.parameters(), **given)
        self.run = dcompile.train_step(self.module, loss_fn, self.optimizer, options=QUIET, **settings)
        torch.manual_seed(5)

    @property
    def step(self):
        return find_model(self.module).step

    def train(self, data, accumulate=1):
        groups = [data[first : first + accumulate] for first in range(0, len(data), accumulate)]
        return [self.run(group if accumulate > 1 else group[0]) for group in groups]

    def state(self):
        own = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return [*self.module.state_dict().values(), *own]


def check_equal(one, other, found, expected):
    for mine, its in zip(one.state(), other.state(), strict=True):
        assert torch.equal(mine, its), float((mine.double() - its.double()).abs().max())
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine.loss, its.loss) and not mine.loss.requires_grad
        assert mine.norm is its.norm is None or torch.equal(mine.norm, its.norm)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_program_has_the_bits_of_forward_and_backward_by_themselves(optimizer, clip_norm, accumulate):
    one, other = (Trained(f, optimizer, clip_norm=clip_norm, accumulate=accumulate) for f in (own_loss, read_loss))
    data = batches(6 * accumulate)
    check_equal(one, other, one.train(data, accumulate), other.train(data, accumulate))
    assert one.step.whole == 5 and other.step.whole == 0 and other.step.joined >= 5
    assert sum(other.step.forwards.separate.values()) == 6


class Drop(nn.Dropout):
    def __init__(self):
        super().__init__(0.3)


class Norm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(32)


@pytest.mark.parametrize("middle", [Drop, Norm])
def test_random_numbers_and_buffers_are_those_of_the_forward_by_itself(middle):
    one, other = Trained(own_loss, middle=middle), Trained(read_loss, middle=middle)
    torch.manual_seed(7)
    found = one.train(batches(6))
    torch.manual_seed(7)
    check_equal(one, other, found, other.train(batches(6)))
    assert one.step.whole == 5
    for mine, its in zip(one.module.buffers(), other.module.buffers(), strict=True):
        assert mine._version == its._version > 0


class Rows(Net):
    """A model whose other result is a view of a product."""

    def forward(self, x, y):
        found = self.body(x.view(2, -1, 16)).view(-1, 4)
        return nn.functional.mse_loss(found.float(), y), found.view(2, -1, 4)


def test_a_step_under_autocast_whose_results_are_views_is_one_program(monkeypatch):
    def cast(loss_fn):
        def under_autocast(module, batch):
            with torch.autocast("cpu", torch.bfloat16):
                return loss_fn(module, batch)

        return under_autocast

    monkeypatch.setitem(globals(), "Net", Rows)
    one, other = Trained(cast(own_loss), clip_norm=0.1), Trained(cast(read_loss), clip_norm=0.1)
    check_equal(one, other, one.train(batches(4)), other.train(batches(4)))
    with torch.autocast("cpu", torch.bfloat16):  # around the whole step
        check_equal(one, other, one.train(batches(3)), other.train(batches(3)))
    assert one.step.whole >= 5


def test_another_batch_size_and_a_scheduler_need_nothing_but_a_program():
    one, other = Trained(own_loss, "AdamW"), Trained(read_loss, "AdamW")
    results = []
    for each in (one, other):
        schedule = torch.optim.lr_scheduler.StepLR(each.optimizer, 2, 0.5)
        results.append([])
        for batch in [*batches(4), *batches(3, rows=5), *batches(2)]:
            results[-1] += each.train([batch])
            schedule.step()
    check_equal(one, other, *results)
    assert one.step.whole == 5, "not the first, and not those of symbolic sizes"


def test_a_forward_by_itself_is_right_between_two_steps():
    one, other = Trained(own_loss), Trained(read_loss)
    found, expected = [], []
    for batch in batches(4):
        found += one.train([batch])
        expected += other.train([batch])
        one.module.eval(), other.module.eval()
        with torch.no_grad():
            assert torch.equal(own_loss(one.module, batch), own_loss(other.module, batch))
        one.module.train(), other.module.train()
        for each in (one, other):  # the user's own step
            own_loss(each.module, batch).backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
    check_equal(one, other, found, expected)
    assert one.step.whole == 3 and one.step.joined == 4


def test_results_that_somebody_keeps_are_those_of_the_forward():
    kept = {own_loss: [], read_loss: []}

    def keeping(loss_fn):
        def keep(module, batch):
            loss, found = module(batch[:, :16], batch[:, 16:])
            kept[loss_fn].append(found if loss_fn is own_loss else found.detach().clone())
            return loss

        return keep

    one, other = Trained(keeping(own_loss)), Trained(keeping(read_loss))
    data = batches(4)
    found, expected = one.train(data), other.train(data)
    assert type(kept[own_loss][-1]) is PendingResult and kept[own_loss][-1].shape == (8, 4)
    for mine, its in zip(kept[own_loss], kept[read_loss], strict=True):
        assert torch.equal(mine.detach(), its) and (mine + 0).sum() == its.sum()
    check_equal(one, other, found, expected)
    assert one.step.whole == 3


def test_results_that_nobody_keeps_are_not_computed_and_hold_no_memory():
    one = Trained()
    one.train(batches(3))
    seen = []

    def watching(module, batch):
        results = module(batch[:, :16], batch[:, 16:])
        seen.extend(map(weakref.ref, results))
        return results[0]

    one.run.loss_fn = watching
    (result,) = one.train(batches(1))
    gc.collect()
    assert [reference() for reference in seen] == [None, None] and result.loss.untyped_storage().nbytes() == 4


# --- what makes the forward run by itself


def twice(module, batch):
    module(batch[:, :16], batch[:, 16:])
    return own_loss(module, batch)


def scaled(module, batch):
    return own_loss(module, batch) * 2


def decayed(module, batch):
    return own_loss(module, batch) + 0.01 * sum(p.square().sum() for p in module.parameters())


class Double(torch.autograd.Function):
    """A function of the user's own, which C++ calls with its arguments as they are."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def by_function(module, batch):
    return Double.apply(own_loss(module, batch))


@torch.compile(backend="eager")
def doubled(loss):
    return loss * 2


def by_dynamo(module, batch):
    return doubled(own_loss(module, batch))


def looked_at(module, batch):
    loss = own_loss(module, batch)
    assert loss.grad_fn is not None and loss.requires_grad and not loss.is_leaf
    return loss


def without_recording(module, batch):
    loss, found = module(batch[:, :16], batch[:, 16:])
    with torch.no_grad():
        assert not found.mean().requires_grad
    return loss + found.mean()


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("loss_fn", [twice, scaled, decayed, by_function, by_dynamo, looked_at, without_recording])
def test_whatever_else_loss_fn_does_gives_eagers_parameters(loss_fn, always):
    """Also where it begins in the fourth step, whose forward waits."""
    eager, one = Net(), Trained(loss_fn if always else own_loss)
    optimizer = torch.optim.SGD(eager.parameters(), **OPTIMIZERS["SGD"][1])
    for number, batch in enumerate(batches(6)):
        if number == 3:
            one.run.loss_fn = loss_fn
        loss = one.run.loss_fn(eager, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (found,) = one.train([batch])
        torch.testing.assert_close(found.loss, loss.detach())
    for mine, its in zip(one.module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-5)
    assert one.step.whole == (0 if always else 2)
    if not always:
        assert one.step.forwards.separate[FORWARD if loss_fn is twice else READ] == 3


class Pair(Net):
    """A model that returns two losses."""

    def forward(self, x, y):
        found = self.body(x)
        return nn.functional.mse_loss(found, y), nn.functional.l1_loss(found, y)


def test_another_loss_than_that_of_the_first_step_is_right(monkeypatch):
    monkeypatch.setitem(globals(), "Net", Pair)
    eager, one, chosen = Pair(), Trained(), [0]
    one.run.loss_fn = loss_fn = lambda module, batch: module(batch[:, :16], batch[:, 16:])[chosen[0]]
    optimizer = torch.optim.SGD(eager.parameters(), **OPTIMIZERS["SGD"][1])
    for number, batch in enumerate(batches(5)):
        chosen[0] = int(number == 3)
        one.train([batch])
        loss_fn(eager, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, its in zip(one.module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-5)
    assert one.step.whole == 3 and one.step.forwards.separate[OTHER] == 1


def test_a_hook_of_a_parameter_or_of_the_optimizer_is_called():
    one, seen = Trained(), []
    one.train(batches(3))
    handle = one.module.body[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    one.train(batches(2))
    handle.remove()
    one.train(batches(1))
    assert len(seen) == 2 and one.step.whole == 3
    before = one.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0].grad.abs().sum())
    )
    one.train(batches(2))
    before.remove()
    assert len(seen) == 4 and one.step.whole == 3
    one.train(batches(1))
    assert one.step.whole == 4


def test_a_change_of_settings_parameters_or_state_is_seen():
    def change(each):
        each.optimizer.param_groups[0]["momentum"] = 0.5
        each.module.load_state_dict({name: value * 0.5 for name, value in each.module.state_dict().items()})
        each.optimizer.load_state_dict(copy.deepcopy(each.optimizer.state_dict()))

    one, other, results = Trained(own_loss), Trained(read_loss), []
    for each in (one, other):
        found = each.train(batches(3))
        change(each)
        results.append(found + each.train(batches(3)))
    check_equal(one, other, *results)
    assert one.step.whole == 5


def test_an_input_that_changes_before_the_forward_has_run_is_an_error():
    def spoiling(module, batch):
        loss = own_loss(module, batch)
        if changes:
            batch.zero_()
        return loss

    changes, one = [], Trained(spoiling)
    one.train(batches(3))
    changes.append(True)
    before = copy.deepcopy(one.state())
    with pytest.raises(DcompileError, match=CHANGED[:60]):
        one.train(batches(1))
    assert all(map(torch.equal, before, one.state()))
    changes.clear()
    one.train(batches(1))
    assert one.step.whole == 3


def test_a_loss_fn_that_raises_leaves_the_last_good_state():
    def failing(module, batch):
        loss = own_loss(module, batch)
        if faults:
            raise faults.pop()
        return loss

    faults, one = [], Trained(failing)
    one.train(batches(3))
    before = copy.deepcopy(one.state())
    faults.append(ValueError("a bad batch"))
    with pytest.raises(ValueError, match="a bad batch"):
        one.train(batches(1))
    assert all(map(torch.equal, before, one.state()))
    one.train(batches(1))
    assert one.step.whole == 3


def test_a_result_of_a_step_that_was_given_up_says_so():
    kept = []

    def failing(module, batch):
        kept.append(module(batch[:, :16], batch[:, 16:]))
        raise ValueError

    one = Trained()
    one.train(batches(2))
    one.run.loss_fn = failing
    with pytest.raises(ValueError):
        one.train(batches(1))
    with pytest.raises(DcompileError, match="was not computed"):
        kept[0][0].item()


def test_older_gradients_of_changed_parameters_are_an_error_as_in_eager():
    one = Trained()
    one.train(batches(3))
    loss = own_loss(one.module, batches(1)[0])
    one.train(batches(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_grad_scaler_keeps_its_own_way():
    one = Trained(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    one.train(batches(4))
    assert one.step.whole == 0 and one.step.joined == 3 and one.step.forwards.separate == {SCALED: 4}
