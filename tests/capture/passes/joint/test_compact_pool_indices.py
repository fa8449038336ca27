"""Positions that max pooling saves are short, and come back exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import dcompile
from dcompile.capture.passes.joint.compact_pool_indices import IMAGE_OF, compact_pool_indices

aten = torch.ops.aten


def both(x, kernel, stride, padding, dilation, ceil):
    pooled, positions = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
    gradient = torch.cos(pooled)
    backward = aten.max_pool2d_with_indices_backward
    return pooled, backward(gradient, x, kernel, stride, padding, dilation, ceil, positions)


WINDOWS = {
    "as in ResNet": ((2, 3, 20, 21), [3, 3], [2, 2], [1, 1], [1, 1], False),
    "no stride": ((2, 3, 12, 9), [2], [], [0], [1], False),
    "dilated": ((1, 2, 17, 15), [3, 2], [2, 1], [1, 0], [2, 3], False),
    "rounded up": ((3, 1, 13, 13), [3, 3], [2, 2], [0, 0], [1, 1], True),
    "no batch": ((4, 10, 10), [3, 3], [1, 1], [1, 1], [1, 1], False),
    "two bytes": ((1, 1, 40, 300), [5, 5], [3, 3], [2, 2], [1, 1], False),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_go_where_they_went(name):
    shape, *window = WINDOWS[name]
    x = torch.randn(shape)
    x[..., 3, :] = 1.0  # ties, and not-a-numbers, which win
    x[..., 5, 5] = float("nan")
    gm = make_fx(lambda x: both(x, *window), tracing_mode="fake")(x)
    assert compact_pool_indices(gm).changes == 1
    converted = [node.meta["val"].dtype for node in gm.graph.nodes if node.target is aten._to_copy.default]
    (short,) = {*converted} - {torch.int64}
    assert short == (torch.int16 if name == "two bytes" else torch.uint8)
    for found, wanted in zip(gm(x), both(x, *window), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_windows_too_large_for_two_bytes_stay():
    gm = make_fx(lambda x: both(x, [40, 40], [1, 1], [0, 0], [1, 1], False), tracing_mode="fake")(
        torch.randn(1, 1, 41, 900)
    )
    assert compact_pool_indices(gm).changes == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_saves_bytes(dynamic):
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1)
    saved = []

    def step(call, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
            loss = F.max_pool2d(call(x), 3, 2, 1).square().sum()
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in convolution.parameters()]

    def model(x):
        return F.max_pool2d(convolution(x).relu(), 3, 2, 1)

    x = torch.randn(2, 3, 16, 16)
    wanted = step(model, x)
    convolution.zero_grad()
    saved.clear()
    found = step(dcompile.compile(model, dynamic=dynamic, options={"receipt": False}), x)
    torch.testing.assert_close(found, wanted)
    assert (torch.uint8 in saved) == (not dynamic)


def test_backwards_do_not_save_the_image():
    def model(x):
        return F.avg_pool2d(F.max_pool2d(x.exp(), 3, 2, 1).sin(), 2)

    def step(call, x):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            loss = call(x).square().sum()
        loss.backward()
        gradient, x.grad = x.grad, None
        return loss.detach(), gradient, saved

    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    *wanted, _ = step(model, x)
    *found, saved = step(dcompile.compile(model, options={"receipt": False}), x)
    torch.testing.assert_close(found, wanted)
    assert sum(shape == x.shape for shape in saved) == 1  # the input or its exponential


@pytest.mark.parametrize("backward", IMAGE_OF, ids=str)
def test_no_backward_of_the_list_reads_its_image(backward):
    """Given room full of not-a-number in place of the image, gradients are what they were."""
    kind, rank = str(backward), 3 if "3d" in str(backward) else 2
    x = torch.randn(2, 3, *[8] * rank, requires_grad=True)
    if "adaptive" in kind:
        forward = getattr(F, f"adaptive_{'avg' if 'avg' in kind else 'max'}_pool{rank}d")
        y = forward(x, 3)
    else:
        y = getattr(F, f"{'avg' if 'avg' in kind else 'max'}_pool{rank}d")(x, 2)
    given = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, x, given)

    class Swap(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is backward:
                self.seen += 1
                args = list(args)
                args[IMAGE_OF[func]] = torch.full_like(args[IMAGE_OF[func]], float("nan"))
            return func(*args, **(kwargs or {}))

    y = forward(x, 3) if "adaptive" in kind else getattr(F, f"{'avg' if 'avg' in kind else 'max'}_pool{rank}d")(x, 2)
    with Swap() as swap:
        (found,) = torch.autograd.grad(y, x, given)
    assert swap.seen == 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
