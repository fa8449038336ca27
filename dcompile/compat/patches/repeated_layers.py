"""TorchDynamo traces two calls of equal layers, and copies the second for all others."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing dcompile loads no torch
    from dcompile.compat.layer_calls.frame import FrameCalls


@contextlib.contextmanager
def repeated_layers_once(wanted: bool = True) -> Iterator[FrameCalls]:
    """Copy calls of equal layers in the frame that is traced in this context, if that is `wanted`."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Module

    from dcompile.compat.layer_calls.frame import FrameCalls

    frame = FrameCalls()
    if not wanted:
        yield frame
        return
    trace, mutation, store = Module.call_function, SideEffects.mutation, SideEffects.store_attr

    def call_function(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        return frame.call(trace, variable, translator, args, kwargs)

    def mutating(effects: Any, variable: Any) -> None:
        frame.changed(effects, variable)
        mutation(effects, variable)

    def storing(effects: Any, item: Any, name: str, value: Any, *more: Any, **keywords: Any) -> None:
        frame.changed(effects, item, value)
        store(effects, item, name, value, *more, **keywords)

    with (
        unittest.mock.patch.object(Module, "call_function", call_function),
        unittest.mock.patch.object(SideEffects, "mutation", mutating),
        unittest.mock.patch.object(SideEffects, "store_attr", storing),
    ):
        yield frame
