"""The loop over transformers' experts is traced as one product of groups."""

from __future__ import annotations

import contextlib
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def experts_grouped(group_experts: Callable[..., Any] | None) -> Iterator[None]:
    """Trace `group_experts(loop, grouped)` where transformers chooses its loop over experts ("eager").

    The loop runs once per used expert, on as many rows as the expert has. TorchDynamo captures neither number.
    """
    experts = sys.modules.get("transformers.integrations.moe")
    choose = getattr(getattr(experts, "ExpertsInterface", None), "get_interface", None)
    grouped = getattr(experts, "grouped_mm_experts_forward", None)
    if group_experts is None or choose is None or grouped is None:
        yield
        return
    from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable

    original = UserMethodVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is not choose or len(args) != 2 or not args[0].is_python_constant():
            return original(self, tx, args, kwargs)
        if args[0].as_python_constant() != "eager":
            return original(self, tx, args, kwargs)
        return UserFunctionVariable(group_experts).call_function(  # type: ignore[arg-type, unused-ignore]
            tx, [args[1], UserFunctionVariable(grouped)], {}
        )

    with unittest.mock.patch.object(UserMethodVariable, "call_function", call_function):
        yield
