"""Elements of a captured graph's tensors as symbolic functions of their positions.

`arange(n)[None] <= arange(n)[:, None]` has the element `i1 <= i0` for any n. The analysis covers operations that make
constant tensors, compare them, combine them element by element, and move elements. It goes through bodies of
higher-order operators, and sizes may be symbolic. Elements of inputs, or of another operation's result, are variables
too (`reads.py`), if they are booleans or integers. Others are unknown. torch itself computes constants, one element for
all, so rounding and dtypes are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.capture.passes.dynamo.symbolic_elements.reads import Reads
from dcompile.ir.index import Index, Ranges, Size, as_index, as_size, bounds, var
from dcompile.ir.piecewise import Tree


class UnknownElements(Exception):
    """No rule determines a value."""


@dataclass(frozen=True)
class Elements:
    """A tensor by its element at position (i0, i1, ...), which may also depend on positions in batches of `vmap`."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    tree: Tree
    batches: tuple[tuple[str, Size], ...] = ()
    """Variables of `vmap`'s batches, and their sizes."""

    @property
    def ranges(self) -> dict[str, Size]:
        """Size of each variable's range."""
        return {axis(n): size for n, size in enumerate(self.shape)} | dict(self.batches)


def axis(number: int) -> str:
    """Return the variable of the position in a dimension."""
    return f"i{number}"


def size_of(value: Any) -> Size:
    """Return an int, a SymInt or a node of either as a size, without adding a guard. Raises UnknownElements."""
    if isinstance(value, Node):
        value = value.meta.get("example_value")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, torch.SymInt):
        return as_size(_index_of(compat.sizes.size_expression(value), value.node.shape_env))
    raise UnknownElements


def _index_of(expression: Any, shape_env: Any) -> Index:
    """Convert an expression: sums and products of size symbols; any other part becomes a symbol named by its text."""
    if expression.is_Integer:
        return as_index(int(expression))
    head = type(expression).__name__
    if head in ("Add", "Mul"):
        total = as_index(0 if head == "Add" else 1)
        for part in (_index_of(arg, shape_env) for arg in expression.args):
            total = total + part if head == "Add" else total * part
        return total
    least = compat.sizes.least_value(shape_env, expression) if expression.is_Symbol else None
    return var(f"{'z' if least is None or least < 0 else 's' if least >= 2 else 'u'}_{expression}")


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """Return the sizes of a traced tensor. Raises UnknownElements."""
    return tuple(size_of(size) for size in value.shape)


def sizes_of(node: Any) -> tuple[Size, ...]:
    """Return the sizes of a node's tensor, to be compared without guards; () if it is no tensor or they are unknown."""
    value = value_of(node)
    try:
        return shape_of(value) if isinstance(value, torch.Tensor) else ()
    except UnknownElements:
        return ()


def value_of(node: Any) -> Any:
    """Return the traced value of a node, or None."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def name_of(node: Node) -> str:
    """Return the name of a node's operation, as a function, a method or a special method: `__eq__` is "eq"."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.removeprefix("__").removesuffix("__") if name.startswith("__") else name


def is_of_torch(node: Node) -> bool:
    """Does a node call a tensor's method, a Python operator or a function of torch, not another one of that name?"""
    if node.op != "call_function":
        return node.op == "call_method"
    module = str(getattr(node.target, "__module__", None) or "torch")  # some functions in C++ have none
    if module.startswith(("torch.ops.", "torch._ops.")):
        return module.endswith(".aten")
    return module in ("_operator", "torch") or module.startswith("torch.")


@dataclass(frozen=True)
class Operation:
    """A node with the elements of its operands."""

    node: Node
    known: Mapping[Node, Elements]
    reads: Reads

    @property
    def shape(self) -> tuple[Size, ...]:
        """Shape of the result."""
        return shape_of(value_of(self.node))

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the result."""
        found = value_of(self.node).dtype
        assert isinstance(found, torch.dtype), f"{self.node} has no dtype"
        return found

    @property
    def first(self) -> Elements:
        """Elements of the first operand: the tensor that is viewed or converted."""
        return self.elements(self.node.args[0] if self.node.args else self.node.kwargs.get("input"))

    def elements(self, argument: Any) -> Elements:
        """Return the elements of an argument. Raises UnknownElements if it is no tensor."""
        if isinstance(argument, Node) and argument in self.known:
            return self.known[argument]
        raise UnknownElements

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument, positional or by name."""
        return self.node.args[place] if len(self.node.args) > place else self.node.kwargs.get(name, default)

    @property
    def ranges(self) -> dict[str, Size]:
        """Size of the range of each of the result's variables."""
        batches = batches_of(list(self.known.values()))
        return {axis(n): size for n, size in enumerate(self.shape)} | dict(batches)

    def at(self, source: Elements, positions: Mapping[int, Index], ranges: Ranges | None = None) -> Tree:
        """Return the element of `source` at these positions, by dimension, as a tree over positions in the result.

        `ranges` are those of the variables, if these are no positions in the result. Raises UnknownElements if the
        element depends on a dimension without a position.
        """
        given = {**positions, **{n: as_index(0) for n, size in enumerate(source.shape) if size == 1}}
        values = {axis(n): index for n, index in given.items()}
        if not self.reads.positions(source.tree) <= values.keys() | dict(source.batches).keys():
            raise UnknownElements
        return self.reads.replace(source.tree, values, self.ranges if ranges is None else ranges)

    def broadcast(self, source: Elements) -> Tree:
        """Return the element at the result's position of `source`, broadcast to the result's shape."""
        shape = self.shape
        before = len(shape) - len(source.shape)
        same = {n: before + n for n, size in enumerate(source.shape) if before >= 0 and size == shape[before + n]}
        return self.at(source, {n: var(axis(place)) for n, place in same.items()})

    def made(self, tree: Tree) -> Elements:
        """Return the result with this element, and with the batches of all operands."""
        return Elements(self.shape, self.dtype, tree, batches_of(list(self.known.values())))


def batches_of(sources: Sequence[Elements]) -> tuple[tuple[str, Size], ...]:
    """Return the batches of `vmap` of all these tensors."""
    return tuple(sorted({name: size for source in sources for name, size in source.batches}.items()))


def fits(index: Index, dtype: torch.dtype, ranges: Ranges) -> bool:
    """Does a dtype provably represent every value of an index exactly?"""
    least, greatest = bounds(index, ranges)
    if dtype == torch.int64 and (least is None or greatest is None):
        # symbols are sizes, below 2**31, and reads are positions, lengths or numbers of documents, which are as small:
        # a linear form of these with small coefficients is below 2**62
        linear = all(len(monomial) <= 1 for monomial, _ in index.terms) and index.is_affine
        return linear and sum(abs(number) for _, number in index.terms) < 1 << 30
    if dtype == torch.bool or least is None or greatest is None:
        return False
    if dtype.is_floating_point:
        return max(-least, greatest) <= 2 / torch.finfo(dtype).eps  # each whole number up to here
    return torch.iinfo(dtype).min <= least and greatest <= torch.iinfo(dtype).max
