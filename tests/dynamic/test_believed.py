"""What `torch._check` says of a size that depends on values is compared with what the run shows, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import config

import dcompile


def found(x: Any) -> Any:
    z = x.nonzero()
    torch._check(z.size(0) == 4)
    return z + 3


def number(x: Any) -> Any:
    k = x.max().item()
    torch._check(k == 4)
    return torch.ones(k) * 2


def multiple(x: Any) -> Any:
    z = x.nonzero()
    torch._check(z.size(0) % 2 == 0)
    return z.reshape(-1, 2) + 1


def equal(x: Any) -> Any:
    y, z = x.nonzero(), (x > 1).nonzero()
    torch._check(y.size(0) == z.size(0))
    return y + z


def whole(x: Any) -> Any:
    z = x.nonzero()
    torch._check(z.size(0) == x.size(0))
    return z[:, 0] + x


def chosen(x: Any) -> Any:
    z = x[x > 0]
    torch._check(z.size(0) == 4)
    return z * 2


def distinct(x: Any) -> Any:
    z = x.unique()
    torch._check(z.size(0) == 5)
    return z * 2


def limited(x: Any) -> Any:
    z = x.nonzero()
    torch._check(z.size(0) <= 5)
    return z + 1


FOUR = [0, 1, 3, 4, 2, 0, 0]
CASES: list[tuple[Callable[[Any], Any], list[int], list[list[int]]]] = [
    (found, FOUR, [[0] * 7, [1] * 7]),
    (number, [4, 1], [[7, 1], [0, 0]]),
    (multiple, [1, 2, 0, 0, 5, 6], [[1, 2, 3, 0, 0, 0]]),
    (equal, [2, 3, 0], [[1, 2, 3]]),
    (whole, [1, 2, 3], [[1, 0, 3]]),
    (chosen, FOUR, [[0] * 7, [1] * 7]),
    (distinct, [0, 1, 2, 3, 4], [[1] * 5, [0, 1, 2, 3, 3]]),
    (limited, [3, 3, 0, 0, 0, 0, 0], [[1] * 7]),
]


@pytest.mark.parametrize("kernels", ["own", "aten"])
@pytest.mark.parametrize(("function", "right", "wrong"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_check_that_does_not_hold_raises(
    function: Callable[[Any], Any], right: list[int], wrong: list[list[int]], kernels: str
) -> None:
    torch._dynamo.reset()
    options = {"receipt": False} | ({"kernels": "aten"} if kernels == "aten" else {})
    call = torch.compile(function, backend="dcompile", options=options)
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        assert torch.equal(call(torch.tensor(right)), function(torch.tensor(right)))
        for values in wrong:
            with pytest.raises(RuntimeError):
                function(torch.tensor(values))
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                call(torch.tensor(values))
        assert torch.equal(call(torch.tensor(right)), function(torch.tensor(right)))


def test_what_is_not_checked_is_not_compared() -> None:
    """A size that is told by the call itself needs no line in the program."""
    torch._dynamo.reset()
    call = dcompile.compile(lambda x: x.nonzero() + 3)
    with config.patch(capture_dynamic_output_shape_ops=True):
        for values in (FOUR, [1] * 7):
            assert torch.equal(call(torch.tensor(values)), torch.tensor(values).nonzero() + 3)
