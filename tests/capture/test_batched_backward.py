"""Backwards of many gradients at once, compared with eager mode's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.errors import DcompileError


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Kernels of ours run here, as they read memory that a batch does not have."""
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    torch._dynamo.reset()


class Network(nn.Module):
    """Two results, a view among what is saved, and dropout, whose mask all gradients share."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.p = p

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = nn.functional.dropout(nn.functional.gelu(self.norm(self.first(x))), self.p)
        return self.second(hidden), hidden.t().exp()


def batched(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = model(x)[0]
    units = torch.eye(result.numel()).view(-1, *result.shape)
    wanted = [x, *model.first.parameters(), *model.second.parameters()]
    return [*torch.autograd.grad(result, wanted, units, is_grads_batched=True)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_batched_gradients_are_eagers(trained, dynamic):
    torch.manual_seed(0)
    eager = Network()
    model = dcompile.compile(copy.deepcopy(eager), dynamic=dynamic)
    x = torch.randn(4, 6, requires_grad=True)
    if trained:  # the program is there already
        for network in (eager, model):
            network(x)[0].sum().backward()
    torch.testing.assert_close(batched(model, x), batched(eager, x))
    for network in (eager, model):  # and goes on to serve
        network.zero_grad()
        network(x)[0].square().sum().backward()
    torch.testing.assert_close([*model.parameters()], [*eager.parameters()])
    for own, stock in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, stock.grad)
    receipt = dcompile.receipt(model)
    assert any("batched gradients" in note for note in receipt.notes)
    assert receipt.fallbacks["backward of batched gradients"] == 1
    batched(model, x)
    assert dcompile.receipt(model).fallbacks["backward of batched gradients"] == 2


def test_a_batch_is_what_its_gradients_are_one_by_one():
    """Dropout's mask is computed again from its key in each of them."""
    torch.manual_seed(0)
    model, x = dcompile.compile(Network(0.5)), torch.randn(4, 6, requires_grad=True)
    result = model(x)[0]
    units = torch.eye(result.numel()).view(-1, *result.shape)
    single = [torch.autograd.grad(result, x, unit, retain_graph=True)[0] for unit in units]
    (together,) = torch.autograd.grad(result, x, units, is_grads_batched=True)
    torch.testing.assert_close(together, torch.stack(single))


def test_jacobians_by_vmap():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model, x = dcompile.compile(copy.deepcopy(eager)), torch.randn(4, 6)
    model(x).sum().backward()
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(model, x, vectorize=True), jacobian(eager, x))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_reduces_none_of_them(one_rank):
    torch.manual_seed(0)
    eager = Network()
    model = dcompile.compile(DistributedDataParallel(copy.deepcopy(eager)))
    x = torch.randn(4, 6, requires_grad=True)
    units = torch.eye(12).view(12, 4, 3)
    for _ in range(2):
        own, stock = (torch.autograd.grad(network(x)[0], x, units, is_grads_batched=True) for network in (model, eager))
        torch.testing.assert_close(own, stock)
        assert all(parameter.grad is None for parameter in model.parameters())
        model(x)[0].sum().backward()
        model.zero_grad()


def test_with_sharded_parameters_the_error_says_what_to_do(one_rank):
    torch.manual_seed(0)
    model = dcompile.compile(fully_shard(Network(), mesh=init_device_mesh("cpu", (1,))))  # not on a GPU that is there
    x = torch.randn(4, 6, requires_grad=True)
    model(x)[0].sum().backward()
    with pytest.raises(DcompileError, match="one by one"):
        torch.autograd.grad(model(x)[0], x, torch.eye(12).view(12, 4, 3), is_grads_batched=True)
