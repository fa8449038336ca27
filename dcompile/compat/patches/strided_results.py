"""Custom Functions that work in tiles of a buffer stay in Dynamo's graph: `out=` of a tile, and results of None."""

from __future__ import annotations

import contextlib
import unittest.mock
from typing import Any


def strided_results_written() -> contextlib.AbstractContextManager[Any]:
    """Trace `op(x, out=tile)` as `tile.copy_(op(x))`, where Dynamo would break the graph.

    Eager mode refuses `out=` where an argument requires gradients, and resizes or casts a result that does not fit.
    Such calls are left to Dynamo.
    """
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable as Function

    original = Function.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        tile = _strided(kwargs.get("out"))
        if tile is None or _differentiated(args):
            return original(self, tx, args, kwargs)
        found = original(self, tx, args, {name: value for name, value in kwargs.items() if name != "out"})
        result = _value(found)
        if result is None or (result.shape, result.dtype) != (tile.shape, tile.dtype):
            return original(self, tx, args, kwargs)
        kwargs["out"].call_method(tx, "copy_", [found], {})
        return kwargs["out"]

    return unittest.mock.patch.object(Function, "call_function", call_function)


def _strided(variable: Any) -> Any:
    """The traced tensor of a variable, if it is one that is not contiguous."""
    from torch._prims_common import is_contiguous_or_false

    value = None if variable is None else _value(variable)
    return None if value is None or is_contiguous_or_false(value) else value


def _value(variable: Any) -> Any:
    from torch._dynamo.variables.tensor import TensorVariable

    variable = variable.realize()
    return variable.as_proxy().node.meta.get("example_value") if isinstance(variable, TensorVariable) else None


def _differentiated(args: Any) -> bool:
    import torch

    values = (_value(variable) for variable in args) if torch.is_grad_enabled() else ()
    return any(value is not None and value.requires_grad for value in values)


def absent_gradients_passed() -> contextlib.AbstractContextManager[Any]:
    """Call the backward of a custom Function where results are None, or were not used and stay absent.

    Dynamo asks each gradient for its contiguous form, None too, and finds an AttributeError in what eager mode runs.
    """
    import importlib

    module = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    name = "autograd_function_backward_rewritten"
    if not hasattr(module, name):
        return contextlib.nullcontext()

    def rewritten(original: Any) -> Any:
        def new_backward(ctx: Any, *grads: Any) -> Any:
            return original(ctx, *[grad if grad is None else grad.contiguous() for grad in grads])

        return new_backward

    return unittest.mock.patch.object(module, name, rewritten)
