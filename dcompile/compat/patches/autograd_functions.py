"""What Dynamo traces where it meets `apply` of an autograd Function."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def traced_sync_batch_norm(sync_batch_norm: Callable[..., Any] | None) -> Iterator[None]:
    """Trace another function where Dynamo meets `apply` of SyncBatchNorm's autograd Function."""
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch.nn.modules._functions import SyncBatchNorm

    original = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if sync_batch_norm is None or self.fn_cls is not SyncBatchNorm:
            return original(self, tx, args, kwargs)
        return UserFunctionVariable(sync_batch_norm).call_function(tx, args, kwargs)  # type: ignore[arg-type, unused-ignore]

    with unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", call_apply):
        yield


@contextlib.contextmanager
def functions_told_of_absence_in_eager() -> Iterator[None]:
    """Leave a Function to eager where it has asked to be told which of its results have no gradient.

    Dynamo traces its backward with a tensor for each result that may have one, and AOTAutograd passes zeros.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable

    apply, attribute = AutogradFunctionVariable.call_apply, AutogradFunctionContextVariable.var_getattr
    asked = list[Any]()

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name == "set_materialize_grads":
            asked.append(self)
        return attribute(self, tx, name)

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked.clear()
        found: Any = apply(self, tx, args, kwargs)
        results = [part for part in getattr(found, "items", ()) if part.is_tensor()]
        if asked and len(results) > 1:  # a single one always has a gradient
            unimplemented(
                gb_type="absent gradients in an autograd Function",
                context=self.fn_cls.__name__,
                explanation=f"{self.fn_cls.__name__} calls set_materialize_grads and has several results; "
                "which of them have no gradient is known in the backward only",
                hints=[],
            )
        return found

    with (
        unittest.mock.patch.object(AutogradFunctionContextVariable, "var_getattr", var_getattr),
        unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", call_apply),
    ):
        yield
