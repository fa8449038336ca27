"""Guards that are saved leave out gradients that they do not read.

torch replaces such a `.grad` by a mark where it pickles the guards of `aot_compile`, and fails to assign that mark
where it loads them. A function whose arguments had gradients when it was compiled could be saved, but not loaded.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unread_gradients_left_out() -> Iterator[None]:
    """Pickle tensors of guards without a `.grad` that no guard reads."""
    import torch
    from torch._dynamo import guards

    pickler: Any = getattr(guards, "GuardsStatePickler", None)
    if not hasattr(pickler, "_unpickle_tensor"):
        yield
        return
    own = pickler.reducer_override

    def reducer_override(self: Any, obj: Any) -> Any:
        reduced = own(self, obj)
        if not isinstance(reduced, tuple) or reduced[0] != type(self)._unpickle_tensor:
            return reduced
        function, (*others, grad) = reduced
        is_read = not isinstance(grad, torch.Tensor) or id(grad) in self.guard_tree_values
        return function, (*others, grad if is_read else None)

    with unittest.mock.patch.object(pickler, "reducer_override", reducer_override):
        yield
