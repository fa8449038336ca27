"""Operators give elements by lowering's rules, or raise: nothing is guessed."""

import pytest
import torch

from dcompile.codegen.lower.elements import ElementTracer
from dcompile.ir.index import as_index, var
from dcompile.ir.piecewise import Test, UnknownElements


def traced(function, *given):
    """The elements of what a function computes of tensors, each of which is read where its dtype allows that."""
    tracer = ElementTracer()
    for number, tensor in enumerate(given):
        tracer.bind(tensor, tracer.read(tensor, number))
    with tracer.tracing():
        result = function(*given)
    return tracer.elements(result), tracer.reads


def test_elements_are_functions_of_positions():
    found, _ = traced(lambda: torch.arange(5)[:, None] - torch.arange(7))
    assert found.shape == (5, 7) and found.tree == var("i0") - var("i1")


def test_operators_without_a_rule_are_decomposed():
    found, _ = traced(lambda: torch.rot90(torch.arange(12).reshape(3, 4)[:1]))
    assert found.shape == (4, 1) and found.tree == as_index(3) - var("i0")


def test_reads_move_with_their_tensor():
    found, reads = traced(lambda x: x.t()[1:], torch.zeros(3, 4, dtype=torch.int64))
    (name,) = found.tree.variables
    assert reads.found(name).positions == (var("i1"), var("i0") + 1)


def test_booleans_that_are_read_are_tests():
    found, _ = traced(lambda x: ~x, torch.zeros(3, dtype=torch.bool))
    assert isinstance(found.tree, Test) and (found.tree.then, found.tree.otherwise) == (False, True)


def test_numbers_of_the_program_text_are_known():
    assert traced(lambda: torch.tensor(3) * 2)[0].tree == 6


def test_equal_elements_have_a_running_sum():
    assert traced(lambda: torch.ones(2, 5, dtype=torch.bool).cumsum(-1))[0].tree == var("i1") + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.arange(5).cumsum(0),
        lambda x: torch.arange(200, dtype=torch.int8) * 2,
        lambda x: torch.arange(5).add_(1),
        lambda x: torch.rand(5) > 0,
        lambda x: torch.arange(5)[x],
        lambda x: x.float() + 1,
        lambda x: torch.arange(12).reshape(3, 4).reshape(12)[:, None].expand(12, 2).reshape(24),
        lambda x: torch.unique(x),
    ],
    ids=["scan", "overflow", "in place", "random", "positions of unknown sign", "rounded", "divided", "without a rule"],
)
def test_what_has_no_form_raises(function):
    with pytest.raises(UnknownElements):
        traced(function, torch.zeros(5, dtype=torch.int64))
