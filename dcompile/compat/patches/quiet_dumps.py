"""What torch writes out while it compiles, left out where nobody reads it."""

from __future__ import annotations

import contextlib
import logging
import unittest.mock
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any


@contextlib.contextmanager
def no_unread_graphs() -> Iterator[None]:
    """Have AOTAutograd write joint, forward and backward graph as text only where somebody gets to see it.

    That are its logs, torch's trace (TORCH_TRACE), and its cache. It asks nobody before it writes: 0.5 of 12.4 s of a
    warm start of 32 Llama layers.
    """
    from torch._functorch._aot_autograd import graph_compile

    if _is_heard(graph_compile):
        yield
        return
    with contextlib.ExitStack() as changes:
        for name, nothing in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
            own = getattr(graph_compile, name, None)
            if own is not None:
                quiet = _only_for_the_cache(own, nothing)
                changes.enter_context(unittest.mock.patch.object(graph_compile, name, quiet))
        yield


@contextlib.contextmanager
def no_unread_backwards() -> Iterator[None]:
    """While graphs are partitioned, have the backward's Python text written when somebody asks for it.

    The forward's is, where Dynamo compiles. The backward gets its order in a module that writes the text at once, again
    for each change, and once more in the copy that AOTAutograd makes: 0.7 of 17 s of CPU time of a cold start of 32
    Llama layers.
    """
    from torch._functorch import partitioners
    from torch.fx import GraphModule
    from torch.fx._lazy_graph_module import _LazyGraphModule

    name = "reordering_to_mimic_autograd_engine"
    own: Any = getattr(partitioners, name, None)
    if own is None:
        yield
        return
    written, thread = GraphModule.recompile, get_ident()

    def later(module: Any) -> Any:
        return None if get_ident() == thread else written(module)

    def reorder(gm: Any) -> Any:
        with unittest.mock.patch.object(GraphModule, "recompile", later):
            ordered = own(gm)
            return gm if ordered is gm else _LazyGraphModule.from_graphmodule(ordered)

    with unittest.mock.patch.object(partitioners, name, reorder):
        yield


@contextlib.contextmanager
def no_unread_latencies() -> Iterator[None]:
    """Have Dynamo time a frame's new guards only where somebody gets to see how long they take.

    It sweeps the processor's caches before it does: 27 ms of CPU time a frame, on two busy cores 55, and whatever else
    runs on the machine reads its memory again.
    """
    from torch._dynamo import guards

    own, log = getattr(guards, "profile_guard_manager", None), getattr(guards, "guards_log", None)
    if own is None or log is None or log.isEnabledFor(logging.DEBUG):
        yield
        return

    def timed(*given: Any) -> Any:
        # asked only here: until the first event of a process, torch's trace has a handler that finds out whether it is
        # wanted, and so would be taken for one
        return own(*given) if _is_traced() else 0.0

    with unittest.mock.patch.object(guards, "profile_guard_manager", timed):
        yield


@contextlib.contextmanager
def no_unread_names() -> Iterator[None]:
    """Have Dynamo find out which function a traced line is in only where its log of traced calls says so.

    It takes the whole file apart for that, once a process: 0.08 s of CPU time for torch/nn/functional.py alone.
    """
    from torch._dynamo import output_graph, symbolic_convert

    own = getattr(symbolic_convert, "get_funcname", None)
    logs = getattr(output_graph, "trace_call_log", None), getattr(symbolic_convert, "trace_source_log", None)
    if own is None or any(log is None or log.isEnabledFor(logging.DEBUG) for log in logs):
        yield
        return
    with unittest.mock.patch.object(symbolic_convert, "get_funcname", lambda filename, line: None):
        yield


def _is_heard(graph_compile: Any) -> bool:
    logs = (getattr(graph_compile, name, None) for name in ("aot_joint_log", "aot_graphs_log"))
    return any(log is None or log.isEnabledFor(logging.INFO) for log in logs) or _is_traced()


def _is_traced() -> bool:
    """Whether TORCH_TRACE writes down what a compilation comes to."""
    from torch._logging import _internal

    trace = getattr(_internal, "trace_log", None)
    return trace is None or bool(trace.handlers)


def _only_for_the_cache(own: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    def quiet(*args: Any, **keywords: Any) -> Any:
        *_, config = (*args, *keywords.values())
        return nothing if getattr(config, "cache_info", own) is None else own(*args, **keywords)

    return quiet
