"""Gradients of results are expected to be stored as the results are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def tangents_as_results() -> Iterator[None]:
    """Expect a result's gradient to lie as the result does, and not in row-major order, before torch 2.13 does so.

    A gradient that lies otherwise than expected is copied, which was two thirds of rotary embedding's backward. Results
    that overlap themselves (from expand) say nothing about their gradients, which the setting alone would copy wrong.
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
