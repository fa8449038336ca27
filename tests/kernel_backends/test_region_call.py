"""What another compiler returns: checked once, brought to the graph's strides, in memory of its own."""

from __future__ import annotations

import pytest
import torch

from dcompile.errors import DcompileError
from dcompile.kernel_backends.region_call import RegionCall

X = torch.arange(6.0).reshape(2, 3)
LAYOUT = ((2, 3), (3, 1), torch.float32)


def call(function, *layouts) -> RegionCall:
    return RegionCall(0, "other", function, layouts or (LAYOUT,), "region 0 of forward0")


def test_one_result_is_a_tensor_and_several_are_a_tuple() -> None:
    one, bare = call(lambda values: (values[0] + 1,)), call(lambda values: values[0] + 1)
    two = call(lambda values: [values[0] + 1, values[0] * 2], LAYOUT, LAYOUT)
    for _ in range(2):
        assert torch.equal(one([X]), X + 1) and torch.equal(bare([X]), X + 1)
        plus, twice = two([X])
        assert torch.equal(plus, X + 1) and torch.equal(twice, X * 2)


def test_results_that_share_memory_become_copies() -> None:
    made = call(lambda values: (values[0], y := values[0] + 1, y), LAYOUT, LAYOUT, LAYOUT)
    for _ in range(2):
        same, plus, again = made([X])
        same += 1
        plus += 1
        assert torch.equal(X, torch.arange(6.0).reshape(2, 3)) and torch.equal(again, X + 1)


def test_results_get_the_strides_of_the_graph() -> None:
    turned = call(lambda values: (values[0] * 2,), ((2, 3), (1, 2), torch.float32))
    repeated = call(lambda values: (values[0] * 0,), ((2, 3), (0, 1), torch.float32))
    for _ in range(2):
        assert turned([X]).stride() == (1, 2) and torch.equal(turned([X]), X * 2)
        assert repeated([X]).stride() == (0, 1) and torch.equal(repeated([X]), X * 0)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda values: (values[0].double(),), r"\(2, 3\), torch.float64 as result 0, where the graph says \(2, 3\)"),
        (lambda values: (values[0].sum(),), r"\(\), torch.float32 as result 0"),
        (lambda values: (values[0], values[0]), "2 results, where the graph says 1"),
        (lambda values: (3,), "as result 0"),
    ],
)
def test_other_result_than_the_graph_says_is_an_error(function, text: str) -> None:
    with pytest.raises(DcompileError, match=text):
        call(function)([X])
