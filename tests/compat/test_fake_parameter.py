"""Fake tensors of plain parameters: as a mode makes them, and found by it; others are left to the mode."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dcompile.compat.tensors import fake_parameter, fake_tensor, in_memory_of_their_own, storage_key


def seen(value: torch.Tensor) -> tuple[object, ...]:
    """All that tracing reads of a fake tensor."""
    layout = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    return layout, value.dtype, value.device, value.requires_grad, value.is_leaf, isinstance(value, nn.Parameter)


def plain() -> dict[str, nn.Parameter]:
    made = {
        "weight": nn.Parameter(torch.randn(3, 4)),
        "transposed": nn.Parameter(torch.randn(3, 4).t()),
        "frozen": nn.Parameter(torch.randn(5), requires_grad=False),
        "no elements": nn.Parameter(torch.randn(0, 2)),
        "with gradient": nn.Parameter(torch.randn(2, 2, dtype=torch.float64)),
    }
    made["with gradient"].grad = torch.randn(2, 2, dtype=torch.float64)
    return made


@pytest.mark.parametrize("name", plain())
def test_plain_parameters_have_the_fake_tensor_that_a_mode_makes(name: str) -> None:
    value, mode, other = plain()[name], FakeTensorMode(shape_env=ShapeEnv()), FakeTensorMode(shape_env=ShapeEnv())
    made, theirs = fake_parameter(mode, value), other.from_tensor(value, static_shapes=True)
    assert mode.from_tensor(value) is made
    assert seen(made) == seen(theirs)
    assert (made.grad is None) == (theirs.grad is None)
    if made.grad is not None:
        assert seen(made.grad) == seen(theirs.grad)


def shared() -> nn.Parameter:
    """A parameter whose storage another tensor shares."""
    value = nn.Parameter(torch.randn(4))
    value.other = value.detach()  # type: ignore[attr-defined]
    return value


def with_sparse_gradient() -> nn.Parameter:
    value = nn.Parameter(torch.randn(4, 2))
    value.grad = torch.eye(4, 2).to_sparse()
    return value


OTHERS = {
    "a tensor": lambda: torch.randn(3),
    "a number": lambda: 3,
    "another class": lambda: nn.Buffer(torch.randn(3)),
    "a part of its storage": lambda: nn.Parameter(torch.randn(8)[2:6]),
    "shared storage": shared,
    "sparse gradient": with_sparse_gradient,
    "negative": lambda: nn.Parameter(torch._neg_view(torch.randn(3))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_left_to_the_mode(name: str) -> None:
    value = OTHERS[name]()
    assert fake_parameter(FakeTensorMode(shape_env=ShapeEnv()), value) is None


def test_values_that_one_tensor_stands_for_are_told_apart() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    one, other = (fake_tensor(mode, torch.float32, "cpu", None, 0, (2, 3), (3, 1)) for _ in range(2))
    found = in_memory_of_their_own([one, 4, one, other, one])
    assert found[0] is one and found[1] == 4 and found[3] is other
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    assert len({storage_key(value) for value in tensors}) == 4 and len({seen(value) for value in tensors}) == 1
