"""Accept gradients that are DTensors of other sizes than the first one.

Before it calls a backward, AOTAutograd compares the placements of a gradient with the traced ones. The traced
description of a DTensor includes its sizes. For symbolic sizes, the comparison specializes them, in a backward that is
still to be compiled, after Dynamo's guards were made. With any backend of torch 2.13, such a backward has the first
batch's sizes. The comparison is about placements, for which sizes do not matter.
"""

from __future__ import annotations

import contextlib
import copy
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def tangents_of_any_size() -> Iterator[None]:
    """Make AOTAutograd ignore sizes when it compares DTensors of symbolic sizes."""
    import torch
    from torch._dynamo import disable
    from torch._dynamo.eval_frame import skip_code
    from torch._functorch._aot_autograd import runtime_wrappers

    owner: Any = getattr(runtime_wrappers, "AOTDispatchAutograd", None)
    own: Callable[..., Any] | None = getattr(owner, "process_runtime_tangent", None)
    if own is None:
        yield
        return
    known: dict[int, tuple[Any, Any]] = {}
    """Identity of a traced description, which stays valid as the description is kept -> (description, same without
    sizes).
    """

    def process_without_sizes(x: Any, meta: Any, *more: Any, **keywords: Any) -> Any:
        if id(meta) not in known:
            known[id(meta)] = meta, _without_sizes(meta)
        return own(x, known[id(meta)][1], *more, **keywords)

    untraced: Any = disable(process_without_sizes)  # type: ignore[no-untyped-call, unused-ignore]

    def process(x: Any, meta: Any, *more: Any, **keywords: Any) -> Any:
        chosen = own if x is None or type(x) is torch.Tensor else untraced
        return chosen(x, meta, *more, **keywords)

    skip_code(process.__code__)  # a backward may run inside a frame that Dynamo continues
    with unittest.mock.patch.object(owner, "process_runtime_tangent", staticmethod(process)):
        yield


def _without_sizes(meta: Any) -> Any:
    """Traced description of a tensor, made to ignore symbolic sizes; others stay as they are."""
    spec = getattr(meta, "meta", None)
    if not isinstance(spec, tuple) or not any(map(_is_symbolic, spec)):
        return meta
    changed = copy.copy(meta)
    changed.meta = _DTensorSpec(spec)
    return changed


def _is_symbolic(part: Any) -> bool:
    """Whether a part of a DTensor's description is or contains a symbolic size."""
    import torch

    shape = getattr(getattr(part, "tensor_meta", part), "shape", ())
    return isinstance(shape, tuple) and any(isinstance(size, torch.SymInt) for size in shape)


class _DTensorSpec(tuple[Any, ...]):
    """Mesh, placements and metadata of a DTensor; equal to those of a tensor with equal placements, of any size."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        same_length = isinstance(other, tuple) and len(other) == len(self)
        return same_length and all(map(_is_alike, self, other))  # type: ignore[call-overload]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def _is_alike(traced: Any, given: Any) -> bool:
    """Whether two parts of descriptions are equal except for sizes."""
    if not _is_symbolic(traced):
        return bool(traced == given)
    if hasattr(traced, "tensor_meta"):
        return (traced.placements, traced.mesh) == (given.placements, given.mesh)
    return traced.dtype == given.dtype and len(traced.shape) == len(given.shape)
