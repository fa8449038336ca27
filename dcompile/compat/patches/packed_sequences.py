"""Packed sequences that are padded again break the graph, where tracing them fails."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def packed_sequences_apart() -> Iterator[None]:
    """Break the graph where a packed sequence is padded: torch 2.11 fails to trace that; later ones break, too."""
    import torch
    from torch._dynamo import disallow_in_graph, trace_rules

    padded = getattr(torch._VF, "_pad_packed_sequence", None)
    if padded is None or not torch.__version__.startswith("2.11."):
        yield
        return
    known = id(padded) in trace_rules._disallowed_callable_ids
    disallow_in_graph(padded)
    try:
        with warnings.catch_warnings():  # torch warns that it cannot trace the function
            warnings.filterwarnings("ignore", message="(?s).*_pad_packed_sequence")
            yield
    finally:
        if not known:
            trace_rules._disallowed_callable_ids.remove(id(padded))
