"""What `aot_compile` saves of a function is whole: guards without gradients that they do not read, and globals.

torch replaces such a `.grad` by a mark where it pickles the guards of `aot_compile`, and fails to assign that mark
where it loads them. A function whose arguments had gradients when it was compiled could be saved, but not loaded.

Dynamo's code names modules by globals of its own process, as `collections` where it makes an OrderedDict (outputs of
transformers). torch 2.11 also leaves out builtins.
"""

from __future__ import annotations

import builtins
import contextlib
import types
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


@contextlib.contextmanager
def globals_saved() -> Iterator[None]:
    """Save with a function the modules, by name, and the builtins that its code reads."""
    from torch._dynamo import convert_frame

    captured: Any = getattr(convert_frame, "GraphCaptureOutput", None)
    if not hasattr(captured, "get_runtime_env"):
        yield
        return
    own = captured.get_runtime_env

    def get_runtime_env(self: Any) -> Any:
        environment, known = own(self), self.f_globals
        for name in getattr(environment, "external_refs", ()):
            if isinstance(module := known.get(name), types.ModuleType):
                environment.import_sources.setdefault(name, module.__name__)
            elif name not in known and hasattr(builtins, name):
                environment.used_globals.setdefault(name, getattr(builtins, name))
        return environment

    with unittest.mock.patch.object(captured, "get_runtime_env", get_runtime_env):
        yield
