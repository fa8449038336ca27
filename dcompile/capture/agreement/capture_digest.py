"""What a rank has captured, as lines that ranks compare before the first collective of a model.

In the lines: versions, settings, parameters in their order, and each call of the captured graph that makes a tensor.
Not in them: shapes of inputs, and numbers in calls, which may differ between ranks (a ragged batch, a rank's own scale)
without any harm to the collectives; and the names of inputs in the graph, which are others in a frame that is whole and
in one that has a graph break: parameters have those of the model there, and others are numbered as they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from dcompile.capture.services import Line
from dcompile.compat.user_line import user_line
from dcompile.toolchain import own_source, own_version

CAPTURES = "captured graphs"
"""What ranks disagree on, if they do."""
_OF_A_PART = "torch.ops.higher_order."


class ComparedModel(Protocol):
    """A compiled model (`compiled_model.CompiledModel`), as far as ranks compare it."""

    settings: Any
    adapter: Any
    services: Any


def captured_calls(model: ComparedModel, gm: Any, params: Mapping[int, int]) -> list[Line]:
    """What ranks compare of a graph, once a call of the model is to exchange something between them."""
    return [*calls_of(gm, _names(model, params))]


def compare_captures(model: ComparedModel, captures: Sequence[Sequence[Line]]) -> None:
    """Compare the graphs of a call, in their order, between ranks: all come. Raises PlanMismatchError, on all ranks.

    Graphs are told apart by their place in the call: how many a rank has made before, alone, is its own affair.
    """
    graphs = [line for n, calls in enumerate(captures) for line in ((f"graph {n} of the call", ""), *calls)]
    lines = [*_surroundings(model), *graphs]
    model.services.agree(model.adapter.group, CAPTURES, lines, model.adapter.way_to_differ)


def compare_surroundings(model: ComparedModel) -> None:
    """The same where ranks may run other graphs: compare all but these."""
    model.services.agree(model.adapter.group, "settings", [*_surroundings(model)])


def _surroundings(model: ComparedModel) -> Iterator[Line]:
    yield f"torch {torch.__version__}, dcompile {own_version()} (source {own_source()[:12]})", ""
    yield f"settings {model.settings.config.key()}", ""
    for info in model.adapter.param_infos():
        yield f"parameter {info.fqn} {list(info.shape)} {info.dtype} {info.kind}", ""


def _names(model: ComparedModel, params: Mapping[int, int]) -> dict[int, str]:
    """Position among a graph's inputs -> the name of its parameter."""
    infos = model.adapter.param_infos()
    return {position: infos[number].fqn for position, number in params.items()}


def calls_of(gm: Any, parameters: Mapping[int, str]) -> Iterator[Line]:
    """The calls that make tensors, the same whichever sizes vary. `parameters`: names of inputs, by position."""
    inputs = {node: parameters.get(n) for n, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    names: dict[Any, str] = {}
    calls = used = 0
    for node in gm.graph.nodes:
        if not _makes_tensor(node) or node in inputs:
            continue
        if not node.op.startswith("call_"):
            names[node] = node.name
            continue
        for value in node.all_input_nodes:
            if value in inputs and value not in names and _makes_tensor(value):
                names[value] = inputs[value] or f"input{used}"
                used += 1
        names[node], target = f"%{calls}", _target(gm, node)  # numbered by itself: names count calls for sizes too
        calls += 1
        # a call of a part of the graph gets the sizes that vary as arguments of their own
        given = [arg for arg in node.args if not (target.startswith(_OF_A_PART) and _is_size(arg))]
        yield f"{names[node]} = {target}({', '.join(_argument(arg, names) for arg in given)})", user_line(node)


def _is_size(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and not _makes_tensor(argument)


def _makes_tensor(node: Any) -> bool:
    """Inputs and calls that are sizes are as many as the sizes that vary, on this rank."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return not isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool | torch.Size)


def _target(gm: Any, node: Any) -> str:
    if node.op == "call_module":
        return f"{node.target}: {type(gm.get_submodule(node.target)).__name__}"
    if isinstance(node.target, str):
        return f".{node.target}"
    module = getattr(node.target, "__module__", None) or ""
    return f"{module}.{getattr(node.target, '__name__', type(node.target).__name__)}"


def _argument(value: Any, names: dict[Any, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return names.get(value, "_")
    if isinstance(value, tuple | list):
        items = [_argument(item, names) for item in value]
        return f"[{', '.join(items)}]" if {*items} != {"_"} else "_"  # sizes one by one, or all as one value
    return "_"
