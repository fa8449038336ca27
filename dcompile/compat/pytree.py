"""Flatten nested arguments and results into leaves, and write their structure as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Flatten a value into (leaves, structure)."""
    return _pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Rebuild a value from its leaves and structure."""
    return _pytree.tree_unflatten(list(leaves), structure)


def map_only(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Replace the leaves of one class in a value."""
    return _pytree.tree_map_only(kind, function, value)


@functools.cache
def _name_return_types() -> None:
    """Name the tuples that torch's operators return, as torch 2.15 does: an older one cannot write them as JSON."""
    for name, found in vars(torch.return_types).items():
        known = _pytree.SUPPORTED_SERIALIZED_TYPES.get(found) if isinstance(found, type) else None
        if known is not None and known.serialized_type_name == _pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            full = f"torch.return_types.{name}"
            _pytree.SUPPORTED_SERIALIZED_TYPES[found] = _pytree._SerializeNodeDef(found, full, None, None)
            _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[full] = found


def to_text(structure: Any) -> str:
    """Write a structure as JSON. Raises NotImplementedError for a class that is not registered with a name."""
    _name_return_types()
    return _pytree.treespec_dumps(structure)


def from_text(text: str) -> Any:
    """Read a structure that `to_text` wrote. Raises NotImplementedError for a class that this process does not know."""
    _name_return_types()
    return _pytree.treespec_loads(text)
