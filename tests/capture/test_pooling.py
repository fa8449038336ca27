"""Positions that max pooling saves are short, and come back exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.pooling import shorten_positions

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
    assert shorten_positions(gm) == 1
    converted = [node.meta["val"].dtype for node in gm.graph.nodes if node.target is aten._to_copy.default]
    (short,) = {*converted} - {torch.int64}
    assert short == (torch.int16 if name == "two bytes" else torch.uint8)
    for found, wanted in zip(gm(x), both(x, *window), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_windows_too_large_for_two_bytes_stay():
    gm = make_fx(lambda x: both(x, [40, 40], [1, 1], [0, 0], [1, 1], False), tracing_mode="fake")(
        torch.randn(1, 1, 41, 900)
    )
    assert shorten_positions(gm) == 0


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
