"""Flatten nested arguments and results into leaves, and write their structure as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Flatten a value into (leaves, structure)."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Rebuild a value from its leaves and structure."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(list(leaves), structure)


def to_text(structure: Any) -> str:
    """Write a structure as JSON. Raises NotImplementedError for a class that is not registered with a name."""
    from torch.utils import _pytree

    return _pytree.treespec_dumps(structure)


def from_text(text: str) -> Any:
    """Read a structure that `to_text` wrote. Raises NotImplementedError for a class that this process does not know."""
    from torch.utils import _pytree

    return _pytree.treespec_loads(text)
