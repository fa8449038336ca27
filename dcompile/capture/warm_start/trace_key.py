"""The key of a trace: the SHA-256 of a text of everything that AOTAutograd and its passes read.

The text holds versions, settings of dcompile and torch, and the adapter's additions to a trace. It holds the inputs
(shapes, strides, dtypes, devices, gradients, shared memory). A symbolic size is an expression of numbered symbols, of
which the text holds ranges and guards, and no values. It holds the captured graph with its subgraphs, constants and
function names. A graph may call only functions of torch and dcompile: other code is not part of the text, so such a
graph has no key. The text leaves out names of modules and inputs, and source lines. Messages and comments may name
those of the model that was traced first.

Functions return text, or raise NotKeepable for what text cannot identify.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import hashlib
import math
import operator
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from dcompile.capture.warm_start.records import op_name
from dcompile.capture.warm_start.size_symbols import SizeSymbols, is_symbolic
from dcompile.compat import groups
from dcompile.compat.dynamo import holds_graphs
from dcompile.compat.process_state import NotKeepable, code_roots, global_state
from dcompile.compat.tensors import is_operator, plain_tensor_types, real_tensors, storage_key, viewed_tensor
from dcompile.config import Config
from dcompile.toolchain import own_source, own_version

FORMAT = 2
"""Version of the entries' format. It is part of each key."""
_ELSEWHERE = frozenset(
    (
        "receipt", "progress", "log", "dump", "trace_enabled", "trace_graph_diagram", "verify", "cache_dir",
        "cache_size_gib", "share_artifacts", "compile_timeout_s", "precompiled",
    )
)  # fmt: skip
"""Settings that do not affect a trace, such as output directories."""
_KEY_MARKS = ("custom", "recompute", "ac_graph_id")
"""Keys of node metadata that tracing reads."""
_TRACED_BODIES = frozenset(
    (
        "tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "autograd_function_apply", "invoke_subgraph",
        "flex_attention",
    )
)  # fmt: skip
"""Higher-order operators of torch that only call subgraphs of the captured graph."""
LARGEST_HELD = 1 << 16
"""Maximum bytes of a constant tensor whose values are part of a key."""
_PLAIN_MODULES = (builtins, operator, math)


def trace_key(
    gm: GraphModule, inputs: Sequence[Any], config: Config, facts: Sequence[str], symbols: SizeSymbols
) -> str:
    """Return a trace's cache key. `facts`: lines that an adapter adds. It numbers `symbols`. Raises NotKeepable."""
    if config.backend is not None and config.backend.cache_objection:
        raise NotKeepable(config.backend.cache_objection)
    check_apart(inputs, symbols)
    graph = _GraphText(symbols)
    given = (graph.input(value) for value in inputs)
    lines = (*_environment(config), *global_state(), *facts, *given, *graph.lines(gm, "graph"), *symbols.facts())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _environment(config: Config) -> Iterator[str]:
    yield f"trace {FORMAT}"
    yield f"dcompile {own_version()} {own_source()}"
    yield f"torch {torch.__version__} {torch.version.git_version} python {sys.version_info[:3]} {sys.platform}"
    for option in dataclasses.fields(config):
        if option.metadata and option.name not in _ELSEWHERE:
            yield f"{option.name}={getattr(config, option.name)}"


class _GraphText:
    """Text of a captured graph, its inputs and its subgraphs."""

    def __init__(self, symbols: SizeSymbols) -> None:
        self._symbols = symbols
        self._storages: dict[int, int] = {}

    def input(self, value: Any) -> str:
        """Return the line of an input."""
        if isinstance(value, torch.Tensor):
            return f"input {tensor_text(value, self._storages, self._symbols)}{device_text(value.device)}"
        if type(value) in (int, float, bool, str):
            return f"input {value!r}"
        if isinstance(value, torch.SymInt):
            return f"input {self._symbols.text(value)}"
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise NotKeepable(f"an input is a symbolic {'float' if isinstance(value, torch.SymFloat) else 'bool'}")
        raise NotKeepable(f"an input is a {type(value).__name__}")

    def lines(self, gm: GraphModule, name: str) -> Iterator[str]:
        """Yield a line for each node, with numbers instead of names."""
        check_captured(gm)
        numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
        yield f"{name} begins"
        for node in gm.graph.nodes:
            args, kwargs = _text(node.args, numbers), _text(node.kwargs, numbers)
            marks = [f"{mark}={_text(node.meta[mark], numbers)}" for mark in _KEY_MARKS if mark in node.meta]
            value = "" if node.op == "output" else result_text(node.meta.get("example_value"), self._symbols)
            yield " ".join((node.op, self._target(node), args, kwargs, value, *marks))
            if node.op == "get_attr":
                yield from self._held(operator.attrgetter(str(node.target))(gm), f"{name}.{numbers[node]}")
        yield f"{name} ends"

    def _target(self, node: Node) -> str:
        if node.op == "call_function":
            return callable_text(node.target)
        if node.op == "call_method":
            return f".{node.target}"
        if node.op == "call_module":
            raise NotKeepable("it calls a module, whose code is not in the graph")
        return static_mark(node)

    def _held(self, value: Any, name: str) -> Iterator[str]:
        """Yield lines for an attribute: a subgraph, or a small tensor whose values tracing may read."""
        if isinstance(value, GraphModule):
            yield from self.lines(value, name)
            return
        if not isinstance(value, torch.Tensor):
            raise NotKeepable(f"it holds a {type(value).__name__}")
        yield f"{name} {tensor_text(value, self._storages, self._symbols)} {numbers_digest(value)}"


def _text(value: Any, numbers: dict[Node, int]) -> str:
    """Return an argument's text. Raises NotKeepable for values without a distinguishing text."""
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex):
        return repr(value)
    if isinstance(value, str):
        group = groups.group_by_name(value) if dist.is_initialized() else None
        return repr(value) if group is None else f"{value!r} of {group.size()} ranks"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format | torch.device):
        return f"{type(value).__name__} {value}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_text(k, numbers)}:{_text(v, numbers)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        opening = "[" if isinstance(value, list) else "("
        return f"{opening}{','.join(_text(item, numbers) for item in value)},"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, enum.Enum) and type(value).__module__.startswith("torch"):
        return f"{type(value).__name__}.{value.name}"
    if callable(value):
        return callable_text(value)
    raise NotKeepable(f"it holds a {type(value).__name__}")


# --- texts of called code and of tensors ------------------------------------------------------------------------------


def callable_text(target: Any, within: tuple[Any, ...] = ()) -> str:
    """Return the name of a call target whose code versions identify. Raises NotKeepable.

    `within`: functions whose closures hold it. One that holds itself, as decorators make them, is entered once.
    """
    if is_operator(target):
        return op_name(target)
    if holds_graphs(target):
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
    return target.__code__.co_filename.startswith(code_roots())


def _is_plain_class(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, type) and (module == "torch" or module.startswith("torch."))


def tensor_text(
    value: torch.Tensor, storages: dict[int, int], symbols: SizeSymbols, whole_of: torch.Tensor | None = None
) -> str:
    """Return an input's or constant's properties that tracing reads. `storages` numbers storages by first use.

    Sizes are those of the fake tensor that will be traced. `whole_of`: the fake tensor of a view of this one. Raises
    NotKeepable for tensor subclasses with their own dispatch.
    """
    if type(value) not in plain_tensor_types():
        raise NotKeepable(f"an input is a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized:
        raise NotKeepable(f"an input is {value.layout}")
    number = storages.setdefault(storage_key(value), len(storages))
    known: Any = symbols.fake_of(value) if whole_of is None else whole_of._base
    if known is None:
        raise NotKeepable("a view of memory that the captured graph does not know")
    marks = (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference())
    kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
    lies = f"{_layout_text(known, whole_of, symbols)} of {number}"
    base = ""
    if (view := viewed_tensor(value)) is not None:
        of, made = view
        base = f" view of {tensor_text(of, storages, symbols, known)} {made}"
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
    tensors = [value for value in inputs if type(value) in plain_tensor_types() and value.layout is torch.strided]
    counts = Counter(storage_key(value) for value in tensors)
    shared = (value for value in tensors if counts[storage_key(value)] > 1)
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
