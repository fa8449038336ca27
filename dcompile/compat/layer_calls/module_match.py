"""Whether two modules, and objects that tracing read of them, are equal in all that it could have seen."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size,
)  # fmt: skip
_STATIC = "_dynamo_static_input_type"
_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)


@dataclass
class ModulePairs:
    """Modules of one layer and those of another, which are equal: `pair` finds them."""

    modules: dict[int, torch.nn.Module] = field(default_factory=dict)
    """Identity of a module -> its counterpart."""
    hook_tables: dict[int, Any] = field(default_factory=dict)
    """Identity of a table of hooks -> its counterpart."""
    hook_keys: dict[int, int] = field(default_factory=dict)
    """Key of a hook -> that of its counterpart."""

    def pair(self, old: torch.nn.Module, new: torch.nn.Module) -> bool:
        """Pair all modules of two layers. False where trees, tables or hooks differ."""
        taken: dict[int, int] = {}
        todo = [(old, new)]
        while todo:
            one, other = todo.pop()
            found = self.modules.setdefault(id(one), other)
            if found is not other or taken.setdefault(id(other), id(one)) != id(one):
                return False
            if one is not other and not (_alike(one, other) and self._pair_hooks(one, other)):
                return False
            todo += [
                (mine, theirs)
                for mine, theirs in zip(one._modules.values(), other._modules.values(), strict=True)
                if mine is not None and theirs is not None
            ]
        return True

    def _pair_hooks(self, old: torch.nn.Module, new: torch.nn.Module) -> bool:
        """Whether two modules have the same hooks. Keys in their tables differ, since no two hooks have one key."""
        for name, table in old.__dict__.items():
            if _is_of_calls(name):
                other = new.__dict__[name]
                if len(table) != len(other) or any(
                    x is not y for x, y in zip(table.values(), other.values(), strict=True)
                ):
                    return False
                self.hook_tables[id(table)] = other
                self.hook_keys |= dict(zip(table, other, strict=True))
        return True


def hook_keys(module: torch.nn.Module) -> set[int]:
    """Keys of the hooks of a module and of all modules in it."""
    return {key for table in _hook_tables(module) for key in table}


def unguarded_tables(module: torch.nn.Module) -> set[int]:
    """Identities of the tables of hooks in a module on which Dynamo makes no guards: all of them, unless set so."""
    import torch._dynamo.config as config

    return {id(table) for table in _hook_tables(module)} if config.skip_nnmodule_hook_guards else set()


def _hook_tables(module: torch.nn.Module) -> Iterator[dict[int, Any]]:
    """Tables of hooks of a module and of all modules in it."""
    return (table for part in module.modules() for name, table in part.__dict__.items() if _is_of_calls(name))


def _is_of_calls(name: str) -> bool:
    """Whether an attribute of modules is a table of hooks of their calls."""
    return name.startswith(("_forward", "_backward")) and "_hooks" in name


def _alike(old: torch.nn.Module, new: torch.nn.Module) -> bool:
    """Whether two modules have one class and the same names of attributes."""
    mine, theirs = old.__dict__, new.__dict__
    if type(old) is not type(new) or mine.keys() != theirs.keys() or old.training is not new.training:
        return False
    if mine.get("forward") is not theirs.get("forward"):
        return False
    for name in ("_modules", "_parameters", "_buffers"):
        if [*mine[name]] != [*theirs[name]]:
            return False
        if any((x is None) is not (y is None) for x, y in zip(mine[name].values(), theirs[name].values(), strict=True)):
            return False
    return True


def are_equal(old: Any, new: Any, guard: str) -> bool:
    """Whether a guard of this type, made of `old`, holds of `new` and says as much of it."""
    if old is new:
        return True
    compare = _COMPARISONS.get(guard)
    return compare is not None and type(old) is type(new) and compare(old, new)


def is_constant(value: Any) -> bool:
    """Whether a value is compared by what it is, not by identity."""
    return type(value) in _CONSTANTS or isinstance(value, enum.Enum)


def _constants(old: Any, new: Any) -> bool:
    if is_constant(old):
        return bool(old == new) and repr(old) == repr(new)
    if type(old) in (tuple, list):
        return len(old) == len(new) and all(
            x is y or (type(x) is type(y) and _constants(x, y)) for x, y in zip(old, new, strict=True)
        )
    return type(old) in (set, frozenset) and all(map(is_constant, old)) and bool(old == new)


def _structure(old: Any, new: Any) -> bool:
    """Whether kinds and names of what two objects hold are the same; what was read of it has guards of its own."""
    if is_constant(old):
        return True  # a guard on the type alone
    if isinstance(old, torch.Tensor):
        return _tensors(old, new)
    if isinstance(old, torch.nn.Module):
        return _alike(old, new)
    if isinstance(old, dict):
        return all(map(is_constant, old)) and [*old] == [*new]
    if isinstance(old, tuple | list):
        return len(old) == len(new)
    if isinstance(old, set | frozenset):
        return _constants(old, new)
    if isinstance(old, _CALLED):
        return False
    return getattr(old, "__dict__", {}).keys() == getattr(new, "__dict__", {}).keys()


def _tensors(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors of a module are traced to the same: plain ones, in memory of their own."""
    if type(old) not in (torch.Tensor, torch.nn.Parameter):
        return False
    mine, theirs = dict(old.__dict__), dict(new.__dict__)
    for attributes in (mine, theirs):
        if attributes.get(_STATIC) == "unguarded":  # Dynamo's mark of a module's tensor that it has read
            del attributes[_STATIC]
    return _traits(old) == _traits(new) and [*mine] == [*theirs] and mine.get(_STATIC) == theirs.get(_STATIC)


def _traits(value: torch.Tensor) -> tuple[Any, ...]:
    return (
        value.dtype,
        value.device,
        value.layout,
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.requires_grad,
        value.is_leaf,
        value._is_view(),
        value.is_conj(),
        value.is_neg(),
        value.is_inference(),
        value._backward_hooks is None,
        torch._C._dispatch_keys(value).raw_repr(),
        repr(getattr(value, "_dynamo_dynamic_indices", None)),
    )


IDENTITIES = frozenset(("ID_MATCH", "NN_MODULE", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "FUNCTION_MATCH"))
"""Types of guards that compare identities, of whatever object."""
_COMPARISONS = {
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"), _constants),
    **dict.fromkeys(
        (
            "TYPE_MATCH", "SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT", "HASATTR",
            "DICT_CONTAINS", "DICT_NOT_CONTAINS", "DICT_KEYS_MATCH", "DICT_LENGTH", "NOT_NONE_MATCH", "TENSOR_MATCH",
            "SET_CONTAINS", "SET_NOT_CONTAINS",
        ),
        _structure,
    ),
}  # fmt: skip
"""Types of guards that say no more than these comparisons. All others need the same object."""
