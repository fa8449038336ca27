"""Decompositions of our own: eager's values, and eager's strides on the device that tracing says."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dcompile
from dcompile.codegen.lower.decompositions.table import table

LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shuffled_channels_are_laid_out_as_in_eager(layout):
    shuffle = table()[torch.ops.aten.channel_shuffle.default]
    x = torch.randn(2, 6, 4, 5).to(memory_format=layout)
    found, expected = shuffle(x, 3), torch.channel_shuffle(x, 3)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    # a GPU's kernels give row-major images whatever they get (seen on an H200, torch 2.11)
    assert shuffle(torch.empty_like(x, device="meta"), 3).is_contiguous()


@pytest.mark.parametrize("value", [2.5, torch.tensor(-1.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 6),
        torch.randn(4, 6).t(),
        torch.randn(8, 12)[::2, ::2],
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(4, 1).expand(4, 3),
        torch.randn(()),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_filled_slices_are_laid_out_as_in_eager(x, dim, value):
    fill = table()[torch.ops.aten.index_fill.int_Scalar]
    for index in (torch.tensor([0]), torch.tensor(0), torch.tensor([0, 0]), torch.empty(0, dtype=torch.int64)):
        found, expected = fill(x, dim, index, value), x.index_fill(dim, index, value)
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_a_fills_value_gets_the_gradient_of_each_slice_once():
    """It asks which places differ, whose number torch 2.11 makes up while tracing."""

    def function(x, index, value):
        return x.index_fill(1, index, value) * 2

    x, index = torch.randn(5, 6, requires_grad=True), torch.tensor([4, 4, 0, 1, 4])
    cotangent, found = torch.randn(5, 6), []
    for call in (function, dcompile.compile(function, options={"receipt": False})):
        value = torch.tensor(-1.5, requires_grad=True)
        found.append(torch.autograd.grad(call(x, index, value), (x, value), cotangent))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


def test_pixels_that_are_none_get_a_shape_all_the_same():
    """On the CPU eager leaves an empty tensor's shape alone, elsewhere it does not."""
    unshuffle = table()[torch.ops.aten.pixel_unshuffle.default]
    for device in ("cpu", "meta"):
        x = torch.empty(0, 1, 6, 6, device=device)
        assert unshuffle(x, 3).shape == torch.pixel_unshuffle(x, 3).shape


def test_pixels_are_laid_out_as_eager_lays_them_out():
    """On GPUs in row-major order, whatever the image's layout; torch's own decomposition does not ask where it is."""
    shuffle = table()[torch.ops.aten.pixel_shuffle.default]
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            for layout in (torch.contiguous_format, torch.channels_last):
                x = torch.empty(2, 8, 3, 5, device=device).to(memory_format=layout)
                assert shuffle(x, 2).stride() == torch.pixel_shuffle(x, 2).stride(), (device, layout)
    for shape in ((2, 8, 3, 5), (9, 2, 2), (0, 4, 2, 3), (2, 3, 4, 1, 2)):
        factor = 3 if shape[0] == 9 else 2
        x = torch.randn(shape)
        assert torch.equal(shuffle(x, factor), torch.pixel_shuffle(x, factor))


def saved(function, x, *args):
    """Shapes of what a compiled function's backward needs; its gradient of `x` is eager's."""
    found, shapes = [], []
    for call in (function, dcompile.compile(function, options={"receipt": False})):
        leaf = x.clone().requires_grad_()
        shapes.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (shapes.append(tuple(x.shape)), x)[1], lambda x: x):
            result = call(leaf, *args)
        found.append((result, *torch.autograd.grad(result.sum(), leaf)))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)
    return shapes


def test_rotary_angles_are_made_again_from_their_frequencies():
    """As Hugging Face's models make them: an outer product by `matmul`, twice side by side."""

    def turned(x, frequencies, places):
        angles = (frequencies[None, :, None] @ places[:, None, :].float()).transpose(1, 2)
        return x * torch.cat((angles, angles), -1).cos()

    shapes = saved(turned, torch.randn(2, 40, 16), torch.rand(8), torch.arange(40).expand(2, 40))
    assert all(shape not in ((2, 40, 16), (2, 40, 8), (2, 8, 40)) for shape in shapes), shapes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [1, -1])
def test_a_tensor_beside_itself_lies_as_in_eager(layout, dim):
    x = torch.randn(2, 3, 4, 5).to(memory_format=layout)
    for one in (x, x.transpose(1, 3), x[:, :1], x.double()[..., ::2]):
        found = dcompile.compile(lambda one: torch.cat([one, one, one], dim) + 1, options={"receipt": False})(one)
        expected = torch.cat([one, one, one], dim) + 1
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_nothing_beside_nothing_along_a_dimension_that_is_not_there():
    """As eager mode has it, for tensors of shape (0,)."""
    found = dcompile.compile(lambda x: torch.cat([x, x], 1) + 1, options={"receipt": False})(torch.ones(0))
    assert found.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64], ids=str)
def test_products_that_add_nothing_up(dtype):
    x, y = torch.arange(6).reshape(2, 3, 1).to(dtype), torch.arange(10).reshape(2, 1, 5).to(dtype)
    for left, right in ((x, y), (x.transpose(0, 1).contiguous().transpose(0, 1), y.expand(2, 1, 5))):
        found = dcompile.compile(torch.bmm, options={"receipt": False})(left, right)
        expected = torch.bmm(left, right)
        assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_a_softmaxs_gradient_has_the_dtype_that_eager_gives_it(name):
    def gradient(grad, y):
        return getattr(torch.ops.aten, name)(grad, y, 1, torch.bfloat16)

    grad, y = torch.randn(2, 3), torch.randn(2, 3).softmax(1)
    for dtype in (torch.float32, torch.bfloat16):
        given = grad.to(dtype), y.to(dtype)
        torch.testing.assert_close(dcompile.compile(gradient, options={"receipt": False})(*given), gradient(*given))
