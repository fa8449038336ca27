"""Offloading on a GPU: copies beside kernels change no bit, and memory is free meanwhile; pinned memory is reused."""

from __future__ import annotations

import pytest
import torch

import dcompile
from dcompile.capture import captured_graph
from dcompile.errors import DcompileError
from dcompile.runtime.program.host_copies import IN_GRAPH
from tests.offloading import layers
from tests.runtime.program.test_host_copies import compiled, copies, gradients, host_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ROWS, WIDTH = 8192, 1024
"""Activations of 32 and 64 MiB: a copy takes longer than the kernels beside it, so that a missing wait shows."""


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()


def model() -> torch.nn.Module:
    return layers(4, WIDTH).cuda()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def test_copies_change_no_bit_over_many_steps():
    plain, offloading = model(), model()
    stays, run = compiled(plain, offloads=False), compiled(offloading)
    for step in range(20):
        x = batch(step % 3)
        expected, found = gradients(plain, stays, x), gradients(offloading, run, x)
        assert all(map(torch.equal, expected, found)), f"step {step}"
    assert copies(offloading, "offload") == copies(offloading, "load") >= 8


def held_after_forward(network, run) -> int:
    """Bytes that a forward leaves on the device until its backward."""
    x = batch()
    gradients(network, run, x)
    network.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = run(x).square().mean()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held


def test_the_device_holds_less_between_forward_and_backward():
    plain, offloading = model(), model()
    usual = held_after_forward(plain, compiled(plain, offloads=False))
    less = held_after_forward(offloading, compiled(offloading))
    offloaded = dcompile.receipt(offloading).bytes_offloaded
    assert offloaded > 8 * ROWS * WIDTH * 4
    assert usual - less >= 0.9 * offloaded, (usual, less, offloaded)


def test_the_peak_of_a_step_is_lower():
    def peak(network, run) -> int:
        gradients(network, run, batch())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients(network, run, batch())
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    plain = model()
    usual = peak(plain, compiled(plain, offloads=False))
    del plain
    offloading = model()
    assert peak(offloading, compiled(offloading)) < usual - 4 * ROWS * WIDTH * 4


def test_pinned_memory_is_reused():
    network = model()
    run = compiled(network)
    gradients(network, run, batch())
    before = host_bytes(network)
    for step in range(20):
        gradients(network, run, batch(step % 3))
    assert host_bytes(network) == before


def test_a_program_with_copies_is_not_recorded_and_the_receipt_says_so():
    network = model()
    run = compiled(network, mode="reduce-overhead")
    plain = model()
    expected = gradients(plain, compiled(plain, offloads=False), batch())
    for _ in range(4):
        found = gradients(network, run, batch())
    assert all(map(torch.equal, expected, found))
    assert "copies to or from host memory" in str(dcompile.receipt(network))


def test_a_cuda_graph_of_the_callers_is_refused():
    network = model()
    run = compiled(network)
    x = batch()
    gradients(network, run, x)
    with pytest.raises(DcompileError, match=IN_GRAPH[:60]), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(x)


def test_hooks_read_complete_copies():
    network, plain, x = model(), model(), batch()
    expected = gradients(plain, compiled(plain, offloads=False), x)
    run = compiled(network)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = run(x).square().mean()
        network.zero_grad()
        loss.backward()
        assert all(torch.equal(p.grad, b) for p, b in zip(network.parameters(), expected, strict=True))


def test_save_on_cpu_around_a_call():
    network, plain, x = model(), model(), batch()
    expected = gradients(plain, compiled(plain, offloads=False), x)
    run = dcompile.compile(network)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = run(x).square().mean()
        network.zero_grad()
        loss.backward()
        for p, b in zip(network.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, b)
    assert captured_graph.SAVED_ON_HOST in str(dcompile.receipt(network))
    assert dcompile.receipt(network).bytes_offloaded > 8 * ROWS * WIDTH * 4
