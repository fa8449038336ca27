"""Saved values in host memory: the same gradients, memory that comes back, and what the receipt says."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn

import dcompile
from dcompile import compat
from dcompile.capture import captured_graph
from dcompile.capture.entry import find_model
from dcompile.compiler.driver import WAITED
from dcompile.runtime.program import host_copies
from tests.offloading import layers, marked


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()


def compiled(model, offloads=True, **options):
    """The model, compiled at its first call, and its large activations offloaded."""
    call = dcompile.compile(model, **options)

    def run(*args):
        with marked() if offloads else marked(lambda node: False):
            return call(*args)

    return run


def programs(model) -> dict[str, Any]:
    found = find_model(model)
    assert found is not None
    return {name: program for graph in found.graphs for name, program in graph.executables.items()}


def copies(model, kind) -> int:
    """How many copies of a kind the programs of a model have."""
    return sum(program.source.count(f"run.host_copy({kind!r}") for program in programs(model).values())


def host_bytes(model) -> int:
    """Bytes of host memory that the model has allocated for what it offloads."""
    (memory,) = {id(p._workspaces): p._workspaces.host for p in programs(model).values()}.values()
    return memory.nbytes


def gradients(model, run, x) -> list[torch.Tensor]:
    model.zero_grad()
    run(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_have_the_same_bits():
    x = torch.randn(16, 32)
    plain, offloading = layers(), layers()
    expected = gradients(plain, compiled(plain, offloads=False), x)
    run = compiled(offloading)
    for _ in range(2):
        for a, b in zip(gradients(offloading, run, x), expected, strict=True):
            assert torch.equal(a, b)
    assert copies(plain, "offload") == 0
    assert copies(offloading, "offload") == copies(offloading, "load") >= 6


def test_they_are_eagers_too():
    x, model = torch.randn(16, 32), layers()
    expected = gradients(model, model, x)
    for a, b in zip(gradients(model, compiled(model), x), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_two_forwards_before_two_backwards():
    x, y, model = torch.randn(16, 32), torch.randn(16, 32), layers()
    expected = [a + b for a, b in zip(gradients(model, model, x), gradients(model, model, y), strict=True)]
    run = compiled(model)
    for _ in range(2):
        model.zero_grad()
        first, second = run(x).square().mean(), run(y).square().mean()
        first.backward()
        second.backward()
        for p, b in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, b)


def test_a_retained_graph_is_read_again_after_another_step():
    x, y, model = torch.randn(16, 32), torch.randn(16, 32), layers()
    run, parameters = compiled(model), [*model.parameters()]
    loss = run(x).square().mean()
    once = torch.autograd.grad(loss, parameters, retain_graph=True)
    gradients(model, run, y)  # in other memory
    again = torch.autograd.grad(loss, parameters)
    assert all(map(torch.equal, once, again))


def test_memory_of_a_backward_that_never_runs_comes_back():
    x, model = torch.randn(16, 32), layers()
    run = compiled(model)
    gradients(model, run, x)
    before = host_bytes(model)
    assert before > 0
    for _ in range(3):
        loss = run(x)
        del loss
        gc.collect()
    assert host_bytes(model) == before


def test_fifty_steps_allocate_what_one_does():
    x, model = torch.randn(16, 32), layers()
    run = compiled(model)
    gradients(model, run, x)
    before = host_bytes(model)
    for _ in range(50):
        gradients(model, run, x)
    assert host_bytes(model) == before


def test_sizes_may_vary():
    model, eager = layers(), layers()
    run = compiled(model, dynamic=True)
    for rows in (16, 24, 16):
        x = torch.randn(rows, 32)
        expected = gradients(eager, eager, x)
        for a, b in zip(gradients(model, run, x), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert dcompile.receipt(model).graphs == 1 and copies(model, "offload") == copies(model, "load") >= 6


def test_a_backward_with_the_update_loads_too():
    x, trained = torch.randn(16, 32), []
    for offloads in (False, True):
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = compiled(model, offloads, optimizer=optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
        assert ("run.host_copy('load'" in programs(model)["step"].source) == offloads
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *trained))


class Shown(nn.Module):
    """A result that is saved as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).tanh()
        return hidden, self.second(hidden)


def test_what_the_caller_holds_stays_and_the_receipt_says_so():
    model, x = Shown(), torch.randn(16, 32)
    hidden, out = compiled(model)(x)
    (hidden.sum() + out.square().sum()).backward()
    assert copies(model, "offload") == 0
    assert "saved on its device, not in host memory: tanh" in str(dcompile.receipt(model))


def test_aten_kernels_offload_in_library_calls():
    x, model = torch.randn(16, 32), layers()
    expected = gradients(model, model, x)
    run = compiled(model, options={"kernels": "aten"})
    for a, b in zip(gradients(model, run, x), expected, strict=True):
        torch.testing.assert_close(a, b)
    receipt = dcompile.receipt(model)
    assert receipt.bytes_offloaded == 3 * (2 * 64 + 32) * 16 * 4 - 32 * 16 * 4 and WAITED in receipt.notes


@pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint.CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="torch has no such policy"
)
def test_a_policy_of_selective_checkpointing_offloads():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=context)

    x, model = torch.randn(16, 32), Checkpointed()
    expected = gradients(model.inner, model.inner, x)
    call = dcompile.compile(model)
    for a, b in zip(gradients(model, call, x), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert copies(model, "offload") >= 5


def test_receipt_timeline_and_report_show_copies():
    x, model = torch.randn(16, 32), layers()
    run = compiled(model)
    gradients(model, run, x)
    # results of all layers but the last one, whose gradient needs that of tanh: the caller gets it
    assert dcompile.receipt(model).bytes_offloaded == (3 * (2 * 64 + 32) - 32) * 16 * 4
    assert "offloaded to host memory" in str(dcompile.receipt(model))
    with dcompile.profile(model) as measured:
        for _ in range(3):
            gradients(model, run, x)
    found = {(e.program, e.kind) for step in measured.timeline.steps for e in step.exchanges}
    assert found == {("forward0", "offload"), ("backward0", "load")}
    assert {e.group for step in measured.timeline.steps for e in step.exchanges} == {"the link to host memory"}
    assert all(e.wire >= 0 for step in measured.timeline.steps for e in step.exchanges)
    assert "offload" in str(measured)
    with marked():
        report = str(dcompile.explain(model, x))
    assert "over the link to host memory" in report and "a saved value" in report


# --- hooks for saved tensors ------------------------------------------------------------------------------------------


def test_hooks_get_what_is_in_host_memory():
    """Whoever packs sees the copies, and may give others back."""
    x, model, packed = torch.randn(16, 32), layers(), []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    expected = gradients(model, model, x)
    run = compiled(model)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = run(x).square().mean()
        model.zero_grad()
        loss.backward()
        for p, b in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, b)
    assert packed.count((16, 64)) >= 2 * 6 and copies(model, "offload") >= 6


def saving_on_cpu(model, run, x) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = run(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_programs_do_what_save_on_cpu_asks_for(monkeypatch):
    """As on a GPU, where it asks for copies; and only in calls that it surrounds."""
    monkeypatch.setattr(captured_graph, "saves_on_host", lambda device: compat.hooks.saves_on_cpu())
    seen = []
    monkeypatch.setattr(host_copies, "saved_hooks_run", lambda: seen.append(compat.hooks.saved_hooks_run()))
    x, model = torch.randn(16, 32), layers()
    expected = gradients(model, model, x)
    run = dcompile.compile(model)
    for _ in range(2):
        for a, b in zip(saving_on_cpu(model, run, x), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert copies(model, "offload") == copies(model, "load") >= 6
    assert seen and not any(seen), "the hooks themselves do nothing"
    assert captured_graph.SAVED_ON_HOST in str(dcompile.receipt(model))
    for a, b in zip(gradients(model, run, x), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert dcompile.receipt(model).bytes_offloaded == 0, "a call without it has another graph"


def test_save_on_cpu_of_a_cpu_copies_nothing():
    x, model = torch.randn(16, 32), layers()
    expected = gradients(model, model, x)
    run = dcompile.compile(model)
    for a, b in zip(saving_on_cpu(model, run, x), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert copies(model, "offload") == 0


class SavesInside(nn.Module):
    """A part of the forward is under `save_on_cpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = self.first(x)
        return self.second(x)


def test_a_forward_that_begins_save_on_cpu_itself_runs_as_in_eager_mode():
    """TorchDynamo leaves such a frame, and the receipt says so."""
    x, model = torch.randn(16, 32), SavesInside()
    expected = gradients(model, model, x)
    assert all(map(torch.equal, gradients(model, dcompile.compile(model), x), expected))
    assert "save_on_cpu" in str(dcompile.receipt(model))
