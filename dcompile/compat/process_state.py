"""The state of this process that tracing reads: settings of torch, what is registered for its operators, and modes.

Functions return text, or raise NotKeepable for state that text cannot identify.

Below, torch's own log settings, TORCH_LOGS and `torch._logging.set_logs`, as far as they concern dcompile's loggers.

`TORCH_LOGS="+dcompile"` needs nothing here: torch takes the name of any importable package, sets the level of its
logger, and adds a handler. dcompile's loggers are not registered with `register_log`. With each `set_logs`, torch would
reset their levels, stop propagation to the root logger, and print receipts in its own format.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.library

from dcompile.compat.attention import chosen_flash_attention

_BACKENDS = frozenset(("CPU", "CUDA", "MPS", "XPU", "HIP", "MTIA", "HPU", "Meta", "MkldnnCPU", "QuantizedCPU"))
"""Dispatch keys of kernels, which do not change a trace. `Meta` functions, which compute shapes, are torch's own."""
_VMAP = (
    "addr", "huber_loss_backward", "mse_loss_backward", "nll_loss2d_backward", "nll_loss2d_forward",
    "nll_loss_backward", "nll_loss_forward", "smooth_l1_loss_backward",
)  # fmt: skip
_TORCHS = frozenset(
    (
        "aten/to_dense/FuncTorchDynamicLayerFrontMode",
        "aten/to_dense/PythonTLSSnapshot",
        *(f"aten/{op}/FuncTorchBatched" for op in _VMAP),
    )
)
"""Further registrations by torch itself: of torch 2.15, and of `torch.vmap` after its first use."""
_PRECISION = (
    "fp32_precision",
    *(f"cuda.matmul.{name}" for name in ("fp32_precision", "allow_fp16_accumulation")),
    *(
        f"cuda.matmul.allow_{dtype}_reduced_precision_reduction{of}"
        for dtype in ("fp16", "bf16")
        for of in ("", "_split_k")
    ),
    *(f"{library}.fp32_precision" for library in ("cudnn", "cudnn.conv", "cudnn.rnn")),
    *(f"{library}.fp32_precision" for library in ("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")),
)
"""Names below `torch.backends`."""


class NotKeepable(Exception):
    """Raised for a value of a traced or captured graph that has no record. The message names it."""


def global_state() -> Iterator[str]:
    """Yield the settings of this process and thread that tracing reads. Raises NotKeepable."""
    yield f"grad {torch.is_grad_enabled()} inference {torch.is_inference_mode_enabled()}"
    for kind in sorted(map(str, torch._C._autocast_supported_devices())):
        if torch.is_autocast_enabled(kind):
            yield f"autocast {kind} {torch.get_autocast_dtype(kind)} {torch.is_autocast_cache_enabled()}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = getattr(torch.utils.deterministic, "fill_uninitialized_memory", None)
    yield f"deterministic {deterministic} {torch.is_deterministic_algorithms_warn_only_enabled()} {fills}"
    yield f"defaults {torch.get_default_dtype()} {torch.get_default_device()}"
    yield from _library_switches()
    yield precision_settings()
    yield f"functorch {_functorch_settings()}"
    yield from _registrations()
    _check_modes()


def _library_switches() -> Iterator[str]:
    """Yield ATen's enabled kernels: a trace contains the chosen attention and batch norm."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    names = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
    yield "attention " + " ".join(str(getattr(cuda, name)()) for name in names if hasattr(cuda, name))
    yield f"flash attention {chosen_flash_attention()}"
    yield f"cudnn {cudnn.enabled} {cudnn.benchmark} {cudnn.deterministic} mkldnn {mkldnn.enabled}"


def precision_settings() -> str:
    """Return the settings of `torch.backends` for the precision of library calls, as text.

    Old names, such as `allow_tf32` and `torch.get_float32_matmul_precision()`, are left out: torch refuses to read them
    once a new name is set, and what they set shows under the new ones.
    """
    return " ".join(f"{name}={_setting(name)}" for name in _PRECISION)


def _setting(name: str) -> str:
    """Return a setting's value as text; one that torch refuses to read, or does not have, is told apart from values."""
    try:
        return repr(operator.attrgetter(name)(torch.backends))
    except Exception as error:  # a key can do without a value, and a compiler must
        return type(error).__name__


def _functorch_settings() -> str:
    """Return the settings of AOTAutograd and the partitioner as text."""
    import torch._functorch.config as config

    values: dict[str, Any] = config.get_config_copy()  # type: ignore[attr-defined, unused-ignore]
    for name, value in values.items():
        if value is not None and not isinstance(value, bool | int | float | str | list | tuple | dict):
            raise NotKeepable(f"torch._functorch.config.{name} is a {type(value).__name__}")
        if isinstance(value, list | tuple | dict) and any(map(callable, value)):
            raise NotKeepable(f"torch._functorch.config.{name} holds functions")
    return " ".join(f"{name}={value!r}" for name, value in sorted(values.items()))


def _registrations() -> Iterator[str]:
    """Yield implementations and decompositions that Python code has registered for torch's own operators."""
    aten = sorted(name for name in torch.library._impls if name.startswith("aten/"))
    for name in aten:
        if name.rpartition("/")[2] not in _BACKENDS and name not in _TORCHS:
            raise NotKeepable(f"an operator of torch's has an implementation of its own here, {name}")
    yield f"aten {','.join(name for name in aten if name not in _TORCHS)}"
    tables = getattr(sys.modules.get("torch._decomp"), "global_decomposition_table", {})
    for op, function in tables.get("post_autograd", {}).items():
        if not is_of_torch(function):
            raise NotKeepable(f"an operator of torch's has a decomposition of its own here, {op}")


def _check_modes() -> None:
    """Refuse active modes, which may change traced operations."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        raise NotKeepable("a mode that looks at operations is on")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise NotKeepable("hooks for saved tensors are on")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotKeepable("a transform of torch.func is on")


@functools.cache
def code_roots() -> tuple[str, ...]:
    """Folders of code that versions and dcompile's digest identify."""
    return tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def is_of_torch(function: Any) -> bool:
    """Whether a function's code belongs to torch, dcompile or Python."""
    function = inspect.unwrap(function)
    module = getattr(function, "__module__", None) or ""
    if not module.startswith(("torch", "dcompile", "_operator", "operator", "math", "builtins")):
        return False
    code = getattr(function, "__code__", None)
    return code is None or code.co_filename.startswith(code_roots())


# --- torch's log settings ---------------------------------------------------------------------------------------------


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
