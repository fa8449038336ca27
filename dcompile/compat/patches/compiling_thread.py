"""`torch.compiler.is_compiling()` while a frame is compiled: true in the thread that compiles, and in no other."""

from __future__ import annotations

import contextlib
import threading
import unittest.mock
from collections.abc import Iterator


@contextlib.contextmanager
def compiling_in_one_thread() -> Iterator[None]:
    """Let other threads see that they compile nothing.

    torch sets one flag for all threads. An optimizer that steps in another one then stacks its numbers as for a graph,
    and fails. Until torch 2.13, fx's flag of a trace is one for all threads, too. While it is set, only threads that
    seem to compile may call compiled code: so all of them do.
    """
    import torch

    if not hasattr(torch.compiler, "_compile_session_context"):
        yield
        return
    with unittest.mock.patch.object(torch.compiler, "_compile_session_context", _session):
        yield


@contextlib.contextmanager
def _session() -> Iterator[None]:
    import torch

    known = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = _OfThisThread(True)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = known


class _OfThisThread(int):
    """A flag that is true in the thread that has made it, and elsewhere while fx traces for all threads."""

    def __init__(self, _value: bool) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        from torch.fx import _symbolic_trace

        return threading.get_ident() == self._thread or bool(getattr(_symbolic_trace, "_is_fx_tracing_flag", False))

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))
