"""What is read by an index lies as in eager mode, where the index does not lie in row-major order.

torch finds the strides of `x[i]` while it traces by those of `x` alone. Its kernels look at the index as well: of
`table[i.t()]` the rows lie as `i` does. aot_eager calls these kernels, whatever tracing said; a program of ours makes
its memory by what tracing says, and all that is computed of `x[i]` follows.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def strides_of_indices() -> Iterator[None]:
    """While graphs are traced, have `x[i]` lie as the kernels leave it.

    Within itself (Dynamo's tracing calls AOTAutograd's) it changes nothing.
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
    """Fake tensors remember what operators make of what for all modes, hence for other backends and from them."""
    from torch._subclasses import fake_tensor

    own = fake_tensor.FakeTensorMode._cache_key

    def key(mode: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if func is op and not _in_order(args[1]):
            raise fake_tensor._BypassDispatchCache("strides of an index")
        return own(mode, state, func, args, kwargs)

    with unittest.mock.patch.object(fake_tensor.FakeTensorMode, "_cache_key", key):
        yield


class _Reading:
    """torch's own implementation of `x[indices]`, whose result is made anew if it would lie otherwise."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, mode: Any, func: Any, x: Any, indices: Sequence[Any], **more: Any) -> Any:
        if more or _in_order(indices):
            return self._own(mode, func, x, indices, **more)
        import torch

        with mode:
            common = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))  # type: ignore[no-untyped-call]
            # left to itself, torch takes the shape of an index without dimensions for that of all
            spread = [None if index is None else index.expand(common) for index in indices]
            found = self._own(mode, func, x, spread)
            return found.new_empty_strided(found.shape, _strides(x, spread, found.shape))


def _in_order(indices: Sequence[Any]) -> bool:
    """Whether these leave the result as torch has it: of one shape, in row-major order; or masks, read as one row."""
    import torch
    from torch._prims_common import is_contiguous_or_false

    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8, torch.int8) for index in given):
        return True
    single = any(isinstance(size, int) and size == 1 for index in given for size in index.shape)
    alike = all(index.ndim and index.shape == given[0].shape for index in given)
    return alike and not single and all(map(is_contiguous_or_false, given))


def _strides(x: Any, indices: Sequence[Any], shape: Any) -> Any:
    """Strides of `x[indices]` as torch's iterator finds them, of `x` and the indices with the result's dimensions."""
    import torch
    from torch import _prims_common as prims

    dims = [dim for dim, index in enumerate(indices) if index is not None]
    read = [indices[dim].to(torch.int64) for dim in dims]
    if x.device.type == "cuda" and any(index.stride() != read[0].stride() for index in read):
        read = [index.contiguous() for index in read]  # what its kernel wants
    start = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    others = [x.stride(dim) for dim in range(x.ndim) if dim not in dims]
    seen = x.as_strided(shape, (*others[:start], *[0] * read[0].ndim, *others[start:]))
    before, after = (1,) * start, (1,) * (len(others) - start)
    read = [index.reshape((*before, *index.shape, *after)).expand(shape) for index in read]
    order, *_ = prims.compute_elementwise_output_logical_to_physical_perm(seen, *read)
    dense = prims.make_contiguous_strides_for([shape[dim] for dim in order])
    return [dense[order.index(dim)] for dim in range(len(shape))]
