"""Lower the model's own functional collectives to two steps of the program: a start and a wait.

In a traced graph they are operations on tensors: one that returns at once, and a wait on each of its results. The
schedule moves start and wait apart, as for the collectives that dcompile inserts. Collectives with sizes known only at
run time, and those whose results are returned without a wait, stay library calls.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.fx import Node

from dcompile.codegen.lower.context import Lowering, dtype_name
from dcompile.codegen.lower.lazy_tensor import LazyTensor, from_view
from dcompile.codegen.lower.symbolic.strides import contiguous
from dcompile.compat.size_expressions import opaque_shape
from dcompile.ir.collective_kinds import COLLECTIVES
from dcompile.ir.functional_collectives import is_wait, kind_of
from dcompile.ir.index import Index
from dcompile.ir.nodes import Arg, Collective, Extern, View, Wait
from dcompile.ir.ops import DTYPES

REDUCTIONS = frozenset(("sum", "avg", "product", "min", "max", "band", "bor", "bxor"))
"""Names of the reductions that the runtime supports."""


def lower_collective(low: Lowering, node: Node, args: Sequence[Any]) -> Any:
    """Return the result of a functional collective or a wait, and add its step; None where it is no step."""
    op = str(node.target)
    if is_wait(op):
        return _wait(low, args[0])
    kind = kind_of(op)
    if kind is None:
        return None
    if (reason := _why_not(low, node, args)) is not None:
        low.declined.append(f"{op} is a library call, which nothing hides: {reason}")
        return None
    tensors = args[0] if isinstance(args[0], list) else [args[0]]
    value: Any = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    views = [_buffer(low, fake, node.name if len(values) == 1 else f"{node.name}_{n}") for n, fake in enumerate(values)]
    sent, in_place = views, COLLECTIVES[kind].in_place
    if in_place:
        for tensor, view in zip(tensors, views, strict=True):
            low.store_into(tensor, view)
    else:
        sent = [low.exact(replace(tensor, strides=contiguous(tensor.shape))) for tensor in tensors]
    given: Arg = sent[0] if isinstance(value, torch.Tensor) else tuple(sent)
    buffers = tuple(view.buffer for view in views)
    mode: Literal["mutate", "out"] = "mutate" if in_place else "out"
    call = Extern(op, (given, *map(low.argument, args[1:])), (), buffers, mode, origin=low.origin)
    start = Collective(kind, buffers[0], low.groups.get(args[-1], args[-1]), buffers, call)
    low.steps.append(start)
    low.in_flight |= dict.fromkeys(buffers, start)
    if not _waits(node):
        _land(low, start)  # every rank takes part, even if the result is unused
    results = [from_view(view, dtype_name(fake.dtype)) for view, fake in zip(views, values, strict=True)]
    return results[0] if isinstance(value, torch.Tensor) else results


def _why_not(low: Lowering, node: Node, args: Sequence[Any]) -> str | None:
    """Return why a collective cannot be a step, or None."""
    value: Any = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = args[0] if isinstance(args[0], list) else [args[0]]
    if not isinstance(args[-1], str):
        return "its process group has no name"
    if not all(map(_is_waited_for, _results(node))):
        return "its result is used without a wait in this graph"
    if any(isinstance(arg, str) and arg not in REDUCTIONS for arg in args[1:-1]):
        return "its reduction is none of torch.distributed's plain ones"
    if any(not isinstance(tensor, LazyTensor) or tensor.dtype not in DTYPES for tensor in tensors):
        return "loops know no such dtype"
    sizes = [size for fake in values for size in opaque_shape(fake)[0]]
    sizes += [size for tensor in tensors for size in tensor.shape]
    sizes += [item for arg in args[1:] for item in (arg if isinstance(arg, list) else [arg]) if isinstance(item, Index)]
    return None if low.has(sizes) and not _is_late(low, sizes) else "its size is known only at run time"


def _is_late(low: Lowering, sizes: Sequence[Any]) -> bool:
    """Return whether a library call defines a size: its value must be known before the program begins."""
    return any(not size.variables <= low.known for size in sizes if isinstance(size, Index))


def _results(node: Node) -> list[Node]:
    """Return the node, or the nodes that select its results if it returns several tensors."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [node]
    return [user if user.target is operator.getitem else node for user in node.users]


def _is_waited_for(result: Node) -> bool:
    return all(user.op == "call_function" and is_wait(str(user.target)) for user in result.users)


def _waits(node: Node) -> list[Node]:
    return [user for result in _results(node) for user in result.users]


def _buffer(low: Lowering, fake: torch.Tensor, name: str) -> View:
    """Add a row-major buffer for a result, since backends send memory without gaps."""
    return low.buffer(opaque_shape(fake)[0], dtype_name(fake.dtype), name=name, device=fake.device.type)


def _wait(low: Lowering, given: Any) -> Any:
    """Return the result of a wait; the first wait of a collective adds its step, and other tensors pass unchanged.

    `given` is a tensor or a list of them. None where a library call has made one of them, or the caller: that may be
    in flight.
    """
    tensors = given if isinstance(given, list) else [given]
    for tensor in tensors:
        view = tensor.view if isinstance(tensor, LazyTensor) else None
        if view is not None and view.buffer in low.in_flight:
            _land(low, low.in_flight[view.buffer])
    return given if all(_is_computed_here(low, tensor) for tensor in tensors) else None


def _is_computed_here(low: Lowering, tensor: Any) -> bool:
    """Whether a tensor is the result of a loop or of a collective that is a step."""
    if not isinstance(tensor, LazyTensor):
        return False
    if tensor.view is None:
        return True
    called = (step for step in low.steps if isinstance(step, Extern) and step.mode != "out")
    return tensor.view.buffer not in low.inputs and not any(tensor.view.buffer in step.writes for step in called)


def _land(low: Lowering, start: Collective) -> None:
    low.steps.append(Wait(start.bucket, start.buffers, start.sent))
    for name in start.buffers:
        del low.in_flight[name]
