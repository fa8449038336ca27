"""Write to inputs of the graph: functionalized in-place operations return to the caller's memory.

Inputs may also be given other memory, by `p.data = h` in a forward. The new data is copied, since programs reuse their
memory. But where the graph returns a view of it (`p.detach()`), the memory belongs to the caller already, and both
share it, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.codegen.lower.context import Lowering
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, make_lazy
from dcompile.codegen.lower.library_calls import Unsupported
from dcompile.codegen.lower.rules.indexing import check_positions, indexed_shape, indexed_space
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.scatter import ONE_THREAD
from dcompile.codegen.lower.symbolic.strides import ranges_of, variables
from dcompile.ir.float8 import OPAQUE
from dcompile.ir.index import flatten, size_product
from dcompile.ir.nodes import Extern, Load, Step, Store, View
from dcompile.ir.ops import DTYPES

OVERWRITES = frozenset(("aten.copy_.default",))
PUTS = frozenset(("aten.index_put.default", "aten._unsafe_index_put.default"))


def overwrite_input(low: Lowering, value: torch.Tensor, target: LazyTensor, source: LazyTensor, *_: Any) -> LazyTensor:
    """Lower `copy_` into an input to a loop that stores to its memory, after all reads of its old values.

    Relies on: steps stay after earlier steps that read the same buffer.
    """
    view = target.view
    if view is not None and source.view == view and view.buffer in low.overwritten:
        return target  # already written in place
    if view is None or view.buffer not in low.inputs or {target.dtype, source.dtype} - DTYPES.keys():
        raise Unsupported("dcompile: copy_ into something that is not an input of the graph")
    if source.dtype != target.dtype and {source.dtype, target.dtype} & {*OPAQUE}:
        raise Unsupported(f"dcompile: copy_ of {source.dtype} into {target.dtype}")
    if any(view.buffer in step.writes for step in low.steps):
        raise Unsupported(f"dcompile: {view.buffer} is overwritten twice")
    low.keep_before_overwrite(view.buffer, low.position)
    seen = broadcast(source, target.shape)
    cast = make_lazy(
        target.shape, target.dtype, lambda body, coords: to_dtype(body, body.trace(seen, coords), target.dtype), (seen,)
    )
    body = low.body(ranges_of("i", cast.shape))
    coords = variables("i", cast.shape)
    index = flatten(coords, view.strides) + view.offset
    ref = body.trace(cast, coords)
    body_values, _ = body.finish((Store(view.buffer, index, ref),))
    elsewhere = any(isinstance(v, Load) and v.buffer == view.buffer and v.index != index for v in body_values)
    low.store_into(low.store(cast) if elsewhere else cast, view)
    return target


def put_in_place(low: Lowering, node: Node, args: Sequence[Any]) -> LazyTensor | None:
    """Lower an index_put in place if its result only replaces the input that it starts from.

    A decoder's cache takes a token's keys and values this way: as a function, each step would copy the whole cache. On
    GPUs a single position becomes a loop, which may fuse; several positions, which may be equal, are the library's. On
    CPUs few values are the library's, with positions checked before anything is written. None where something else
    needs the old values.
    """
    if not low.traits.is_compiled or str(node.target) not in PUTS or len(args) < 3 or (len(args) > 3 and args[3]):
        return None
    target, indices, values = args[:3]
    start: Any = node.args[0]
    copies = [user for user in start.users if str(user.target) in OVERWRITES and user.args[:2] == (start, node)]
    if (
        not copies
        or set(start.users) != {node, *copies}
        or not isinstance(target, LazyTensor)
        or not isinstance(values, LazyTensor)
    ):
        return None
    view = target.view
    if view is None or view.buffer not in low.inputs or values.dtype != target.dtype:
        return None
    if any(isinstance(index, LazyTensor) and index.dtype in ("bool", "uint8") for index in indices):
        return None
    if any(view.buffer in step.writes for step in low.steps):
        return None
    if not low.traits.aten.checks_while_writing:
        return _put_few(low, target, indices, values)
    low.keep_before_overwrite(view.buffer, low.position)
    if all(index is None or index.numel == 1 for index in indices) and 0 not in (*target.shape, *values.shape):
        # a kernel cannot read CPU memory, where the value or its position may be
        seen = [None if index is None else low.brought(index, low.device) for index in indices]
        _put_at(low, target, seen, low.brought(values, low.device))
        return target
    low.extern("aten.index_put_.default", [view, list(indices), values], [view.buffer], mode="mutate", effect=True)
    return target


def _put_few(
    low: Lowering, target: LazyTensor, indices: Sequence[LazyTensor | None], values: LazyTensor
) -> LazyTensor | None:
    """Write values that the library puts in order on one thread; None if they are many, or none."""
    assert target.view is not None, "an input is in memory"
    count = size_product(indexed_shape(target, indices))
    if not isinstance(count, int) or not 0 < count < ONE_THREAD:
        return None
    buffer, sizes = target.view.buffer, target.shape
    seen = [
        None if index is None else check_positions(low, index, sizes[dim], wrap=True)
        for dim, index in enumerate(indices)
    ]
    low.keep_before_overwrite(buffer, low.position)
    low.extern("aten.index_put_.default", [target.view, seen, values], [buffer], mode="mutate", effect=True)
    return target


def _put_at(low: Lowering, target: LazyTensor, indices: Sequence[LazyTensor | None], values: LazyTensor) -> None:
    """Add a loop that stores `values` at one position.

    A kernel's bounds check while writing catches every wrong position: in all other dimensions the loop covers the full
    size.
    """
    assert target.view is not None, "an input is in memory"
    space = indexed_space(low, target, indices, check=False)
    seen = broadcast(values, space.shape)
    body = low.body(ranges_of("i", space.shape))
    coords = variables("i", space.shape)
    index = flatten(space.place(body, coords), target.view.strides) + target.view.offset
    low.loop(space.shape, (), body, [Store(target.view.buffer, index, body.trace(seen, coords))])


def with_shared_data(low: Lowering, returned: Sequence[Any], outputs: Sequence[Any]) -> tuple[Step, ...]:
    """Return the steps of a program; `outputs` are the results of the nodes `returned` that the caller sees.

    A program may store a copy of a value at the value's address. Only tracing distinguishes the two.
    """
    if not low.data_given:
        return tuple(low.steps)
    shared = {
        (view.buffer, compat.tensors.storage_key(node.meta["val"]))
        for node, view in zip(returned, outputs, strict=False)  # tensors saved for a backward are no results
        if isinstance(node, Node) and isinstance(view, View)
    }
    memories = {id(step): memory for step, memory in low.data_given}

    def settled(step: Step) -> Step:
        if isinstance(step, Extern) and id(step) in memories:
            source = step.args[1]
            if isinstance(source, View) and (source.buffer, memories[id(step)]) in shared:
                return replace(step, args=(*step.args[:2], False))
        return step

    return tuple(map(settled, low.steps))
