"""torch's own log settings, TORCH_LOGS and `torch._logging.set_logs`, as far as they concern dcompile's loggers.

`TORCH_LOGS="+dcompile"` needs nothing here: torch takes the name of any importable package, sets the level of its
logger, and adds a handler. dcompile's loggers are not registered with `register_log`. With each `set_logs`, torch would
reset their levels, stop propagation to the root logger, and print receipts in its own format.
"""

from __future__ import annotations

from typing import Any

CODE_ARTIFACTS = ("output_code", "kernel_code")
"""Artifacts with generated code: whole programs with their kernels, and kernels alone."""

TRACE_ARTIFACTS = ("aot_graphs", "aot_joint_graph")
"""Names that stand for what AOTAutograd traces."""


def is_artifact_enabled(*names: str) -> bool:
    """Whether TORCH_LOGS or `set_logs` names one of these artifacts; False if this torch cannot tell."""
    try:
        from torch._logging import _internal

        state: Any = _internal.log_state
        return any(state.is_artifact_enabled(name) for name in names)
    except (ImportError, AttributeError):
        return False
