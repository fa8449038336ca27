"""Steps of torch.optim's optimizers, traced as a whole."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def optimizers_whole() -> Iterator[None]:
    """Trace through the graph breaks that torch.optim puts around every optimizer's step.

    They are there for AOTAutograd to see that nothing in the step asks for gradients, which it finds by itself today.
    With them a step is three frames, and two of them are searched for the optimizer's tensors by guards.
    Functions of fused optimizers, which Dynamo is kept out of, have stand-ins; what those refer to is not guarded, as
    what modules of Python's own refer to is not.
    """
    import torch._dynamo
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
    from torch.optim import optimizer

    from dcompile.compat import fused_optimizers
    from dcompile.compat.fused_optimizers import STAND_INS

    original = SkipFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch._dynamo.graph_break and tx.f_code.co_filename == optimizer.__file__:
            return ConstantVariable.create(None)
        stand_in = STAND_INS.get(getattr(self.value, "__name__", ""))
        if stand_in is not None and str(getattr(self.value, "__module__", "")).startswith("torch.optim."):
            return UserFunctionVariable(stand_in).call_function(tx, args, kwargs)  # type: ignore[arg-type, unused-ignore]
        return original(self, tx, args, kwargs)

    is_stdlib: Callable[[object], bool] = getattr(symbolic_convert, "is_stdlib", lambda _: False)

    def is_unchanging(module: object) -> bool:
        return module is fused_optimizers or is_stdlib(module)

    with (
        unittest.mock.patch.object(SkipFunctionVariable, "call_function", call_function),
        unittest.mock.patch.object(symbolic_convert, "is_stdlib", is_unchanging, create=True),
    ):
        yield
