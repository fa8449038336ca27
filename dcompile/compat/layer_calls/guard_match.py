"""Whether guards on what one module's call read of that module hold of another one, and those guards for that one.

Modules, and objects that tracing read of them, are compared in all that it could have seen.

A guard belongs to a source, the way from the frame's variables to the guarded object. The ways to what two layers hold
differ in one place: the layer's index in its container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import ChainedSource, Source

TENSORS = "TENSOR_MATCH"
CODE = "CLOSURE_MATCH"
ALIASES = ("DUPLICATE_INPUT", "OBJECT_ALIASING")
IN, NOT_IN = "DICT_CONTAINS", "DICT_NOT_CONTAINS"
HAS = "HASATTR"
ABSENT = object()
"""Value of an attribute that an object does not have: torch 2.11 guards on its source that it is absent."""
NO_HOOKS = "EMPTY_NN_MODULE_HOOKS_DICT"
"""Type of guards on tables of hooks. Half of a layer's guards are of it, and by default they check nothing."""
IDENTITIES = frozenset(("ID_MATCH", "NN_MODULE", "CLASS_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "FUNCTION_MATCH"))
"""Types of guards that compare identities, of whatever object."""
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size,
)  # fmt: skip
_STATIC = "_dynamo_static_input_type"
_BASE = "__dcompile_base"
"""Name of the base's value in the expression of a source."""
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
            if one is not other and not (_have_equal_names(one, other) and self._pair_hooks(one, other)):
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


def _have_equal_names(old: torch.nn.Module, new: torch.nn.Module) -> bool:
    """Whether two modules have one class and the same names of attributes."""
    mine, theirs = old.__dict__, new.__dict__
    if type(old) is not type(new) or mine.keys() != theirs.keys() or old.training is not new.training:
        return False
    if not are_equal(mine.get("forward"), theirs.get("forward"), CODE):
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


def _equal_constants(old: Any, new: Any) -> bool:
    if is_constant(old):
        return bool(old == new) and repr(old) == repr(new)
    if type(old) in (tuple, list):
        return len(old) == len(new) and all(
            x is y or (type(x) is type(y) and _equal_constants(x, y)) for x, y in zip(old, new, strict=True)
        )
    return type(old) in (set, frozenset) and all(map(is_constant, old)) and bool(old == new)


def _equal_structure(old: Any, new: Any) -> bool:
    """Whether kinds and names of what two objects hold are the same; what was read of it has guards of its own."""
    if is_constant(old):
        return True  # a guard on the type alone
    if isinstance(old, torch.Tensor):
        return _equal_tensors(old, new)
    if isinstance(old, torch.nn.Module):
        return _have_equal_names(old, new)
    if isinstance(old, dict):
        return all(map(is_constant, old)) and [*old] == [*new]
    if isinstance(old, tuple | list):
        return len(old) == len(new)
    if isinstance(old, set | frozenset):
        return _equal_constants(old, new)
    if isinstance(old, _CALLED):
        return _equal_functions(old, new)
    return getattr(old, "__dict__", {}).keys() == getattr(new, "__dict__", {}).keys()


def _equal_functions(old: Any, new: Any) -> bool:
    """Whether two functions, or methods, are of one definition.

    What tracing reads of their cells, defaults and `__self__` has guards of its own.
    """
    if type(old) is types.MethodType:
        return are_equal(old.__func__, new.__func__, CODE)
    if type(old) is not types.FunctionType:
        return False
    if old.__code__ is not new.__code__ or old.__globals__ is not new.__globals__:
        return False
    mine, theirs = (
        (len(each.__defaults__ or ()), [*(each.__kwdefaults__ or ())], [*each.__dict__]) for each in (old, new)
    )
    return mine == theirs


def _equal_tensors(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors of a module are traced to the same: plain ones, in memory of their own."""
    if type(old) not in (torch.Tensor, torch.nn.Parameter):
        return False
    mine, theirs = dict(old.__dict__), dict(new.__dict__)
    for attributes in (mine, theirs):
        if attributes.get(_STATIC) == "unguarded":  # Dynamo's mark of a module's tensor that it has read
            del attributes[_STATIC]
    return _traits_of(old) == _traits_of(new) and [*mine] == [*theirs] and mine.get(_STATIC) == theirs.get(_STATIC)


def _traits_of(value: torch.Tensor) -> tuple[Any, ...]:
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


_COMPARISONS = {
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"), _equal_constants),
    **dict.fromkeys(
        (
            "TYPE_MATCH", "SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT", "HASATTR",
            "DICT_CONTAINS", "DICT_NOT_CONTAINS", "DICT_KEYS_MATCH", "DICT_LENGTH", "NOT_NONE_MATCH", "TENSOR_MATCH",
            "SET_CONTAINS", "SET_NOT_CONTAINS",
        ),
        _equal_structure,
    ),
    CODE: _equal_functions,
}  # fmt: skip
"""Types of guards that say no more than these comparisons. All others need the same object."""


def without_module_marks(source: Any) -> Any:
    """A source without Dynamo's marks of modules around it."""
    from torch._dynamo.source import NNModuleSource

    while isinstance(source, NNModuleSource):
        source = source.base
    return source


def layer_source(source: Any) -> Any:
    """Source of a layer as an entry of its container, where sources of what it holds begin; None for others."""
    source = without_module_marks(source)
    return source if hasattr(source, "index") and hasattr(source, "base") else None


def differ_in_index(old: Any, new: Any) -> bool:
    """Whether two sources of layers are entries of one container."""
    return type(old) is type(new) and old != new and dataclasses.replace(new, index=old.index) == old


class Renaming:
    """Sources with one layer's source in them -> the same with another's."""

    def __init__(self, old: Any, new: Any, hook_keys: Mapping[int, int]) -> None:
        """Rename what leads through `old`, and hooks in its tables. `hook_keys`: key of a hook -> its counterpart's."""
        self._known, self._hook_keys = {old: new}, hook_keys
        self._seen: dict[int, tuple[Any, Any]] = {}
        """Identity of a source -> it, and its new name: torch works out a source's hash in Python."""

    def of(self, source: Any) -> Any:
        """The source after renaming; the very same object if the layer's source is not in it."""
        seen = self._seen.get(id(source))
        if seen is None:
            seen = self._seen[id(source)] = source, self._renamed(source)
        return seen[1]

    def _renamed(self, source: Any) -> Any:
        found = self._known.get(source)
        if found is None:
            changed = {}
            for entry in dataclasses.fields(source):
                value = getattr(source, entry.name)
                if isinstance(value, Source):
                    renamed = self.of(value)
                    if renamed is not value:
                        changed[entry.name] = renamed
                elif type(value) is int and _is_of_calls(getattr(without_module_marks(source.base), "member", "")):
                    changed[entry.name] = self._hook_keys.get(value, value)
            found = self._known[source] = dataclasses.replace(source, **changed) if changed else source
        return found


def guard_type(guard: Any) -> str:
    """Name of the check that a guard makes."""
    made = guard.create_fn
    return str((made.func if isinstance(made, functools.partial) else made).__name__)


def guard_arguments(guard: Any) -> Mapping[str, Any]:
    """Arguments of the check beside the source; positional ones by number."""
    made = guard.create_fn
    if not isinstance(made, functools.partial):
        return {}
    return {**{str(place): value for place, value in enumerate(made.args)}, **made.keywords}


class Values:
    """Values of sources in the frame that is traced."""

    def __init__(self, translator: Any) -> None:
        root = translator.output.root_tx
        self._globals = {"G": root.f_globals, "L": root.f_locals}
        self._cache: dict[Any, Any] = {}
        self._seen: dict[int, tuple[Any, Any]] = {}
        """Identity of a source -> it, and its value."""

    def of(self, source: Any) -> Any:
        """Raises LookupError for a source that is no expression over the frame's variables."""
        try:
            return self._of(source)
        except Exception as error:
            raise LookupError(source.name) from error

    def guarded(self, source: Any, kind: str) -> Any:
        """The value behind a guard of some type. Raises LookupError as `of` does."""
        try:
            return self.of(source)
        except LookupError as error:
            if kind != HAS or not isinstance(error.__cause__, AttributeError):
                raise
            self.of(without_module_marks(source).base)
            return ABSENT

    def _of(self, source: Any) -> Any:
        """Evaluate a source as torch does, whose `get_value` compiles the expression of each source anew."""
        seen = self._seen.get(id(source))
        if seen is None:
            if type(source).get_value is not ChainedSource.get_value:
                found = source.get_value(self._globals, {}, self._cache)
            else:
                found = eval(_source_code(source._name_template), self._globals, {_BASE: self._of(source.base)})
            seen = self._seen[id(source)] = source, found
        return seen[1]


@functools.lru_cache(4096)
def _source_code(template: str) -> types.CodeType:
    """Return the code of a source's expression, by torch's template. Thousands of sources have some twenty."""
    return compile(template.format(_BASE), "<source>", "eval")


@dataclass
class GuardedLayer:
    """Guards on what tracing read of a layer, with the values that it found."""

    source: Any
    guards: list[tuple[Any, str, Any]] = field(default_factory=list)
    """Guard, its type, and the guarded value."""
    ordered: list[Any] = field(default_factory=list)
    """Sources of dicts whose order of keys is guarded."""
    hook_guards: list[Any] = field(default_factory=list)
    """Guards on torch's global tables of hooks, that a hook of the layer is not in them."""

    @classmethod
    def of(cls, translator: Any, within: Within, values: Values, unread: Collection[int]) -> GuardedLayer:
        """Collect the guards on what is `within` a layer. Raises LookupError.

        `unread`: identities of tables of hooks, whose guards are left out. `ModulePairs` compares these tables.
        """
        output, found = translator.output, cls(within.layer)
        for guard in output.guards:
            if within(guard.originating_source):
                kind = guard_type(guard)
                value = values.guarded(guard.originating_source, kind)
                if kind != NO_HOOKS or id(value) not in unread:
                    found.guards.append((guard, kind, value))
        found.ordered = [*filter(within, output.guard_on_key_order)]
        return found

    def tensors(self) -> list[Any]:
        """Sources of the tensors that were read, in the order of reading."""
        return [guard.originating_source for guard, kind, _ in self.guards if kind == TENSORS]


class Within:
    """Whether sources lead through a layer's. Guards share most of their ways, so each source is looked at once."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._seen: dict[int, tuple[Any, bool]] = {}
        """Identity of a source -> it, and whether it does: torch works out a source's hash in Python."""

    def __call__(self, source: Any) -> bool:
        seen = self._seen.get(id(source))
        if seen is None:
            same = type(source) is type(self.layer) and source == self.layer
            seen = self._seen[id(source)] = source, same or any(map(self, _parts(source)))
        return seen[1]


def _parts(source: Any) -> Iterator[Any]:
    """Sources that a source is made of."""
    return (value for name in _field_names(source.__class__) if isinstance(value := getattr(source, name), Source))


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(kind))


def is_about_hook(guard: Any, keys: Collection[int]) -> bool:
    """Whether a guard says that a hook with one of these keys is not in a global table of torch's."""
    name, arguments = guard.originating_source.name, guard_arguments(guard)
    return "._global_forward_" in name and guard_type(guard) == NOT_IN and arguments.get("key") in keys


def holds_for(layer: GuardedLayer, renaming: Renaming, values: Values, pairs: ModulePairs, tracked: Any) -> bool:
    """Whether all guards on a layer hold for another one, so that tracing it would read the same.

    `tracked(value)`: the source under which Dynamo already knows an object, or None.
    """
    taken: dict[int, int] = {}
    for guard, kind, old in layer.guards:
        source = renaming.of(guard.originating_source)
        try:
            new = values.guarded(source, kind)
            if kind in ALIASES and not _aliases_hold(guard, new, renaming, values):
                return False
        except LookupError:
            return False
        if not _is_counterpart(old, new, kind, pairs):
            return False
        if new is not old and not is_constant(new):
            if taken.setdefault(id(new), id(old)) != id(old):
                return False  # two objects of the layer are one here
            known, before = (None if name is None else without_module_marks(name) for name in map(tracked, (new, old)))
            if known not in (None, without_module_marks(source), before and without_module_marks(renaming.of(before))):
                return False  # known by another name, so comparisons with `is` may tell
    return not any(
        pairs.hook_keys[guard_arguments(guard)["key"]] in values.of(guard.originating_source)
        for guard in layer.hook_guards
    )


def _is_counterpart(old: Any, new: Any, kind: str, pairs: ModulePairs) -> bool:
    """Whether an object is another layer's counterpart of what a guard of some type was made of."""
    for known in (pairs.modules, pairs.hook_tables):
        if id(old) in known:
            return known[id(old)] is new and (kind not in IDENTITIES or old is new)
    return are_equal(old, new, kind)


def _aliases_hold(guard: Any, new: Any, renaming: Renaming, values: Values) -> bool:
    """Whether a guard that two sources lead to one object holds for the renamed sources."""
    others = [value for value in guard_arguments(guard).values() if isinstance(value, Source)]
    return bool(others) and all(values.of(renaming.of(other)) is new for other in others)


def install(layer: GuardedLayer, renaming: Renaming, pairs: ModulePairs, translator: Any) -> None:
    """Write down a layer's guards for another layer, except for those on tensors, which come with a graph's inputs.

    They tell the same line of the model in a recompilation's reason as if the other layer had been traced.
    """
    output = translator.output
    absent = [(guard, NOT_IN, None) for guard in layer.hook_guards]
    for guard, kind, value in (*layer.guards, *absent):
        if kind != TENSORS:
            hooked = kind in (IN, NOT_IN) and (value is None or id(value) in pairs.hook_tables)
            keys = pairs.hook_keys if hooked else {}
            made = renaming.of(guard.originating_source).make_guard(_renamed_check(guard, renaming, keys))
            made.stack, made.user_stack = guard.stack, guard.user_stack
            output.guards.add(made, collect_debug_stack=False)
    for source in layer.ordered:
        output.guard_on_key_order.add(renaming.of(source))


def _renamed_check(guard: Any, renaming: Renaming, keys: Mapping[int, int]) -> Any:
    made = guard.create_fn
    if not isinstance(made, functools.partial):
        return made

    def renamed(name: str, value: Any) -> Any:
        if isinstance(value, Source):
            return renaming.of(value)
        return keys.get(value, value) if name == "key" and type(value) is int else value

    keywords = {name: renamed(name, value) for name, value in made.keywords.items()}
    return functools.partial(made.func, *(renamed("", value) for value in made.args), **keywords)


def told_as(layer: GuardedLayer, renaming: Renaming, translator: Any) -> None:
    """Give new guards on tensors the line that those of the layer name."""
    lines = {renaming.of(guard.originating_source): guard for guard, kind, _ in layer.guards if kind == TENSORS}
    find = getattr(translator.output.guards, "get_guards_for_source", None)  # since torch 2.13
    for source, guard in lines.items():
        for made in () if find is None else find(source):
            if guard_type(made) == TENSORS:
                made.stack, made.user_stack = guard.stack, guard.user_stack


@contextlib.contextmanager
def watched_guards(translator: Any) -> Iterator[list[Any]]:
    """Guards that this context adds and that say something new, once it has ended."""
    before, added = {_condition_of(guard) for guard in translator.output.guards}, list[Any]()
    yield added
    added += [guard for guard in translator.output.guards if _condition_of(guard) not in before]


def _condition_of(guard: Any) -> Any:
    """What a guard says. Dynamo adds some guards anew at each reading."""
    arguments = tuple((name, _hashable(value)) for name, value in guard_arguments(guard).items())
    return guard_type(guard), guard.originating_source, arguments


def _hashable(value: Any) -> Any:
    return value if is_constant(value) or isinstance(value, Source) else id(value)
