"""Decompose attention of one token to a cache into three kernels of dcompile that read keys and values once.

The library's kernels distribute queries over a GPU's multiprocessors. With one query a head, most of these are idle.
For 32 heads of 128 over a cache of 1024 tokens, cuDNN took 24 us, reading keys and values 1 us (docs/lab/constants.md,
K16). A matrix-vector product is a row reduction, which loops compute at the speed of memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION, argument, is_call, value_of
from dcompile.capture.passes.dynamo.grouped_query_attention import expanded_heads
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.device_traits import traits_of
from dcompile.passes import GAIN, PassReport

MAX_QUERIES = 132
"""Maximum number of queries, the multiprocessors of an H200: with more, the library's kernels keep all of them busy.

There is no maximum where keys and values are repeated for each head: the library would need them in memory, so often.
"""
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def decompose_decode_attention(gm: GraphModule) -> PassReport:
    """Decompose attention calls with one query a head and no gradient, in a Dynamo graph and its subgraphs, in place.

    Scores and weights are float32 (float64 for float64), as in the library. Weights are not rounded before they are
    multiplied by values. An implementation of FlashAttention that the user has activated keeps its calls.
    """
    nest = NestedGraphs(gm)
    if chosen := compat.attention.chosen_flash_attention():
        left = sum(
            node.target is ATTENTION and _shape(argument(node, 0, "query"))[2:3] == (1,) for node in nest.nodes()
        )
        return PassReport(notes=(f"{left} attention calls of one query a head are left to {chosen}",) if left else ())
    count = sum(_rewritten(nest.owner(node), node) for node in nest.nodes() if node.target is ATTENTION)
    if not count:
        return PassReport()
    nest.recompile()
    return PassReport(
        count, (f"{GAIN}{count} attention calls of one query a head are written out, as kernels of ours",)
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Compute attention of query [batch, heads, 1, width] to key and value [batch, groups, length, width].

    Each group serves `heads // groups` adjacent heads of queries. `mask` broadcasts to [batch, 1, 1, length] and is
    boolean, or added to scores. If no key is allowed, the result is 0, as from the library.
    """
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.reshape(batch, groups, heads // groups, 1, width)
    scores = (rows * key[:, :, None].to(compute)).sum(-1) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    result = (weights[..., None] * value[:, :, None].to(compute)).sum(-2)
    return result.to(query.dtype).reshape(batch, heads, 1, value.shape[3])


def _rewritten(gm: GraphModule, node: Node) -> bool:
    given = dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
    query, mask, shape = given["query"], given.get("attn_mask"), _shape(given["query"])
    if len(shape) != 4 or shape[2] != 1 or traits_of(value_of(query).device.type).aten.splits_single_query:
        return False
    if given.get("dropout_p") or given.get("is_causal"):
        return False
    if mask is not None and (len(_shape(mask)) < 2 or any(size != 1 for size in _shape(mask)[-3:-1])):
        return False
    repeats = dict.fromkeys((given["key"], given["value"]))
    key, value = (_repeated_heads(given[name]) or given[name] for name in ("key", "value"))
    if _shape(key)[:3] != _shape(value)[:3] or len(_shape(key)) != 4 or shape[1] % _shape(key)[1]:
        return False
    is_repeated = _repeated_heads(given["key"]) is not None or _repeated_heads(given["value"]) is not None
    if (shape[0] * shape[1] > MAX_QUERIES and not is_repeated) or _trains(query, key, value, mask):
        return False
    scale = given.get("scale")
    with gm.graph.inserting_before(node):
        arguments = (query, key, value, mask, 1 / math.sqrt(shape[3]) if scale is None else scale)
        made = gm.graph.call_function(attend, arguments)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    gm.graph.erase_node(node)
    for repeat in repeats:
        _erase_unused(gm, repeat)
    return True


def _trains(*nodes: Any) -> bool:
    """Does any value require a gradient?"""
    return any(isinstance(value := value_of(node), torch.Tensor) and value.requires_grad for node in nodes)


def _erase_unused(gm: GraphModule, repeat: Any) -> None:
    """Erase the three nodes that repeated keys or values, unless something else uses them."""
    if _repeated_heads(repeat) is None:
        return
    for _ in range(3):
        if repeat.users:
            return
        behind = repeat.args[0]
        gm.graph.erase_node(repeat)
        repeat = behind


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's value; () if it is no tensor or has symbolic sizes."""
    value = value_of(node)
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    return shape if all(isinstance(size, int) for size in shape) else ()


def _repeated_heads(node: Any) -> Node | None:
    """Return the tensor whose heads `node` repeats, each several times in a row, as [batch, heads, length, width]."""
    if len(_shape(node)) != 4 or not is_call(node, "reshape", "view"):
        return None
    source = expanded_heads(node.args[0])
    if source is None:
        return None
    batch, heads, *rest = _shape(source)
    return source if _shape(node) == (batch, heads * _shape(node.args[0])[2], *rest) else None
