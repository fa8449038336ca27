"""Key of a graph's cache entry: the SHA-256 of a text of everything that compilation depends on.

The text holds nodes with their arguments and results (shapes, strides, dtypes, device types). It also holds the
request, the settings, and the versions of everything that writes code.

It leaves out ranks, device numbers, and names of process groups. It leaves out values of parameters and constants,
except single numbers on the CPU, which the program text contains. It leaves out the graph's name, its modules and its
source lines. So equal graphs of different models share an entry. Comments in its host program then name the model that
was compiled first.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.collectives.contract import Request
from dcompile.compat.process_state import precision_settings
from dcompile.config import Config
from dcompile.ir.nodes import PART
from dcompile.toolchain import (
    cache_bytes,
    compiler_stamp,
    cpu_features,
    openmp_library,
    own_source,
    own_version,
    triton_version,
)

_PYTHON = ("operator", "math", "builtins", "torch")
"""Modules whose functions are identified by their name and the versions in the key."""
_BUILT_IN = ("aten", "prims")
"""Namespaces of torch's own ops. For ops of other namespaces, the schema is part of the text."""


class NotCacheable(Exception):
    """The graph holds something that has no distinguishing text. The message names it."""


def graph_key(gm: GraphModule, request: Request, config: Config) -> str:
    """Key of a graph's cache entry. Raises NotCacheable."""
    if config.backend is not None and config.backend.cache_objection:
        raise NotCacheable(config.backend.cache_objection)
    machine = _machine(request) if communicates(gm, request) or config.backend is not None else ()
    given = (*_request(request), *machine)
    surroundings = (f"{what} {value}" for what, value in environment().items())
    lines = (*surroundings, *_gpus(gm), config.key(), *given, *_symbols(gm), *_nodes(gm), *_storages(gm))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def graph_text(gm: GraphModule) -> list[str]:
    """Text lines of a graph's nodes alone, as they enter the key. Raises NotCacheable."""
    return [*_symbols(gm), *_nodes(gm)]


def constants_of(gm: GraphModule) -> dict[str, Any]:
    """Tensors that the graph's module holds, by the name of their `get_attr` node."""
    nodes = gm.graph.find_nodes(op="get_attr")
    return {node.name: operator.attrgetter(str(node.target))(gm) for node in nodes}


def device_numbers(gm: GraphModule) -> dict[str, int]:
    """Device type -> the only device number that calls of the graph name. Types with several numbers are left out.

    Host programs spell these devices out. A cache entry has `*` in place of the number, so that ranks may share it.
    """
    found: dict[str, set[int]] = {}
    for node in gm.graph.nodes:
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, torch.device) and value.index is not None:
                found.setdefault(value.type, set()).add(value.index)
    return {kind: numbers.pop() for kind, numbers in found.items() if len(numbers) == 1}


def group_names(gm: GraphModule) -> dict[str, str]:
    """Name of each process group in calls of the graph -> its placeholder in keys and entries.

    Groups are named in the order in which a rank created them, so equal programs on different ranks may name them
    differently. Empty if such a name is also an argument with another meaning: then all names stay.
    """
    strings = [
        (argument.name == "group_name", value)
        for node in gm.graph.nodes
        if node.op == "call_function" and (schema := _collective_schema(node)) is not None
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if isinstance(value, str)
    ]
    names = dict.fromkeys(value for is_group, value in strings if is_group)
    others = {value for is_group, value in strings if not is_group}
    return {} if others & names.keys() else {name: f"*{number}" for number, name in enumerate(names)}


def _collective_schema(node: Node) -> Any:
    """Schema of a call of torch's functional collectives; None for other nodes."""
    schema = getattr(node.target, "_schema", None)
    return (
        schema if schema is not None and schema.name.partition("::")[0] in compat.groups.COLLECTIVE_NAMESPACES else None
    )


def gpus(gm: GraphModule) -> set[str]:
    """GPUs that hold values of the graph: "cuda:0", ..."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    return {str(value.device) for value in values if isinstance(value, torch.Tensor) and value.device.type == "cuda"}


def environment() -> dict[str, str]:
    """What every program depends on beside its graph and the settings, by name."""
    return {
        "dcompile": f"{own_version()} {own_source()}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "C++ compiler": compiler_stamp(),
        "processor": cpu_features(),
        "largest cache in bytes": f"{cache_bytes()}",
        "OpenMP library": (openmp_library() or "").rpartition("/")[2],
        "deterministic algorithms": f"{torch.are_deterministic_algorithms_enabled()}",
        "precision": precision_settings(),
        "flash attention": f"{compat.attention.chosen_flash_attention()}",
    }


def _gpus(gm: GraphModule) -> Iterator[str]:
    """Lines for what GPU kernels depend on: Triton, and each GPU's compute capability."""
    values = {id(value): value for value in map(_value, gm.graph.nodes)}.values()
    found = {value.device for value in values if isinstance(value, torch.Tensor)}
    gpus = sorted(str(device) for device in found if device.type == "cuda")
    if gpus:
        yield f"{len(gpus)} GPUs, triton {triton_version()}"
        yield from sorted({f"sm {torch.cuda.get_device_capability(device)}" for device in gpus})


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _request(request: Request) -> Iterator[str]:
    yield f"{request.kind} {request.grads} {request.rule} {request.donated}"
    yield f"{request.reductions}"
    yield f"{request.gathers} {request.results if request.gathers or request.kind == 'forward' else ''}"
    for param in request.params:  # without their names
        yield f"{param.number} {param.shape} {param.dtype} {param.device} {param.kind} {param.group} {param.shard}"


def _machine(request: Request) -> Iterator[str]:
    """What collectives are scheduled by. Without any, a program is the same for every number of ranks."""
    yield f"{request.figures} {request.groups} {request.early_bytes} {request.region_us}"


def communicates(gm: GraphModule, request: Request) -> bool:
    """Whether the graph's program has collectives: those of parameters, or the model's own."""
    sharded = any(param.shard is not None for param in request.params)
    return request.rule is not None or bool(request.gathers) or sharded or bool(compat.groups.named_groups(gm))


# --- the graph --------------------------------------------------------------------------------------------------------


def _nodes(gm: GraphModule) -> Iterator[str]:
    numbers, groups = device_numbers(gm), group_names(gm)
    known: dict[int, str] = {}  # values of one layout are often one tensor, which the graph holds
    for node in gm.graph.nodes:
        target = _target(node.target) if node.op == "call_function" else ""
        named = groups if node.op == "call_function" and _collective_schema(node) is not None else {}
        given = [named.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args]
        args = ",".join(_text(arg, numbers) for arg in given) if node.op != "placeholder" else ""
        kwargs = ",".join(f"{name}={_text(value, numbers)}" for name, value in node.kwargs.items())
        value = operator.attrgetter(str(node.target))(gm) if node.op == "get_attr" else node.meta.get("val")
        if node.op == "get_attr" and not isinstance(value, torch.Tensor):
            yield from _part(node, value)
            continue
        if (text := known.get(id(value))) is None:
            text = known[id(value)] = _text(value, numbers)
        yield f"{node.op} {node.name} {target}({args};{kwargs}) {text}"
        part = (node.meta.get("custom") or {}).get(PART)
        if part is not None:
            yield f"part {part}"
        if node.op == "get_attr" and type(value) is torch.Tensor and compat.tensors.is_number(value):
            with compat.tensors.real_tensors():
                number = value.item()
            yield repr(number)  # kernels may be specialized on it


def _part(node: Node, value: Any) -> Iterator[str]:
    """Lines for a function of FlexAttention: a graph whose call is made anew from the graph that is loaded."""
    if not isinstance(value, GraphModule) or not all(compat.inductor.is_flex(user.target) for user in node.users):
        raise NotCacheable(f"it holds a {type(value).__name__}")
    yield f"graph {node.name}"
    yield from _nodes(value)
    yield f"{node.name} ends"


def _target(target: Any) -> str:
    if compat.inductor.is_flex(target):
        return f"higher_order.{target}"
    schema = getattr(target, "_schema", None)
    if schema is not None:
        name = str(target)
        return name if name.partition(".")[0] in _BUILT_IN else f"{name} {schema}"
    module = (getattr(target, "__module__", None) or "").lstrip("_")
    if module in _PYTHON and hasattr(target, "__name__"):
        return f"{module}.{target.__name__}"
    raise NotCacheable(f"it calls {target}")


def _text(value: Any, numbers: dict[str, int]) -> str:
    """Text of an argument or a result.

    Different values have different texts; raises NotCacheable for those without one.
    """
    match value:
        case Node():
            return f"%{value.name}"
        case bool() | int() | float() | complex() | str() | None:
            return repr(value)
        case torch.Tensor():
            strides = _sizes(value.stride()) if value.layout == torch.strided else value.layout
            return f"{value.dtype}{_sizes(value.shape)}{strides}{value.device.type}"
        case tuple() | list():
            return f"({','.join([_text(item, numbers) for item in value])})"
        case dict():
            return _text([*value.items()], numbers).join("{}")
        case torch.SymInt():
            return f"<{compat.sizes.expression_text(compat.sizes.size_expression(value))}>"
        case torch.SymFloat() | torch.SymBool():
            return f"<{value}>"
        case torch.device():
            shared = value.index is not None and numbers.get(value.type) == value.index
            number = "*" if shared else value.index
            return f"device {value.type}:{number}"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case slice():
            return f"slice({_text((value.start, value.stop, value.step), numbers)})"
        case _ if hasattr(value, "_schema"):  # an op as an argument
            return _target(value)
        case _:
            raise NotCacheable(f"it holds a {type(value).__name__}")


def _sizes(sizes: Any) -> str:
    return ",".join(_text(size, {}) for size in sizes).join("[]")


def _storages(gm: GraphModule) -> Iterator[str]:
    """Storage offset and size of inputs whose whole storage the graph addresses, as `as_strided` does."""
    for node in compat.storage_offsets.looked_around(gm):
        value = node.meta["val"]
        yield f"{node.name} from {value.storage_offset()} of {value.untyped_storage().nbytes()} bytes"


def _symbols(gm: GraphModule) -> Iterator[str]:
    """Facts about each size symbol that lowering may use: whether it can be 0, 1 or negative, and its divisor.

    The size during tracing is left out.
    """
    facts = {str(symbol): known for symbol, known in compat.sizes.known_facts(gm).items()}
    for symbol, (least, divisor) in sorted(facts.items()):
        # lowering asks whether a symbol's multiples can be 1 or 2 as well
        yield f"{symbol} {'any' if least is None or least < 0 else min(least, 2 * divisor)} {divisor}"


# --- device numbers and group names in host programs ------------------------------------------------------------------


def without_numbers(source: str, numbers: dict[str, int]) -> str:
    """Replace the number of each device in a host program by `*`."""
    for kind, number in numbers.items():
        source = source.replace(f"torch.device('{kind}:{number}')", f"torch.device('{kind}:*')")
    return source


def with_numbers(source: str, numbers: dict[str, int]) -> str:
    """Insert this process's device numbers into a host program from the cache."""
    return re.sub(
        r"torch\.device\('(\w+):\*'\)", lambda found: f"torch.device('{found[1]}:{numbers[found[1]]}')", source
    )


def without_groups(source: str, names: dict[str, str]) -> str:
    """Replace the names of process groups in a host program by their placeholders."""
    return _renamed(source, names)


def with_groups(source: str, names: dict[str, str]) -> str:
    """Insert the names of this process's groups into a host program from the cache."""
    return _renamed(source, {stands_for: name for name, stands_for in names.items()})


def _renamed(source: str, names: dict[str, str]) -> str:
    """Replace quoted strings in a program's calls of collectives, which it makes through local names."""
    namespaces = "|".join(compat.groups.COLLECTIVE_NAMESPACES)
    functions = re.findall(rf"^ *(\w+) = .*\b(?:{namespaces})\.", source, re.MULTILINE)
    if not names or not functions:
        return source
    quoted = {repr(old): repr(new) for old, new in names.items()}
    strings, calls = "|".join(map(re.escape, quoted)), "|".join(functions)

    def line(found: re.Match[str]) -> str:
        return re.sub(strings, lambda string: quoted[string[0]], found[0])

    return re.sub(rf"^.*\b(?:{calls})\(.*$", line, source, flags=re.MULTILINE)
