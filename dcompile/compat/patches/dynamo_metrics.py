"""Metrics of a compilation leave out settings that they cannot write, or that say nothing of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest.mock
from collections.abc import Iterator


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
            if hasattr(utils, name):
                stack.enter_context(unittest.mock.patch.object(utils, name, lambda: None))
        yield


@functools.cache
def _can_log_functions() -> bool:
    import torch._dynamo.utils as utils

    own = getattr(utils, "_get_dynamo_config_for_logging", None)
    return own is None or "ignore_logging_functions" in inspect.getsource(own)
