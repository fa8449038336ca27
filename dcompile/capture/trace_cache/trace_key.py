"""Cache key of a trace: the SHA-256 of a text of everything that AOTAutograd and its passes read.

The text holds versions, settings of dcompile and torch, and the adapter's additions to a trace. It holds the inputs
(shapes, strides, dtypes, devices, gradients, shared memory). A symbolic size is an expression of numbered symbols, of
which the text holds ranges and guards, and no values. It holds the captured graph with its subgraphs, constants and
function names. A graph may call only functions of torch and dcompile: other code is not part of the text, so such
a graph has no key. The text leaves out names of modules and inputs, and source lines. Messages and comments may name
those of the model that was traced first.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from dcompile.compat import groups
from dcompile.compat.trace_records import NotKeepable
from dcompile.compat.trace_state import (
    callable_text,
    check_apart,
    check_captured,
    device_text,
    global_state,
    numbers_digest,
    result_text,
    static_mark,
    tensor_text,
)
from dcompile.compat.trace_symbols import SizeSymbols
from dcompile.config import Config
from dcompile.toolchain import own_source, own_version

FORMAT = 2
"""Version of the entries' format. It is part of each key."""
_ELSEWHERE = frozenset(
    (
        "receipt", "progress", "log", "dump", "trace_enabled", "trace_graph_diagram", "verify", "cache_dir",
        "cache_size_gib", "share_artifacts", "compile_timeout_s", "precompiled",
    )
)  # fmt: skip
"""Settings that do not affect a trace, such as output directories."""
_MARKS = ("custom", "recompute", "ac_graph_id")
"""Keys of node metadata that tracing reads."""


def trace_key(
    gm: GraphModule, inputs: Sequence[Any], config: Config, facts: Sequence[str], symbols: SizeSymbols
) -> str:
    """Return a trace's cache key. `facts`: lines that an adapter adds. It numbers `symbols`. Raises NotKeepable."""
    if config.backend is not None and config.backend.cache_objection:
        raise NotKeepable(config.backend.cache_objection)
    check_apart(inputs, symbols)
    graph = _GraphText(symbols)
    given = (graph.input(value) for value in inputs)
    lines = (*_environment(config), *global_state(), *facts, *given, *graph.lines(gm, "graph"), *symbols.facts())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _environment(config: Config) -> Iterator[str]:
    yield f"trace {FORMAT}"
    yield f"dcompile {own_version()} {own_source()}"
    yield f"torch {torch.__version__} {torch.version.git_version} python {sys.version_info[:3]} {sys.platform}"
    for field in dataclasses.fields(config):
        if field.metadata and field.name not in _ELSEWHERE:
            yield f"{field.name}={getattr(config, field.name)}"


class _GraphText:
    """Text of a captured graph, its inputs and its subgraphs."""

    def __init__(self, symbols: SizeSymbols) -> None:
        self._symbols = symbols
        self._storages: dict[int, int] = {}

    def input(self, value: Any) -> str:
        """Return the line of an input."""
        if isinstance(value, torch.Tensor):
            return f"input {tensor_text(value, self._storages, self._symbols)}{device_text(value.device)}"
        if type(value) in (int, float, bool, str):
            return f"input {value!r}"
        if isinstance(value, torch.SymInt):
            return f"input {self._symbols.text(value)}"
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise NotKeepable(f"an input is a symbolic {'float' if isinstance(value, torch.SymFloat) else 'bool'}")
        raise NotKeepable(f"an input is a {type(value).__name__}")

    def lines(self, gm: GraphModule, name: str) -> Iterator[str]:
        """Yield a line for each node, with numbers instead of names."""
        check_captured(gm)
        numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
        yield f"{name} begins"
        for node in gm.graph.nodes:
            args, kwargs = _text(node.args, numbers), _text(node.kwargs, numbers)
            marks = [f"{mark}={_text(node.meta[mark], numbers)}" for mark in _MARKS if mark in node.meta]
            value = "" if node.op == "output" else result_text(node.meta.get("example_value"), self._symbols)
            yield " ".join((node.op, self._target(node), args, kwargs, value, *marks))
            if node.op == "get_attr":
                yield from self._held(operator.attrgetter(str(node.target))(gm), f"{name}.{numbers[node]}")
        yield f"{name} ends"

    def _target(self, node: Node) -> str:
        if node.op == "call_function":
            return callable_text(node.target)
        if node.op == "call_method":
            return f".{node.target}"
        if node.op == "call_module":
            raise NotKeepable("it calls a module, whose code is not in the graph")
        return static_mark(node)

    def _held(self, value: Any, name: str) -> Iterator[str]:
        """Yield lines for an attribute: a subgraph, or a small tensor whose values tracing may read."""
        if isinstance(value, GraphModule):
            yield from self.lines(value, name)
            return
        if not isinstance(value, torch.Tensor):
            raise NotKeepable(f"it holds a {type(value).__name__}")
        yield f"{name} {tensor_text(value, self._storages, self._symbols)} {numbers_digest(value)}"


def _text(value: Any, numbers: dict[Node, int]) -> str:
    """Return an argument's text. Raises NotKeepable for values without a distinguishing text."""
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex):
        return repr(value)
    if isinstance(value, str):
        group = groups.group_by_name(value) if dist.is_initialized() else None
        return repr(value) if group is None else f"{value!r} of {group.size()} ranks"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format | torch.device):
        return f"{type(value).__name__} {value}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_text(k, numbers)}:{_text(v, numbers)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        opening = "[" if isinstance(value, list) else "("
        return f"{opening}{','.join(_text(item, numbers) for item in value)},"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, enum.Enum) and type(value).__module__.startswith("torch"):
        return f"{type(value).__name__}.{value.name}"
    if callable(value):
        return callable_text(value)
    raise NotKeepable(f"it holds a {type(value).__name__}")
