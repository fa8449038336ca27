"""Record AOTAutograd's traces for the cache, and replay cached traces instead of tracing.

AOTAutograd runs a graph twice before compilation. The first run finds mutated inputs and aliased results
(`ViewAndMutationMeta`), the second traces the joint or inference graph. A replay replaces both functions. Everything
after them, from the choice of detached inputs to the wrappers around programs, is torch's own code.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext

_COLLECTS = "run_functionalized_fw_and_collect_metadata"
"""torch's function that finds a graph's mutations and aliases."""
_TRACERS = {"aot_dispatch_autograd_graph": True, "aot_dispatch_base_graph": False}
"""torch's tracing functions -> whether they trace forward and backward as one graph."""


@dataclass
class TracedMetadata:
    """AOTAutograd's metadata of a traced graph."""

    record: Any = None
    objection: str = "AOTAutograd has traced it in a way that is not known"
    """Why there is no record; empty if there is one."""


@contextlib.contextmanager
def recording_metadata(found: TracedMetadata, record_of: Callable[[Any], Any]) -> Iterator[None]:
    """Record in `found` AOTAutograd's metadata of the first graph that it traces. `record_of` makes the record."""
    from torch._functorch._aot_autograd import graph_compile

    wrappers: list[Any] = []
    own_wrappers = getattr(graph_compile, "_create_wrappers_for_dispatch", None)
    if own_wrappers is None or not all(hasattr(graph_compile, name) for name in _TRACERS):
        yield
        return
    traced = False

    def create_wrappers(*args: Any, **kwargs: Any) -> Any:
        made = own_wrappers(*args, **kwargs)
        if not traced:
            wrappers[:] = made
        return made

    def recording(own: Callable[..., Any]) -> Callable[..., Any]:
        def trace(*args: Any, **kwargs: Any) -> Any:
            nonlocal traced
            results = own(*args, **kwargs)
            if not traced:
                traced = True
                _record(found, wrappers, kwargs.get("fw_metadata"), results, record_of)
            return results

        return trace

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(graph_compile, "_create_wrappers_for_dispatch", create_wrappers))
        for name in _TRACERS:
            own = getattr(graph_compile, name)
            stack.enter_context(unittest.mock.patch.object(graph_compile, name, recording(own)))
        yield


def _record(
    found: TracedMetadata, wrappers: list[Any], metadata: Any, results: Any, record_of: Callable[[Any], Any]
) -> None:
    """Make the record, or set the reason why there is none."""
    from dcompile.compat.process_state import NotKeepable

    try:
        if any(getattr(wrapper, "needs_post_compile", True) for wrapper in wrappers):
            raise NotKeepable("inputs share memory, or are given twice, and one of them changes")
        if metadata is None or len(results) != 4 or results[-1] is not None:
            raise NotKeepable("AOTAutograd takes tensors apart for it")
        if metadata.tokens:
            raise NotKeepable("it has operators whose effects are kept in order")
        found.record, found.objection = record_of(metadata), ""
    except NotKeepable as reason:
        found.record, found.objection = None, str(reason)


@contextlib.contextmanager
def replayed(metadata: Any, inference: torch.fx.GraphModule | None, inputs: Sequence[Any]) -> Iterator[None]:
    """Replace AOTAutograd's analysis of the first graph that it traces, which has these inputs, by `metadata`.

    For a graph without gradients, `inference` replaces the trace. For others nothing is traced, and the partition
    function must supply both parts.
    """
    from torch._functorch import aot_autograd
    from torch._functorch._aot_autograd import graph_compile

    replaced, held = False, _plain_fakes(inputs)
    collect = getattr(aot_autograd, _COLLECTS)

    def collected(*args: Any, **kwargs: Any) -> Any:
        return collect(*args, **kwargs) if replaced else lambda *_: metadata

    def replaying(own: Callable[..., Any], joint: bool) -> Callable[..., Any]:
        def trace(*args: Any, **kwargs: Any) -> Any:
            nonlocal replaced
            if replaced:
                return own(*args, **kwargs)
            replaced = True
            _, inputs, descriptions, *_ = args
            assert joint == (inference is None), "a graph needs gradients where it was kept without, or the other way"
            if not joint:
                return inference, inputs, descriptions, None
            tangents, described = metadata.traced_tangents, metadata.traced_tangents_descs
            return _untraced(len(inputs), len(tangents)), (inputs, tangents), (descriptions, described), None

        return trace

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(aot_autograd, _COLLECTS, collected))
        for name, joint in _TRACERS.items():
            own = getattr(graph_compile, name)
            stack.enter_context(unittest.mock.patch.object(graph_compile, name, replaying(own, joint)))
        yield
    held.clear()


def _plain_fakes(inputs: Sequence[Any]) -> list[Any]:
    """Make fake tensors of plain parameters, which AOTAutograd finds as long as they are held."""
    from dcompile.compat.tensors import fake_parameter

    mode = tracing_mode()
    return [fake_parameter(mode, value) for value in inputs if has_static_sizes(value)]


def _untraced(inputs: int, tangents: int) -> torch.fx.GraphModule:
    """Make a placeholder joint graph: inputs by AOTAutograd's names, and no results."""
    graph = torch.fx.Graph()
    for kind, count in (("primals", inputs), ("tangents", tangents)):
        for number in range(1, count + 1):
            graph.placeholder(f"{kind}_{number}")
    graph.output(())
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def can_replay() -> bool:
    """Whether this torch has the functions that `replayed` replaces."""
    from torch._functorch import aot_autograd
    from torch._functorch._aot_autograd import graph_compile

    return hasattr(aot_autograd, _COLLECTS) and all(
        hasattr(graph_compile, name) for name in (*_TRACERS, "_create_wrappers_for_dispatch")
    )


def tracing_mode() -> Any:
    """Return the fake tensor mode of the capture, inside Dynamo's backend; None elsewhere."""
    context = TracingContext.try_get()
    return None if context is None else context.fake_mode


def symbolic_context(value: torch.Tensor) -> Any:
    """Return which sizes of an input Dynamo has made symbolic; None for tensors that are no inputs."""
    tracing = TracingContext.try_get()
    contexts: Any = {} if tracing is None else tracing.tensor_to_context
    return contexts.get(value)


def has_static_sizes(value: Any) -> bool:
    """Whether a value is a tensor that Dynamo has made an input of the captured graph, with numbers as sizes."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    known = symbolic_context(value) if isinstance(value, torch.Tensor) else None
    return known is not None and all(size is DimDynamic.STATIC for size in known.dynamic_sizes)
