"""Describe what a rank has captured, as lines that ranks compare before the first collective of a model.

The lines contain versions, settings, parameters in order, and each call of the captured graph that makes a tensor. They
do not contain shapes of inputs or numbers in calls. These may differ between ranks (a ragged batch, a rank's own scale)
without harm to the collectives. Names of the graph's inputs are missing, too, since they depend on graph breaks.
Parameters have their names in the model instead, and other inputs are numbered in the order of use.

The plan of a program's collectives has one line each, equal on every rank that runs the same program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.services import Line
from dcompile.collectives.contract import ParamInfo
from dcompile.compat.aot_metadata import user_line
from dcompile.ir.buffers import Bucket
from dcompile.ir.functional_collectives import NAMESPACE, is_wait
from dcompile.toolchain import own_source, own_version

CAPTURES = "captured graphs"
"""Subject of the comparison, in errors."""
_OF_A_PART = "torch.ops.higher_order."


class ComparedModel(Protocol):
    """Interface of a compiled model (`compiled_model.CompiledModel`) for comparisons between ranks."""

    settings: Any
    adapter: Any
    services: Any


def captured_calls(model: ComparedModel, gm: Any, params: Mapping[int, int]) -> list[Line]:
    """Return the lines of a graph that ranks compare before a call of the model starts a collective."""
    return [*calls_of(gm, _names(model, params))]


def compare_captures(model: ComparedModel, captures: Sequence[Sequence[Line]]) -> None:
    """Compare the graphs of a call, in order, between ranks; all ranks call this. Raises PlanMismatchError on all.

    Graphs are identified by their position in the call, since a rank may have captured others alone before.
    """
    graphs = [line for n, calls in enumerate(captures) for line in ((f"graph {n} of the call", ""), *calls)]
    lines = [*_surroundings(model), *graphs]
    model.services.agree(model.adapter.group, CAPTURES, lines, model.adapter.way_to_differ)


def compare_surroundings(model: ComparedModel) -> None:
    """Compare versions, settings and parameters, but no graphs, where ranks may run different ones."""
    model.services.agree(model.adapter.group, "settings", [*_surroundings(model)])


def _surroundings(model: ComparedModel) -> Iterator[Line]:
    yield f"torch {torch.__version__}, dcompile {own_version()} (source {own_source()[:12]})", ""
    yield "\n".join(f"option {setting}" for setting in model.settings.config.key().splitlines()), ""
    for info in model.adapter.param_infos():
        yield f"parameter {info.fqn} {list(info.shape)} {info.dtype} {info.kind}", ""


def _names(model: ComparedModel, params: Mapping[int, int]) -> dict[int, str]:
    """Return position among a graph's inputs -> name of the parameter."""
    infos = model.adapter.param_infos()
    return {position: infos[number].fqn for position, number in params.items()}


def calls_of(gm: Any, parameters: Mapping[int, str]) -> Iterator[Line]:
    """Yield the calls that make tensors, the same whichever sizes are symbolic.

    `parameters`: names of inputs, by position.
    """
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
        names[node], target = f"%{calls}", _target(gm, node)  # own numbers: FX names count computations of sizes, too
        calls += 1
        # a call of a subgraph gets symbolic sizes as additional arguments
        given = [arg for arg in node.args if not (target.startswith(_OF_A_PART) and _is_size(arg))]
        yield f"{names[node]} = {target}({', '.join(_argument(arg, names) for arg in given)})", user_line(node)


def _is_size(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and not _makes_tensor(argument)


def _makes_tensor(node: Any) -> bool:
    """Is a node's value no number? The count of size inputs and size computations depends on this rank's sizes."""
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
        return f"[{', '.join(items)}]" if {*items} != {"_"} else "_"  # sizes may come as a list or as one value
    return "_"


def plan_of(buckets: Iterable[Bucket], params: Iterable[ParamInfo]) -> list[str]:
    """Return the lines of a program's buckets, in the order of their collectives."""
    infos = {info.number: info for info in params}
    lines = []
    for bucket in buckets:
        names = ", ".join(f"{infos[n].fqn}[{prod(infos[n].shape)}]" for n, _ in bucket.places)
        what = f"{bucket.dtype} as {bucket.wire}" if bucket.wire else bucket.dtype
        exchange = f"{bucket.kind} {bucket.name} {what} {bucket.numel} elements of {bucket.group}"
        lines.append(f"{exchange}: {names}")
    return lines


def own_collectives(gm: Any) -> Iterator[tuple[str, str]]:
    """Yield (name of the process group, line) for each collective that is an operation of a graph.

    Lines contain no sizes, since batches may differ between ranks.
    """
    for node in gm.graph.nodes:
        op = str(node.target)
        if node.op == "call_function" and op.startswith(NAMESPACE) and not is_wait(op):
            texts = [arg for arg in node.args if isinstance(arg, str)]
            if texts:  # otherwise its group is an object, which lowering reports
                *how, group = texts
                yield group, f"{' '.join((op.split('.')[1], *how))} over {compat.groups.size_of(group)} ranks"


def by_group(own: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group, line in own:
        found.setdefault(group, []).append(line)
    return found
