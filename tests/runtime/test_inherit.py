"""Backwards overwrite saved tensors once they are read, and never what anybody else can still see."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.entry import find_model
from dcompile.runtime.program.arena import like
from dcompile.runtime.program.workspace import HostProgramServices


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + torch.softmax(self.down(nn.functional.gelu(self.up(self.norm(x)))), -1).sin()
        return x


@pytest.fixture(scope="module")
def blocks():
    """(eager, compiled) with equal parameters."""
    torch.manual_seed(0)
    eager, ours = Block(), Block()
    ours.load_state_dict(eager.state_dict())
    x = torch.randn(96, 128)
    compiled = dcompile.compile(ours, options={"receipt": False})
    for _ in range(2):
        compiled(x).sum().backward()
    (graph,) = find_model(compiled).graphs
    source = graph.executables["backward"].source
    assert "run.inherit" in source, "the plan takes saved tensors' memory"
    return eager, compiled, x


def gradients(model, loss, **keywords):
    return torch.autograd.grad(loss, [*model.parameters()], **keywords)


def test_a_retained_graph_can_be_run_again(blocks):
    eager, compiled, x = blocks
    expected = gradients(eager, eager(x).square().sum())
    loss = compiled(x).square().sum()
    for retain in (True, True, False):
        torch.testing.assert_close(gradients(compiled, loss, retain_graph=retain), expected)


def test_backwards_of_several_forwards_in_any_order(blocks):
    eager, compiled, x = blocks
    inputs = [x, 2 * x, x + 1]
    losses = [compiled(given).square().sum() for given in inputs]
    for n in (1, 2, 0):
        torch.testing.assert_close(gradients(compiled, losses[n]), gradients(eager, eager(inputs[n]).square().sum()))


def test_what_a_hook_keeps_is_left_alone(blocks):
    _, compiled, x = blocks
    kept, copies = [], []

    def pack(tensor):
        kept.append(tensor)
        copies.append(tensor.clone())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(x).square().sum()
    gradients(compiled, loss)
    assert kept
    for tensor, copy in zip(kept, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_threads(blocks):
    eager, compiled, x = blocks
    expected = [gradients(eager, eager(k * x).square().sum()) for k in range(1, 4)]
    wrong = []

    def work(k: int) -> None:
        for _ in range(5):
            found = gradients(compiled, compiled(k * x).square().sum())
            wrong.extend(k for a, b in zip(found, expected[k - 1], strict=True) if not torch.allclose(a, b, 1e-4, 1e-4))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def other_views(tensor):
    return [tensor[1:], tensor.detach(), tensor.numpy(), tensor.untyped_storage(), [tensor]]


def test_only_what_nobody_else_refers_to_is_inherited():
    def inherit(tensor):
        address = tensor.data_ptr()
        values = tensor.clone()
        room = HostProgramServices.inherit(tensor)
        assert room.shape == tensor.shape and room.stride() == tensor.stride() and torch.equal(tensor, values)
        return room.data_ptr() == address

    def given_away():
        box = [torch.empty_strided((4, 8), (1, 4)).fill_(3)]
        args = list(box)
        box.clear()
        (tensor,) = args
        args.clear()
        address = tensor.data_ptr()
        tensor = HostProgramServices.inherit(tensor)
        return tensor.data_ptr() == address

    assert given_away()
    for n in range(5):
        tensor = torch.randn(8, 4)
        other = other_views(tensor)[n]
        assert not inherit(tensor), type(other)
    saved = torch.randn(8, 4)
    loss = (torch.ones(8, 4, requires_grad=True) * saved).sum()
    assert not inherit(saved)
    del loss


@pytest.fixture
def anew(monkeypatch):
    """Shapes of what is allocated because somebody still holds what the plan takes."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr("dcompile.runtime.program.workspace.like", lambda x: shapes.append(tuple(x.shape)) or like(x))
    return shapes


def test_steady_backwards_find_all_memory(blocks, anew):
    """All that the plan takes is there to be taken: nobody between forward and backward keeps a reference."""
    _, compiled, x = blocks
    gradients(compiled, compiled(x).sum())
    assert not anew
    loss = compiled(x).sum()
    gradients(compiled, loss, retain_graph=True)
    assert anew


class Tagger(nn.Module):
    """A model that returns its loss and its logits, of which the loss's backward needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, 999)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x).sin())
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.fixture
def tagger(monkeypatch):
    """(eager, compiled, inputs); the backward is planned on a CPU as it is on GPUs, where results may be dropped."""
    monkeypatch.setattr("dcompile.capture.joint_graph._may_be_lent", lambda result: True)
    torch.manual_seed(0)
    eager, ours = Tagger(), Tagger()
    ours.load_state_dict(eager.state_dict())
    inputs = torch.randn(4, 16, 32), torch.randint(0, 999, (4, 16))
    return eager, dcompile.compile(ours, options={"receipt": False, "skip": "compute_loss_gradient_in_forward"}), inputs


def test_a_gradient_lies_where_logits_were_that_nobody_holds(tagger, anew):
    eager, compiled, inputs = tagger
    expected = gradients(eager, eager(*inputs)[0])
    torch.testing.assert_close(gradients(compiled, compiled(*inputs)[0]), expected)
    assert not anew

    def whole(logits):
        return logits

    def part(logits):
        return logits.detach()[1]

    def array(logits):
        return logits.detach().numpy()

    for hold in (whole, part, array):
        loss, logits = compiled(*inputs)
        held = hold(logits)
        del logits
        values = held.tolist()
        torch.testing.assert_close(gradients(compiled, loss), expected)
        # torch 2.15 saves the logits before they are flattened
        assert anew == ([(4, 16, 999)] if torch.__version__ >= "2.15" else [(64, 999)]), hold
        assert values == held.tolist(), hold
        anew.clear()
