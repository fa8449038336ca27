"""Convolutions run channels-last inside, norms on contiguous rows; results are the same, strides included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.joint.layouts import keep_rows_contiguous, use_channels_last

aten = torch.ops.aten


def traced(function, *args):
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def convolutions(gm):
    return [node for node in gm.graph.nodes if node.target in (aten.convolution.default,)]


def is_channels_last(node):
    return node.meta["val"].is_contiguous(memory_format=torch.channels_last)


def strides_of_results(gm):
    (results,) = gm.graph.output_node().args
    return [node.meta["val"].stride() for node in (results if isinstance(results, (tuple, list)) else (results,))]


def net(x, w, v):
    y = torch.relu(torch.conv2d(x, w, padding=1)) + 1
    z = torch.conv2d(y, v)
    return y, z.flatten(1).sum(1), z.permute(0, 2, 3, 1)


INPUTS = (torch.randn(2, 8, 6, 6), torch.randn(16, 8, 3, 3), torch.randn(4, 16, 1, 1))


def test_convolutions_read_and_write_channels_last_and_the_border_stays():
    gm = traced(net, *INPUTS)
    before = strides_of_results(gm)
    assert use_channels_last(gm).changes > 0
    assert all(is_channels_last(node) and is_channels_last(node.args[0]) for node in convolutions(gm))
    assert strides_of_results(gm) == before
    for found, expected in zip(gm(*INPUTS), net(*INPUTS), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_is_channels_last_already_is_not_copied():
    images = [tensor.contiguous(memory_format=torch.channels_last) for tensor in INPUTS]
    gm = traced(net, *images)
    nodes = len(gm.graph.nodes)
    assert use_channels_last(gm).changes == 0 and len(gm.graph.nodes) == nodes


def test_sums_over_blocks_of_an_image_keep_its_order():
    def function(x, w, v):
        blocks = torch.conv2d(x, w, padding=1).unflatten(2, (3, 2)).unflatten(4, (3, 2))
        return torch.conv2d(blocks.sum([3, 5]), v), blocks.amax(5, keepdim=True).flatten(1)

    gm = traced(function, *INPUTS)
    use_channels_last(gm)
    (sums,) = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert is_channels_last(sums)
    assert convolutions(gm)[1].args[0] is sums, "there is no copy in between"
    for found, expected in zip(gm(*INPUTS), function(*INPUTS), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_image_read_twice_is_copied_once():
    gm = traced(lambda x, w, v: (torch.conv2d(x, w), torch.conv2d(x, v)), INPUTS[0], INPUTS[1], torch.randn(4, 8, 1, 1))
    use_channels_last(gm)
    first, second = convolutions(gm)
    assert first.args[0] is second.args[0]


def test_what_depends_on_strides_reads_what_it_would_have_read():
    def strided(x, w):
        return torch.conv2d(x, w, padding=1).as_strided((5, 3), (7, 2), 4)

    gm = traced(strided, *INPUTS[:2])
    assert use_channels_last(gm).changes > 0
    torch.testing.assert_close(gm(*INPUTS[:2]), strided(*INPUTS[:2]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.conv_transpose2d(x, w.transpose(0, 1).contiguous()),
        lambda x, w: torch.conv2d(x.double(), w.double()),
        lambda x, w: x.flatten(1) @ x.flatten(1).t() + w.sum(),
    ],
    ids=["transposed", "float64", "no convolution"],
)
def test_left_alone(function):
    gm = traced(function, *INPUTS[:2])
    text = str(gm.graph)
    assert use_channels_last(gm).changes == 0 and str(gm.graph) == text


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(
            3, 16, 3, padding=1, bias=False
        )  # a bias before a norm gets rounding errors for a gradient
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.group = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.one(x)))
        z = self.depthwise(nn.functional.max_pool2d(y, 2)) + nn.functional.avg_pool2d(y, 2)
        z = self.group(self.up(torch.cat((z[:, :8], nn.functional.gelu(z[:, 8:])), 1)))
        return self.head(z.permute(0, 2, 3, 1)), z, y.mean((2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_are_eagers_and_errors_no_larger(dtype):
    torch.manual_seed(0)
    model, image = Net().to(dtype), torch.randn(2, 3, 12, 12).to(dtype)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run(model, call, x):
        model.load_state_dict(state)
        model.zero_grad()
        results = call(x.requires_grad_())
        sum(y.square().sum() for y in results).backward()
        return [*(y.detach() for y in results), x.grad, *(p.grad for p in model.parameters())]

    def error(found):
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    exact = run(double := copy.deepcopy(model).double(), double, image.double())
    eager = run(model, model, image.clone())
    call = torch.compile(model, backend="dcompile", options={"receipt": False, "verify": True})
    found = run(model, call, image.clone())
    assert [a.stride() for a in found] == [a.stride() for a in eager]
    # in bfloat16, eager's norms keep float32 between operations that ours round one by one
    times = 1.5 if dtype == torch.float32 else 4
    for ours, theirs in zip(error(found), error(eager), strict=True):
        assert ours <= max(times * theirs, 1e-5)


def test_inference_too():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        expected = model(x)
        found = dcompile.compile(model, options={"receipt": False})(x)
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_enlarged_image_stays_channels_last():
    def function(x, w, v):
        y = torch.conv2d(x, w, padding=1)
        places = torch.arange(12) // 2
        return torch.conv2d(aten._unsafe_index(y, [None, None, places[:, None], places]), v)

    gm = traced(function, *INPUTS)
    assert use_channels_last(gm).changes > 0
    (gather,) = [node for node in gm.graph.nodes if node.target is aten._unsafe_index.Tensor]
    assert is_channels_last(gather) and is_channels_last(gather.args[0])
    assert all(node.args[0] is not gather for node in gm.graph.nodes if node.target is aten.clone.default)
    torch.testing.assert_close(gm(*INPUTS), function(*INPUTS))


@pytest.mark.parametrize("channels", [3, 16])
def test_filters_of_one_pixel_in_steps_over_few_channels_stay(channels):
    """oneDNN's gradient of them corrupts the heap where images lie channels-last."""

    def function(x, w, v):
        y = torch.conv2d(torch.relu(torch.conv2d(x, w, padding=1)), v, stride=2)
        return torch.autograd.grad(y.square().sum(), [x, w, v])

    x = torch.randn(4, 8, 12, 12, requires_grad=True)
    w, v = torch.randn(channels, 8, 3, 3, requires_grad=True), torch.randn(8, channels, 1, 1, requires_grad=True)
    gm = traced(function, x, w, v)
    assert use_channels_last(gm).changes > 0
    own = [node for node in gm.graph.nodes if node.target is aten.convolution_backward.default]
    small = [node for node in own if node.args[2].meta["val"].shape[-1] == 1]
    assert len(own) == 2 and len(small) == 1
    assert [is_channels_last(node.args[1]) for node in small] == [channels == 16]
    for found, expected in zip(gm(x, w, v), function(x, w, v), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_changed_operand_decides_where_operands_disagree():
    """The gradient of a mean is row-major; with it, all gradients before it would be."""

    def gradients(x, w, v, g):
        y = torch.conv2d(x, w, padding=1)
        g = g.expand_as(y) / 36
        z = (g * (y + 1)).view(2, 2, 8, 36) * y.view(2, 2, 8, 36)
        return torch.conv2d(z.view(2, 16, 6, 6) + g, v).sum()

    given = (*INPUTS, torch.randn(2, 16, 1, 1))
    gm = traced(gradients, *given)
    assert use_channels_last(gm).changes > 0
    copied = [node for node in gm.graph.nodes if node.target is aten.clone.default]
    assert len(copied) == 1  # of the input
    assert is_channels_last(convolutions(gm)[1].args[0])
    torch.testing.assert_close(gm(*given), gradients(*given))


def test_a_concatenation_has_the_order_of_most_channels():
    """Of one channel that was summed, row-major, and 16 that are channels-last."""

    def joined(x, w, v):
        y = torch.conv2d(x, w, padding=1)
        z = torch.cat([y, torch.relu(y).sum(1, keepdim=True).contiguous()], 1)
        return torch.conv2d(z, v), z.sum([0, 2, 3])

    images = [tensor.contiguous(memory_format=torch.channels_last) for tensor in INPUTS[:2]]
    given = (*images, torch.randn(4, 17, 1, 1).contiguous(memory_format=torch.channels_last))
    gm = traced(joined, *given)
    (both,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    use_channels_last(gm)
    assert is_channels_last(both) and convolutions(gm)[1].args[0] is both
    for found, expected in zip(gm(*given), joined(*given), strict=True):
        torch.testing.assert_close(found, expected)


X, PLACES, WEIGHT = torch.randn(2, 32, 40), torch.randn(40, 32), torch.randn(32, 32)


def traced_rows(function: Any, *args: torch.Tensor) -> Any:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def stream(x: torch.Tensor, places: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two residual layers behind features over time; also returns the sum that a caller sees permuted."""
    first = x.permute(0, 2, 1) + places
    second = first + F.layer_norm(first, (32,)) @ weight
    return first, F.layer_norm(second, (32,)).cos()


def by_mean(x: torch.Tensor, places: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with a root mean square, from single operations."""
    first = x.permute(0, 2, 1) + places
    return (first * (first.square().mean(-1, keepdim=True) + 1e-5).rsqrt()) @ weight


@pytest.mark.parametrize("function", [stream, by_mean])
def test_sums_are_contiguous_inside_and_the_border_stays(function: Any) -> None:
    gm = traced_rows(function, X, PLACES, WEIGHT)
    assert keep_rows_contiguous(gm).changes
    sums = [node for node in gm.graph.nodes if node.target is aten.add.Tensor and node.meta["val"].shape == (2, 40, 32)]
    assert sums and all(node.meta["val"].is_contiguous() for node in sums)
    given, wanted = gm(X, PLACES, WEIGHT), function(X, PLACES, WEIGHT)
    for found, expected in zip(*(x if isinstance(x, tuple) else (x,) for x in (given, wanted)), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, places, w: (x.permute(0, 2, 1) + places).permute(0, 2, 1) * 2,
        lambda x, places, w: F.layer_norm(x.permute(0, 2, 1) + places, (40, 32)),
        lambda x, places, w: F.layer_norm(x.permute(0, 2, 1)[:, :, :8] + 1, (8,)),
    ],
    ids=["not normalized", "along all dimensions", "short rows"],
)
def test_what_keeps_its_layout(function: Any) -> None:
    gm = traced_rows(function, X, PLACES, WEIGHT)
    nodes = len(gm.graph.nodes)
    assert keep_rows_contiguous(gm).changes == 0 and len(gm.graph.nodes) == nodes


class Encoder(nn.Module):
    """A convolution over time, positions, and two layers with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 32, 3, padding=1)
        self.places = nn.Parameter(torch.randn(40, 32))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x)).permute(0, 2, 1) + self.places
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def test_training_gives_what_eager_gives() -> None:
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(2, 4, 40)
    compiled = dcompile.compile(model, options={"receipt": False})
    results = []
    for call in (compiled, model):
        model.zero_grad()
        found = call(x)
        found.square().mean().backward()
        results.append([found, *(parameter.grad for parameter in model.parameters())])
    assert results[0][0].stride() == results[1][0].stride()
    for ours, eagers in zip(*results, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
