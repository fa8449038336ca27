"""A float32 softmax of 16-bit scores is recomputed in the backward on GPUs, where its sources have fewer bytes."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.joint import broadcast_addends
from dcompile.capture.passes.joint import recompute_softmax as module
from dcompile.device_traits import traits_of
from dcompile.driver import Pipeline
from dcompile.ir.nodes import Loop

HEADS, ROWS, WIDTH = 2, 64, 16


def written_out(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) * 0.25 + mask
    return F.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def dropped(q, k, v, mask):
    found = torch.where(mask > 0, q @ k.transpose(-2, -1), -100.0)
    return F.dropout(F.softmax(found, -1, dtype=torch.float32), 0.0).to(v.dtype) @ v


def capped(q, k, v, mask):
    scores = torch.tanh((q @ k.transpose(-2, -1) + mask) / 5) * 5
    return F.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def biased(q, k, v, mask):
    """A bias for each head and key is added to scores, and a mask of keys in float32."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    scores = torch.baddbmm(mask[0, 0, :4, None].to(v.dtype), flat[0], flat[1].mT, alpha=0.25).view(2, HEADS, ROWS, ROWS)
    return F.softmax(scores + mask[..., :1, :], -1, dtype=torch.float32).to(v.dtype).flatten(0, 1) @ flat[2]


def in_layers(q, k, v, mask):
    """One computed mask for two layers, with a matmul between its readers."""
    computed = torch.where(mask > 0, 0.0, -30.0)
    return written_out(written_out(q, k, v, computed), k, v, computed)


def returned(q, k, v, mask):
    weights = F.softmax(q @ k.transpose(-2, -1) + mask, -1, dtype=torch.float32)
    return weights, weights.to(v.dtype) @ v


def in_float32(q, k, v, mask):
    return F.softmax((q @ k.transpose(-2, -1)) + mask, -1, dtype=torch.float32) @ v.float()


def over_heads(q, k, v, mask):
    return F.softmax(q @ k.transpose(-2, -1) + mask, 1, dtype=torch.float32).to(v.dtype) @ v


def given():
    return [torch.randn(2, HEADS, ROWS, WIDTH).bfloat16().requires_grad_() for _ in range(3)]


def gradients(function, args, mask):
    results = function(*args, mask)
    results = results if isinstance(results, tuple) else (results,)
    return torch.autograd.grad(sum(one.float().square().sum() for one in results), args)


@contextlib.contextmanager
def as_on_a_gpu():
    """Have the passes choose as for tensors on a GPU."""
    on_gpu = {"traits_of": lambda _: traits_of("cuda")}
    with mock.patch.multiple(module, MIN_BYTES=0, **on_gpu), mock.patch.multiple(broadcast_addends, **on_gpu):
        yield


def score_dtypes(function):
    """Plan a step; return dtypes of values of the scores' size: those that are saved, and the backward's own."""
    saved, plan = [], Pipeline.plan

    def planned(pipeline, gm, request, *more):
        found = plan(pipeline, gm, request, *more)
        program = found.program
        if request.kind == "forward":
            saved.extend(program.outputs[request.results :])
        written = {store.buffer for step in program.steps if isinstance(step, Loop) for store in step.stores}
        tables.append((request.kind, program.table, written))
        return found

    tables = []
    torch._dynamo.reset()
    with mock.patch.object(Pipeline, "plan", planned), as_on_a_gpu():
        dcompile.explain(dcompile.compile(function), *given(), torch.randn(1, 1, ROWS, ROWS))
    ((_, forward, _),) = (table for table in tables if table[0] == "forward")
    ((_, backward, written),) = (table for table in tables if table[0] == "backward")
    stored = [buffer for name, buffer in backward.items() if name in written]
    return tuple(
        [one.dtype for one in buffers if one.shape[-2:] == (ROWS, ROWS) and len(one.shape) > 2 and one.shape[0] > 1]
        for buffers in ([forward[view.buffer] for view in saved], stored)
    )


@pytest.mark.parametrize(
    "function", [written_out, in_layers, biased, *(pytest.param(f, marks=pytest.mark.full) for f in (dropped, capped))]
)
def test_scores_are_saved_instead(function):
    saved, stored = score_dtypes(function)
    assert saved == ["bfloat16"] * (2 if function is in_layers else 1)
    assert set(stored) == {"bfloat16"}, "the backward stores probabilities and gradients in 16 bits alone"


@pytest.mark.full
@pytest.mark.parametrize("function", [returned, in_float32, over_heads])
def test_softmax_that_others_read_in_float32_is_saved(function):
    saved, _ = score_dtypes(function)
    assert saved == ["float32"]


@pytest.mark.full
@pytest.mark.parametrize("function", [written_out, in_layers, dropped, capped])
def test_gradients_are_eagers(function):
    torch.manual_seed(0)
    args, mask = given(), torch.randn(1, 1, ROWS, ROWS)
    expected = gradients(function, args, mask)
    torch._dynamo.reset()
    with as_on_a_gpu():
        found = gradients(dcompile.compile(function), args, mask)
    for ours, eagers in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1.6e-2, atol=1e-4)


@pytest.mark.full
def test_gradients_behind_a_bias_are_as_near_as_eagers():
    """Eager rounds the sum with the bias to 16 bits, so equal distances are not equal gradients."""
    torch.manual_seed(0)
    args, mask = given(), torch.randn(1, 1, ROWS, ROWS)
    exact = gradients(biased, [x.detach().double().requires_grad_() for x in args], mask.double())
    eager = gradients(biased, args, mask)
    torch._dynamo.reset()
    with as_on_a_gpu():
        found = gradients(dcompile.compile(biased), args, mask)
    for ours, eagers, true in zip(found, eager, exact, strict=True):
        assert (ours - true).norm() <= 1.05 * (eagers - true).norm()
