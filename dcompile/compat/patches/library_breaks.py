"""Trace steps of torch.optim's optimizers, and torch's own chunked loss, as a whole."""

from __future__ import annotations

import contextlib
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def library_functions_whole() -> Iterator[None]:
    """Trace through the graph breaks that torch.optim puts around every optimizer's step, and that a loss makes.

    They let AOTAutograd see that nothing in the step needs gradients, which it now finds by itself. With them, a step
    is three frames, two of which search for the optimizer's tensors in guards. Functions of fused optimizers, which are
    hidden from Dynamo, are replaced.

    `linear_cross_entropy` warns that torch.compile keeps its gradients, or that it has no chunks for these arguments,
    and its warnings break the graph. Here neither is so: `chunked_cross_entropy` computes such losses.
    """
    import torch._dynamo
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
    from torch.nn import functional
    from torch.optim import optimizer

    from dcompile.compat.fused_optimizers import STAND_INS

    original = SkipFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch._dynamo.graph_break and tx.f_code.co_filename == optimizer.__file__:
            return ConstantVariable.create(None)
        is_of_loss = "linear_cross_entropy" in tx.f_code.co_name and tx.f_code.co_filename == functional.__file__
        if self.value is warnings.warn and is_of_loss:
            return ConstantVariable.create(None)
        stand_in = STAND_INS.get(getattr(self.value, "__name__", ""))
        if stand_in is not None and str(getattr(self.value, "__module__", "")).startswith("torch.optim."):
            return UserFunctionVariable(stand_in).call_function(tx, args, kwargs)  # type: ignore[arg-type, unused-ignore]
        return original(self, tx, args, kwargs)

    with unittest.mock.patch.object(SkipFunctionVariable, "call_function", call_function):
        yield
