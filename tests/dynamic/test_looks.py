"""Views of inputs with symbolic sizes, handed to the caller."""

import pytest
import torch

import dcompile


def alone(x):
    return x.as_strided((2, 2), (1, 2), 1)


def behind_its_own_sizes(x):
    return x.as_strided(x.shape, x.stride()).as_strided((2, 2), (1, 2), 1)


def of_a_slice(x):
    return x[1:].as_strided((x.shape[0] - 1, 2), (x.stride(0), 1), 1)


def turned(x):
    return x.as_strided((x.shape[0] - 1, 2), (x.stride(0), 1), 1).t()


def of_another_shape(x):
    return x.view(x.shape[0], -1).as_strided((2, 2), (1, 2), 2)


# Dynamo itself looks at .grad of a graph's input that is no leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    "look", [alone, behind_its_own_sizes, of_a_slice, turned, of_another_shape], ids=lambda look: look.__name__
)
def test_a_look_that_counts_from_where_the_storage_begins(look, learns, read):
    """Of known size, of a look with symbols in it, it was a copy, and AOTAutograd's view began at 0 as that did."""

    def function(x):
        seen = look(x)
        return (seen, seen[..., 0], seen.t()[1:], *((seen * 2,) if read else ()))

    compiled = dcompile.compile(function, dynamic=True)
    for size in (5, 7):
        x = torch.randn(size, 4).requires_grad_(learns) * 1
        for got, want in zip(compiled(x), function(x), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
            assert got.storage_offset() == want.storage_offset()
