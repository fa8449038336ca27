"""TorchDynamo traces two calls of equal layers, and copies the second for all others."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing dcompile loads no torch
    from torch.fx import Graph, Node

    from dcompile.compat.layer_calls.frame import FrameCalls

CREATED, RENAMED = "created", "renamed"
"""What happens to a node while a layer is traced."""


@contextlib.contextmanager
def repeated_layers_once(wanted: bool = True) -> Iterator[FrameCalls]:
    """Copy calls of equal layers in the frame that is traced in this context, if that is `wanted`."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Module

    from dcompile.compat.layer_calls.frame import FrameCalls

    frame = FrameCalls()
    if not wanted:
        yield frame
        return
    trace, mutation, store = Module.call_function, SideEffects.mutation, SideEffects.store_attr

    def call_function(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        return frame.call(trace, variable, translator, args, kwargs)

    def mutating(effects: Any, variable: Any) -> None:
        frame.changed(effects, variable)
        mutation(effects, variable)

    def storing(effects: Any, item: Any, name: str, value: Any, *more: Any, **keywords: Any) -> None:
        frame.changed(effects, item, value)
        store(effects, item, name, value, *more, **keywords)

    with (
        unittest.mock.patch.object(Module, "call_function", call_function),
        unittest.mock.patch.object(SideEffects, "mutation", mutating),
        unittest.mock.patch.object(SideEffects, "store_attr", storing),
    ):
        yield frame


@contextlib.contextmanager
def watched_tracing(graph: Graph, log: list[tuple[str, Node, str]], assume: Callable[[], None]) -> Iterator[None]:
    """Log nodes that are added to a graph and names that they get; `assume`: called for results that are constants."""
    from torch._dynamo.variables import functions
    from torch.fx import Node

    create, rename, constant = graph.create_node, Node._rename, functions.invoke_and_store_as_constant

    def creating(*args: Any, **keywords: Any) -> Node:
        node = create(*args, **keywords)
        log.append((CREATED, node, node.name))
        return node

    def renaming(node: Node, candidate: str) -> None:
        if node.graph is graph:
            log.append((RENAMED, node, candidate))
        rename(node, candidate)

    def invoking(*args: Any, **keywords: Any) -> Any:
        assume()
        return constant(*args, **keywords)

    with (
        unittest.mock.patch.object(functions, "invoke_and_store_as_constant", invoking),
        unittest.mock.patch.object(graph, "create_node", creating),
        unittest.mock.patch.object(Node, "_rename", renaming),
    ):
        yield
