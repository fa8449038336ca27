"""Specs of shapes: `dynamic_shapes` of torch.compile, `shapes_spec` until torch 2.14."""

import inspect

import pytest
import torch

import dcompile
from dcompile import compat
from dcompile.capture.entry import find_model

NAME = compat.sizes.argument()
KNOWN = pytest.mark.skipif(NAME is None, reason="this torch has no specs of shapes")


def batch(static=3):
    from torch.fx.experimental.dynamic_spec import STATIC, ShapeVar, TensorSpec

    return TensorSpec([ShapeVar("batch"), STATIC])


def twice(x, y):
    return (2 * x + y.sum()).relu()


def many(first, *others, **named):
    return first + sum(others) + named["last"]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x).relu()


def graphs_of_four_sizes(call, arguments):
    """Calls with four sizes, each compared with what is compiled; how many graphs there are."""
    torch.manual_seed(0)
    for size in (4, 6, 8, 10):
        args, kwargs, expected = arguments(torch.randn(size, 3))
        torch.testing.assert_close(call(*args, **kwargs), expected)
    return len(find_model(call).graphs)


WAYS = {
    "torch.compile": lambda target, spec: torch.compile(target, backend="dcompile", **{NAME: spec}),
    "dynamic_shapes": lambda target, spec: dcompile.compile(target, dynamic_shapes=spec),
    "shapes_spec": lambda target, spec: dcompile.compile(target, shapes_spec=spec),
}


@KNOWN
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_serves_all_sizes_of_a_function(way):
    from torch.fx.experimental.dynamic_spec import ParamsSpec

    y = torch.ones(3)
    call = WAYS[way](twice, ParamsSpec({"x": batch()}))
    assert graphs_of_four_sizes(call, lambda x: ((x, y), {}, twice(x, y))) == 1


@KNOWN
@pytest.mark.parametrize("way", ["torch.compile", "dynamic_shapes"])
def test_one_graph_serves_all_sizes_of_a_module_and_of_keywords(way):
    from torch.fx.experimental.dynamic_spec import ShapesSpec

    layer = Layer()
    call = WAYS[way](layer, ShapesSpec({"x": batch()}))
    assert graphs_of_four_sizes(call, lambda x: ((), {"x": x}, layer.forward(x))) == 1


@KNOWN
def test_arguments_without_names_of_their_own_are_found():
    from torch.fx.experimental.dynamic_spec import ShapesSpec

    each = batch()
    call = dcompile.compile(
        many, dynamic_shapes=ShapesSpec({"first": each, "*args": [each], "**kwargs": {"last": each}})
    )
    assert graphs_of_four_sizes(call, lambda x: ((x, x + 1), {"last": x}, 3 * x + 1)) == 1


@KNOWN
def test_what_is_not_in_a_spec_is_static():
    call = dcompile.compile(twice, dynamic_shapes={"y": None})
    y = torch.ones(3)
    assert graphs_of_four_sizes(call, lambda x: ((x, y), {}, twice(x, y))) == 4


@pytest.mark.skipif(NAME != "dynamic_shapes", reason="torch has dynamic_spec since 2.15")
@pytest.mark.parametrize("way", ["torch.compile", "dcompile.compile", "module.compile"])
@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_spec_on_the_function_itself_counts(way, kind):
    from torch.fx.experimental.dynamic_spec import dynamic_spec

    def plain(x):
        return x.relu() + 1

    class Told(Layer):
        @dynamic_spec({"x": batch()})
        def forward(self, x):
            return self.inner(x).relu()

    target = Told() if kind == "module" else dynamic_spec({"x": batch()})(plain)
    if way == "module.compile" and kind == "module":
        target.compile(backend="dcompile")
        call = target
    else:
        call = dcompile.compile(target) if way == "dcompile.compile" else torch.compile(target, backend="dcompile")
    eager = target.forward if kind == "module" else plain
    assert graphs_of_four_sizes(call, lambda x: ((x,), {}, eager(x))) == 1
    with pytest.raises(ValueError, match="dynamic_spec"):
        dcompile.compile(target, dynamic_shapes={"x": batch()})


def test_names_that_this_torch_lacks_and_both_names_are_errors(monkeypatch):
    with pytest.raises(TypeError, match="one argument"):
        compat.sizes.requested_spec({"dynamic_shapes": {}, "shapes_spec": {}})

    def compile_of_old(model, *, dynamic=None):
        """torch.compile before 2.12."""

    monkeypatch.setattr(torch, "compile", compile_of_old)
    assert "dynamic_shapes" not in inspect.signature(torch.compile).parameters
    with pytest.raises(TypeError, match="has no dynamic_shapes"):
        dcompile.compile(twice, dynamic_shapes={"x": None})
