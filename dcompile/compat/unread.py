"""What torch writes out while it compiles, left out where nobody reads it."""

from __future__ import annotations

import contextlib
import logging
import unittest.mock
from collections.abc import Callable, Iterator
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


def _is_heard(graph_compile: Any) -> bool:
    from torch._logging import _internal

    logs = (getattr(graph_compile, name, None) for name in ("aot_joint_log", "aot_graphs_log"))
    trace = getattr(_internal, "trace_log", None)
    return any(log is None or log.isEnabledFor(logging.INFO) for log in logs) or trace is None or bool(trace.handlers)


def _only_for_the_cache(own: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    def quiet(*args: Any, **keywords: Any) -> Any:
        *_, config = (*args, *keywords.values())
        return nothing if getattr(config, "cache_info", own) is None else own(*args, **keywords)

    return quiet
