"""Memoize arithmetic on symbolic sizes while graphs with such sizes are traced.

Each fake tensor of symbolic sizes multiplies, adds and compares them, for its storage size and for row-major order.
That is about 40 operations a tensor, and 130,000 for a training step of a Llama with 16 layers: a quarter of the
tracing time. They concern only a few hundred pairs of expressions.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

METHODS = (
    "_add", "_sub", "_mul", "_eq", "_ne", "_gt", "_lt", "_ge", "_le", "_and_", "_or_", "_sym_max", "_sym_min",
)  # fmt: skip
"""Operations of `SymNode` that depend only on their two expressions. The remainder also reads ranges."""
NUMBERS = (int, bool)
"""Types of a size's hint, its value in the traced batch."""


MARK = "_dcompile_remembers"


@contextlib.contextmanager
def remembered_arithmetic() -> Iterator[None]:
    """Memoize operations on symbolic sizes, for each shape environment.

    Nested uses change nothing: Dynamo's tracing calls AOTAutograd's.
    """
    from torch.fx.experimental.sym_node import SymNode

    theirs = {name: own for name in METHODS if (own := getattr(SymNode, name, None)) is not None}
    if any(hasattr(own, MARK) for own in theirs.values()):
        yield
        return
    with contextlib.ExitStack() as patches:
        for name, own in theirs.items():
            patches.enter_context(unittest.mock.patch.object(SymNode, name, _remembering(own)))
        yield


def _remembering(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    known: dict[Any, Any] = {}

    def operation(node: Any, other: Any) -> Any:
        # a graph under construction needs a node for each operation
        if type(node._hint) not in NUMBERS or type(other._hint) not in NUMBERS or get_proxy_mode():
            return own(node, other)
        environment = node.shape_env
        if getattr(environment, "_translation_validation_enabled", False):
            return own(node, other)
        # counts replacements of symbols, which change expressions; torch 2.11 has no counter
        version = getattr(environment, "_replacements_version_counter", None)
        left, right = (node.expr, other.expr) if version is None else (node._expr, other._expr)
        key = (id(environment), version, node.pytype, left, other.pytype, right)
        found = known.get(key)
        if found is None:  # the result keeps the environment alive, so that its id stays unique
            found = known[key] = own(node, other)
        return _twin(found)

    setattr(operation, MARK, True)
    return operation


def _twin(node: Any) -> Any:
    """Return an equal node, since tracers identify values by node: a shared one could come from a tangent."""
    twin = object.__new__(type(node))
    twin.__dict__.update(node.__dict__)
    return twin
