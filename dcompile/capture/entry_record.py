"""What Dynamo keeps of an entry: its code, its backends, finalizers of its guards; and settings for its frames."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dcompile import compat
from dcompile.capture.compiled_model import CompiledModel


@dataclass(eq=False)
class EntryRecord:
    """Objects of an entry that Dynamo keeps in tables that outlive the entry."""

    codes: list[types.CodeType] = field(default_factory=list)
    finalizers: list[Any] = field(default_factory=list)
    backends: list[Any] = field(default_factory=list)

    def forget(self, model: CompiledModel) -> None:
        """Remove the compiled code of an entry that was collected, with all that the code keeps alive."""
        for finalizer in self.finalizers:
            finalizer.detach()
        for code in self.codes:
            compat.skip_frame_eval.forget_code(code)
        for backend in self.backends:
            compat.dynamo.forget_backend(backend)
        model.release()


@contextlib.contextmanager
def dynamo_settings(model: CompiledModel, code: Any, own: Any, spec: Any, late_sizes: bool) -> Iterator[None]:
    """Set up Dynamo's work on a frame. `spec`: the shapes of the outermost frame, whose code is `own`."""
    with model.compiling(code, own, late_sizes), compat.shapes.in_entry(spec if code is own else None):
        yield
