"""Gradients that are one tensor, or views of one, become each parameter's own: compared with eager mode."""

import copy
import itertools

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.results.unshare_gradients import keep_apart, shared_pairs


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Programs of ours run here: it is they that look at memory."""
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    torch._dynamo.reset()


class Sums(nn.Module):
    """Two parameters of the same gradient; with `shapes`, two more that see it in another shape."""

    def __init__(self, shapes: bool) -> None:
        super().__init__()
        self.scale, self.a, self.b = (nn.Parameter(torch.ones(8)) for _ in range(3))
        self.c, self.d = (nn.Parameter(torch.ones(4, 2)) if shapes else None for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.c.view(8) + self.d.reshape(8) if self.c is not None else 0
        return x * self.scale + (self.a + self.b + more)


def gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [*torch.autograd.grad(model(torch.randn(3, 8)).square().sum(), [*model.parameters()])]


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_added_up_has_gradients_of_its_own(shapes, dynamic):
    eager = Sums(shapes)
    model = dcompile.compile(copy.deepcopy(eager), dynamic=dynamic)
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randn(3, 8)).square().sum().backward()
    # eager's own .grad would share memory with shapes
    expected = [sum(each) for each in zip(*(gradients(eager, seed) for seed in range(3)), strict=True)]
    found = [parameter.grad for parameter in model.parameters()]
    assert len({x.data_ptr() for x in found}) == len(found)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_ddp_keeps_local_do_too(accumulates):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        eager = Sums(shapes=True)
        model = DistributedDataParallel(copy.deepcopy(eager))
        dcompile.compile(model)
        for seed in range(3):
            torch.manual_seed(seed)
            model.require_backward_grad_sync = not accumulates or seed == 2
            model(torch.randn(3, 8)).square().sum().backward()
        expected = [sum(each) for each in zip(*(gradients(eager, seed) for seed in range(3)), strict=True)]
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    finally:
        dist.destroy_process_group()


def test_what_shares_memory():
    x = torch.arange(12.0)
    look = x.view(3, 4)
    given = [x[:8], None, x[8:], x[:8], x[4:6], torch.ones(2), 3, torch.ones(0), look[2], x[:8].view(2, 4)]
    pairs = shared_pairs(given)
    assert sorted(pairs) == [(3, 0, True), (4, 0, False), (8, 2, True), (9, 0, False)]
    apart = keep_apart([*given], pairs)
    assert apart[3] is apart[0] and not shared_pairs(apart)
    for one, other in zip(apart, given, strict=True):
        assert one is other or torch.equal(one, other)


def test_one_tensor_is_left_to_autograd():
    x = torch.ones(3)
    assert not shared_pairs([x, x, None]) and shared_pairs([x, x.view(3)]) == ((1, 0, True),)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parts_of_a_tensor_share_memory_where_their_elements_do(data):
    memory = torch.zeros(4096)
    base = memory[: 3 * 4 * 5].view(3, 4, 5).permute(data.draw(st.permutations(range(3))))
    parts = []
    for _ in range(2):
        part = base
        for dim in range(3):
            first = data.draw(st.integers(0, part.shape[dim] - 1))
            part = part.narrow(dim, first, data.draw(st.integers(1, part.shape[dim] - first)))
        if data.draw(st.integers(0, 4)) == 0:
            part = part.flatten() if part.is_contiguous() else part.transpose(0, 1)
        parts.append(part)
    seen = [set(torch.arange(60).as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()) for x in parts]
    common = bool(seen[0] & seen[1])
    assert bool(shared_pairs(parts)) or not common


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_gradients_of_what_is_concatenated_are_not_copied(order):
    whole = torch.zeros(4, 6, 8).permute(order)
    for dim in range(3):
        parts = whole.split([1, whole.shape[dim] - 3, 2], dim)
        assert shared_pairs(parts) == () and [pair[0] for pair in shared_pairs([*parts, parts[1].select(dim, 0)])] == [
            3
        ]
