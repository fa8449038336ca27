"""FlexAttention by a loop over tiles of block-masked scores, with its functions of pairs of positions.

Functions of one pair, as FlexAttention has them, are applied to many pairs, and their gradients are summed. A gradient
graph adds what a pair gives for a captured tensor to zeros of that tensor's size. In a loop that is a tensor of that
size for each tile. `JointGraph` returns values and indices instead, and adds them to one sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile.compat import flex
from dcompile.compat.flex import BlockTables
from dcompile.ir.predicate import QUERIES_AT_ONCE

_PAIRS = 4
"""Dimensions of a pair's place: batch, head, query, key."""
_BEFORE_BUFFERS = 1 + _PAIRS


def over_pairs(
    function: Callable[..., Any], before: Sequence[int], after: Sequence[int | None], out: Any = 0
) -> Callable[..., Any]:
    """Apply a function of scalars to positions along four dimensions, as eager does.

    `before` and `after`: dimensions of arguments before and after the positions that are mapped over, or None.
    """
    for dim in reversed(range(_PAIRS)):
        places = [0 if dim == n else None for n in range(_PAIRS)]
        function = torch.vmap(function, in_dims=(*before, *places, *after), out_dims=out)
    return function


def is_identity(function: Any) -> bool:
    """Whether a graph returns its first argument."""
    if not isinstance(function, GraphModule):
        return False
    first = next(iter(function.graph.nodes))
    return bool(function.graph.output_node().args[0] is first)


def unexpanded(tensor: torch.Tensor, dims: Sequence[int] = range(_PAIRS)) -> torch.Tensor:
    """Return a tensor without its repetitions along dimensions."""
    for dim in dims:
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# --- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Term:
    """A part of a captured tensor's gradient: how many results of the graph it has, and what they are."""

    buffer: int
    is_whole: bool
    """Whether the result is the gradient of a tile. Else it is one for each pair, with indices after it."""
    indices: int = 0


class JointGraph:
    """Gradients of a score function, by the graph that autograd has made of it."""

    def __init__(self, graph: GraphModule) -> None:
        joint, copies = Graph(), dict[Node, Node]()
        joint.graph_copy(graph.graph, copies)
        by_score: Node | None = graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        captured = flex.gradients_of_captured(graph)
        self._is_missing = [node is None for node in captured]
        self._terms: list[_Term] = []
        results: list[Node] = [] if by_score is None else [copies[by_score]]
        for buffer, node in enumerate(captured):
            for item in () if node is None else summands(node):
                term, nodes = _term(buffer, item)
                self._terms.append(term)
                results += [copies[node] for node in nodes]
        joint.output(tuple(results))
        joint.eliminate_dead_code()
        self._by_score = by_score is not None
        self._is_identity = self._by_score and by_score is inputs[_BEFORE_BUFFERS] and not self._terms
        self._function = GraphModule(graph, joint)
        outs: list[int | None] = [0] * self._by_score
        for term in self._terms:
            outs += [None] if term.is_whole else [0] * (1 + term.indices)
        self._outs = tuple(outs)

    def __call__(
        self,
        scores: torch.Tensor,
        places: Sequence[torch.Tensor],
        grad: torch.Tensor,
        buffers: Sequence[Any],
        sums: Sequence[torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Return the gradient of a tile's scores, if they have one. Add those of captured tensors to `sums`."""
        if self._is_identity:
            return grad
        if not self._outs:
            return None
        mapped = over_pairs(self._function, (0,), (0, *[None] * len(buffers)), self._outs)
        results = iter(mapped(scores, *places, grad, *buffers))
        by_score: torch.Tensor | None = next(results) if self._by_score else None
        for term in self._terms:
            total, values = sums[term.buffer], next(results)
            assert total is not None, "captured tensors with a gradient have a sum"
            if term.is_whole:
                total += values
            else:
                _add_at(total, [next(results) for _ in range(term.indices)], values)
        return by_score

    def sums(self, buffers: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return zeros for the gradients of captured tensors, in float32 at least."""
        return [
            None if missing else torch.zeros_like(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32))
            for buffer, missing in zip(buffers, self._is_missing, strict=True)
        ]

    def gradients(self, buffers: Sequence[Any], sums: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """Return the gradients of captured tensors: those that have none are 0 if they are of floats, else None."""
        return tuple(map(_gradient, buffers, sums))


def summands(node: Node) -> Iterator[Node]:
    """Yield what a gradient is the sum of: a tensor that is read several times has as many."""
    if node.target is torch.ops.aten.add.Tensor and not node.kwargs and has_scatter(node):
        for item in node.args:
            assert isinstance(item, Node), "a sum of gradients is one of tensors"
            yield from summands(item)
    else:
        yield node


def _term(buffer: int, node: Node) -> tuple[_Term, list[Node]]:
    found = flex.scattered(node)
    if found is not None:
        indices, values = found
        return _Term(buffer, False, len(indices)), [values, *indices]
    return _Term(buffer, has_scatter(node)), [node]


def has_scatter(node: Node) -> bool:
    """Return whether a gradient is made by adding values to zeros, among others."""
    seen, waiting = {node}, [node]
    while waiting:
        item = waiting.pop()
        if flex.is_scatter(item):
            return True
        waiting += [source for source in item.all_input_nodes if source not in seen]
        seen.update(item.all_input_nodes)
    return False


def _add_at(total: torch.Tensor, indices: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Add values of pairs to the elements that indices name. Those of pairs with the same index are summed first."""
    same = [dim for dim in range(_PAIRS) if all(index.stride(dim) == 0 for index in indices)]
    if same:
        values = values.sum(same, keepdim=True)
    values = values.to(total.dtype)
    if indices:
        total.index_put_([unexpanded(index, same) for index in indices], values, accumulate=True)
    else:
        total += values.reshape(values.shape[_PAIRS:])


def _gradient(buffer: Any, total: torch.Tensor | None) -> torch.Tensor | None:
    if total is not None:
        return torch.empty_like(buffer, memory_format=torch.contiguous_format).copy_(total)
    if isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
        return torch.zeros_like(buffer, memory_format=torch.contiguous_format)
    return None


KEYS_AT_ONCE = 512
SCORES_AT_ONCE = 1 << 21
"""Scores of a tile, over all batches and heads of its part, where there are several."""

Row: TypeAlias = "tuple[tuple[int, bool], ...]"
"""Blocks of keys of one row of blocks, in order: place, and whether it is computed without the mask's function."""
Span: TypeAlias = "tuple[int, int, bool]"


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Keys that a part computes at once."""

    keys: slice | torch.Tensor
    whole: bool | torch.Tensor
    """Whether pairs are all allowed; by key, if that differs."""


@dataclass(frozen=True, slots=True)
class Part:
    """Queries that are computed at once."""

    rows: tuple[slice, slice, slice]
    """Batches, heads and queries."""
    tiles: tuple[KeyTile, ...]


def parts(tables: BlockTables, queries: Sequence[int], keys: int) -> list[Part]:
    """Return the parts of a call that have keys. `queries`: the shape of the queries. `keys`: the number of keys."""
    batch, heads, length = queries[:3]
    rows = _rows(tables)
    if len(rows) * tables.query_block < length:
        raise ValueError(f"the block mask has {len(rows)} rows of {tables.query_block} queries; there are {length}")
    known: dict[Row, tuple[KeyTile, ...]] = {(): ()}
    found: list[Part] = []
    first = 0
    for cells, same in groupby(rows):
        begin, first = first, first + sum(1 for _ in same)
        end = min(first * tables.query_block, length)
        for at in range(begin * tables.query_block, end, QUERIES_AT_ONCE):
            step = slice(at, min(at + QUERIES_AT_ONCE, end))
            for of_batch, of_heads, row in _rectangles(cells, batch, heads):
                if row not in known:
                    known[row] = tuple(_tiles(row, tables.key_block, keys, tables.partial.device))
                found += _bounded(of_batch, of_heads, step, known[row])
    return found


def _bounded(batch: slice, heads: slice, queries: slice, tiles: tuple[KeyTile, ...]) -> Iterator[Part]:
    """Yield a rectangle of rows in parts of a bounded number of scores."""
    if not tiles:
        return
    count = max(1, SCORES_AT_ONCE // (KEYS_AT_ONCE * (queries.stop - queries.start)))
    of_heads = min(count, heads.stop - heads.start)
    of_batch = max(1, count // of_heads) if of_heads == heads.stop - heads.start else 1
    for b in range(batch.start, batch.stop, of_batch):
        for h in range(heads.start, heads.stop, of_heads):
            rows = (slice(b, min(b + of_batch, batch.stop)), slice(h, min(h + of_heads, heads.stop)), queries)
            yield Part(rows, tiles)


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """Places of key blocks by batch, head and row of query blocks, as many as there are counted."""

    counts: torch.Tensor
    places: torch.Tensor
    whole: bool

    def expanded(self, batch: int, heads: int) -> _Table:
        counts = self.counts.expand(batch, heads, -1)
        return replace(self, counts=counts, places=self.places.expand(batch, heads, -1, -1))

    def is_equal_along(self, dim: int) -> bool:
        return all(
            table.shape[dim] == 1 or table.stride(dim) == 0 or bool((table == table.narrow(dim, 0, 1)).all())
            for table in (self.counts, self.places)
        )

    def first_along(self, dim: int) -> _Table:
        return replace(self, counts=self.counts.narrow(dim, 0, 1), places=self.places.narrow(dim, 0, 1))


def _rows(tables: BlockTables) -> list[tuple[tuple[Row, ...], ...]]:
    """Return the key blocks of each row of query blocks, by batch and head; or one for all, if they are equal."""
    read = [_table(tables.partial_counts, tables.partial, False)]
    if tables.whole is not None:
        read.append(_table(tables.whole_counts, tables.whole, True))
    batch, heads = (max(table.places.shape[dim] for table in read) for dim in (0, 1))
    read = [table.expanded(batch, heads) for table in read]
    for dim in (0, 1):
        if all(table.is_equal_along(dim) for table in read):
            read = [table.first_along(dim) for table in read]
    lists = [(table.counts.tolist(), table.places.tolist(), table.whole) for table in read]
    batch, heads, rows = read[0].counts.shape
    return [tuple(tuple(_row(lists, b, h, r) for h in range(heads)) for b in range(batch)) for r in range(rows)]


def _table(counts: torch.Tensor, places: torch.Tensor, whole: bool) -> _Table:
    """Return a table with dimensions for batch and head, which a mask need not have."""
    counts = counts.reshape((1,) * (3 - counts.dim()) + counts.shape)
    return _Table(counts, places.reshape((1,) * (4 - places.dim()) + places.shape), whole)


def _row(lists: Sequence[tuple[Any, Any, bool]], b: int, h: int, r: int) -> Row:
    found: dict[int, bool] = {}
    for counts, places, whole in lists:
        found |= dict.fromkeys(places[b][h][r][: counts[b][h][r]], whole)
    return tuple(sorted(found.items()))


def _rectangles(cells: Sequence[Sequence[Row]], batch: int, heads: int) -> Iterator[tuple[slice, slice, Row]]:
    """Join neighbours with equal keys: heads of a batch, then batches with the same heads."""
    by_batch = [tuple(_runs(row, heads)) for row in cells]
    for first, last, runs in _runs(by_batch, batch):
        for begin, end, row in runs:
            yield slice(first, last), slice(begin, end), row


def _runs(values: Sequence[Any], length: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (first, last, value) of equal neighbours. One value alone is that of all places."""
    if len(values) == 1:
        yield 0, length, values[0]
        return
    first = 0
    for value, same in groupby(values):
        begin, first = first, first + sum(1 for _ in same)
        yield begin, first, value


# --- keys -------------------------------------------------------------------------------------------------------------


def _tiles(row: Row, block: int, length: int, device: torch.device) -> Iterator[KeyTile]:
    """Yield the keys of a row in tiles of bounded size."""
    spans: list[Span] = []
    count = 0
    for place, whole in row:
        end = min((place + 1) * block, length)
        for begin in range(place * block, end, KEYS_AT_ONCE):
            stop = min(begin + KEYS_AT_ONCE, end)
            if spans and count + stop - begin > KEYS_AT_ONCE:
                yield _tile(spans, device)
                spans, count = [], 0
            spans.append((begin, stop, whole))
            count += stop - begin
    if spans:
        yield _tile(spans, device)


def _tile(spans: Sequence[Span], device: torch.device) -> KeyTile:
    begin, end = spans[0][0], spans[-1][1]
    keys: slice | torch.Tensor = slice(begin, end)
    if end - begin > sum(stop - start for start, stop, _ in spans):
        keys = torch.cat([torch.arange(start, stop, device=device) for start, stop, _ in spans])
    kinds = {whole for *_, whole in spans}
    if len(kinds) == 1:
        return KeyTile(keys, kinds.pop())
    whole = [torch.full((stop - start,), kind, device=device) for start, stop, kind in spans]
    return KeyTile(keys, torch.cat(whole))


def loop_of(node: Node, fixed: Mapping[Node, Any]) -> tuple[Callable[..., Any], Mapping[Node, Any]] | str:
    """Return the loop that computes a call, and its constants as the loop wants them; or why none does."""
    is_forward, count = str(node.target) == "flex_attention", flex.ARGUMENTS[str(node.target)]
    if node.kwargs or len(node.args) != count:
        return f"{len(node.args)} arguments, which are {count} in known versions of torch"
    block_mask = node.args[4 if is_forward else 9]
    if not isinstance(block_mask, (tuple, list)) or not flex.is_known_mask(block_mask):
        return "a block mask of an unknown version of torch"
    if is_forward:
        return attend, fixed
    joint = node.args[8]
    if not isinstance(joint, Node) or not isinstance(fixed.get(joint), GraphModule):
        return "no graph of its score function's gradient"
    return differentiate, {**fixed, joint: JointGraph(fixed[joint])}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any],
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: Any,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the attention, each row's logarithm of its sum, and its largest score, both in float32.

    A row without keys is 0, and both are minus infinity.
    """
    call = _AttentionCall(query, key, value, score_mod, block_mask, scale, score_buffers, mask_buffers)
    out = flex.laid_out_as(query, (*query.shape[:3], value.shape[3])).zero_()
    logsumexp = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    largest = torch.full_like(logsumexp, -torch.inf)
    with _eagerly():
        for part in call.parts:
            mixed, sums, top = call.softmax(part)
            out[part.rows] = mixed.div_(sums.masked_fill(sums == 0, 1))
            logsumexp[part.rows] = (_log_of_sum(sums, top) / flex.LOG_2).squeeze(-1)
            largest[part.rows] = (top / flex.LOG_2).squeeze(-1)
    return out, logsumexp, largest


def differentiate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    score_mod: Callable[..., Any],
    joint: JointGraph | GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: Any,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Return gradients of queries, keys, values, and of the tensors that the score function reads."""
    call = _AttentionCall(query, key, value, score_mod, block_mask, scale, score_buffers, mask_buffers)
    joint = joint if isinstance(joint, JointGraph) else JointGraph(joint)
    by_query = flex.laid_out_as(query, query.shape).zero_()
    by_key, by_value = (torch.zeros_like(tensor, dtype=call.wide) for tensor in (key, value))
    by_buffers = joint.sums(score_buffers)
    with _eagerly():
        for part in call.parts:
            rows = _QueryBlock(call, part, out, logsumexp, grad_out, grad_logsumexp)
            total: torch.Tensor | float = 0.0
            for tile, mask in call.tiles(part):
                keys = call.keys(key, part, tile)
                raw, scores = call.scores(rows.query, keys, part, tile, mask)
                weights = (scores - rows.logsumexp).exp_()
                call.add_to(by_value, weights.mT @ rows.grad, part, tile)
                grad = (rows.grad @ call.keys(value, part, tile).mT).sub_(rows.level).mul_(weights)
                found = joint(raw, call.places(part, tile), grad, score_buffers, by_buffers)
                if found is not None:
                    found = call.of_products(found, mask)
                    total = total + found @ keys
                    call.add_to(by_key, found.mT @ rows.query, part, tile)
            by_query[part.rows] = total
    by_captured = joint.gradients(score_buffers, by_buffers)
    return by_query, call.as_given(by_key, key), call.as_given(by_value, value), by_captured


class _QueryBlock:
    """What a part of the queries needs for its gradients, in the precision of the sums."""

    def __init__(
        self,
        call: _AttentionCall,
        part: Part,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        grad_out: torch.Tensor | None,
        grad_logsumexp: torch.Tensor | None,
    ) -> None:
        self.query = call.query(part)
        found = out[part.rows].to(call.wide)
        self.grad = torch.zeros_like(found) if grad_out is None else grad_out[part.rows].to(call.wide)
        level = (found * self.grad).sum(-1, keepdim=True)
        if grad_logsumexp is not None:
            level = level - grad_logsumexp[part.rows].to(call.wide).unsqueeze(-1) / flex.LOG_2
        self.level = level
        """What is taken off each weight's gradient."""
        if logsumexp.dtype == call.wide:
            total = logsumexp[part.rows].unsqueeze(-1) * flex.LOG_2
        else:  # as it was saved, it has too few digits for these sums
            _, sums, top = call.softmax(part)
            total = _log_of_sum(sums, top)
        self.logsumexp = total.masked_fill(total == -torch.inf, torch.inf)
        """Infinite for rows without keys: their weights are 0."""


class _AttentionCall:
    """The operands of a call of either operator, and the scores of a part of it."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Callable[..., Any],
        block_mask: Sequence[Any],
        scale: float,
        score_buffers: Sequence[Any],
        mask_buffers: Sequence[Any],
    ) -> None:
        self.wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        self._query, self._key, self._value, self._scale = query, key, value, scale
        if query.shape[0] != key.shape[0] != 1:
            raise ValueError(f"queries have batch size {query.shape[0]}, and keys {key.shape[0]}")
        self._group = query.shape[1] // key.shape[1]
        tables = flex.tables(block_mask)
        self.parts = parts(tables, query.shape, key.shape[2])
        self._score = None if is_identity(score_mod) else over_pairs(score_mod, (0,), [None] * len(score_buffers))
        self._mask = over_pairs(tables.mask_mod, (), [None] * len(mask_buffers))
        self._score_buffers, self._mask_buffers = score_buffers, mask_buffers

    def query(self, part: Part) -> torch.Tensor:
        """Return the queries of a part."""
        return self._query[part.rows].to(self.wide)

    def softmax(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows of weighted values, the sums of their weights, and the scores that have weight 1."""
        query = self.query(part)
        top = query.new_full((*query.shape[:3], 1), -torch.inf)
        sums, mixed = torch.zeros_like(top), query.new_zeros(*query.shape[:3], self._value.shape[3])
        for tile, mask in self.tiles(part):
            _, scores = self.scores(query, self.keys(self._key, part, tile), part, tile, mask)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == -torch.inf, 0)
            weights, factor = (scores - base).exp_(), (top - base).exp_()
            sums = sums.mul_(factor).add_(weights.sum(-1, keepdim=True))
            mixed = mixed.mul_(factor).add_(weights @ self.keys(self._value, part, tile))
            top = higher
        return mixed, sums, top

    def tiles(self, part: Part) -> Iterator[tuple[KeyTile, torch.Tensor | None]]:
        """Yield the tiles of a part where some pair is allowed; with the mask, if some pair is not."""
        for tile in part.tiles:
            if tile.whole is True:
                yield tile, None
                continue
            mask = unexpanded(self._mask(*self.places(part, tile), *self._mask_buffers))
            if tile.whole is not False:
                mask = mask | tile.whole
            if bool(mask.all()):
                yield tile, None
            elif bool(mask.any()):
                yield tile, mask

    def scores(
        self, query: torch.Tensor, keys: torch.Tensor, part: Part, tile: KeyTile, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tile's scores as the score function gets them, and what becomes of them."""
        raw = (query @ keys.mT).mul_(self._scale)
        found = raw
        if self._score is not None:
            found = self._score(raw, *self.places(part, tile), *self._score_buffers).to(self.wide)
        return raw, found if mask is None else torch.where(mask, found, -torch.inf)

    def of_products(self, grad: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of products of queries and keys by that of their scores."""
        grad = grad.to(self.wide) * self._scale
        return grad if mask is None else torch.where(mask, grad, 0.0)

    def places(self, part: Part, tile: KeyTile) -> list[torch.Tensor]:
        """Return the positions of a tile: batches, heads, queries and keys."""
        device = self._query.device
        keys = tile.keys
        found = [torch.arange(place.start, place.stop, device=device) for place in part.rows]
        return [*found, torch.arange(keys.start, keys.stop, device=device) if isinstance(keys, slice) else keys]

    def keys(self, tensor: torch.Tensor, part: Part, tile: KeyTile) -> torch.Tensor:
        """Return the keys or values of a tile, once for each head of the queries."""
        found = self._shared(tensor, part)[:, :, tile.keys].to(self.wide)
        return found if self._group == 1 else found.index_select(1, self._heads(part))

    def add_to(self, total: torch.Tensor, found: torch.Tensor, part: Part, tile: KeyTile) -> None:
        """Add what a tile gives for its keys or values to the sum for all of them."""
        place = self._shared(total, part)
        if self._group > 1:
            shared = found.new_zeros(found.shape[0], place.shape[1], *found.shape[2:])
            found = shared.index_add_(1, self._heads(part), found)
        if found.shape[0] > place.shape[0]:
            found = found.sum(0, keepdim=True)
        if isinstance(tile.keys, slice):
            place[:, :, tile.keys] += found
        else:
            place.index_add_(2, tile.keys, found)

    def as_given(self, total: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return a sum in the dtype of the keys or values, laid out as eager's gradient of them is."""
        found: torch.Tensor = flex.laid_out_as(given, given.shape, batch=self._query.shape[0])
        found.copy_(total)
        return found

    def _shared(self, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        """Return a part's batches, and the heads of keys that heads of the part share."""
        batch, heads, _ = part.rows
        first, last = heads.start // self._group, (heads.stop - 1) // self._group
        if tensor.shape[0] == 1:
            batch = slice(None)
        return tensor[batch, first : last + 1]

    def _heads(self, part: Part) -> torch.Tensor:
        """Return which of the shared heads each head of a part has."""
        heads = part.rows[1]
        first: int = heads.start // self._group
        return torch.arange(heads.start, heads.stop, device=self._query.device) // self._group - first


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Keep autograd and autocast of the caller's out of the loop."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _log_of_sum(sums: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    return torch.where(top.isinf(), top, top + sums.log())
