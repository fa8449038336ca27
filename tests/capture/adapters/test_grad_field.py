"""Gradients of several programs of one backward, summed in the memory of the first; and what else is added to them."""

import pytest
import torch

from dcompile.capture.adapters.grad_field import MergedGradients
from dcompile.runtime.communication.ddp_buckets import ReducedRun


def program(merged, parameters, factor, used=None):
    """A function of the parameters whose backward returns views of a bucket, as a program does."""
    numel = sum(p.numel() for p in parameters)
    offsets = [sum(p.numel() for p in parameters[:n]) for n in range(len(parameters))]
    places = {n: ("b0", offsets[n]) for n in (used or range(len(parameters)))}

    class Program(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            return sum(x.sum() for x in given) * factor

        @staticmethod
        def backward(ctx, gradient):
            flat = torch.full((numel,), factor)
            results = [
                flat[offset : offset + p.numel()].view(p.shape) if n in places else None
                for n, (offset, p) in enumerate(zip(offsets, parameters, strict=True))
            ]
            run = ReducedRun({"b0": flat}, places, parameters.__getitem__)
            merged.add(run, results, [(n, n) for n in range(len(parameters))])
            return tuple(results)

    return Program.apply


def outside(merged, parameters):
    def differs(number, address):
        return parameters[number].grad.data_ptr() != address

    return dict(merged.outside(differs, but=()))


@pytest.fixture(params=[torch.contiguous_format, torch.channels_last])
def parameters(request):
    shapes = (2, 3, 2, 2), (3,)
    return [
        torch.nn.Parameter(torch.ones(shape).to(memory_format=request.param if len(shape) == 4 else None))
        for shape in shapes
    ]


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_gradients_of_programs_alone_are_one_tensor(parameters, runs):
    merged = MergedGradients()
    sum(program(merged, parameters, 10.0**n)(*parameters) for n in range(runs)).backward()
    assert all(torch.equal(p.grad, torch.full_like(p, [1.0, 11.0, 111.0][runs - 1])) for p in parameters)
    assert not outside(merged, parameters)
    assert all(p.grad.stride() == p.stride() for p in parameters)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_what_else_is_added_shows_wherever_the_backward_reaches_it(parameters, place):
    merged, (weight, _) = MergedGradients(), parameters
    terms = [lambda n=n: program(merged, parameters, 10.0**n)(*parameters) for n in range(3)]
    terms.insert(place, lambda: (weight * 0.5).sum())
    sum(term() for term in terms).backward()
    found = outside(merged, parameters)
    assert torch.equal(weight.grad, torch.full_like(weight, 111.5)) and 0 in found
    assert all(torch.equal(gradient, torch.full_like(gradient, 111.0)) for gradient in found.values())


def test_a_program_without_a_gradient_of_a_parameter_adds_none(parameters):
    merged = MergedGradients()
    (
        program(merged, parameters, 1.0, used=[0])(*parameters) + program(merged, parameters, 10.0)(*parameters)
    ).backward()
    assert [float(p.grad.mean()) for p in parameters] == [11.0, 10.0] and not outside(merged, parameters)
