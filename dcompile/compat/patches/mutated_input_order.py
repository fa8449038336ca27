"""Results of a graph in their own places.

A result that is an input which the graph changes itself (a counter: `self.steps += 1`) is that input. AOTAutograd puts
it in the place that it has among the results; but inputs that are changed behind the graph (what has a gradient and is
no leaf: `x += self.shift`) come before them. With torch 2.11 to 2.13, a model returned its counter in another place.
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
    """Have AOTAutograd's graphs return what they compute, where inputs come before results.

    Whoever calls such a graph gets the input itself all the same, at the end.
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
    """The same, but that no result is an input."""
    from torch._functorch._aot_autograd.schemas import OutputType

    changed = copy.copy(meta)
    changed.output_info = [
        dataclasses.replace(info, output_type=OutputType.non_alias) if info.output_type is OutputType.is_input else info
        for info in meta.output_info
    ]
    return changed
