"""Batch norms change their running statistics unseen by autograd, as in eager mode.

There the kernel writes them, which no version counter shows: a norm that is called twice has saved them in its first
call, for a backward that in training does not read them. Traced, they are inputs that a graph changes, counted as such,
and where eager code called the norm before the graph did, its backward was refused.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unseen_statistics() -> Iterator[None]:
    """While graphs are traced, mark what batch norms write as hidden from autograd; other changes still count.

    Within itself (Dynamo's tracing calls AOTAutograd's) it changes nothing.
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
