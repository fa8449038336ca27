"""SyncBatchNorm is traced as functions of ours, with its collectives in the graph."""

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
