"""Capture a model with and without copies of repeated layers, and say what comes of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.output_graph import OutputGraph

from dcompile.compat.layer_calls.guard_match import NO_HOOKS, guard_type
from dcompile.compat.patches.dynamo_frames import repeated_layers_once


@dataclass
class Captured:
    """Graphs of a model's first call, with the guards that Dynamo has collected for each."""

    graphs: list[list[Any]] = field(default_factory=list)
    guards: list[set[tuple[str, str]]] = field(default_factory=list)
    copies: int = 0
    refusals: list[str] = field(default_factory=list)
    result: Any = None


def captured(make: Callable[[], nn.Module], args: tuple[Any, ...], once: bool, **options: Any) -> Captured:
    """What Dynamo captures of the first call of a new model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, found = make(), Captured()

    def backend(gm: Any, _inputs: Any) -> Any:
        found.graphs.append([*described(gm, model)])
        return gm

    with guards_kept(found), repeated_layers_once(once) as frame:
        found.result = torch.compile(model, backend=backend, **options)(*args)
    found.copies, found.refusals = frame.copies, frame.refusals
    return found


@contextlib.contextmanager
def guards_kept(found: Captured) -> Iterator[None]:
    """Note the guards of each graph, but for those on tables of hooks, which check nothing by default."""
    own = OutputGraph.compile_subgraph

    def compile_subgraph(output: Any, *args: Any, **keywords: Any) -> Any:
        checks = (guard for guard in output.guards if guard_type(guard) != NO_HOOKS)
        names = ((guard_type(guard), guard.originating_source.name) for guard in checks)
        found.guards.append({(kind, re.sub(r"(_dict___|_c)\d+", r"\1", name)) for kind, name in names})
        return own(output, *args, **keywords)

    with mock.patch.object(OutputGraph, "compile_subgraph", compile_subgraph):
        yield


def described(gm: Any, model: nn.Module) -> Iterator[Any]:
    """Nodes of a graph with all that compilers read of them; modules by name instead of identity."""
    names = {str(id(module)): name for name, module in model.named_modules()}
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    memory: dict[int, list[torch.fx.Node]] = {}

    def place(node: torch.fx.Node, example: torch.Tensor) -> int:
        """The first value in the same memory. Values inside of layers may share it with those of other layers."""
        first = memory.setdefault(example.untyped_storage()._cdata, [])
        first.append(node)
        return next(numbers[other] for other in first if is_seen(other, _layer(node)))

    def value(node: torch.fx.Node, example: Any) -> Any:
        if isinstance(example, tuple | list):
            return type(example).__name__, [value(node, item) for item in example]
        if not isinstance(example, torch.Tensor):
            return str(example)
        sizes = str((example.shape, example.stride(), example.storage_offset()))
        return place(node, example), sizes, example.dtype, example.requires_grad, type(example).__name__

    for node in gm.graph.nodes:
        stack = [
            (names.get(key.partition("@")[0], key), *key.partition("@")[1:], entry)
            for key, entry in node.meta.get("nn_module_stack", {}).items()
        ]
        lines = node.meta.get("source_fn_stack"), node.meta.get("stack_trace"), sorted(node.meta)
        yield node.op, node.name, str(node.target), str(node.args), str(node.kwargs), stack, lines
        yield value(node, node.meta.get("example_value"))
        if node.op == "get_attr" and isinstance(region := getattr(gm, node.target), torch.fx.GraphModule):
            yield [*described(region, model)]


def is_seen(node: torch.fx.Node, layer: str | None) -> bool:
    """Whether a value is of this layer, or of none, or is read outside of its own layer."""
    own = _layer(node)
    return own in (None, layer) or any(_layer(user) != own for user in node.users)


def _layer(node: torch.fx.Node) -> str | None:
    """The repeated layer that an operation is in."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    found = re.search(r"^.*?[.[](\d+)\b", paths[-1]) if paths else None
    return found and found[0]


def same_with_and_without(make: Callable[[], nn.Module], *args: Any, **options: Any) -> Captured:
    """Capture a model both ways, and assert that graphs, guards and results are equal."""
    plain, copied = (captured(make, args, once, **options) for once in (False, True))
    assert copied.graphs == plain.graphs
    assert copied.guards == plain.guards
    assert not plain.copies
    torch.testing.assert_close(copied.result, plain.result, rtol=0, atol=0)
    return copied
