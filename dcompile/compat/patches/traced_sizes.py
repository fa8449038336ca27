"""Sizes and strides of traced tensors: arithmetic on symbols, views of symbolic sizes, and results of an index.

**Arithmetic** on symbolic sizes is memoized. Each fake tensor of symbolic sizes multiplies, adds and compares them, for
its storage size and for row-major order. That is about 40 operations a tensor, and 130,000 for a training step of a
Llama with 16 layers: a quarter of the tracing time. They concern only a few hundred pairs of expressions.

**Views** get the requested sizes, with few guards. torch 2.13 computes the sizes of a view by merging and splitting
dimensions, and guards on each comparison. Its result equals the requested sizes only by such a guard. A plane of `x`
pixels cut into windows by `view(x // 2, 2)` becomes `x // 2` by `x // (x // 2)`. Each view of a view makes the
expressions longer. Tracing a training step of a Swin with three layers took 360 s of CPU time, and takes 20 s with this
patch (docs/lab/runtime.md, R6). A row-major tensor can be viewed with any sizes of as many elements, and the view is
row-major. torch itself uses that where sizes are data-dependent.

**An index** that is not row-major changes the strides of `x[i]`. In tracing, torch derives them from those of `x`
alone. Its kernels also use those of the index: rows of `table[i.t()]` are stored in the order of `i`. aot_eager calls
these kernels, whatever tracing assumed. A compiled program allocates its memory by the traced strides, and everything
computed from `x[i]` follows.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import _prims_common as prims
from torch._prims_common import infer_size, is_contiguous_or_false, make_contiguous_strides_for
from torch._subclasses import fake_impls, fake_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

METHODS = (
    "_add", "_sub", "_mul", "_eq", "_ne", "_gt", "_lt", "_ge", "_le", "_and_", "_or_", "_sym_max", "_sym_min",
)  # fmt: skip
"""Operations of `SymNode` that depend only on their two expressions. The remainder also reads ranges."""
_NUMBERS = (int, bool)
"""Types of a size's hint, its value in the traced batch."""
_MARK = "_dcompile_remembers"


@contextlib.contextmanager
def remembered_arithmetic() -> Iterator[None]:
    """Memoize operations on symbolic sizes, for each shape environment.

    Nested uses change nothing: Dynamo's tracing calls AOTAutograd's.
    """
    theirs = {name: own for name in METHODS if (own := getattr(SymNode, name, None)) is not None}
    if any(hasattr(own, _MARK) for own in theirs.values()):
        yield
        return
    with contextlib.ExitStack() as patches:
        for name, own in theirs.items():
            patches.enter_context(unittest.mock.patch.object(SymNode, name, _remembering(own)))
        yield


def _remembering(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[Any, Any] = {}

    def operation(node: Any, other: Any) -> Any:
        # a graph under construction needs a node for each operation
        if type(node._hint) not in _NUMBERS or type(other._hint) not in _NUMBERS or get_proxy_mode():
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
        return _equal_node(found)

    setattr(operation, _MARK, True)
    return operation


def _equal_node(node: Any) -> Any:
    """Return an equal node, since tracers identify values by node: a shared one could come from a tangent."""
    twin = object.__new__(type(node))
    twin.__dict__.update(node.__dict__)
    return twin


def views_as_asked() -> contextlib.AbstractContextManager[Any]:
    """View dense tensors of symbolic sizes with exactly the requested sizes, while graphs are traced.

    Nested uses (Dynamo's tracing calls AOTAutograd's) change nothing.
    """
    known: dict[Any, Callable[..., Any]] = getattr(fake_impls, "op_implementations_dict", {})
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    theirs = {op: known[op] for op in views if op in known and not isinstance(known[op], _View)}
    return unittest.mock.patch.dict(known, {op: _View(own) for op, own in theirs.items()})


class _View:
    """torch's own implementation of a view, with a shortcut."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, mode: Any, func: Any, x: Any, *shape: Any, **more: Any) -> Any:
        if more or len(shape) != 1 or not _is_plain_view(x, shape[0]):
            return self._own(mode, func, x, *shape, **more)
        _guard_on_quotients(x, shape[0])
        _guard_on_outer_sizes(x, shape[0])
        asked = infer_size(tuple(shape[0]), x.numel())  # checks the number of elements
        return x.as_strided(asked, make_contiguous_strides_for(asked))


def _is_plain_view(x: Any, shape: Any) -> bool:
    """Whether sizes are symbols with known hints, and the tensor is row-major."""
    symbolic = [size for size in (*x.shape, *shape) if isinstance(size, torch.SymInt)]
    return bool(symbolic and x.ndim and shape) and all(map(_has_hint, symbolic)) and _is_row_major(x)


def _has_hint(size: Any) -> bool:
    """Whether a size's value during tracing is known: it is not data-dependent."""
    known = _hints(size.node.shape_env)
    return all(symbol in known for symbol in size.node.expr.free_symbols)


def _hints(shape_env: Any) -> Any:
    return shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val


def _is_row_major(x: Any) -> bool:
    """Whether a tensor is known to be row-major, including dimensions of one element."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not is_contiguous_or_false(x):
        return False
    expected = make_contiguous_strides_for(x.shape)
    single = [place for place, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    return all(statically_known_true(x.stride(place) == expected[place]) for place in single)


def _guard_on_quotients(x: Any, shape: Any) -> None:
    """Where a size is a quotient, `x // 2`, guard on a zero remainder, if it is zero.

    Only then the numbers of elements are equal. torch can then simplify `2 * (x // 2)`.
    """
    import sympy  # type: ignore[import-untyped, unused-ignore]
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.utils._sympy.functions import FloorDiv, Mod

    if any(isinstance(size, int) and size < 0 for size in shape) or statically_known_true(x.numel() == prod(shape)):
        return
    for size in shape:
        for factor in sympy.Mul.make_args(size.node.expr) if isinstance(size, torch.SymInt) else ():
            if isinstance(factor, FloorDiv) and factor.args[1].is_Integer:
                rest = Mod(*factor.args)
                if rest.xreplace(_hints(size.node.shape_env)) == 0:
                    size.node.shape_env.evaluate_expr(sympy.Eq(rest, 0))


def _guard_on_outer_sizes(x: Any, shape: Any) -> None:
    """Where one size is left open (-1), guard on outer sizes that stay and whose hints are equal.

    The open size is a quotient by the other sizes. If a batch is `a` in one tensor and `b` in the next, all later sizes
    would contain `a * n // b`, which is `n`.
    """
    import sympy
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    given = [size for size in shape if isinstance(size, torch.SymInt) or size >= 0]
    if len(given) == len(shape) or statically_known_true(x.numel() % prod(given) == 0):
        return
    env = next(size.node.shape_env for size in (*x.shape, *shape) if isinstance(size, torch.SymInt))
    for pair in zip(x.shape, shape, strict=False):
        equal = sympy.Eq(*(size.node.expr if isinstance(size, torch.SymInt) else size for size in pair))
        if not equal.xreplace(_hints(env)):
            return
        if equal != sympy.true:
            env.evaluate_expr(equal)


@contextlib.contextmanager
def strides_of_indices() -> Iterator[None]:
    """Give `x[i]` the strides of the kernels' results while graphs are traced.

    Nested uses (Dynamo's tracing calls AOTAutograd's) change nothing.
    """
    known: dict[Any, Callable[..., Any]] = getattr(fake_impls, "op_implementations_dict", {})
    op = torch.ops.aten.index.Tensor
    own = known.get(op)
    if own is None or isinstance(own, _Index):
        yield
        return
    with unittest.mock.patch.dict(known, {op: _Index(own)}), _uncached(op):
        yield


@contextlib.contextmanager
def _uncached(op: Any) -> Iterator[None]:
    """Bypass the fake tensors' cache of results, which all modes share, so that other backends are not affected."""
    own = fake_tensor.FakeTensorMode._cache_key

    def key(mode: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if func is op and not _has_torchs_strides(args[1]):
            raise fake_tensor._BypassDispatchCache("strides of an index")
        return own(mode, state, func, args, kwargs)

    with unittest.mock.patch.object(fake_tensor.FakeTensorMode, "_cache_key", key):
        yield


class _Index:
    """torch's own implementation of `x[indices]`, with corrected strides of the result."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, mode: Any, func: Any, x: Any, indices: Sequence[Any], **more: Any) -> Any:
        if more or _has_torchs_strides(indices):
            return self._own(mode, func, x, indices, **more)
        with mode:
            common = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))  # type: ignore[no-untyped-call]
            # otherwise torch uses the shape of an index without dimensions for all of them
            spread = [None if index is None else index.expand(common) for index in indices]
            found = self._own(mode, func, x, spread)
            return found.new_empty_strided(found.shape, _strides_of_index(x, spread, found.shape))


def _has_torchs_strides(indices: Sequence[Any]) -> bool:
    """Whether torch's strides are right: row-major indices of one shape; or masks, which are read as one row."""
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8, torch.int8) for index in given):
        return True
    single = any(isinstance(size, int) and size == 1 for index in given for size in index.shape)
    alike = all(index.ndim and index.shape == given[0].shape for index in given)
    return alike and not single and all(map(is_contiguous_or_false, given))


def _strides_of_index(x: Any, indices: Sequence[Any], shape: Any) -> Any:
    """Strides of `x[indices]` by torch's iterator, from `x` and the indices with the result's dimensions."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    read = [indices[dim].to(torch.int64) for dim in dims]
    if x.device.type == "cuda" and any(index.stride() != read[0].stride() for index in read):
        read = [index.contiguous() for index in read]  # its kernel requires that
    start = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    others = [x.stride(dim) for dim in range(x.ndim) if dim not in dims]
    seen = x.as_strided(shape, (*others[:start], *[0] * read[0].ndim, *others[start:]))
    before, after = (1,) * start, (1,) * (len(others) - start)
    read = [index.reshape((*before, *index.shape, *after)).expand(shape) for index in read]
    order, *_ = prims.compute_elementwise_output_logical_to_physical_perm(seen, *read)
    dense = prims.make_contiguous_strides_for([shape[dim] for dim in order])
    return [dense[order.index(dim)] for dim in range(len(shape))]
