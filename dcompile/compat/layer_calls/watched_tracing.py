"""Watch which nodes a call of a layer adds to the graph, and what they are named."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the registry of patches names this function, and importing dcompile loads no torch
    from torch.fx import Graph, Node

CREATED, RENAMED = "created", "renamed"
"""What happens to a node while a layer is traced."""


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
