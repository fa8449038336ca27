"""Memory that programs use in turn, and layouts of saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.entry import find_model
from dcompile.collectives.contract import ProgramReport
from dcompile.runtime.program.artifact import CompiledGraph, Loadable
from dcompile.runtime.program.executable import HostProgram
from dcompile.runtime.program.workspace import RELAID as NOTE
from dcompile.runtime.program.workspace import SavedLayouts, Workspace, Workspaces


class Program:
    """Needs as many bytes as it is told, and counts how often it is prepared."""

    def __init__(self, nbytes: int) -> None:
        self.libraries: dict = {}
        self.report = ProgramReport()
        self.prepared: list[int] = []
        self.nbytes = nbytes

    def needs(self, *sizes: int) -> int:
        return self.nbytes * (sizes[0] if sizes else 1)

    def make(self, run, *sizes):
        self.prepared.append(run.arena.nbytes)
        return lambda args, buckets, sync: [run.address]


def test_programs_take_turns_in_one_arena_that_grows_to_the_largest():
    workspace, small, large = Workspace(-1), Program(100), Program(1000)
    for _ in range(3):
        for program in (small, large):
            workspace.call(program, ())([], None, False)
    assert small.prepared == [100, 1000], "once in an arena of its own, and once in the larger one"
    assert large.prepared == [1000]
    assert workspace.call(small, ())([], None, False) == workspace.call(large, ())([], None, False)


def test_growing_for_one_size_forgets_addresses_in_the_old_arena():
    workspace, program = Workspace(-1), Program(100)
    for size in (1, 3, 1, 3):
        workspace.call(program, (size,))
    assert program.prepared == [100, 300, 300]


def test_a_call_within_a_call_has_memory_of_its_own():
    """Of a program that calls itself, as one may that calls an operator whose implementation is compiled."""
    source = "def make(run):\n    return lambda args, buckets=None, sync=False: args[0](run)"
    graph = CompiledGraph(source, (), (), 64, {}, ProgramReport())
    program = HostProgram("nested", Loadable(graph, {}, {}))
    seen: list[int] = []

    def outer(run):
        seen.append(run.address)
        return program([lambda run: [run.address]])

    with torch.no_grad():
        inner = [program([outer])[0] for _ in range(2)]
    assert seen[0] == seen[1], "the first lasts"
    assert seen[0] not in inner


def test_only_the_first_workspace_of_a_device_lasts():
    workspaces = Workspaces()
    first, second = workspaces.another(-1), workspaces.another(-1)
    assert first.lasting
    assert not second.lasting
    assert workspaces.another(0).lasting, "the first of another device"
    workspaces.release()
    assert workspaces.another(-1).lasting


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.softmax(layer(x), -1) * x
        return x.square().mean()


def test_forward_and_backward_of_a_model_share_an_arena():
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(32, 64)
    expected = torch.autograd.grad(model(x), [*model.parameters()])
    compiled = dcompile.compile(model, options={"receipt": False})
    for _ in range(2):
        first, second = compiled(x), compiled(2 * x)  # two forwards in flight: what they saved is not in the arena
        del second
        found = torch.autograd.grad(first, [*model.parameters()])
        torch.testing.assert_close(found, expected)
    (graph,) = find_model(compiled).graphs
    forward, backward = (graph.executables[kind] for kind in ("forward", "backward"))
    (workspace,) = forward._workspaces.idle[-1]
    assert workspace.lasting
    assert {forward, backward} <= workspace._prepared.keys()
    assert workspace.arena.nbytes == max(forward.needs(), backward.needs())


def scaled(a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return a * m


def looked_at(a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.addmm(a, m.as_strided(m.shape, m.stride()), m)


CHANGES = {
    "turned": lambda m: m.data.t(),
    "every second": lambda m: m.data.repeat_interleave(2, 1)[:, ::2],
}


def gradients(function, change, symbolic: bool) -> list[torch.Tensor]:
    """After a second step, when layouts have been seen to be right once."""
    torch.manual_seed(0)
    rows = 4 if not symbolic else 6
    a, m = torch.rand(rows, rows, requires_grad=True), torch.rand(rows, rows, requires_grad=True)
    torch.autograd.grad(function(a, m).sum(), [a, m])
    total = (function(a, m) * torch.arange(float(rows * rows)).view(rows, rows)).sum()
    m.data = change(m)
    return list(torch.autograd.grad(total, [a, m]))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_with_new_data_between_forward_and_backward(change: str, symbolic: bool) -> None:
    compiled = torch.compile(scaled, backend="dcompile", dynamic=symbolic, options={"receipt": False})
    got = gradients(compiled, CHANGES[change], symbolic)
    for x, y in zip(got, gradients(scaled, CHANGES[change], symbolic), strict=True):
        torch.testing.assert_close(x, y)


def test_a_look_by_strides_keeps_the_memory_that_it_saw() -> None:
    compiled = torch.compile(looked_at, backend="dcompile", options={"receipt": False})
    got = gradients(compiled, CHANGES["turned"], False)
    for x, y in zip(got, gradients(looked_at, CHANGES["turned"], False), strict=True):
        torch.testing.assert_close(x, y)


def test_hooks_that_return_saved_tensors_in_another_order() -> None:
    compiled = dcompile.compile(lambda x: x.exp(), options={"receipt": False})
    x = torch.rand(4, 5).t().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y.contiguous()):
        y = compiled(x)
    factors = torch.arange(20.0).view(5, 4)
    (y * factors).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp() * factors)
    assert NOTE in str(dcompile.receipt(compiled))


def test_another_shape_is_an_error() -> None:
    saved = SavedLayouts(((torch.float32, (2, 3), (3, 1), "cpu", False),), [])
    assert saved.check(torch.ones(2, 3)) and saved.check(torch.ones(2, 3)) and not saved.check(torch.ones(3, 2).t())
    assert saved.fit(torch.ones(3, 2).t())[0].is_contiguous()
    assert saved.fit(torch.ones(2, 3).double())[0].dtype == torch.float32
    with pytest.raises(RuntimeError, match="is another tensor in the backward"):
        saved.fit(torch.ones(1, 3))
