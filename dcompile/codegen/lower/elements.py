"""Elements of traced tensors as piecewise functions of positions, by lowering's own rules.

Each operator of ATen that a function calls is lowered at once, to the body of a loop that computes one element of its
result. The body is read back as a piecewise function (`ir/piecewise.py`). Sizes may be symbols, and `torch.vmap` may
be around. An operator without a rule, or whose rule needs memory, raises UnknownElements.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from dcompile import compat
from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.dtypes import fits_a_loop
from dcompile.codegen.lower.fx_nodes import in_order, is_in_place
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.registry import RULES
from dcompile.codegen.lower.symbolic.strides import ranges_of, variables
from dcompile.compat.size_expressions import Inexpressible, size_of
from dcompile.device_traits import HOST
from dcompile.ir.index import Index, as_index, substitute, var
from dcompile.ir.nodes import Apply, Const, IndexOf, Ref, View
from dcompile.ir.piecewise import (
    COMPUTING,
    Elements,
    Leaf,
    Reads,
    Tree,
    UnknownElements,
    apply_to_indices,
    axis,
    combine,
    in_range,
    whole,
)

_TREE = "z_tree"
"""Start of a variable that stands for a piecewise function in a body."""


class ElementTracer:
    """Elements of the tensors that functions compute while `tracing()`."""

    def __init__(self) -> None:
        self.reads = Reads()
        self._known: dict[int, tuple[torch.Tensor, Elements | None]] = {}
        self._trees: dict[str, Tree] = {}
        self._decompositions = table()
        self._low = _OnlyExpressions("elements")
        self._low.positions_in_loops = True

    def tracing(self) -> AbstractContextManager[Any]:
        """Context in which operators are traced; they raise UnknownElements."""
        return compat.dispatch_watch.computing(self._traced)

    def bind(self, tensor: torch.Tensor, elements: Elements | None) -> None:
        """Set the elements of a tensor that functions are about to be called with; None for unknown ones."""
        self._known[id(tensor)] = tensor, elements  # keeps the tensor alive, so that its id stays unique

    def elements(self, tensor: torch.Tensor) -> Elements | None:
        """Return the elements of a tensor that was traced or bound."""
        return self._known.get(id(tensor), (tensor, None))[1]

    def read(self, tensor: torch.Tensor, source: Any) -> Elements | None:
        """Return elements that are reads of `source`; None for dtypes that masks do not have, or unknown sizes."""
        try:
            return self.reads.elements(source, shape_of(tensor), dtype_name(tensor.dtype))
        except (UnknownElements, Inexpressible):
            return None

    def _traced(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operator, and the elements of its results."""
        rule = RULES.get(str(op))
        if is_in_place(op) or torch.Tag.nondeterministic_seeded in op.tags:
            raise UnknownElements
        if rule is None:
            if op not in self._decompositions:
                raise UnknownElements
            with self.tracing():
                return self._decompositions[op](*args, **kwargs)
        value = op(*args, **kwargs)
        try:
            named = {name: self._argument(arg) for name, arg in kwargs.items()}
            given = in_order(op, self._argument(args), named)
            if str(op) == "aten.cumsum.default":
                self.bind(value, self._running_sum(value, *given))
                return value
            result = NotImplemented
            if fits_a_loop(op, value, given, HOST):
                result = rule.lower(self._low, value, *given, **named)
            if result is NotImplemented:
                raise UnknownElements
            for item, lazy in (
                zip(value, result, strict=True) if isinstance(result, list | tuple) else [(value, result)]
            ):
                self.bind(item, self._elements(lazy))
        except Inexpressible:
            raise UnknownElements from None
        return value

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self._lazy(arg)
        if isinstance(arg, torch.SymInt):
            return size_of(arg)
        if isinstance(arg, (torch.SymFloat, torch.SymBool)):
            raise UnknownElements
        return [self._argument(item) for item in arg] if isinstance(arg, (tuple, list)) else arg

    def _lazy(self, tensor: torch.Tensor) -> LazyTensor:
        """Return a tensor for rules; an element of an unknown one raises UnknownElements."""
        is_fake = isinstance(tensor, compat.tensors.fake_tensor_type())
        if id(tensor) not in self._known and not is_fake and tensor.numel() == 1:  # a number of the program text
            with compat.tensors.real_tensors():
                return constant(tensor.item(), shape_of(tensor), dtype_name(tensor.dtype))
        known = self.elements(tensor)

        def at(body: Body, coords: Coords) -> Ref:
            if known is None:
                raise UnknownElements
            return self._placed(body, known, coords)

        shape = shape_of(tensor) if known is None else known.shape
        return make_lazy(shape, dtype_name(tensor.dtype), at, ())

    def _placed(self, body: Body, elements: Elements, coords: Coords) -> Ref:
        """Return the element at these coordinates as a value of a body."""
        reader = _BodyReader(body, self._trees)

        def moved(*positions: Leaf) -> Tree:
            values = {name: whole(position) for name, position in zip(used, positions, strict=True)}
            return self.reads.moved(elements.tree, values, body.ranges)

        used = [name for name in map(axis, range(len(coords))) if name in self.reads.positions(elements.tree)]
        tree = elements.tree
        if coords != variables("i", elements.shape):
            tree = combine(moved, [reader.piecewise(coords[int(name[1:])]) for name in used], body.ranges)
        if isinstance(tree, Index):
            return body.index(tree, elements.dtype)
        if isinstance(tree, bool | int | float):
            return body.const(tree, elements.dtype)
        name = f"{_TREE}{len(self._trees)}"
        self._trees[name] = tree
        return body.index(var(name), elements.dtype)

    def _elements(self, tensor: LazyTensor) -> Elements:
        body = Body(ranges_of("i", tensor.shape))
        ref = body.trace(tensor, variables("i", tensor.shape))
        return Elements(tensor.shape, tensor.dtype, _BodyReader(body, self._trees).tree(ref))

    def _running_sum(self, value: torch.Tensor, x: LazyTensor, dim: int) -> Elements:
        """Return the sums along a dimension on which elements do not depend: a scan of others has no form."""
        found, dtype = self._elements(x), dtype_name(value.dtype)
        dim %= max(len(found.shape), 1)
        if value.dtype.is_floating_point or axis(dim) in self.reads.positions(found.tree):
            raise UnknownElements
        count = (*variables("i", found.shape), as_index(0))[dim] + 1
        tree = combine(lambda leaf: whole(leaf) * count, (found.tree,), found.ranges)
        return Elements(found.shape, dtype, in_range(tree, dtype, found.ranges))


class _OnlyExpressions(Lowering):
    """A lowering without memory."""

    def buffer(self, *_: Any, **__: Any) -> View:
        """Raise UnknownElements: a rule stores a tensor, or calls the library."""
        raise UnknownElements


class _BodyReader:
    """Values of a loop body as piecewise functions."""

    def __init__(self, body: Body, trees: dict[str, Tree]) -> None:
        self._body, self._trees = body, trees
        self._found: dict[Ref, Tree] = {}

    def tree(self, ref: Ref) -> Tree:
        """Return a value as a piecewise function. Raises UnknownElements."""
        if ref not in self._found:
            self._found[ref] = self._read(ref)
        return self._found[ref]

    def piecewise(self, index: Index) -> Tree:
        """Return an index in which variables may stand for piecewise functions, or for other values of the body."""
        names = [name for name in sorted(index.variables) if name[0] == "v" or name in self._trees]
        trees = [self.tree(int(name[1:])) if name[0] == "v" else self._trees[name] for name in names]
        if len(names) == 1 and index == var(names[0]):
            return trees[0]

        def replaced(*leaves: Leaf) -> Tree:
            values = {name: whole(leaf) for name, leaf in zip(names, leaves, strict=True)}
            found = substitute(index, values, self._body.ranges)
            return found if found.constant is None else found.constant

        return combine(replaced, trees, self._body.ranges)

    def _read(self, ref: Ref) -> Tree:
        ranges = self._body.ranges
        match self._body.values[ref]:
            case Const(value):
                return value
            case IndexOf(index, dtype):  # a body adds indices of int64 only
                found = self.piecewise(index)
                return in_range(found, dtype, ranges) if dtype == "int64" else found
            case Apply(op, args, dtype):
                dtypes = [self._body.dtype(arg) for arg in args]

                def applied(*leaves: Leaf) -> Tree:
                    if any(isinstance(leaf, Index) for leaf in leaves):
                        return apply_to_indices(op, leaves, dtype, ranges)
                    return _of_constants(op, leaves, dtypes, dtype)

                found = combine(applied, [self.tree(arg) for arg in args], ranges)
                return in_range(found, dtype, ranges) if op in COMPUTING else found
        raise UnknownElements


def _of_constants(op: str, leaves: tuple[Any, ...], dtypes: list[str], dtype: str) -> Leaf:
    """Return an operation's result for numbers, as a loop body folds it."""
    body = Body({})
    refs = [body.const(leaf, of) for leaf, of in zip(leaves, dtypes, strict=True)]
    value = body.values[body.cast(refs[0], dtype) if op == "cast" else body.apply(op, *refs, dtype=dtype)]
    while isinstance(value, Apply) and value.op == "cast":  # a number of 8 or 16 bits, already rounded
        value = body.values[value.args[0]]
    if not isinstance(value, Const):
        raise UnknownElements
    return value.value
