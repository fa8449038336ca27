"""Attention under a predicate as torch operators: no mask in memory, and no scores where all pairs are masked.

`torch.ops.dcompile_attention.forward` and its backward serve CPUs. Queries are taken in blocks. A block calls ATen's
kernel with the keys between the first and the last one that any of its queries may attend to. A block's part of the
mask is computed when it is needed. `predicate` is the text of a `Predicate`; `reads` are the tensors that it reads,
one for each read, and `sizes` the values of its sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dcompile.compat import attention
from dcompile.ir.index import Index, evaluate_on
from dcompile.ir.piecewise import Test, Tree
from dcompile.ir.predicate import BATCH, HEAD, KEY, QUERIES_AT_ONCE, QUERY, Predicate, parse_predicate
from dcompile.operators.own_operators import Functions, define_operators

NAMESPACE = "dcompile_attention"

_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor[] reads, SymInt[] sizes, str predicate, float scale"
_SCHEMAS = (
    f"forward({_GIVEN}) -> (Tensor, Tensor)",
    f"backward(Tensor grad, Tensor out, Tensor logsumexp, {_GIVEN}) -> (Tensor, Tensor, Tensor)",
)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reads: Sequence[torch.Tensor],
    sizes: Sequence[int],
    predicate: str,
    scale: float,
) -> torch.Tensor:
    """Attention of (batch, heads, queries, width) to keys and values, for allowed pairs; 0 where a row has none.

    Operands are converted to autocast's dtype where autocast is on, as those of `scaled_dot_product_attention` are.
    """
    operands = autocast(query, key, value)
    return torch.ops.dcompile_attention.forward(*operands, [*reads], [*sizes], predicate, scale)[0]  # type: ignore[no-any-return]


def autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert operands as autocast does for operations in lower precision."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    return query, key, value


# --- predicates on tensors --------------------------------------------------------------------------------------------


def allowed(
    predicate: Predicate, places: Mapping[str, Any], reads: Sequence[torch.Tensor], sizes: Sequence[Any]
) -> torch.Tensor | bool:
    """Return whether pairs are allowed: a boolean tensor of the places' common shape, or one value for all.

    `places` has integer tensors for `b`, `h`, `q` and `k`, which broadcast.
    """
    values: dict[str, Any] = {**places, **dict(zip(predicate.sizes, sizes, strict=True))}
    for number, (tensor, positions) in enumerate(zip(reads, predicate.reads, strict=True)):
        values[f"z{number}"] = element(tensor, [evaluate_on(index, values) for index in positions])
    found: torch.Tensor | bool = _evaluated(predicate.tree, values)
    return found


def element(tensor: torch.Tensor, positions: Sequence[Any]) -> torch.Tensor:
    """Return a tensor's elements at positions, numbers or tensors, as integers."""
    for dim in reversed(range(tensor.dim())):
        if not isinstance(positions[dim], torch.Tensor):
            tensor = tensor.select(dim, positions[dim])
    tensors = [position for position in positions if isinstance(position, torch.Tensor)]
    found = torch.ops.aten.index(tensor, tensors) if tensors else tensor
    return found.to(torch.int32) if found.dtype == torch.bool else found


def _evaluated(tree: Tree, values: Mapping[str, Any]) -> Any:
    if not isinstance(tree, Test):
        return tree
    test = at_least_zero(tree.condition, values)
    if isinstance(test, bool):
        return _evaluated(tree.then if test else tree.otherwise, values)
    return chosen(test, ~test, _evaluated(tree.then, values), _evaluated(tree.otherwise, values))


def at_least_zero(condition: Index, values: Mapping[str, Any]) -> Any:
    """Return whether an index is at least 0. Terms with negative factors are compared with the others.

    So a read near the end of its dtype's range is not subtracted from.
    """
    above = Index(tuple(term for term in condition.terms if term[1] > 0))
    below = Index(tuple((monomial, -factor) for monomial, factor in condition.terms if factor < 0))
    return evaluate_on(above, values) >= evaluate_on(below, values)


def chosen(test: torch.Tensor, opposite: torch.Tensor, then: Any, otherwise: Any) -> Any:
    """Return `then` where `test`, and `otherwise` where `opposite`; either may be one boolean for all.

    A pair may have both tests: then it is true if either result is.
    """
    parts = []
    for condition, result in ((test, then), (opposite, otherwise)):
        if result is True:
            parts.append(condition)
        elif result is not False:
            parts.append(condition & result)
    if not parts:
        return False
    return parts[0] if len(parts) == 1 else parts[0] | parts[1]


# --- what the operators do --------------------------------------------------------------------------------------------


class _Blocks:
    """The calls of ATen's kernel for one call of an operator: slices of queries and keys, and the mask of each."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        reads: Sequence[torch.Tensor],
        sizes: Sequence[int],
        text: str,
    ) -> None:
        self._predicate = parse_predicate(text)
        self._reads, self._sizes = reads, sizes
        self._named = dict(zip(self._predicate.sizes, sizes, strict=True))
        self._batch, self._heads, self._queries, _ = query.shape
        self._keys, self._dtype, self._device = key.shape[2], query.dtype, query.device

    def __iter__(self) -> Iterator[tuple[slice, slice, slice, torch.Tensor | None]]:
        """Yield (batch, queries, keys, mask to add or None) of each call; keys are empty where all are masked."""
        step = 1 if self._predicate.by_batch else max(self._batch, 1)
        for at in range(0, self._batch, step):
            for begin in range(0, self._queries, QUERIES_AT_ONCE):
                end = min(begin + QUERIES_AT_ONCE, self._queries)
                yield self._call(slice(at, at + step), slice(begin, end))

    def _call(self, batch: slice, queries: slice) -> tuple[slice, slice, slice, torch.Tensor | None]:
        first, last = self._predicate.key_range(queries.start, queries.stop, self._keys, self._named)
        places = {
            BATCH: self._places(batch.start, batch.start + 1, 0),
            HEAD: self._places(0, self._heads, 1),
            QUERY: self._places(queries.start, queries.stop, 2),
            KEY: self._places(first, last, 3),
        }
        mask = allowed(self._predicate, places, self._reads, self._sizes)
        if mask is False:
            last = first
        if isinstance(mask, bool) or first == last:
            return batch, queries, slice(first, last), None
        used = mask.flatten(0, 2).any(0).expand(last - first).nonzero()
        if not len(used):
            return batch, queries, slice(first, first), None
        low, high = int(used[0]), int(used[-1]) + 1
        if mask.shape[3] > 1:
            mask = mask[..., low:high]
        keys = slice(first + low, first + high)
        if bool(mask.all()):
            return batch, queries, keys, None
        added = torch.zeros(mask.shape, dtype=self._dtype, device=self._device).masked_fill_(~mask, -torch.inf)
        return batch, queries, keys, added.expand(-1, -1, queries.stop - queries.start, high - low)

    def _places(self, begin: int, end: int, dim: int) -> torch.Tensor:
        return torch.arange(begin, end, device=self._device).view([-1 if n == dim else 1 for n in range(4)])


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`given`: tensors that the predicate reads, its sizes, its text, and the scale."""
    (*masked, scale), (out, logsumexp) = given, _empty_forward(query)
    for batch, queries, keys, mask in _Blocks(query, key, *masked):
        if keys.start == keys.stop:
            out[batch, :, queries] = 0
            logsumexp[batch, :, queries] = -torch.inf
            continue
        found, total = attention.attend_on_cpu(
            query[batch, :, queries], key[batch, :, keys], value[batch, :, keys], mask, scale
        )
        out[batch, :, queries] = found
        logsumexp[batch, :, queries] = total
    return out, logsumexp


def _backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum gradients of keys and values over blocks of queries in float32, or in float64."""
    *masked, scale = given
    by_query, by_key, by_value = map(torch.empty_like, (query, key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = [torch.zeros_like(tensor, dtype=wide) for tensor in (by_key, by_value)]
    for batch, queries, keys, mask in _Blocks(query, key, *masked):
        if keys.start == keys.stop:
            by_query[batch, :, queries] = 0
            continue
        found = attention.attend_backward_on_cpu(
            grad[batch, :, queries], query[batch, :, queries], key[batch, :, keys], value[batch, :, keys],
            out[batch, :, queries], logsumexp[batch, :, queries], mask, scale,
        )  # fmt: skip
        by_query[batch, :, queries] = found[0]
        for total, part in zip(sums, found[1:], strict=True):
            total[batch, :, keys] += part
    by_key.copy_(sums[0])
    by_value.copy_(sums[1])
    return by_query, by_key, by_value


# --- what tracing and autograd know of them ---------------------------------------------------------------------------


def _empty_forward(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, _width = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(batch, length, heads, dtype=wide).transpose(1, 2)


def _empty_backward(
    grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(given[0]), torch.empty_like(given[1]), torch.empty_like(given[2])


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
    query, key, value, reads, sizes, predicate, scale = inputs
    ctx.save_for_backward(*output, query, key, value, *reads)
    ctx.given = (sizes, predicate, scale)
    ctx.set_materialize_grads(True)


def _differentiate(ctx: Any, grad: torch.Tensor, _grad_of_logsumexp: Any) -> tuple[Any, ...]:
    out, logsumexp, query, key, value, *reads = ctx.saved_tensors
    sizes, predicate, scale = ctx.given
    found = torch.ops.dcompile_attention.backward(
        grad, out, logsumexp, query, key, value, [*reads], [*sizes], predicate, scale
    )
    return *found, [None] * len(reads), [None] * len(sizes), None, None


def _register() -> torch.library.Library:
    functions: dict[str, Functions] = {"forward": (_forward, _empty_forward), "backward": (_backward, _empty_backward)}
    library = define_operators(NAMESPACE, _SCHEMAS, functions, "CPU")
    torch.library.register_autograd(f"{NAMESPACE}::forward", _differentiate, setup_context=_save, lib=library)
    return library


_LIBRARY = _register()
"""Library of the operators, which exist as long as this object."""
