"""Read torch's settings, and the values of Dynamo's sources, in fewer steps while a frame is compiled."""

from __future__ import annotations

import contextlib
import functools
import types
import unittest.mock
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

BASE = "__dcompile_base"
"""Name of the base's value in the expression of a source."""


@contextlib.contextmanager
def quick_settings() -> Iterator[None]:
    """Return a setting of torch at once if it is a plain one: no alias, not deprecated, not hidden.

    Dynamo reads settings 17 000 times for a frame, and 500 times more for each layer that it copies. torch asks seven
    questions at each, through two further calls.
    """
    from torch.utils import _config_module

    module, unset = _config_module.ConfigModule, getattr(_config_module, "_UNSET_SENTINEL", None)
    constants = getattr(_config_module, "_IMMUTABLE_CONFIG_TYPES", None)
    own = module.__getattr__
    if unset is None or constants is None:
        yield
        return
    plain: dict[int, Any] = {}
    """Entries whose value is what was set, or their default."""

    def read(settings: Any, name: str) -> Any:
        entry = settings._config.get(name)
        if id(entry) not in plain:
            if not _is_plain(entry, unset, constants):
                return own(settings, name)
            plain[id(entry)] = entry
        if entry.hide:
            return own(settings, name)
        value = entry.user_override.get()
        return entry.default if value is unset else value

    with unittest.mock.patch.object(module, "__getattr__", read):
        yield


def _is_plain(entry: Any, unset: Any, constants: tuple[type, ...]) -> bool:
    """Whether nothing but `user_override` and `default` decides an entry's value."""
    return (
        entry is not None
        and type(entry.user_override) is ContextVar
        and entry.alias is None
        and entry.justknob is None
        and not getattr(entry, "deprecated", True)
        and entry.env_value_force is unset
        and entry.env_value_default is unset
        and isinstance(entry.default, constants)
    )


@contextlib.contextmanager
def compiled_sources() -> Iterator[None]:
    """Compile the expression of each kind of source once, where torch compiles that of each source.

    Guards read the values of thousands of sources, such as `base.weight`, which come from some twenty templates.
    """
    from torch._guards import ChainedSource

    own = getattr(ChainedSource, "get_value", None)
    if own is None or not hasattr(ChainedSource, "_name_template"):
        yield
        return

    def get_value(source: Any, scope: Any, names: dict[str, Any], cache: Any, **more: Any) -> Any:
        if more:  # torch 2.15 reports errors where somebody asks for it
            return own(source, scope, names, cache, **more)
        if source in cache:
            return cache[source]
        base = source.base.get_value(scope, names, cache)
        names[BASE] = base
        try:
            found = cache[source] = eval(source_code(source._name_template), scope, names)
        finally:
            del names[BASE]
        return found

    with unittest.mock.patch.object(ChainedSource, "get_value", get_value):
        yield


@functools.lru_cache(4096)
def source_code(template: str) -> types.CodeType:
    """Return the code of a source's expression, by torch's template: what it makes of its base."""
    return compile(template.format(BASE), "<source>", "eval")
