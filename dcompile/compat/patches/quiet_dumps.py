"""Skip metrics and debug text that torch writes while it compiles, where nothing reads them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import unittest.mock
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from torch._logging import _internal
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from dcompile.compat.patches.torch_patch import replaced_attribute


@contextlib.contextmanager
def quiet_metrics() -> Iterator[None]:
    """Keep Dynamo's metrics from logging an error: torch 2.11's cannot serialize functions among its settings.

    Inductor's settings are always left out: it does not compile these frames, and serializing them takes a millisecond.
    """
    import torch._dynamo.utils as utils

    names = ["_scrubbed_inductor_config_for_logging"]
    if not _can_log_functions():
        names.append("_get_dynamo_config_for_logging")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced_attribute(utils, name, lambda _: lambda: None))
        yield


@functools.cache
def _can_log_functions() -> bool:
    import torch._dynamo.utils as utils

    own = getattr(utils, "_get_dynamo_config_for_logging", None)
    return own is None or "ignore_logging_functions" in inspect.getsource(own)


@contextlib.contextmanager
def no_unread_graphs() -> Iterator[None]:
    """Make AOTAutograd print joint, forward and backward graphs only where something reads the text.

    Readers are its logs, torch's trace (TORCH_TRACE), and its cache. It does not check them before it prints, which
    takes 0.5 s of a warm start of 32 Llama layers (docs/lab/runtime.md, R8).
    """
    from torch._functorch._aot_autograd import graph_compile

    if _is_heard(graph_compile):
        yield
        return
    with contextlib.ExitStack() as changes:
        for name, nothing in (("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
            quiet = functools.partial(_only_for_the_cache, nothing=nothing)
            changes.enter_context(replaced_attribute(graph_compile, name, quiet))
        yield


def no_unread_backwards() -> contextlib.AbstractContextManager[Any]:
    """Generate the backward's Python text lazily while graphs are partitioned.

    The forward's is lazy where Dynamo compiles. The backward is reordered in a module that generates the text at once,
    for each change, and again in AOTAutograd's copy. That takes 0.7 s of a cold start of 32 Llama layers
    (docs/lab/runtime.md, R8).
    """
    from torch._functorch import partitioners

    written, thread = GraphModule.recompile, get_ident()

    def later(module: Any) -> Any:
        return None if get_ident() == thread else written(module)

    def reordering(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def reorder(gm: Any) -> Any:
            with unittest.mock.patch.object(GraphModule, "recompile", later):
                ordered = own(gm)
                return gm if ordered is gm else _LazyGraphModule.from_graphmodule(ordered)

        return reorder

    return replaced_attribute(partitioners, "reordering_to_mimic_autograd_engine", reordering)


def no_unread_latencies() -> contextlib.AbstractContextManager[Any]:
    """Make Dynamo time a frame's new guards only where the result is logged.

    It evicts the processor's caches before, which takes 27 ms of CPU time a frame (docs/lab/runtime.md, R9). Everything
    else on the machine then reads its memory again.
    """
    from torch._dynamo import guards

    log = getattr(guards, "guards_log", None)
    if log is None or log.isEnabledFor(logging.DEBUG):
        return contextlib.nullcontext()
    # checked late: until a process's first event, torch's trace has a handler that finds out whether it is wanted, and
    # so looks enabled
    return replaced_attribute(
        guards, "profile_guard_manager", lambda own: lambda *given: own(*given) if _is_traced() else 0.0
    )


def no_unread_names() -> contextlib.AbstractContextManager[Any]:
    """Make Dynamo look up the function of a traced line only where its log of traced calls prints it.

    It parses the whole file for that, once per process: 0.08 s of CPU time for torch/nn/functional.py alone.
    """
    from torch._dynamo import output_graph, symbolic_convert

    logs = getattr(output_graph, "trace_call_log", None), getattr(symbolic_convert, "trace_source_log", None)
    if any(log is None or log.isEnabledFor(logging.DEBUG) for log in logs):
        return contextlib.nullcontext()
    return replaced_attribute(symbolic_convert, "get_funcname", lambda _: lambda filename, line: None)


def _is_heard(graph_compile: Any) -> bool:
    logs = (getattr(graph_compile, name, None) for name in ("aot_joint_log", "aot_graphs_log"))
    return any(log is None or log.isEnabledFor(logging.INFO) for log in logs) or _is_traced()


def _is_traced() -> bool:
    """Whether TORCH_TRACE records compilations."""
    trace = getattr(_internal, "trace_log", None)
    return trace is None or bool(trace.handlers)


def _only_for_the_cache(own: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    def quiet(*args: Any, **keywords: Any) -> Any:
        *_, config = (*args, *keywords.values())
        return nothing if getattr(config, "cache_info", own) is None else own(*args, **keywords)

    return quiet
