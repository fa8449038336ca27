"""Keep results of a graph at their own positions.

A result that is an input which the graph mutates itself (a counter: `self.steps += 1`) is that input. AOTAutograd puts
it at its position among the results. But inputs that are changed after the graph (non-leaves with a gradient: `x +=
self.shift`) come before them. With torch 2.11 to 2.13, a model returned its counter at another position.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def results_in_their_places() -> Iterator[None]:
    """Make AOTAutograd's graphs return computed results where mutated inputs come before results.

    The graph's caller still gets the input itself in the end.
    """
    from torch._functorch._aot_autograd import graph_capture

    own: Callable[..., Any] | None = getattr(graph_capture, "create_functionalized_fn", None)
    if own is None:
        yield
        return

    def create(*args: Any, meta: Any, **keywords: Any) -> Any:
        return own(*args, meta=_computed(meta) if meta.num_mutated_inp_runtime_indices else meta, **keywords)

    with unittest.mock.patch.object(graph_capture, "create_functionalized_fn", create):
        yield


def _computed(meta: Any) -> Any:
    """Same metadata, without results that are inputs."""
    from torch._functorch._aot_autograd.schemas import OutputType

    changed = copy.copy(meta)
    changed.output_info = [
        dataclasses.replace(info, output_type=OutputType.non_alias) if info.output_type is OutputType.is_input else info
        for info in meta.output_info
    ]
    return changed
