"""Elements of a captured graph's tensors as symbolic functions of their positions.

`arange(n)[None] <= arange(n)[:, None]` has the element `i1 <= i0` for any n. The analysis covers operations that make
constant tensors, compare them, combine them element by element, and move elements. It goes through bodies of
higher-order operators, and sizes may be symbolic. Others are unknown. torch itself computes constants, one element for
all, so rounding and dtypes are torch's.

Elements of inputs, or of another operation's result, are reads: variables, if they are booleans or integers. A padding
mask, lengths and numbers of documents are inputs. Their values are unknown, but it is known where a mask reads them:
`documents[b, q] == documents[b, k]` has two reads of one tensor. If the positions of a tensor's elements change, as in
a view or an index, those of the reads in them change too.

"Raises Unknown" stands for the exception UnknownElements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.ir.index import Index, Ranges, Size, as_index, as_size, bounds, is_symbol, substitute, var
from dcompile.ir.piecewise import Leaf, Test, Tree, combine, replace_variables, variables

DTYPES = (torch.bool, torch.int64, torch.int32)
"""Dtypes whose elements may be read: those of masks, lengths and numbers."""
_PREFIX = "z_read"
"""Start of a read's variable. By its first letter, an integer of unknown sign."""


@dataclass(frozen=True)
class Read:
    """An element of a node's tensor, at a position in each dimension."""

    node: Node
    positions: tuple[Index, ...]


class Reads:
    """All reads of one analysis, each with its variable. Equal reads share theirs."""

    def __init__(self) -> None:
        self._names: dict[Read, str] = {}
        self._reads: dict[str, Read] = {}

    def element(self, read: Read, dtype: torch.dtype) -> Tree:
        """Return a read as an element: an index, or a test of one for a boolean tensor."""
        index = var(self._name(read))
        return Test(index - as_index(1), True, False) if dtype == torch.bool else index

    def found(self, name: str) -> Read | None:
        """Return the read that a variable stands for; None for other variables."""
        return self._reads.get(name)

    def positions(self, tree: Tree) -> frozenset[str]:
        """Return the variables of positions that a tree depends on, directly or by reads; sizes are no positions."""
        names = set[str]()
        for name in variables(tree):
            read = self._reads.get(name)
            found = {name} if read is None else {n for index in read.positions for n in index.variables}
            names |= {n for n in found if not is_symbol(n)}
        return frozenset(names)

    def replace(self, tree: Tree, values: Mapping[str, Index], ranges: Ranges) -> Tree:
        """Replace variables of positions in a tree and in its reads; `ranges` are those of the new variables."""
        moved = dict(values)
        for name in sorted(variables(tree)):
            read = self._reads.get(name)
            if read is not None:
                positions = tuple(substitute(index, values, ranges) for index in read.positions)
                moved[name] = var(self._name(Read(read.node, positions)))
        return replace_variables(tree, moved, ranges)

    def _name(self, read: Read) -> str:
        name = self._names.setdefault(read, f"{_PREFIX}{len(self._names)}")
        self._reads[name] = read
        return name


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


def number(value: Any) -> Leaf:
    """Return a number of the graph as an element. Raises Unknown."""
    if isinstance(value, bool | int | float):
        return value
    return leaf_of(size_of(value))


def leaf_of(size: Size) -> Leaf:
    """Return a size as an element."""
    return size if isinstance(size, int) or size.constant is None else size.constant


def position_in(dim: int, shape: Sequence[Size]) -> Index:
    """Return the position in a dimension: its variable, or 0 for size 1."""
    return as_index(0) if shape[dim] == 1 else var(axis(dim))


def check_element(operation: Operation, tree: Tree) -> Elements:
    """Return the result, if its dtype represents the element exactly. Raises Unknown."""
    return operation.made(in_range(tree, operation.dtype, operation.ranges))


def in_range(tree: Tree, dtype: torch.dtype, ranges: Ranges) -> Tree:
    """Return the tree, if a dtype represents each of its indices exactly. Raises Unknown."""

    def fitting(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Index):
            if not fits(leaf, dtype, ranges):
                raise UnknownElements
            leaf = leaf if leaf.constant is None else leaf.constant
        if isinstance(leaf, int) and not isinstance(leaf, bool) and dtype.is_floating_point:
            return float(leaf)
        return leaf

    return combine(fitting, (tree,), ranges)


def single(value: Any, dtype: torch.dtype, dims: int) -> torch.Tensor:
    """Make a tensor of one element; it has no dimensions if `dims` is 0, since type promotion depends on that."""
    return torch.tensor(value, dtype=dtype, device="cpu").reshape((1,) if dims else ())


def convert_element(leaf: Leaf, dtype: torch.dtype, ranges: Ranges, before: torch.dtype | None = None) -> Tree:
    """Convert an element of the dtype `before` to `dtype`, as torch does. Raises Unknown."""
    if not isinstance(leaf, Index):
        if isinstance(leaf, float) and not math.isfinite(leaf) and not dtype.is_floating_point and dtype != torch.bool:
            raise UnknownElements  # the result depends on the processor
        return single(leaf, before or dtype, 0).to(dtype).item()
    return equal(leaf, 0, yes=False) if dtype == torch.bool else in_range(leaf, dtype, ranges)


def whole(value: Any) -> Index:
    """Return a whole number as an index. Raises Unknown for any other value."""
    if isinstance(value, Index):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer()):
        return as_index(int(value))
    raise UnknownElements


def equal(one: Any, other: Any, yes: bool = True) -> Tree:
    """Return `yes` where two numbers are equal, `not yes` elsewhere. Raises Unknown."""
    difference = whole(one) - whole(other)
    return Test(difference, Test(difference * -1, yes, not yes), not yes)


def dim_of(dim: Any, dims: Sequence[Any]) -> int:
    """Return a dimension relative to the first one. Raises Unknown."""
    if not isinstance(dim, int) or not -len(dims) <= dim < len(dims):
        raise UnknownElements
    return dim % len(dims)


def same_dtype(operation: Operation) -> Elements:
    """Return the first operand's elements, if the result has its dtype. Raises Unknown."""
    source = operation.first
    if source.dtype != operation.dtype:
        raise UnknownElements
    return source
