"""Calls of operators whose arguments have no text, as functions among a program's constants.

FlexAttention is one of them where `flex_attention.py` leaves it. On GPUs TorchInductor compiles its kernel when the
program is built or loaded, not while a graph is lowered: planning a graph again, or for another machine, compiles
nothing. On CPUs it is a loop (`flex_loop`).
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.ir.nodes import CALL, Arg, View
from dcompile.operators import flex_ops

_NUMBER = re.compile(r"(_\d+)?_function$")
"""End of a function's name: the number of its node, and what `function_name` adds."""


def function_name(node: Node) -> str:
    """Return the name of a call's function among the constants of its program."""
    return f"{node.name}_function"


def called_name(args: Sequence[Arg]) -> str:
    """Return the receipt's name for a call, "dcompile.call cond" say, by its arguments: the function comes first."""
    function = args[0]
    assert isinstance(function, View), "a call has its function as first argument"
    return named_call(function.buffer)


def named_call(function: str) -> str:
    """Return the receipt's name for a call by its function's name among the constants."""
    return f"{CALL} {re.sub(_NUMBER, '', function)}"


def opaque_call(node: Node, fixed: Mapping[Node, Any]) -> Callable[..., Any]:
    """Return the node as a function of the values of its input nodes, except those in `fixed`."""
    return FlexCall(node, fixed) if compat.inductor.is_flex(node.target) else as_function(node, fixed)


def as_function(node: Node, fixed: Mapping[Node, Any], by: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return `opaque_call` by the operator itself, as in eager mode, or by another function in its place."""
    target: Any = by or node.target
    inputs = [n for n in node.all_input_nodes if n not in fixed]
    args, kwargs, unpacked, nested = node.args, node.kwargs, returns_one_in_a_tuple(node), is_nested(node)

    def call(*values: Any) -> Any:
        given = {**dict(zip(inputs, values, strict=True)), **fixed}
        filled: Any = torch.fx.map_arg((args, kwargs), lambda n: given[n])
        result = target(*filled[0], **filled[1])
        if nested:
            return tuple(leaves(result))
        return result[0] if unpacked else result

    return call


def returns_one_in_a_tuple(node: Node) -> bool:
    """Return whether a call without a schema has one result in a tuple, such as torch.cond with one result."""
    value = node.meta.get("val")
    return isinstance(value, (tuple, list)) and len(value) == 1 and not hasattr(node.target, "_schema")


def is_nested(node: Node) -> bool:
    """Return whether a call returns nested tuples."""
    value = node.meta.get("val")
    return isinstance(value, (tuple, list)) and any(isinstance(item, (tuple, list)) for item in value)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of nested tuples and lists, in order."""
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (tuple, list)) else [value]


@dataclass(frozen=True, slots=True)
class FlexBuild:
    """What came of a program's calls of FlexAttention, for its receipt."""

    notes: tuple[str, ...] = ()
    left: Mapping[str, int] = field(default_factory=dict)
    """Calls that run as eager math, with the reason -> number of them."""
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    """The same by the names that the program's report has for them."""


class FlexCall:
    """One call of FlexAttention, forward or backward: eager math until `build` has found something better."""

    def __init__(self, node: Node, fixed: Mapping[Node, Any]) -> None:
        self._options, is_forward = compat.flex.options_of(node, fixed), str(node.target) == compat.inductor.FLEX[0]
        self._as_asked = functools.partial(compat.flex.without_kernel, options=self._options, is_forward=is_forward)
        self._run = as_function(node, fixed, self._as_asked(compat.flex.eager(node)))
        self._parts: tuple[Node, Mapping[Node, Any]] | None = (node, fixed)
        self._how = "runs as TorchInductor's kernel"
        self.operator, self.fallback_name = str(node.target), named_call(function_name(node))

    def build(self, known: dict[str, Callable[..., Any] | str] | None = None) -> str:
        """Have TorchInductor compile the call, or a loop compute it, at most once. Return why neither does.

        `known`: text of a call -> what came of it. Equal calls, as the layers of a model have, share one function.
        """
        if self._parts is not None:
            text = _text_of_call(*self._parts)
            found = None if known is None or text is None else known.get(text)
            if found is None:
                found = compat.inductor.compiled_flex(*self._parts)
            if known is not None and text is not None:
                known[text] = found
            if isinstance(found, str) and compat.flex.is_on_cpu(self._parts[0]):
                found = self._loop(*self._parts)
            if isinstance(found, str):
                return found
            self._run, self._parts = found, None
        return ""

    def _loop(self, node: Node, fixed: Mapping[Node, Any]) -> Callable[..., Any] | str:
        found = flex_ops.loop_of(node, fixed)
        if isinstance(found, str):
            return f"no loop for {found}"
        chosen = ", ".join(compat.flex.chosen_options(self._options))
        self._how = "runs as a loop over the blocks that its mask leaves" + (
            chosen and f", without its kernel's {chosen}"
        )
        return as_function(node, found[1], self._as_asked(found[0]))

    def note(self, why_not: str) -> str:
        """Line for the receipt about the call. `why_not`: what `build` has returned."""
        if why_not:
            return f"{self.operator} computes all scores, as in eager mode ({why_not})"
        return f"{self.operator} {self._how}"

    def __call__(self, *values: Any) -> Any:
        """Run on the values of the call's inputs."""
        return self._run(*values)


def _text_of_call(node: Node, fixed: Mapping[Node, Any]) -> str | None:
    """Return the text of a call with its functions and the layouts of its inputs; None if it holds tensors."""
    parts = [value for value in fixed.values() if isinstance(value, GraphModule)]
    if len(parts) != len(fixed) or any(part.graph.find_nodes(op="get_attr") for part in parts):
        return None
    numbers = {n: f"%{number}" for number, n in enumerate(node.all_input_nodes)}
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda n: numbers[n])
    used = sorted({str(user.args[1:]) for user in node.users})
    graphs = [[line.format_node() for line in part.graph.nodes] for part in parts]
    layouts = [_layout(n.meta.get("val")) for n in node.all_input_nodes if n not in fixed]
    return f"{node.target} {arguments} {used} {graphs} {layouts}"


def _layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value}"
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.device}"


def flex_calls(gm: GraphModule, names: Collection[str]) -> dict[str, FlexCall]:
    """Return those calls of FlexAttention in a graph that its program has under one of these names, by name.

    Others are steps of the program, which kernels of ours compute.
    """
    found = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and function_name(node) in names and compat.inductor.is_flex(node.target):
            held = [n for n in node.all_input_nodes if n.op == "get_attr"]
            values = {n: operator.attrgetter(str(n.target))(gm) for n in held}
            fixed = {n: value for n, value in values.items() if not isinstance(value, torch.Tensor)}
            found[function_name(node)] = FlexCall(node, fixed)
    return found


def build_flex(constants: Iterable[Any]) -> FlexBuild:
    """Have the calls of FlexAttention among a program's constants compiled, or computed by a loop."""
    known: dict[str, Callable[..., Any] | str] = {}
    calls = [value for value in constants if isinstance(value, FlexCall)]
    reasons = [call.build(known) for call in calls]
    notes = tuple(call.note(why_not) for call, why_not in zip(calls, reasons, strict=True))
    left = [(call, why) for call, why in zip(calls, reasons, strict=True) if why]
    names = Counter(f"{call.operator} left to eager math: {why}" for call, why in left)
    return FlexBuild(notes, names, Counter(call.fallback_name for call, _ in left))
