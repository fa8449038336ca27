"""Gradients of results are expected to be stored as the results are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def tangents_as_results() -> Iterator[None]:
    """Expect a result's gradient to have the result's strides instead of row-major ones. Needed before torch 2.13.

    A gradient with other strides than expected is copied, which took two thirds of rotary embedding's backward. Strides
    of results that overlap themselves (from expand) say nothing about their gradients; the setting alone would copy
    those wrongly.
    """
    import torch
    import torch._functorch.config as config
    from torch._functorch._aot_autograd import schemas

    name, kind = "guess_tangent_strides_as_outputs", getattr(schemas, "MemoryFormatMeta", None)
    if kind is None or getattr(config, name, True):
        yield
        return
    own = kind.from_tensor

    def from_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        apart = torch._debug_has_internal_overlap(tensor) == 0
        with config.patch({name: apart}):  # type: ignore[no-untyped-call, unused-ignore]
            return own(tensor, *args, **kwargs)

    kind.from_tensor = staticmethod(from_tensor)
    try:
        yield
    finally:
        kind.from_tensor = staticmethod(own)
