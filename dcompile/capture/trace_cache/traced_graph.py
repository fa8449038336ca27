"""Content of a cached trace: AOTAutograd's metadata, the traced graphs, and facts that capture has found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from dcompile.capture.trace_cache.graph_record import graph_of
from dcompile.compat import aot_trace
from dcompile.compat.tensors import real_tensors
from dcompile.compat.trace_records import NotKeepable, Record
from dcompile.compat.trace_symbols import SizeSymbols


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts that capture has found about a graph, apart from the graphs themselves."""

    gradients: tuple[tuple[int, int], ...] = ()
    """Gradients: (position among the backward's outputs, position among the graph's inputs)."""
    results: int = 0
    """Number of the forward's outputs before the saved tensors."""
    may_lack: bool = False
    """Whether the backward may run without tangents of unused results."""
    shapes_kept: tuple[int, ...] = ()
    without_gradients: tuple[int, ...] = ()
    """Positions of results that are views made under `torch.no_grad()`."""
    notes: tuple[str, ...] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """Records of a trace, as the cache stores them. `backward` is None for an inference graph."""

    metadata: Record
    forward: Record
    backward: Record
    facts: TraceFacts
    guards: Record
    """Guards on symbolic sizes that tracing has added."""

    def to_text(self) -> str:
        """Return the records as JSON."""
        parts = {"metadata": self.metadata, "forward": self.forward, "backward": self.backward, "guards": self.guards}
        return json.dumps(parts | {"facts": dataclasses.asdict(self.facts)}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class KeptTrace:
    """Trace from the cache, in the form that AOTAutograd's compilers receive."""

    metadata: Any
    forward: GraphModule
    """The forward graph, or the inference graph."""
    backward: GraphModule | None
    facts: TraceFacts


def kept_trace(text: str, symbols: SizeSymbols) -> KeptTrace | str:
    """Rebuild a trace from text, in the capture's fake tensor mode, and add its guards to the compilation.

    If the guards do not hold, return their text instead. Raises NotKeepable for damaged text.
    """
    try:
        found = json.loads(text)
        if not symbols.satisfy(found["guards"]):
            return json.dumps(found["guards"])
        symbols.add_guards(found["guards"])
        with real_tensors(), symbols.adding_no_guards():
            backward, facts = found["backward"], _facts(found["facts"])
            return KeptTrace(
                aot_trace.metadata_of(found["metadata"], symbols),
                graph_of(found["forward"], symbols, None if backward is None else facts.results),
                None if backward is None else graph_of(backward, symbols, is_backward=True),
                facts,
            )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise NotKeepable(f"{type(error).__name__}: {error}") from error


def _facts(found: Mapping[str, Any]) -> TraceFacts:
    gradients = tuple((place, position) for place, position in found["gradients"])
    lists = {name: tuple(found[name]) for name in ("shapes_kept", "without_gradients", "notes")}
    return TraceFacts(gradients, found["results"], found["may_lack"], fallbacks=found["fallbacks"], **lists)
