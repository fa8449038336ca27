"""What Dynamo keeps of an entry: its code, its backends, finalizers of its guards; and settings for its frames."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

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
        self.forget_code()
        for backend in self.backends:
            compat.dynamo.forget_backend(backend)
        model.release()

    def forget_code(self) -> None:
        """Remove what is compiled so far, since another adapter serves the model: equal modules must not run it."""
        for code in self.codes:
            compat.skip_frame_eval.forget_code(code)
        self.codes.clear()


@dataclass(frozen=True, eq=False)
class EqualModules:
    """Modules inside one module that are of one class, compiled with equal settings, and synchronized alike.

    Each runs whole frames of the others, if all guards hold for it: N equal layers are compiled once.
    """

    of: tuple[Any, ...]
    """What is equal."""
    frames: list[weakref.ref[compat.skip_frame_eval.Frames]] = field(default_factory=list)
    """The compiled code of each module, in order of first calls."""

    def leave(self, own: compat.skip_frame_eval.Frames) -> None:
        """Take a module out, whose code is going to be for another adapter."""
        self.frames[:] = [reference for reference in self.frames if reference() not in (own, None)]

    def others(self, own: compat.skip_frame_eval.Frames) -> Iterator[compat.skip_frame_eval.Frames]:
        """Yield the compiled code of all modules but one."""
        for reference in self.frames:
            frames = reference()
            if frames is not None and frames is not own:
                yield frames


_EQUAL: weakref.WeakKeyDictionary[Module, list[EqualModules]] = weakref.WeakKeyDictionary()
"""Outermost module in whose call compiled modules ran -> those that are equal: separate models share nothing."""


def equal_modules(module: Module, own: compat.skip_frame_eval.Frames, of: tuple[Any, ...]) -> EqualModules:
    """Return the modules that are equal to one, inside the outermost module whose call runs now; add it to them."""
    known = _EQUAL.setdefault(compat.hooks.outermost_caller(module), [])
    found = next((each for each in known if each.of == of), None)
    if found is None:
        known.append(found := EqualModules(of))
    found.frames.append(weakref.ref(own))
    return found


@contextlib.contextmanager
def dynamo_settings(model: CompiledModel, code: Any, own: Any, spec: Any, late_sizes: bool) -> Iterator[None]:
    """Set up Dynamo's work on a frame. `spec`: the shapes of the outermost frame, whose code is `own`."""
    with model.compiling(code, own, late_sizes), compat.shapes.in_entry(spec if code is own else None):
        yield
