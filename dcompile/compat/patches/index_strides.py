"""`index` results keep eager's strides where the index is not row-major.

In tracing, torch derives the strides of `x[i]` from those of `x` alone. Its kernels also use those of the index: rows
of `table[i.t()]` are stored in the order of `i`. aot_eager calls these kernels, whatever tracing assumed. A compiled
program allocates its memory by the traced strides, and everything computed from `x[i]` follows.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def strides_of_indices() -> Iterator[None]:
    """Give `x[i]` the strides of the kernels' results while graphs are traced.

    Nested uses (Dynamo's tracing calls AOTAutograd's) change nothing.
    """
    import torch
    from torch._subclasses import fake_impls

    known: dict[Any, Callable[..., Any]] = getattr(fake_impls, "op_implementations_dict", {})
    op = torch.ops.aten.index.Tensor
    own = known.get(op)
    if own is None or isinstance(own, _Reading):
        yield
        return
    with unittest.mock.patch.dict(known, {op: _Reading(own)}), _not_remembered(op):
        yield


@contextlib.contextmanager
def _not_remembered(op: Any) -> Iterator[None]:
    """Bypass the fake tensors' cache of results, which all modes share, so that other backends are not affected."""
    from torch._subclasses import fake_tensor

    own = fake_tensor.FakeTensorMode._cache_key

    def key(mode: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if func is op and not _in_order(args[1]):
            raise fake_tensor._BypassDispatchCache("strides of an index")
        return own(mode, state, func, args, kwargs)

    with unittest.mock.patch.object(fake_tensor.FakeTensorMode, "_cache_key", key):
        yield


class _Reading:
    """torch's own implementation of `x[indices]`, with corrected strides of the result."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, mode: Any, func: Any, x: Any, indices: Sequence[Any], **more: Any) -> Any:
        if more or _in_order(indices):
            return self._own(mode, func, x, indices, **more)
        import torch

        with mode:
            common = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))  # type: ignore[no-untyped-call]
            # otherwise torch uses the shape of an index without dimensions for all of them
            spread = [None if index is None else index.expand(common) for index in indices]
            found = self._own(mode, func, x, spread)
            return found.new_empty_strided(found.shape, _strides(x, spread, found.shape))


def _in_order(indices: Sequence[Any]) -> bool:
    """Whether torch's strides are right: row-major indices of one shape; or masks, which are read as one row."""
    import torch
    from torch._prims_common import is_contiguous_or_false

    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8, torch.int8) for index in given):
        return True
    single = any(isinstance(size, int) and size == 1 for index in given for size in index.shape)
    alike = all(index.ndim and index.shape == given[0].shape for index in given)
    return alike and not single and all(map(is_contiguous_or_false, given))


def _strides(x: Any, indices: Sequence[Any], shape: Any) -> Any:
    """Strides of `x[indices]` by torch's iterator, from `x` and the indices with the result's dimensions."""
    import torch
    from torch import _prims_common as prims

    dims = [dim for dim, index in enumerate(indices) if index is not None]
    read = [indices[dim].to(torch.int64) for dim in dims]
    if x.device.type == "cuda" and any(index.stride() != read[0].stride() for index in read):
        read = [index.contiguous() for index in read]  # its kernel requires that
    start = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    others = [x.stride(dim) for dim in range(x.ndim) if dim not in dims]
    seen = x.as_strided(shape, (*others[:start], *[0] * read[0].ndim, *others[start:]))
    before, after = (1,) * start, (1,) * (len(others) - start)
    read = [index.reshape((*before, *index.shape, *after)).expand(shape) for index in read]
    order, *_ = prims.compute_elementwise_output_logical_to_physical_perm(seen, *read)
    dense = prims.make_contiguous_strides_for([shape[dim] for dim in order])
    return [dense[order.index(dim)] for dim in range(len(shape))]
