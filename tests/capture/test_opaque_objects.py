"""Meshes among the inputs and results of traced graphs, which no program sees."""

import torch
from torch._library.fake_class_registry import FakeScriptObject

from dcompile.capture.opaque_objects import OpaqueObjects, remove_opaque_objects, without_opaque_objects


def traced(*, taken=False):
    """a, mesh, b, group -> a + b, mesh, None, a, mesh; with `taken`, an operation is given the group."""
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("a", "mesh", "b", "group")}
    for name, node in nodes.items():
        opaque = name in ("mesh", "group")
        node.meta["val"] = FakeScriptObject(object(), name, None) if opaque else torch.empty(2)
    total = graph.call_function(torch.ops.aten.add.Tensor, (nodes["a"], nodes["b"]))
    total.meta["val"] = torch.empty(2)
    if taken:
        graph.call_function(print, (nodes["group"],))
    graph.output((total, nodes["mesh"], None, nodes["a"], nodes["mesh"]))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_is_left_with_tensors_alone():
    gm = traced()
    removed = remove_opaque_objects(gm)
    assert removed == OpaqueObjects((1, 3), ((1, 0), (4, 0)))
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["a", "b"]
    total, nothing, a = gm.graph.output_node().args[0]
    assert (total.op, nothing, a.name) == ("call_function", None, "a")
    gm.graph.lint()


def test_the_caller_sees_them_where_they_were():
    gm = traced()
    removed, given = remove_opaque_objects(gm), []

    def program(args):
        given.extend(args)
        args.clear()
        return list(gm(*given))

    a, b, mesh, group = torch.ones(2), torch.full((2,), 3.0), object(), object()
    args = [a, mesh, b, group]
    results = removed.around(program)(args)
    assert not args and given[0] is a and given[1] is b and len(given) == 2
    assert results[0].tolist() == [4, 4]
    assert results[1] is mesh and results[2] is None and results[3] is a and results[4] is mesh


def test_positions_are_those_of_what_is_left():
    removed = remove_opaque_objects(traced())
    assert [removed.input_place(position) for position in (0, 2)] == [0, 1]
    assert removed.result_places([0, 1, 2, 3, 4]) == (0, 1, 2)
    assert removed.views({3: 0, 4: 1}) == {2: 0}, "a result that is an object is no view"


def test_what_an_operation_takes_stays():
    gm = traced(taken=True)
    assert remove_opaque_objects(gm).inputs == (1,)
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["a", "b", "group"]


def test_a_copy_is_made_only_of_graphs_that_have_some():
    gm = traced()
    copy = without_opaque_objects(gm)
    assert len(gm.graph.find_nodes(op="placeholder")) == 4 and len(copy.graph.find_nodes(op="placeholder")) == 2
    assert without_opaque_objects(copy) is copy


def test_a_program_of_tensors_alone_is_called_as_it_is():
    assert OpaqueObjects().around(len) is len
