"""Results of a forward that are views of what it computed: tensors of their own, with one count of changes.

Autograd takes it amiss when a view that was made inside a function is changed in place. So AOTAutograd hands out such
a result as a tensor of its own (`aten._unsafe_view`), whose count of changes is its own, too: what the backward needs
and lies in the same memory keeps the old one. Whoever changes logits in place before the backward then gets wrong
gradients, and no error. Here what is saved looks at the result itself, and autograd says what was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from dcompile.capture.aliasing.memory import memory_of
from dcompile.compat.tensors import quick_look

quick_view = quick_look()


def saved_in_same_memory(gm: Any, places: Sequence[int], count: int) -> dict[int, tuple[int, ...]]:
    """For these of a forward's `count` results: positions of the saved tensors that lie in the same memory."""
    outputs = gm.graph.output_node().args[0]
    saved = [(place, memory_of(outputs[place])) for place in range(count, len(outputs))]
    found = {}
    for place in places:
        memory = memory_of(outputs[place])
        found[place] = tuple(other for other, its in saved if memory is not None and its == memory)
    return found


def results_to_detach(gm: Any, constant: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Of a forward's `constant` results, which have no gradient, those that lie in the memory of one that has.

    Of `h.detach()` beside `h` a program makes one tensor, of `h[0].detach()` a view of it. Autograd, told that the one
    has no gradient, takes it for the other, or has the view follow what it looks at. What the graph returns several
    times is one tensor: its places come together.
    """
    nodes = gm.graph.output_node().args[0][:count]
    memories = [memory_of(node) for node in nodes]
    learning = {memory for n, memory in enumerate(memories) if n not in constant}
    places: dict[Any, list[int]] = {}
    for n in constant:
        if memories[n] is not None and (memories[n] in learning or nodes.count(nodes[n]) > 1):
            places.setdefault(nodes[n], []).append(n)
    return tuple(map(tuple, places.values()))


def saved_input_views(gm: Any, count: int) -> tuple[int, ...]:
    """Behind a forward's `count` results: positions of what it saves that looks at an input and is not that input.

    A look at all of an input as it lies is the input itself in a program, and by the backward that may have another
    `.data`, which a look of eager's does not follow.
    """
    inputs = {memory_of(node) for node in gm.graph.find_nodes(op="placeholder")} - {None}
    saved = enumerate(gm.graph.output_node().args[0][count:], count)
    return tuple(n for n, node in saved if memory_of(node) in inputs and node.op != "placeholder")


Steps = tuple[tuple[Any, tuple[Any, ...], Mapping[str, Any]], ...]


def remove_dtype_views(gm: Any, count: int) -> tuple[tuple[int, int, Steps], ...]:
    """Of a graph's `count` results, those that look at another one as another dtype: (place, its place, how).

    From here on the graph returns the other one there, and whoever calls it looks: what lies in a program's memory has
    one dtype, and a copy would not change with what it was made of.
    """
    output = gm.graph.output_node()
    results = list(output.args[0])
    places = {node: place for place, node in reversed([*enumerate(results[:count])])}
    found, unread = [], set[Any]()
    for place, node in enumerate(results[:count]):
        base, looks = node, list[Any]()
        while _is_plain_look(base) and (base is node or base not in places):
            looks.append(base)
            base = base.args[0]
        if base in places and any(look.target is torch.ops.aten.view.dtype for look in looks):
            found.append((place, places[base], tuple((x.target, x.args[1:], x.kwargs) for x in reversed(looks))))
            results[place] = base
            unread.update(looks)
    output.args = (tuple(results),)
    for node in reversed(gm.graph.nodes):
        if node in unread and not node.users:
            gm.graph.erase_node(node)
    return tuple(found)


def _is_plain_look(node: Any) -> bool:
    """Whether a node is a view of one tensor, without numbers that differ from call to call."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return False  # a graph may return numbers, too
    return getattr(node.target, "is_view", False) and len(node.all_input_nodes) == 1


def results_to_separate(gm: Any) -> tuple[tuple[int, int, bool], ...]:
    """(place, earlier place, whether as a view) of a graph's results that may be one tensor in a program, and are two.

    A look at all of a result as it lies is the result itself there: `return h, h.view_as(h)`. The view has a base in
    eager mode, and AOTAutograd asks for it where a later graph changes the one and returns a view of the other;
    `h.detach()` has none.
    """
    nodes = gm.graph.output_node().args[0]
    memories = [memory_of(node) for node in nodes]
    pairs = ((place, earlier) for place in range(len(nodes)) for earlier in range(place))
    apart = [(n, m) for n, m in pairs if nodes[n] is not nodes[m] and memories[n] == memories[m] is not None]
    return tuple((n, m, not (_is_detached(nodes[n]) or _is_detached(nodes[m]))) for n, m in apart)


def constant_results_to_separate(gm: Any, constant: Sequence[int]) -> tuple[tuple[int, int, bool], ...]:
    """The same of a forward's `constant` results, which look at one another and not at what has a gradient."""
    return tuple(pair for pair in results_to_separate(gm) if pair[0] in constant and pair[1] in constant)


def _is_detached(node: Any) -> bool:
    """Whether a view is one by way of `detach`."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        if node.target is torch.ops.aten.detach.default:
            return True
        node = node.args[0]
    return False


def repeated_results(gm: Any) -> tuple[tuple[int, int], ...]:
    """(place, first place) of what a graph returns several times, and is one tensor.

    A program looks anew at memory for each place. Two inputs that overlap are what a graph behind a break then has for
    one, and AOTAutograd refuses to change such a one by way of `as_strided`.
    """
    first: dict[Any, int] = {}
    nodes = enumerate(gm.graph.output_node().args[0])
    found = [(place, first.setdefault(node, place)) for place, node in nodes if isinstance(node, torch.fx.Node)]
    return tuple((place, earlier) for place, earlier in found if place != earlier)


def results_without_gradients(gm: Any, learning: Collection[int]) -> tuple[int, ...]:
    """Those of a Dynamo graph's `learning` results that are views made under `torch.no_grad()`.

    In eager mode such a view is a leaf: nothing of what is computed with it goes on to what it looks at (a head's
    prototypes, a target that is a part of an input). AOTAutograd makes views anew outside of the graph, with gradients.
    An input may be a leaf and a view, too, and is what it is converted to where nothing changes (`x.to(x.dtype)`).
    """
    inputs = {id(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")}
    found = []
    for place, node in enumerate(gm.graph.output_node().args[0]):
        value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and id(value) not in inputs and value._is_view() and value.is_leaf:
            found.append(place)
    return tuple(place for place in found if place in learning)


def view_without_gradients(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """`compiled`, whose results in these places are views made under `torch.no_grad()`."""
    if not places:
        return compiled

    def seeing(*args: Any) -> list[Any]:
        results = list(compiled(*args))
        with torch.no_grad():
            for place in places:
                results[place] = results[place].view_as(results[place])
        return results

    return seeing


def separate_results(outputs: list[Any], pairs: Sequence[tuple[int, int, bool]]) -> None:
    """A tensor of its own for each result that is the same as the earlier one of a pair."""
    for place, earlier, view in pairs:
        x = outputs[place]
        if x is outputs[earlier]:
            outputs[place] = x.as_strided(x.shape, x.stride()) if view else x.detach()


def view_as_dtypes(outputs: list[Any], looks: Sequence[tuple[int, int, Steps]]) -> None:
    """See `remove_dtype_views`."""
    for place, source, steps in looks:
        x = outputs[source]
        for target, args, keywords in steps:
            x = target(x, *args, **keywords)
        outputs[place] = x


def return_views(outputs: list[Any], results: Mapping[int, Sequence[int]]) -> None:
    """Put tensors of their own in the places of `results`, and where `saved_in_same_memory` found their memory."""
    for place, saved in results.items():
        view = outputs[place]
        own = outputs[place] = quick_view(view, tuple(view.shape), view.stride(), 0)
        for other in saved:
            x = outputs[other]
            outputs[other] = torch.as_strided(own.detach(), x.shape, x.stride(), x.storage_offset())


def detach_saved_views(outputs: list[Any], places: Sequence[int]) -> None:
    """See `saved_input_views`."""
    for place in places:
        outputs[place] = outputs[place].detach()


def detach_results(outputs: list[Any], places: Sequence[Sequence[int]]) -> None:
    """See `results_to_detach`."""
    for place, *others in places:
        outputs[place] = outputs[place].detach()
        for other in others:
            outputs[other] = outputs[place]


def repeat_results(outputs: list[Any], places: Sequence[tuple[int, int]]) -> None:
    """See `repeated_results`."""
    for place, earlier in places:
        outputs[place] = outputs[earlier]
