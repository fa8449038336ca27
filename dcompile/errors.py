"""Exceptions that dcompile raises on purpose. A message says what, where in the user's program, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DcompileError(RuntimeError):
    """Base of all errors that dcompile raises on purpose, except bad options."""


class OptionError(ValueError, RuntimeError):
    """An unknown or ill-typed mode, option or variable; the message names a similar one, or lists the valid ones.

    It is also a RuntimeError, which torch.compile raises for these, so that existing handlers catch it.
    """


class UnsupportedTorchError(ImportError):
    """The installed torch is outside the supported range."""


class BuildError(DcompileError):
    """The C++ compiler is missing, fails, or cannot write its output."""


class PlanMismatchError(DcompileError):
    """Ranks disagree on what to run; the message shows the first difference."""


class NotCompiledError(DcompileError):
    """A receipt was requested before the first compiled step, or of an object that dcompile never compiled."""


class ExportError(DcompileError):
    """A model cannot be exported, or an exported one cannot be loaded or called here; the message gives the reason."""


class PrecompileError(DcompileError):
    """A job cannot be compiled where its ranks are not; the message says what of it needs them, or needs values."""


class NotInPartsError(DcompileError):
    """A call that is recorded in pieces has to run as a whole; it does, and the receipt says why."""


class WrongResultError(DcompileError):
    """The sentinel has found a wrong result, and is to stop the job; the message names the place."""


class VerifyError(DcompileError):
    """A program breaks a rule of `ir.verify`: always a bug of dcompile.

    The message shows the step and its neighbours.
    """


class ParseError(DcompileError, ValueError):
    """Text is not a program; the message shows line and column, what was found there, and what was expected."""


def suggestion(name: str, valid: Iterable[str], title: str = "") -> str:
    """End of a message about an unknown name: `, did you mean 'dump'?`, or, if nothing is near, `title` and all names.

    Without a title, it is empty if nothing is near.
    """
    known = [*valid]
    if near := difflib.get_close_matches(name, known, n=1):
        return f", did you mean {near[0]!r}?"
    return f"; {title}: {', '.join(known)}" if title else ""
