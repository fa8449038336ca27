"""Definition of a setting: a field with help, its option and variable names, and the check of its value."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from dcompile.errors import OptionError

TRUTH_VALUES = ("0", "1", "false", "true", "")
"""Texts of truth values, in lower case."""


def setting(default: Any, text: str, *, in_key: bool = True, option: str = "", idle: str = "") -> Any:
    """Define a field of `Config`: default, help, whether kernels depend on it, and its option name if that has a dot.

    `idle`: why an option that torch.compile knows has no effect here. The docs and the receipt repeat it.
    """
    facts = {"help": text, "in_key": in_key and not idle, "option": option, "idle": idle}
    return dataclasses.field(default=default, metadata=facts)


def variable_name(name: str) -> str:
    """Environment variable of a field."""
    return f"DCOMPILE_{name.upper()}"


def option_name(f: dataclasses.Field[Any]) -> str:
    """Name of a field in options={...}; some of torch's have a dot."""
    return str(f.metadata["option"] or f.name)


def suggestion(name: str, valid: Iterable[str], title: str = "") -> str:
    """End of a message about an unknown name: `, did you mean 'dump'?`, or, if nothing is near, `title` and all names.

    Without a title, it is empty if nothing is near.
    """
    known = [*valid]
    if near := difflib.get_close_matches(name, known, n=1):
        return f", did you mean {near[0]!r}?"
    return f"; {title}: {', '.join(known)}" if title else ""


def check_type(name: str, hint: Any, value: Any) -> Any:
    """Return `value` converted to the field's type; strings are parsed as from the environment.

    Raises OptionError.
    """
    if typing.get_origin(hint) in (Literal, types.UnionType):
        if value not in typing.get_args(hint):
            near = suggestion(str(value), map(str, typing.get_args(hint)), "valid values")
            raise OptionError(f"dcompile: unknown value {name}={value!r}{near}")
        return value
    if hint is bool and isinstance(value, str):
        if value.lower() not in TRUTH_VALUES:
            raise OptionError(f"dcompile: {name}={value!r} is not a truth value (use 0 or 1)")
        return value.lower() in ("1", "true")
    if hint is float:
        return _fraction(name, value)
    if hint is int and isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    if not isinstance(value, hint):
        raise OptionError(f"dcompile: {name}={value!r} should be {hint.__name__}, not {type(value).__name__}")
    return value


def _fraction(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if isinstance(value, bool) or not 0 <= found <= 1:
        raise OptionError(f"dcompile: {name}={value!r} should be a number from 0 to 1")
    return found


def idle_text(f: dataclasses.Field[Any]) -> str:
    return f" Accepted without effect: {f.metadata['idle']}." if f.metadata["idle"] else ""


def chunk_count(value: Any) -> int | str:
    """A number of chunks of a loss, or `auto`. Raises OptionError."""
    if value == "auto":
        return "auto"
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0 or number == 1:
        raise OptionError(
            f"dcompile: chunked_loss={number!r} should be 'auto', or a number of parts, at least 2, or 0 for none"
        )
    return number


def size_bounds(value: Any) -> str:
    """Bounds of size classes, as text in one form. Raises OptionError unless they are sizes."""
    if value is None or value in ("", "auto"):
        return value or ""
    words = value.split(",") if isinstance(value, str) else value
    words = list(words) if isinstance(words, Iterable) else [words]
    if any(isinstance(word, bool) or not str(word).strip().isdigit() or int(word) < 2 for word in words) or not words:
        raise OptionError(
            f"dcompile: size_classes={value!r} should be sizes of at least 2, such as [512, 1024, 2048], or 'auto'"
        )
    return ",".join(map(str, sorted({int(word) for word in words})))
