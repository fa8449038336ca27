"""Remember what symbolic sizes come to, while graphs of such sizes are traced.

Each fake tensor of symbolic sizes multiplies, adds and compares them anew, for its memory and for whether it lies in
row-major order: about 40 operations a tensor, 130,000 for a training step of a Llama of 16 layers, a quarter of the
time that tracing took. They are about a few hundred pairs of expressions.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

METHODS = (
    "_add", "_sub", "_mul", "_eq", "_ne", "_gt", "_lt", "_ge", "_le", "_and_", "_or_", "_sym_max", "_sym_min",
)  # fmt: skip
"""Operations of `SymNode` that depend on their two expressions alone: not the remainder, which asks for ranges."""
NUMBERS = (int, bool)
"""What a size is in the batch that is traced."""


MARK = "_dcompile_remembers"


@contextlib.contextmanager
def remembered_arithmetic() -> Iterator[None]:
    """Have equal operations on symbolic sizes of one shape environment return equal results.

    Within itself (Dynamo's tracing calls AOTAutograd's) it changes nothing.
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
        # what is recorded as a step of a graph is recorded each time
        if type(node._hint) not in NUMBERS or type(other._hint) not in NUMBERS or get_proxy_mode():
            return own(node, other)
        environment = node.shape_env
        if getattr(environment, "_translation_validation_enabled", False):
            return own(node, other)
        # counts what has become known of symbols, in whose place others may stand; torch 2.11 counts nothing
        version = getattr(environment, "_replacements_version_counter", None)
        left, right = (node.expr, other.expr) if version is None else (node._expr, other._expr)
        key = (id(environment), version, node.pytype, left, other.pytype, right)
        found = known.get(key)
        if found is None:  # the result keeps the environment, so that its number stays its own
            found = known[key] = own(node, other)
        return _twin(found)

    setattr(operation, MARK, True)
    return operation


def _twin(node: Any) -> Any:
    """Return an equal node. Tracers know values by their nodes: a shared one takes what a tangent computes for it."""
    twin = object.__new__(type(node))
    twin.__dict__.update(node.__dict__)
    return twin
