"""Reading torch's symbolic sizes: the same numbers as torch's expressions, and never a guard."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile import compat
from dcompile.compat import size_expressions as symbolic_shapes
from dcompile.compat.size_expressions import Inexpressible, shape_of, size_of, strides_of, traced_sizes
from dcompile.ir.index import as_index, evaluate, var


def shapes(function, *args):
    """(what `function` made while traced with symbols, the symbols' values, the shape environment)."""
    gm = make_fx(function, tracing_mode="symbolic")(*args)
    output = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    placeholder = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    return output.meta["val"], traced_sizes(gm), placeholder.shape[0].node.shape_env


FUNCTIONS = {
    "a sum of products": lambda x: x.new_empty(x.shape[0] * x.shape[1] + 2 * x.shape[0], 3),
    "halves": lambda x: x.new_empty(x.shape[0] // 2, (x.shape[1] + 3) // 4),
    "a remainder": lambda x: x.new_empty(x.shape[0] % 3 + 1, 2),
    "the larger one": lambda x: x.new_empty(torch.sym_max(x.shape[0], x.shape[1]), 2),
    "what a convolution leaves": lambda x: x.new_empty(((x.shape[0] + 1) // 2 - 2) // 2 + 1, (x.shape[1] - 5) // 3 + 2),
    "steps from a half": lambda x: x.new_empty(torch.arange(0.5, x.shape[0] // 2).shape[0], int(x.shape[1] * 1.5)),
    "a square": lambda x: x.new_empty(x.shape[0] * x.shape[0], 2),
    "strides": lambda x: x.new_empty(x.shape[1], x.shape[0], 2).transpose(0, 1),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_sizes_and_strides_are_those_of_torch_and_no_guard_is_added(function):
    x = torch.zeros(7, 9)
    value, known, environment = shapes(function, x)
    before = len(environment.guards)
    expected = function(x)
    assert tuple(evaluate(as_index(size), known) for size in shape_of(value)) == expected.shape
    assert tuple(evaluate(as_index(stride), known) for stride in strides_of(value)) == expected.stride()
    assert len(environment.guards) == before


def test_names_say_how_small_a_size_may_be(monkeypatch):
    value, known, _ = shapes(lambda x: x * 2, torch.zeros(7, 9))
    assert all(name[0] == "s" for name in known) and sorted(known.values()) == [7, 9]
    for least, letter in ((2, "s"), (1, "u"), (0, "u"), (-3, "z"), (None, "z")):
        monkeypatch.setattr(compat.sizes, "least_value", lambda *_, least=least: least)
        (name,) = size_of(value.shape[0]).variables
        assert name[0] == letter


def test_a_size_that_torch_knows_to_be_even_is_twice_a_variable():
    def function(x):
        torch._check(x.shape[0] % 2 == 0)
        torch._check(x.shape[0] % 3 == 0)
        return x.new_empty(2, 3, x.shape[0] // 6, x.shape[0])

    value, known, environment = shapes(function, torch.zeros(12, 9))
    two, three, part, whole = shape_of(value)
    assert (two, three) == (2, 3) and whole == part * 6 and known[str(part)] == 2
    assert compat.sizes.known_divisor(environment, value.shape[3].node.expr) == 6


@pytest.mark.parametrize("factor", [2.0, 1.5, 0.25])
def test_a_size_times_a_float_is_read_if_it_is_exact(factor):
    value, known, _ = shapes(lambda x: x.new_empty(torch.sym_int(x.shape[0] * factor), 2), torch.zeros(7, 9))
    (size, _) = shape_of(value)
    assert not isinstance(size, int) and evaluate(size, known) == int(7 * factor)


def test_other_numbers_made_of_floats_are_symbols_of_their_own():
    def function(x):
        return x.new_empty(torch.sym_int(x.shape[0] * 0.3), torch.sym_int(x.shape[0] * 0.3) + x.shape[1], 2)

    value, known, _ = shapes(function, torch.zeros(7, 9))
    part, more, _ = shape_of(value)
    (name,) = part.variables
    assert part == var(name) and name[0] == "u" and name not in known  # of 2 and more, at least 0
    assert evaluate(more, {**known, name: 2}) == 2 + 9


@pytest.mark.parametrize(("rest", "letter"), [(1, "u"), (3, "z")])
def test_a_power_of_what_is_not_negative_is_not_negative_either(rest, letter):
    """The side of a square of patches: torch has no bound for it, nor for what is made of it."""

    def side(x):
        return torch.sym_int((x.shape[0] - rest) ** 0.5)

    value, _, _ = shapes(lambda x: x.new_empty(side(x), 2), torch.zeros(26, 9))
    ((name,), _) = (size.variables if not isinstance(size, int) else size for size in shape_of(value))
    assert name[0] == letter
    value, known, _ = shapes(lambda x: x.new_empty((x.shape[0] - 1) // side(x), 2), torch.zeros(26, 9))
    if letter == "z":
        with pytest.raises(Inexpressible, match="may be negative"):
            shape_of(value)
    else:
        assert evaluate(as_index(shape_of(value)[0]), {**known, name: 5}) == 5


@pytest.mark.parametrize("exponent", [0.5, 1.5, -0.5])
def test_powers_inside_powers_and_sums_have_bounds(exponent):
    def function(x):
        root = x.shape[0] ** exponent
        return x.new_empty(torch.sym_int((root * 1.5) ** 0.5 + 0.75), torch.sym_int(root - 2.5) + 8)

    value, _, _ = shapes(function, torch.zeros(26, 9))
    letters = [name[0] for size in shape_of(value) for name in size.variables]
    assert letters == ["u", "z"]


def test_a_division_of_what_may_be_negative_is_not_read(monkeypatch):
    value, _, _ = shapes(lambda x: x.new_empty(x.shape[0] // 2, 2), torch.zeros(7, 9))
    monkeypatch.setattr(compat.sizes, "least_value", lambda *_: None)
    with pytest.raises(Inexpressible, match="may be negative"):
        shape_of(value)


def test_a_size_is_read_once_until_torch_knows_more_of_its_symbols(monkeypatch):
    """Every tensor of a layer has the same few sizes: reading those of Swin's windows anew took minutes."""
    value, _, _ = shapes(lambda x: x.new_empty(((x.shape[0] + 3) // 4 + 5) // 6, x.shape[1]), torch.zeros(7, 9))
    heads, read = [], symbolic_shapes._Reader.read
    monkeypatch.setattr(
        symbolic_shapes._Reader, "read", lambda self, e: heads.append(type(e).__name__) or read(self, e)
    )
    first = size_of(value.shape[0])
    heads.clear()
    assert size_of(value.shape[0]) == first and not heads
    (symbol,) = value.shape[0].node.expr.free_symbols
    monkeypatch.setattr(compat.sizes, "known_divisor", lambda _, s: 12 if s == symbol else 1)
    assert size_of(value.shape[0]) != first and "FloorDiv" in heads
