"""Every exception raised on purpose. A message says what, where in the user's program, and what to do next."""

from __future__ import annotations


class DcompileError(RuntimeError):
    """Base of all errors that dcompile raises on purpose, except bad options."""


class OptionError(ValueError, RuntimeError):
    """An unknown or ill-typed mode, option or environment variable; the message lists the valid ones.

    torch.compile raises RuntimeError for these: whoever catches that catches ours.
    """


class UnsupportedTorchError(ImportError):
    """The installed torch is outside the supported range."""


class BuildError(DcompileError):
    """The C++ compiler is missing, fails, or cannot write its output."""


class PlanMismatchError(DcompileError):
    """Ranks disagree on what is to be run; the message shows the first difference."""


class NotCompiledError(DcompileError):
    """A receipt was asked for before the first compiled step, or of something dcompile never compiled."""


class ExportError(DcompileError):
    """A model cannot be exported, or an exported one cannot be loaded or called here; the message says why."""


class PrecompileError(DcompileError):
    """A job cannot be compiled where its ranks are not; the message says what of it needs them, or needs values."""


class VerifyError(DcompileError):
    """A program breaks a rule of `ir.verify`: always a bug of ours; the message shows the step and its neighbours."""
