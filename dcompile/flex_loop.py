"""FlexAttention on CPUs as a loop over the blocks that its mask leaves: no scores of other blocks, nor all at once.

`attend` and `differentiate` take the arguments of the operators `flex_attention` and `flex_attention_backward`, and
have their results. Tables of the block mask say what is computed, as in TorchInductor's kernels. `flex_blocks` says in
which parts. Scores, their softmax and all sums are in float32, or in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile.compat import flex
from dcompile.flex_blocks import KeyTile, Part, parts
from dcompile.flex_functions import JointGraph, is_identity, over_pairs, unexpanded


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
