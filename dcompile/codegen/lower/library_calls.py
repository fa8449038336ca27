"""Library calls: ops left to ATen on purpose, and the generic call for ops without a rule.

The model's own functional collectives become two steps of the program: a start and a wait. In a traced graph they are
operations on tensors: one that returns at once, and a wait on each of its results. The
schedule moves start and wait apart, as for the collectives that dcompile inserts. Collectives with sizes known only at
run time, and those whose results are returned without a wait, stay library calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.fx_nodes import (
    COMPUTING,
    copying_variant,
    has_effect,
    is_in_place,
    op_text,
    returns_alias,
    written_names,
)
from dcompile.codegen.lower.lazy_tensor import LazyTensor, from_view
from dcompile.codegen.lower.opaque_calls import function_name, is_nested, opaque_call, returns_one_in_a_tuple
from dcompile.codegen.lower.symbolic.strides import contiguous
from dcompile.compat.size_expressions import is_symbolic, opaque_shape
from dcompile.errors import DcompileError
from dcompile.ir.buffers import OBJECT
from dcompile.ir.collective_kinds import COLLECTIVES, HOST_LINK
from dcompile.ir.functional_collectives import is_wait, kind_of
from dcompile.ir.gemm import MATMUL_OPS
from dcompile.ir.index import Index
from dcompile.ir.library_ops import LIBRARY_OPS, packet_of
from dcompile.ir.nodes import CALL, REGION, Arg, Collective, Extern, View, Wait
from dcompile.ir.ops import DTYPES
from dcompile.kernel_backends.compile_region import RegionCall
from dcompile.operators import host_copies

WITH_EFFECTS = "higher_order.with_effects"
"""with_effects(token, op, *args): keeps calls that may raise in order; the op inside decides about fallbacks."""

SET_DATA = "dcompile.set_data"
"""set_data(tensor, source, copies): give a tensor the data of `source`, copied if the program reuses that memory."""


class Unsupported(DcompileError):
    """This graph cannot be expressed as loops (it changes an intermediate in place); `lower` leaves it to ATen."""


def call_library(low: Lowering, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Lower the node to a library call with its result in memory."""
    target, value = node.target, node.meta.get("val")
    op, packet = op_text(target), packet_of(op_text(target))
    if op in MATMUL_OPS and isinstance(value, torch.Tensor) and low.has(opaque_shape(value)[0]):
        return _placed(low, op, value, args, kwargs)
    if is_in_place(target):
        return _in_place(low, node, args, kwargs)
    if op == WITH_EFFECTS:
        packet = packet_of(op_text(args[1]))
    if op in compat.storage_offsets.FROM_STORAGE:
        args = [_in_its_storage(low, node, args[0]), *args[1:]]
    fallback = packet not in LIBRARY_OPS and op.partition(".")[0] != "_c10d_functional"
    aliasing = returns_alias(target)
    if aliasing and _is_returned_look(low, node, args):
        if (look := _strided_look(low, op, value, args)) is not None:
            return look
        aliasing = False
    elif op in COMPUTING and not isinstance(args[0], LazyTensor) and isinstance(value, torch.Tensor):
        # of a number: the backward of a multiplication by a Python number
        op, kwargs = "aten.scalar_tensor.default", {"dtype": value.dtype, "device": value.device}
        args, aliasing = [_computed(str(target), args[0])], False
    elif aliasing and (copying := copying_variant(target)) is not None:
        op, aliasing = copying, False
    outs, result = name_results(low, value, node)
    if returns_one_in_a_tuple(node) or is_nested(node) or any(has_no_text(arg) for arg in (*args, *kwargs.values())):
        function, inputs = _bound(low, node)
        low.extern(CALL, [function, *inputs], outs, fallback=fallback, effect=True)
        return result
    low.extern(op, args, outs, kwargs=kwargs, fallback=fallback, effect=has_effect(node))
    return _own_memory(low, outs, result) if aliasing else result


def call_region(low: Lowering, node: Node, args: Sequence[Any]) -> Any:
    """Call a region as one opaque step: it reads its inputs and allocates its results."""
    call: Any = node.target
    function = low.buffer((), OBJECT, name=call.__name__)
    assert function.buffer == call.__name__, "a program from the cache finds the call by its name"
    outs, result = name_results(low, node.meta["val"], node)
    low.constants[function.buffer] = call
    low.inputs[function.buffer] = None
    low.origin = (call.what,)
    low.extern(REGION, [function, *args], outs, cost_us=call.cost_us)
    return result


def is_region(node: Node) -> bool:
    """Return whether a node stands for a region compiled by another compiler."""
    return isinstance(node.target, RegionCall)


def _is_returned_look(low: Lowering, node: Node, args: Sequence[Any]) -> bool:
    """Return whether a view of an input is only returned: AOTAutograd reads its offset in the input from the result.

    Where all sizes on the way from the input are static, AOTAutograd recreates such views by itself.
    """
    base = args[0] if args else None
    of_input = isinstance(base, LazyTensor) and base.view is not None and base.view.buffer in low.inputs
    return of_input and _is_only_returned(node) and _has_symbols(node)


def _has_symbols(view: Node) -> bool:
    """Return whether the layout of a view, or of a tensor that it is a view of, has symbols."""
    of: Any = view
    while isinstance(of, Node) and not is_symbolic(of.meta.get("val")):
        of = of.args[0] if of.op == "call_function" else None
    return isinstance(of, Node)


def _is_only_returned(node: Node) -> bool:
    """Return whether a view, and every view of it, is only returned to the caller."""
    return all(
        user.op == "output" or (getattr(user.target, "is_view", False) and _is_only_returned(user))
        for user in node.users
    )


def _strided_look(low: Lowering, op: str, value: Any, args: Sequence[Any]) -> LazyTensor | None:
    """Return the view that `as_strided` makes of an input from its first element; torch checks its bounds later."""
    shape, strides = opaque_shape(value)
    if op != "aten.as_strided.default" or len(args) > 3 or not low.has((*shape, *strides)):
        return None
    assert args[0].view is not None
    return from_view(View(args[0].view.buffer, shape, strides, args[0].view.offset), args[0].dtype)


def _placed(low: Lowering, op: str, value: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyTensor:
    # the library takes any strided operand: a transposed or sliced one needs no copy
    views = [low.memory(arg).view if isinstance(arg, LazyTensor) else arg for arg in args]
    view = low.buffer(shape_of(value), dtype_name(value.dtype), strides_of(value))
    low.extern(op, views, [view.buffer], kwargs=kwargs, mode="out")
    return from_view(view, dtype_name(value.dtype))


def _in_its_storage(low: Lowering, node: Node, tensor: LazyTensor) -> LazyTensor:
    """Return `tensor` at the start of a storage, as in eager mode; temporaries may be anywhere in the arena."""
    if tensor.view is not None and tensor.view.buffer in low.inputs:
        return tensor  # a view of the caller's own tensor
    around = (
        compat.storage_offsets.storage_input(node, scattered=True) if compat.storage_offsets.has_offset(node) else None
    )
    if around is not None and compat.storage_offsets.is_part(around.meta["val"]):
        raise Unsupported(f"dcompile: {node.target} reads memory outside an input")
    fake = node.args[0].meta["val"]  # type: ignore[union-attr]
    # smaller than the storage, for example via `as_strided` of an input, which is a copy of exact size here
    at_start = isinstance(offset := fake.storage_offset(), int) and offset == 0
    if not (at_start and compat.sizes.is_dense(fake) and fake.untyped_storage().nbytes() == fake.nbytes):
        raise Unsupported(f"dcompile: {node.target} reads the storage outside a slice")
    view = low.exact(tensor)
    out = low.buffer(tensor.shape, tensor.dtype, strides_of(fake), f"{view.buffer}_storage")
    low.extern("aten.clone.default", [view], [out.buffer])
    return from_view(out, tensor.dtype)


def _bound(low: Lowering, node: Node) -> tuple[View, list[Any]]:
    """Return the node as a function among the constants, and its arguments."""
    fixed = {n: value.value for n in node.all_input_nodes if isinstance(value := low.values[n], GraphAttribute)}
    name = function_name(node)
    low.constants[name] = opaque_call(node, fixed)
    low.inputs[name] = None
    return low.buffer((), OBJECT, name=name), [low.values[n] for n in node.all_input_nodes if n not in fixed]


@dataclass(frozen=True, slots=True)
class GraphAttribute:
    """An attribute of the graph module that is not a tensor: a graph, for example."""

    value: Any


def _in_place(low: Lowering, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Lower a call that changes inputs of the graph in place."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    written = [given.get(name) for name in written_names(schema)]
    tensors = [t for item in written for t in (item if isinstance(item, list) else [item]) if isinstance(t, LazyTensor)]
    views = [tensor.view for tensor in tensors]
    if any(view is None or view.buffer not in low.inputs for view in views) or any(
        a.alias_info is None for a in schema.returns
    ):
        raise Unsupported(f"dcompile: {node.target} changes a tensor that is not an input of the graph")
    names = list(dict.fromkeys(view.buffer for view in views if view is not None))
    for name in names:
        low.keep_before_overwrite(name, low.position)
    op = op_text(node.target)
    if op in compat.storage_offsets.GIVES_DATA:
        was = [(view.shape, view.strides, tensor.dtype) for view, tensor in zip(views, tensors, strict=True) if view]
        if [(*opaque_shape(node.meta["val"]), dtype_name(node.meta["val"].dtype))] != was:
            raise Unsupported(f"dcompile: {node.target} gives an input another shape, dtype or other strides")
        op, args = SET_DATA, [*args, _is_made(low, node, args[1])]
    low.extern(op, args, names, kwargs=kwargs, mode="mutate", fallback=True, effect=True)
    if op == SET_DATA:
        step, source = low.steps[-1], node.args[1]
        assert isinstance(step, Extern) and isinstance(source, Node)
        low.data_given.append((step, compat.tensors.storage_key(source.meta["val"])))
    if not schema.returns:
        return None
    return tensors[0] if len(schema.returns) == 1 else tuple(tensors)


def _is_made(low: Lowering, node: Node, source: LazyTensor) -> bool:
    """Return whether the new data of a tensor is computed by the program, rather than (part of) an input."""
    if source.view is None or source.view.buffer not in low.inputs:
        return True
    earlier = [step for step in low.steps if isinstance(step, Extern) and step.op == SET_DATA]
    if any(source.view.buffer in step.outs for step in earlier):
        raise Unsupported(f"dcompile: {node.target} takes what an input was before it got other memory")
    return False


def name_results(low: Lowering, value: Any, node: Node) -> tuple[list[str | None], Any]:
    """Add buffers for a call's results; return their names (None where unread) and the tensors."""
    if isinstance(value, torch.Tensor):
        tensor = low.result(value, node.name)
        return [buffer_name(tensor)], tensor
    if value is None:
        if node.users:
            raise Unsupported(f"dcompile: {node.target} has a result that tracing did not describe")
        return [], None
    if not isinstance(value, (tuple, list)):
        return [], value
    if is_nested(node) and hasattr(node.target, "_schema"):
        raise Unsupported(f"dcompile: {node.target} returns lists inside a tuple")
    used = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    outs: list[str | None] = []

    def named(item: Any, name: str, is_used: bool) -> Any:
        if isinstance(item, (tuple, list)):
            return [named(part, f"{name}_{place}", is_used) for place, part in enumerate(item)]
        kept = low.result(item, name) if isinstance(item, torch.Tensor) and is_used else None
        outs.append(None if kept is None else buffer_name(kept))
        return item if kept is None and not isinstance(item, torch.Tensor) else kept

    return outs, [named(item, f"{node.name}_{number}", number in used) for number, item in enumerate(value)]


def _own_memory(low: Lowering, outs: Sequence[str | None], result: Any) -> Any:
    """Copy results that may be views of the call's arguments, which may be overwritten while the results live."""
    if isinstance(result, list):
        return [_own_memory(low, outs, item) for item in result]
    if not isinstance(result, LazyTensor):
        return result
    assert result.view is not None
    name = buffer_name(result)
    out = low.buffer(result.shape, result.dtype, result.view.strides, f"{name}_copy", low.device_of(result))
    low.extern("aten.clone.default", [result.view], [out.buffer])
    return from_view(out, result.dtype)


def buffer_name(tensor: LazyTensor) -> str:
    """Return the buffer of a tensor in memory."""
    assert tensor.view is not None
    return tensor.view.buffer


def _computed(op: str, number: complex) -> complex:
    return number.conjugate() if op == "aten._conj.default" else -number


def has_no_text(arg: Any) -> bool:
    """Return whether an argument has no text form in a program."""
    if isinstance(arg, (tuple, list)):
        return any(has_no_text(item) for item in arg)
    return isinstance(arg, (dict, torch.nn.Module, slice, GraphAttribute)) or (
        isinstance(arg, Callable) and not hasattr(arg, "_schema")  # type: ignore[arg-type]
        and not isinstance(arg, (LazyTensor, View, torch.dtype))
    )  # fmt: skip


# --- the model's own collectives --------------------------------------------------------------------------------------


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


def lower_host_copy(low: Lowering, node: Node, args: Sequence[Any]) -> LazyTensor | None:
    """Return the result of a copy to or from host memory, and add its start and its wait.

    None where it is none, and where no loop knows the dtype or the size: then it is a library call.
    """
    op = str(node.target)
    kind = host_copies.KINDS.get(op)
    if kind is None:
        return None
    value: Any = node.meta["val"]
    tensor, (shape, strides) = args[0], opaque_shape(value)
    if tensor.dtype not in DTYPES or not low.has((*shape, *strides)) or _is_late(low, (*shape, *strides)):
        return None
    low.device = node.args[0].meta["val"].device.type  # type: ignore[union-attr]  # where it may have to be stored
    sent = low.exact(replace(tensor, strides=strides))
    view = low.buffer(shape, tensor.dtype, strides, name=node.name, device=value.device.type)
    call = Extern(op, (sent,), (), (view.buffer,), "out", origin=low.origin)
    start = Collective(kind, view.buffer, HOST_LINK, (view.buffer,), call)
    low.steps += [start, Wait(start.bucket, start.buffers, start.sent)]
    return from_view(view, tensor.dtype)


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
