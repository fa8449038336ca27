"""What a call of a module gets from outside: its arguments, and the state of the process that tracing reads.

Two calls with equal keys get the same, except for which operations computed their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback


@dataclass
class CallArguments:
    """Arguments of a call, in order: `key` describes them, and other fields hold what differs between calls."""

    key: tuple[Any, ...] = ()
    tensors: list[Any] = field(default_factory=list)
    """Variables of tensors, in order of first use."""
    nodes: dict[Any, int] = field(default_factory=dict)
    """Nodes of these tensors -> position."""
    containers: list[Any] = field(default_factory=list)
    """Variables of lists, tuples and dicts."""
    others: list[Any] = field(default_factory=list)
    """Variables that must be the same objects."""


def describe(args: Any, kwargs: Any, effects: Any) -> CallArguments | None:
    """Describe arguments; None if some may hold state that a key cannot tell."""
    found = CallArguments()
    try:
        described = tuple(_described(value, found, effects) for value in (*args, *kwargs.values()))
    except _Unknown:
        return None
    found.key = (described, tuple(kwargs))
    return found


class _Unknown(Exception):
    """A variable that is neither of a known kind, nor known to be the same object in all calls."""


def realized(variable: Any) -> Any:
    """Variable behind a lazy one, if that was looked at; otherwise the lazy one. Adds no guard."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if type(variable).__name__.startswith("Lazy") and isinstance(variable, LazyVariableTracker):
        return variable.unwrap()
    return variable


def _described(variable: Any, found: CallArguments, effects: Any) -> Any:
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lists import ListVariable, TupleVariable
    from torch._dynamo.variables.tensor import TensorVariable

    variable = realized(variable)
    kind = type(variable)
    if kind is ConstantVariable:
        return "constant", type(variable.value), repr(variable.value)
    if kind is TensorVariable:
        return _tensor(variable, found, effects)
    if kind in (TupleVariable, ListVariable):
        found.containers.append(variable)
        return kind, tuple(_described(item, found, effects) for item in variable.items)
    if kind is ConstDictVariable:
        found.containers.append(variable)
        return kind, tuple((_key(key), _described(item, found, effects)) for key, item in variable.items.items())
    if isinstance(getattr(variable, "mutation_type", None), AttributeMutationNew | ValueMutationNew):
        raise _Unknown
    found.others.append(variable)
    return ("other", id(variable))  # the record keeps it alive


def _key(key: Any) -> Any:
    from torch._dynamo.variables.constant import ConstantVariable

    variable = realized(key.vt)
    if type(variable) is not ConstantVariable:
        raise _Unknown
    return type(variable.value), repr(variable.value)


def _tensor(variable: Any, found: CallArguments, effects: Any) -> Any:
    from torch._dynamo.variables.base import AttributeMutationExisting

    node = variable.proxy.node
    value = node.meta.get("example_value")
    if not is_plain_fake(value) or variable in effects.store_attr_mutations:
        raise _Unknown
    if variable.source is not None or isinstance(variable.mutation_type, AttributeMutationExisting):
        found.others.append(variable)  # can be reached in other ways, too
        return "input", id(variable)
    if node not in found.nodes:
        found.nodes[node] = len(found.tensors)
        found.tensors.append(variable)
    place = found.nodes[node]
    first = next(n for n, other in enumerate(found.nodes) if _memory(other) == _memory(node))
    known = variable is found.tensors[place]
    return "tensor", place, known, first, variable._is_name_set, _options(variable), traits(value), value._is_view()


def _memory(node: Any) -> int:
    return int(node.meta["example_value"].untyped_storage()._cdata)


def _options(variable: Any) -> tuple[Any, ...]:
    return variable.class_type, repr(getattr(variable, "specialized_value", None))


def is_plain_fake(value: Any) -> bool:
    """Whether this is a fake tensor that holds no other tensors: strided, of no subclass."""
    return (type(value) is FakeTensor or (type(value) is torch.nn.Parameter and isinstance(value, FakeTensor))) and (
        value.layout is torch.strided and not value.is_nested and not value.is_quantized
    )


def traits(value: torch.Tensor) -> tuple[Any, ...]:
    """All of a fake tensor that tracing can see, apart from its memory and its history."""
    return (
        type(value),
        value.dtype,
        value.device,
        *(tuple(_size(n) for n in sizes) for sizes in (value.shape, value.stride(), (value.storage_offset(),))),
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_neg(),
        value.is_inference(),
        value._version,
    )


def _size(number: Any) -> Any:
    return number if type(number) is int else ("symbol", str(number.node.expr))


def surroundings(tx: Any) -> tuple[Any, ...]:
    """State outside of arguments and objects that tracing reads: switches of torch, modes, contexts."""
    effects = tx.output.side_effects
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted(map(str, torch._C._autocast_supported_devices()))
            if torch.is_autocast_enabled(kind)
        ),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._functorch.peek_interpreter_stack() is None,
        len(getattr(tx.symbolic_torch_function_state, "mode_stack", ())),
        getattr(tx.symbolic_torch_function_state, "torch_function_subclass_enabled", True),
        getattr(tx.symbolic_torch_function_state, "torch_function_mode_enabled", True),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        len(effects.save_for_backward),
        len(effects.tensor_hooks),
        repr({key: value for key, value in traceback.current_meta.items() if key != "stack_trace"}),
    )
