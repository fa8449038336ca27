"""Sampling an image at given places, and normalised weights: their decompositions against eager, backward too."""

import pytest
import torch
import torch.nn.functional as F

import dcompile

pytestmark = pytest.mark.usefixtures("compiled_anew")


def against_eager(function, *args, fallbacks=0):
    """Results and gradients; in bfloat16 no further from float32's than eager's."""
    call = dcompile.compile(function, fullgraph=True, options={"receipt": False})
    ours, theirs = results(call, args), results(function, args)
    exact = results(function, [x.float() for x in args]) if args[0].dtype == torch.bfloat16 else theirs
    for a, b, x in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        if a.dtype == torch.bfloat16:
            assert (a - x).norm() <= 1.1 * (b - x).norm() <= 0.1 * x.norm()
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(dcompile.receipt(call).fallbacks) == fallbacks


def results(function, args):
    inputs = [x.detach().clone().requires_grad_() for x in args]
    result = function(*inputs)
    result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype))
    return result.detach(), *(x.grad for x in inputs)


# float32 both ways, for the formula; the other dtypes, whose conversions do not depend on it, each in one
@pytest.mark.parametrize(
    ("dtype", "align"),
    [(torch.float32, False), (torch.float32, True), (torch.float64, True), (torch.bfloat16, False)],
)
def test_bilinear_samples_within_and_beyond_the_edges(dtype, align):
    x, grid = torch.randn(2, 3, 5, 4).to(dtype), (torch.rand(2, 6, 3, 2) * 3 - 1.5).to(dtype)
    against_eager(lambda x, grid: F.grid_sample(x, grid, align_corners=align) * 2, x, grid)


def test_other_ways_to_sample_are_the_librarys():
    x, grid = torch.randn(2, 3, 5, 4), torch.rand(2, 6, 3, 2) * 3 - 1.5
    against_eager(
        lambda x, grid: F.grid_sample(x, grid, padding_mode="border", align_corners=False), x, grid, fallbacks=2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 2])
def test_weights_of_a_norm_apart(dtype, dim):
    v, g = (
        torch.randn(4, 3, 5).to(dtype),
        torch.randn(*(n if d == dim else 1 for d, n in enumerate((4, 3, 5)))).to(dtype),
    )
    against_eager(lambda v, g: torch._weight_norm(v, g, dim) * 2, v, g)
