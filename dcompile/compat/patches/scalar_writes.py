"""In-place writes to float64 scalars stay in Dynamo's graph."""

from __future__ import annotations

import contextlib
import unittest.mock
from typing import Any


def writes_to_scalars_kept() -> contextlib.AbstractContextManager[Any]:
    """Keep in-place writes to float64 CPU tensors without dimensions in Dynamo's graph.

    Dynamo removes inputs that only `item()` reads. It also takes such a write (`buffer.add_(1)`), whose result is
    unused, for one of them, so that the buffer stays unchanged with any backend. This patch shows it inputs only.
    """
    from torch._dynamo.output_graph import OutputGraph

    name = "remove_tensorify_specialized_graphargs"
    original = getattr(OutputGraph, name, None)
    if original is None:
        return contextlib.nullcontext()

    def inputs_alone(self: Any) -> None:
        others = [node for node in self.graph.nodes if node.op != "placeholder" and not node.users]
        hidden = [(node, node.meta.pop("example_value")) for node in others if "example_value" in node.meta]
        original(self)
        for node, value in hidden:
            node.meta["example_value"] = value

    return unittest.mock.patch.object(OutputGraph, name, inputs_alone)
