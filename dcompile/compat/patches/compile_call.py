"""torch.compile(model, backend='dcompile') does the same as dcompile.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def intercept_compile(handle: Callable[[Any, Any], Any]) -> None:
    """Pass every torch.compile call to `handle(context, fn)`. If it returns NotImplemented, torch proceeds as usual."""
    from torch._dynamo.eval_frame import _TorchDynamoContext

    original = _TorchDynamoContext.__call__
    if hasattr(original, "_dcompile"):
        return

    @functools.wraps(original)
    def __call__(self: Any, fn: Any) -> Any:
        result = handle(self, fn)
        return original(self, fn) if result is NotImplemented else result

    __call__._dcompile = True  # type: ignore[attr-defined]
    _TorchDynamoContext.__call__ = __call__  # type: ignore[method-assign]
