"""torch's own log settings, TORCH_LOGS and `torch._logging.set_logs`, as far as they concern our loggers.

`TORCH_LOGS="+dcompile"` needs nothing from here: torch takes the name of any importable package, sets the level of the
logger of that name, and gives it a handler. Our loggers are not registered with `register_log`: at every `set_logs`,
whatever it is about, torch would reset their levels, stop their records on the way to the root logger's handlers, and
print receipts in its own format.
"""

from __future__ import annotations

from typing import Any

CODE_ARTIFACTS = ("output_code", "kernel_code")
"""Names that stand for generated code: of whole programs with their kernels, and of kernels alone."""

TRACE_ARTIFACTS = ("aot_graphs", "aot_joint_graph")
"""Names that stand for what AOTAutograd traces."""


def is_artifact_enabled(*names: str) -> bool:
    """Whether TORCH_LOGS or `set_logs` names one of these artifacts; False where torch cannot say."""
    try:
        from torch._logging import _internal

        state: Any = _internal.log_state
        return any(state.is_artifact_enabled(name) for name in names)
    except (ImportError, AttributeError):
        return False
