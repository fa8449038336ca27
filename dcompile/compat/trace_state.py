"""Describe the state that a trace depends on apart from its graph and inputs: settings, and called code, as text.

Functions return text, or raise NotKeepable for state that text cannot identify.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import inspect
import math
import operator
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dcompile.compat.attention import chosen_flash_attention
from dcompile.compat.tensors import real_tensors
from dcompile.compat.trace_records import NotKeepable, op_name
from dcompile.compat.trace_symbols import SizeSymbols, is_symbolic

_TRACED_BODIES = frozenset(
    (
        "tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "autograd_function_apply", "invoke_subgraph",
        "flex_attention",
    )
)  # fmt: skip
"""Higher-order operators of torch that only call subgraphs of the captured graph."""
_BACKENDS = frozenset(("CPU", "CUDA", "MPS", "XPU", "HIP", "MTIA", "HPU", "Meta", "MkldnnCPU", "QuantizedCPU"))
"""Dispatch keys of kernels, which do not change a trace. `Meta` functions, which compute shapes, are torch's own."""
LARGEST_HELD = 1 << 16
"""Maximum bytes of a constant tensor whose values are part of a key."""
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
_PLAIN_MODULES = (builtins, operator, math)


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
    import torch.library

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
def _roots() -> tuple[str, ...]:
    """Return folders of code that versions and dcompile's digest identify."""
    return tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def is_of_torch(function: Any) -> bool:
    """Whether a function's code belongs to torch, dcompile or Python."""
    function = inspect.unwrap(function)
    module = getattr(function, "__module__", None) or ""
    if not module.startswith(("torch", "dcompile", "_operator", "operator", "math", "builtins")):
        return False
    code = getattr(function, "__code__", None)
    return code is None or code.co_filename.startswith(_roots())


def callable_text(target: Any, within: tuple[Any, ...] = ()) -> str:
    """Return the name of a call target whose code versions identify. Raises NotKeepable.

    `within`: functions whose closures hold it. One that holds itself, as decorators make them, is entered once.
    """
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return op_name(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        called = str(target.name())  # type: ignore[no-untyped-call, unused-ignore]
        if called not in _TRACED_BODIES:
            raise NotKeepable(f"it has {called}, an operator on functions")
        return called
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is not None and (_is_builtin(target) or _is_plain_function(target) or _is_plain_class(target)):
        owner = getattr(target, "__self__", None)
        of = f" of {owner.__name__}" if isinstance(owner, type | types.ModuleType) else ""
        cells = () if any(target is holder for holder in within) else getattr(target, "__closure__", None) or ()
        held = [_cell_text(cell, (*within, target)) for cell in cells]
        return " ".join((f"{getattr(target, '__module__', None)}.{name}{of}", *held))
    where = f"{getattr(target, '__module__', '')}.{name}" if name else type(target).__name__
    raise NotKeepable(f"it calls {where}, whose code is not in the graph")


def _is_builtin(target: Any) -> bool:
    """Whether a function is a C function of torch or Python, bound at most to a module or a class."""
    if isinstance(target, types.MethodDescriptorType | types.WrapperDescriptorType | types.GetSetDescriptorType):
        return target.__objclass__.__module__.startswith(("torch", "builtins"))
    if not isinstance(target, types.BuiltinFunctionType):
        return False
    owner = target.__self__
    if owner is None or owner in _PLAIN_MODULES:
        return True
    if type(owner).__name__.startswith(("PyCapsule", "pybind11_detail_function_record")):  # not bound to an object
        return (target.__module__ or "").startswith("torch._C")
    if isinstance(owner, types.ModuleType):
        return owner.__name__.startswith(("torch", "_operator", "math", "builtins"))
    return isinstance(owner, type) and owner.__module__.startswith(("torch", "builtins"))


def _cell_text(cell: types.CellType, within: tuple[Any, ...]) -> str:
    """Return the text of a closure's value, such as the two functions that `max_pool2d` chooses from."""
    try:
        value = cell.cell_contents
    except ValueError:  # a name without a value yet
        return "unset"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    return callable_text(value, within)


def _is_plain_function(target: Any) -> bool:
    """Whether a function belongs to torch or dcompile, by its module and by its code's file."""
    if not isinstance(target, types.FunctionType):
        return False
    module = target.__module__ or ""
    if not module.startswith(("torch.", "dcompile.")) and module != "torch":
        return False
    return target.__code__.co_filename.startswith(_roots())


def _is_plain_class(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, type) and (module == "torch" or module.startswith("torch."))


@functools.cache
def _plain_types() -> tuple[type, ...]:
    """Types of tensors without dispatch of their own."""
    from torch._subclasses.fake_tensor import FakeTensor

    return torch.Tensor, torch.nn.Parameter, FakeTensor


def tensor_text(
    value: torch.Tensor, storages: dict[int, int], symbols: SizeSymbols, whole_of: torch.Tensor | None = None
) -> str:
    """Return an input's or constant's properties that tracing reads. `storages` numbers storages by first use.

    Sizes are those of the fake tensor that will be traced. `whole_of`: the fake tensor of a view of this one. Raises
    NotKeepable for tensor subclasses with their own dispatch.
    """
    if type(value) not in _plain_types():
        raise NotKeepable(f"an input is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized:
        raise NotKeepable(f"an input is {value.layout}")
    number = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    known: Any = symbols.fake_of(value) if whole_of is None else whole_of._base
    if known is None:
        raise NotKeepable("a view of memory that the captured graph does not know")
    marks = (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference())
    kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    lies = f"{_layout_text(known, whole_of, symbols)} of {number}"
    base = ""
    if value._is_view() and not value.is_inference():
        of, made = tensor_text(value._base, storages, symbols, known), torch._C._autograd._get_creation_meta(value)  # type: ignore[arg-type, unused-ignore]
        base = f" view of {of} {made}"
    return f"{kind} {value.dtype} {value.device} {lies} {marks}{base}"


def _layout_text(known: torch.Tensor, whole_of: torch.Tensor | None, symbols: SizeSymbols) -> str:
    """Return the text of a tensor's shape, strides, offset and storage size.

    No guard says how large the memory around a view of symbolic size is, so the text leaves it out.
    """
    if whole_of is not None and is_symbolic(whole_of) and not is_symbolic(known):
        return "any"
    nbytes = known.untyped_storage().nbytes()
    around = "any" if type(nbytes) is int and is_symbolic(known) else symbols.text(nbytes)
    return f"{_sizes_text(known, symbols)} at {symbols.text(known.storage_offset())} in {around}"


def _sizes_text(value: torch.Tensor, symbols: SizeSymbols) -> str:
    """Return the text of a tensor's shape and strides."""
    return " ".join(str([*map(symbols.text, sizes)]) for sizes in (value.shape, value.stride()))


def check_apart(inputs: Sequence[Any], symbols: SizeSymbols) -> None:
    """Refuse inputs of symbolic sizes that share memory with others: whether they overlap depends on the sizes."""
    tensors = [value for value in inputs if type(value) in _plain_types() and value.layout is torch.strided]
    counts = Counter(value.untyped_storage()._cdata for value in tensors)
    shared = (value for value in tensors if counts[value.untyped_storage()._cdata] > 1)
    if any(is_symbolic(symbols.fake_of(value)) for value in shared):
        raise NotKeepable("inputs of symbolic sizes share memory")


def device_text(device: torch.device) -> str:
    """Return the kind of a tensor's GPU, which determines the traced attention."""
    if device.type != "cuda":
        return ""
    if not torch.cuda.is_available():
        raise NotKeepable("its GPU is not there")
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call, unused-ignore]
    return f" {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} cudnn {cudnn}"


def numbers_digest(value: torch.Tensor) -> str:
    """Return the SHA-256 of a small CPU tensor. Raises NotKeepable for others."""
    if value.device.type != "cpu" or value.nbytes > LARGEST_HELD:
        raise NotKeepable(f"it holds a tensor of {value.nbytes} bytes on {value.device}")
    with real_tensors(), torch.no_grad():
        numbers = value.detach().contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
    return hashlib.sha256(bytes(numbers)).hexdigest()


def result_text(value: Any, symbols: SizeSymbols) -> str:
    """Return the text of a captured node's example value. Raises NotKeepable."""
    if isinstance(value, torch.Tensor):
        sizes = _sizes_text(value, symbols)
        return f"{type(value).__name__} {value.dtype} {value.device} {sizes} {value.requires_grad}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return symbols.text(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(result_text(item, symbols) for item in value)}]"
    return type(value).__name__


def check_captured(graph: torch.fx.GraphModule) -> None:
    """Refuse a graph with functions that tracing runs in addition to it. Raises NotKeepable."""
    if "_checkpoint_context_fn" in graph.meta:
        raise NotKeepable("a function says what checkpointing saves (context_fn)")
    if hasattr(graph, "saved_tensors_hooks_pack_0"):
        raise NotKeepable("it has hooks for saved tensors")


def static_mark(placeholder: Any) -> str:
    """Return Dynamo's mark of an input with a static address."""
    return str((placeholder.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type", ""))
