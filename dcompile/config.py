"""Every setting once: default, help, environment name, whether it is in the cache key."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dcompile.errors import OptionError

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {},
}
"""Modes of torch.compile and the options each stands for. On CPU all four run the same program."""


def setting(default: Any, text: str, *, in_key: bool = True, user: bool = True) -> Any:
    """A field of `Config`: default, help, whether kernels depend on it, whether options={...} may set it."""
    return dataclasses.field(default=default, metadata={"help": text, "in_key": in_key, "user": user})


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Each is an option of `dcompile.compile` and an environment variable, `DCOMPILE_` and its name."""

    kernels: Literal["auto", "aten"] = setting("auto", "aten leaves every kernel to ATen: for debugging communication.")
    distributed: Literal["auto", "stock"] = setting("auto", "stock leaves DDP's own reducer on.")
    receipt: bool = setting(True, "Print the receipt on rank 0 after the first compiled step.", in_key=False)
    log: str = setting("", "Log channels, comma-separated: passes,overlap,kernels,memory.", in_key=False)
    dump: str = setting("", "Directory for programs, kernels and the receipt.", in_key=False)
    verify: bool = setting(False, "Verify after each pass; compare collective order across ranks.", in_key=False)
    skip: str = setting("", "Passes to leave out, comma-separated.")
    until: str = setting("", "Stop after this pass.")
    cache_dir: str = setting("", "Kernel cache; default: dcompile under XDG_CACHE_HOME or ~/.cache.", in_key=False)
    compile_timeout_s: int = setting(300, "Longest time one compiler process may take, in seconds.", in_key=False)

    @classmethod
    def make(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Config:
        """Defaults, then environment, then mode, then options. Raises OptionError naming the valid ones."""
        if mode is not None and options:
            raise OptionError("dcompile: give either mode or options, not both (a mode is a set of options)")
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"dcompile: options must be a dict, not {type(options).__name__}")
        chosen = dict(options or {})
        mode = chosen.pop("mode", mode) or "default"
        if mode not in MODES:
            raise OptionError(f"dcompile: unknown mode {mode!r}; valid modes: {', '.join(MODES)}")
        unknown = [name for name in chosen if name not in _fields()]
        if unknown:
            valid = ", ".join(("mode", *_fields()))
            raise OptionError(f"dcompile: unknown option {unknown[0]!r}; valid options: {valid}")
        values = {**_from_environment(), **MODES[mode], **chosen}
        return cls(**{name: _checked(name, value) for name, value in values.items()})

    def key(self) -> str:
        """Text of all settings that generated code depends on."""
        return ",".join(f"{name}={getattr(self, name)}" for name, f in _fields().items() if f.metadata["in_key"])


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Config)}


def _from_environment() -> dict[str, str]:
    names = {f"DCOMPILE_{name.upper()}": name for name in _fields()}
    return {names[variable]: value for variable, value in os.environ.items() if variable in names}


def _checked(name: str, value: Any) -> Any:
    """`value` as the type that the field declares; strings are read as the environment writes them."""
    hint = typing.get_type_hints(Config)[name]
    if typing.get_origin(hint) in (Literal, types.UnionType):
        if value not in typing.get_args(hint):
            valid = ", ".join(map(str, typing.get_args(hint)))
            raise OptionError(f"dcompile: {name}={value!r} is not one of: {valid}")
        return value
    if hint is bool and isinstance(value, str):
        if value.lower() not in ("0", "1", "false", "true", ""):
            raise OptionError(f"dcompile: {name}={value!r} is not a truth value (use 0 or 1)")
        return value.lower() in ("1", "true")
    if hint is int and isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value)
    if not isinstance(value, hint):
        raise OptionError(f"dcompile: {name}={value!r} should be {hint.__name__}, not {type(value).__name__}")
    return value


def option_names() -> list[str]:
    """Names accepted in options={...}."""
    return ["mode", *_fields()]


def describe() -> list[tuple[str, str, str]]:
    """(name, default, help) of every setting: the docs table."""
    return [(name, repr(f.default), f.metadata["help"]) for name, f in _fields().items()]
