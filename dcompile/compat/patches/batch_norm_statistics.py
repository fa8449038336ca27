"""Hide batch norms' changes of running statistics from autograd, as in eager mode.

In eager mode the kernel writes them without a change of their version counter. A norm that is called twice has saved
them in its first call, for a backward that does not read them in training. In a traced graph they are mutated inputs,
which are counted. If eager code called the norm before the graph did, its backward was refused.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unseen_statistics() -> Iterator[None]:
    """Mark batch norms' writes as hidden from autograd while graphs are traced; other changes still count.

    Nested uses (Dynamo's tracing calls AOTAutograd's) change nothing.
    """
    import torch
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    own: Any = FunctionalTensorMode.__torch_dispatch__
    if getattr(own, "hides_statistics", False):
        yield
        return
    writing = (torch.ops.aten._native_batch_norm_legit.default, torch.ops.aten._batch_norm_with_update.default)

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = own(self, func, types, args, kwargs)
        if func in writing:
            for statistic in args[3:5]:
                if isinstance(statistic, FunctionalTensor):
                    statistic.mark_mutation_hidden_from_autograd()
        return result

    dispatch.hides_statistics = True  # type: ignore[attr-defined]
    with unittest.mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield
