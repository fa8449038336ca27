"""What a forward saves and its backward recomputes: views, softmax, clones, and positions of maxima."""

from __future__ import annotations

import contextlib
import operator
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dcompile
from dcompile.capture.passes.joint import broadcast_addends, saved_values
from dcompile.capture.passes.joint import saved_values as module
from dcompile.capture.passes.joint.saved_values import IMAGE_OF, remove_clones
from dcompile.compiler.driver import Pipeline
from dcompile.device_traits import traits_of
from dcompile.ir.nodes import Loop


def gated(x, w):
    """A gate of channels-last images, 20 bytes after the begin of their memory, and channels that no gradient needs."""
    values, gate, rest = torch.conv2d(x, w).split([5, 1, 5], 1)
    return values * gate + rest


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_views_that_are_not_aligned_are_views_of_what_is_saved(device, monkeypatch):
    monkeypatch.setattr(saved_values, "traits_of", lambda _: traits_of(device))
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    w = torch.randn(11, 3, 3, 3, requires_grad=True)
    (want,) = torch.autograd.grad(gated(x, w).sum(), w)
    out = dcompile.compile(gated, options={"receipt": False, "trace_cache": False})(x, w)
    saved = out.grad_fn.saved_tensors
    assert any(tensor.storage_offset() * 4 % 16 for tensor in saved) == (device == "cpu")
    (got,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_views_in_checkpointed_regions_keep_their_region(monkeypatch):
    monkeypatch.setattr(saved_values, "traits_of", lambda _: traits_of("cuda"))
    given = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last), torch.randn(11, 3, 3, 3)
    gm = make_fx(gated, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    views = [node for node in gm.graph.nodes if node.target is operator.getitem]
    for node in views:
        node.meta |= {"recompute": "by its region", "ac_graph_id": 3}
    assert saved_values.recompute_misaligned_views(gm).changes == 0
    assert {node.meta["ac_graph_id"] for node in views} == {3}


@pytest.mark.parametrize("is_sharded", [True, False])
def test_rows_of_a_sharded_table_are_saved(is_sharded):
    """The backward would gather the table for them alone; other tables are there anyway."""
    gm = make_fx(lambda table, places: torch.nn.functional.embedding(places, table).sin())(
        torch.randn(8, 4), torch.tensor([1, 2])
    )
    saved_values.recompute_views(gm, lambda gm: gm.graph.find_nodes(op="placeholder")[: 1 if is_sharded else 0])
    (looked_up,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert ("recompute" in looked_up.meta) == is_sharded


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
    with mock.patch.multiple(module, MIN_SOFTMAX_BYTES=0, **on_gpu), mock.patch.multiple(broadcast_addends, **on_gpu):
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


aten = torch.ops.aten


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def copies(gm):
    return len(gm.graph.find_nodes(op="call_function", target=aten.clone.default))


def test_a_copy_of_a_computed_value_goes():
    gm = traced(
        lambda x: (x.relu().clone() * 2, x.sin().clone(memory_format=torch.preserve_format) + 1), torch.randn(3, 4)
    )
    assert copies(gm) == 2 and remove_clones(gm).changes == 2 and copies(gm) == 0
    x = torch.randn(3, 4)
    torch.testing.assert_close(gm(x)[0], x.relu() * 2, rtol=0, atol=0)


def test_copies_of_inputs_results_and_other_layouts_stay():
    def function(x):
        y = x.exp()
        return x.t().clone().sin(), y.clone(), y, y.t().clone(memory_format=torch.contiguous_format).cos()

    gm = traced(function, torch.randn(3, 4))
    assert copies(gm) == 3 and remove_clones(gm).changes == 0


def test_nothing_goes_where_a_graph_writes():
    gm = traced(lambda x: x.exp().clone().add_(1) * 2, torch.randn(3))
    assert remove_clones(gm).changes == 0


def test_dropout_of_zero_saves_nothing():
    """Of two linear layers with a ReLU and an idle dropout between them, the ReLU's result alone is saved."""
    first, second = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
    saved = []

    def model(x):
        return second(F.dropout(first(x).relu(), 0.0))

    def step(call, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            loss = call(x).square().sum()
        loss.backward()
        found = [loss.detach(), first.weight.grad.clone(), second.weight.grad.clone()]
        first.zero_grad(), second.zero_grad()
        return found

    x = torch.randn(2, 5, 8)
    wanted = step(model, x)
    saved.clear()
    found = step(dcompile.compile(model, options={"receipt": False}), x)
    torch.testing.assert_close(found, wanted)
    assert sum(shape.numel() == 2 * 5 * 16 for shape in saved) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_two_pools(dynamic):
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1)

    def step(call, x):
        loss = F.max_pool2d(call(x), 3, 2, 1).square().sum()
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in convolution.parameters()]

    def model(x):
        return F.max_pool2d(convolution(x).relu(), 3, 2, 1)

    x = torch.randn(2, 3, 16, 16)
    wanted = step(model, x)
    convolution.zero_grad()
    found = step(dcompile.compile(model, dynamic=dynamic, options={"receipt": False}), x)
    torch.testing.assert_close(found, wanted)


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
