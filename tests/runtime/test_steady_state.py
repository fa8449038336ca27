"""From the second step on, nothing is allocated but what leaves the program: results, saved tensors, gradients."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dcompile


class Block(nn.Module):
    """Intermediates of all kinds: products, row statistics, values that only one side needs."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(self.down(nn.functional.gelu(self.up(self.norm(x)))), -1)
        return (x + y) * torch.tanh(y).mean(-1, keepdim=True)


def allocations(call) -> Counter[int]:
    """Sizes of what torch's allocator hands out during a call, empty tensors apart."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        call()
    events = found.profiler.kineto_results.events()
    return Counter(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)


def surplus_of_a_step(**options) -> tuple[Counter[int], Counter[int]]:
    """What forward and backward allocate in the third step beyond what leaves them."""
    torch.manual_seed(0)
    model, x, gradient = Block(), torch.randn(80, 96), torch.randn(80, 96)
    parameters = [*model.parameters()]
    torch._dynamo.reset()
    call = torch.compile(model, backend="dcompile", options={"receipt": False, **options})
    for _ in range(2):
        torch.autograd.grad(call(x), parameters, gradient)
    own = {tensor.data_ptr() for tensor in (x, *parameters)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward = allocations(lambda: kept.append(call(x)))
    leaving = {**saved, kept[0].data_ptr(): kept[0].untyped_storage().nbytes()}
    results: list[torch.Tensor] = []
    backward = allocations(lambda: results.extend(torch.autograd.grad(kept[0], parameters, gradient)))
    gradients = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in results}
    return forward - Counter(leaving.values()), backward - Counter(gradients.values())


@pytest.mark.parametrize("matmul", ["own", "aten"])
def test_nothing_is_allocated_but_what_leaves(matmul):
    assert surplus_of_a_step(matmul=matmul) == (Counter(), Counter())


def test_the_count_would_show_an_intermediate():
    forward, backward = surplus_of_a_step(kernels="aten")
    assert forward and backward


def test_inference_takes_the_memory_of_results_that_are_gone():
    x = torch.randn(512, 512)
    call = dcompile.compile(lambda x: torch.softmax(x @ x, -1) + 1, options={"receipt": False})
    for _ in range(2):
        call(x)
    assert allocations(lambda: call(x)) == Counter()


def python_calls(function, *args) -> list[str]:
    """The Python functions that a call comes by: where a kernel has swept the caches, each takes some 2 us."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, arg: found.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return found


def test_a_call_comes_by_few_functions():
    function = dcompile.compile(lambda x: x.sin().sum(), options={"receipt": False})
    inputs = torch.randn(3), torch.randn(3, requires_grad=True)
    for _ in range(3):
        for x in inputs:
            function(x)
    for x in inputs:
        function(x)  # from now on its guards are asked first
        most = 10 if torch.__version__ >= "2.13" else 12  # earlier versions run wrappers of their own
        assert len(python_calls(function, x)) <= most, python_calls(function, x)
