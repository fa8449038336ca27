"""Reading off the autograd graph which parameters a result used outside compiled graphs."""

import dataclasses
from collections import OrderedDict

import pytest
import torch

from dcompile.capture.agreement import parameter_use
from dcompile.capture.agreement.parameter_use import outside_use, tensors_in


class CompiledFunction(torch.autograd.Function):
    """Named as AOTAutograd names the function it compiles a graph into."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.count = len(tensors)
        return sum(t.sum() for t in tensors)

    @staticmethod
    def backward(ctx, grad):
        return (grad,) * ctx.count


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    name: str = "r"


A, B, OTHER = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))


def name_of(tensor):
    return next((name for name, p in (("a", A), ("b", B)) if p is tensor), None)


def message(*names):
    if len(names) == 1:
        return [f"parameter {names[0]} is used outside the compiled graph"]
    return [f"{len(names)} parameters ({', '.join(names)}) are used outside the compiled graph"]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda: CompiledFunction.apply(A, B), []),
        (lambda: CompiledFunction.apply(A) * 2 + CompiledFunction.apply(B), []),
        (lambda: CompiledFunction.apply(A) + B.sum(), message("b")),
        (lambda: CompiledFunction.apply(A, B) + B.sum(), message("b")),  # inside and outside
        (lambda: CompiledFunction.apply(A * 2), message("a")),  # before a compiled graph
        (lambda: CompiledFunction.apply(A) + OTHER.sum(), []),  # not a parameter that is kept in step
        (lambda: (B.sum(), [A.sum()]), message("a", "b")),
        (lambda: OrderedDict(loss=Result(B.sum())), message("b")),
        (lambda: B.t(), message("b")),
        (lambda: A.detach(), ["no differentiable tensor was found in what the module returned"]),
        (lambda: None, ["no differentiable tensor was found in what the module returned"]),
    ],
)
def test_outside_use(result, expected):
    assert outside_use(result(), name_of) == expected


def test_many_parameters_are_one_reason():
    layer = torch.nn.LSTM(2, 2)
    names = {parameter: f"l.{name}" for name, parameter in layer.named_parameters()}
    found = outside_use([*names, CompiledFunction.apply(A), layer(torch.ones(1, 2))], names.get)
    assert found == [
        "4 parameters (l.bias_hh_l0, l.bias_ih_l0, l.weight_hh_l0, l.weight_ih_l0) are used outside the compiled graph"
    ]
    layer = torch.nn.LSTM(2, 2, bidirectional=True)
    names = {parameter: name for name, parameter in layer.named_parameters()}
    assert (
        "8 parameters (bias_hh_l0, bias_hh_l0_reverse, bias_ih_l0, bias_ih_l0_reverse and 4 more) are used"
        in (outside_use(layer(torch.ones(1, 2)), names.get)[0])
    )


def test_a_deep_graph_needs_no_recursion():
    x = CompiledFunction.apply(A)
    for _ in range(5000):
        x = x + 1
    assert outside_use(x, name_of) == []


def test_tensors_in_looks_into_what_ddp_looks_into():
    x, y, z = (torch.ones(n) for n in (1, 2, 3))
    found = list(tensors_in({"a": (x, [y]), "b": Result(z), "c": 3, "d": Result}))
    assert [t.numel() for t in found] == [1, 2, 3]
    assert parameter_use.tensors_in(object()) is not None and not list(tensors_in(object()))
