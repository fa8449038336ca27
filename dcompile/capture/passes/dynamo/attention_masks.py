"""Skip what attention masks forbid: causal masks, windows, prefixes, padding, documents; drop full masks.

Libraries pass `scaled_dot_product_attention` a mask when they cannot tell whether one is needed. Hugging Face's models
do so while being traced. A kernel with a mask as a tensor reads it, and computes the whole square of scores. Dynamo's
graph shows how the mask is computed. If that is from comparisons of positions, lowering's rules compute its
elements as functions of positions, for any size. A predicate says which pairs of positions they allow.

`is_causal` replaces a mask that is proved to be the lower triangle, and a kernel then computes half of the square.
Before that, in-place changes of constant tensors that a graph makes itself are functionalized.
`mask = full(...); mask.masked_fill_(hidden, 0)` is a common way to make masks. Later readers of the tensor get the
result of the functional operation, as under AOTAutograd.

Other masks come next, for example those that depend on an input (padding). On CPUs, attention then takes blocks of
queries with the keys in their reach (`attention_ops.py`). On GPUs, FlexAttention's kernel gets the predicate
(`flex_masks.py`). Both are chosen where the cost model says that they gain. Other masks stay tensors, and the receipt
names their price.

Sides of blocks in masks that FlexAttention gets from the model become numbers: kernels are written for them, as
torch.compile's are. TorchDynamo of torch 2.11 makes them symbols with `dynamic=True`, like any other number that a
call is given.

The part of the graph that makes a mask is run again, with a `MaskTracer` that computes each operator's elements by
lowering's rules. Nodes of bodies get those of their operands outside. If a node's elements have no form, those of
boolean and integer tensors are reads of it. Only nodes whose operands have elements are run: what masks are made of.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import (
    ATTENTION,
    CAUSAL,
    MASK,
    Changed,
    argument,
    is_call,
    is_of_torch,
    name_of,
    sizes_of,
    value_of,
)
from dcompile.capture.passes.dynamo.grouped_query_attention import erase_repeated, share_heads, unrepeated
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.device_traits import traits_of
from dcompile.ir.index import (
    MIN_SYMBOL_VALUES,
    Index,
    Size,
    as_index,
    is_below,
    is_nonnegative,
    is_symbol,
    substitute,
    var,
)
from dcompile.ir.ops import DTYPES
from dcompile.ir.piecewise import (
    Elements,
    Read,
    Reads,
    TooManyCases,
    Tree,
    UnknownElements,
    axis,
    combine,
    indices_of,
    leaves,
    negate_condition,
    positions_of,
    replace_variables,
)
from dcompile.ir.predicate import (
    BATCH,
    DOCUMENTS,
    HEAD,
    KEY,
    QUERIES_AT_ONCE,
    QUERY,
    WINDOW,
    Predicate,
    allowed_pairs,
)
from dcompile.machine_model import Figures, table_figures
from dcompile.operators import attention_ops, flex_masks
from dcompile.passes import GAIN, PassReport

MAX_READS = 8
"""Maximum number of reads of a predicate: a kernel loads each for every pair in a partial block."""


class UnknownMask(Exception):
    """A mask is no predicate that kernels know. The message says why."""


@dataclass(frozen=True)
class MaskPredicate:
    """A predicate, with the tensors that it reads and the sizes in it."""

    predicate: Predicate
    reads: tuple[Node, ...]
    sizes: tuple[str, ...]
    """Variables of the sizes, as in shapes of the graph's tensors."""


def is_allowed(leaf: Any, dtype: str) -> bool:
    """Does an element of a mask allow attention? Raises UnknownElements if it adds a bias to the score.

    Minus infinity forbids it, and so does the least finite number of the dtype, which some libraries use. In a row with
    an allowed element, the exponential of either is 0 with any finite score.
    """
    if isinstance(leaf, bool):
        return leaf
    if not isinstance(leaf, float) or leaf not in (0.0, -math.inf, _least(dtype)):
        raise UnknownElements
    return leaf == 0.0


def _least(dtype: str) -> float:
    return torch.finfo(getattr(torch, dtype)).min


def scores_shape(query: Any, key: Any) -> tuple[Size, ...]:
    """Return (batch, heads, queries, keys) of an attention call; () if its sizes are unknown or others."""
    by_query, by_key = sizes_of(query), sizes_of(key)
    return (*by_query[:3], by_key[2]) if len(by_query) == len(by_key) == 4 else ()


def broadcasts(shape: Sequence[Size], scores: Sequence[Size]) -> bool:
    """Does a mask of this shape leave the shape of scores as it is?"""
    pairs = zip(reversed(shape), reversed(scores), strict=False)
    return len(shape) <= len(scores) and all(size in (1, whole) for size, whole in pairs)


def _allowed(mask: Elements | None, scores: Sequence[Size]) -> Tree:
    """Return where a mask allows attention, over its own positions. Raises UnknownMask."""
    if mask is None:
        raise UnknownMask("its elements are not known from how it is made")
    if not broadcasts(mask.shape, scores):
        raise UnknownMask("its shape is not that of the scores")
    try:
        return combine(lambda leaf: is_allowed(leaf, mask.dtype), (mask.tree,), mask.ranges)
    except UnknownElements:
        raise UnknownMask("it adds other numbers than 0 and minus infinity to scores") from None
    except TooManyCases:
        raise UnknownMask("it has too many pieces") from None


def predicate_of(mask: Elements | None, reads: Reads, scores: Sequence[Size]) -> MaskPredicate:
    """Return the predicate of a mask over scores (batch, heads, queries, keys). Raises UnknownMask."""
    tree = _allowed(mask, scores)
    assert mask is not None, "an unknown mask has raised"
    found = _in_pairs(tree, mask, reads, scores)
    if _has_least_number(mask) and not found.predicate.has_key_in_each_row(scores[2], scores[3]):
        raise UnknownMask("it adds the least finite number, and a row may have no allowed key")
    return found


def _has_least_number(mask: Elements) -> bool:
    """Does a mask forbid by the least finite number? Rows without an allowed element then average all values."""
    return DTYPES[mask.dtype] == "float" and _least(mask.dtype) in leaves(mask.tree, (), {})


def _in_pairs(tree: Tree, mask: Elements, reads: Reads, scores: Sequence[Size]) -> MaskPredicate:
    """Write a tree over a mask's positions as a predicate of pairs, with reads and sizes numbered in order."""
    dims = len(mask.shape)
    named = {axis(n): var((BATCH, HEAD, QUERY, KEY)[4 - dims + n]) for n in range(dims)}
    ranges = dict(zip((BATCH, HEAD, QUERY, KEY), scores, strict=True))
    names = [*dict.fromkeys(name for index in indices_of(tree) for name in sorted(index.variables))]
    used = [(name, read) for name in names if (read := reads.found(name)) is not None]
    if len(used) > MAX_READS:
        raise UnknownMask(f"it depends on {len(used)} elements of tensors")
    positions = [tuple(substitute(index, named, {}) for index in read.positions) for _, read in used]
    for (_, read), at in zip(used, positions, strict=True):
        _check_read(read, at, ranges)
    values = named | {name: var(f"z{number}") for number, (name, _) in enumerate(used)}
    read_names = {name for name, _ in used}
    symbols = [name for name in names if is_symbol(name) and name not in read_names]
    symbols += [n for at in positions for index in at for n in sorted(index.variables) if is_symbol(n)]
    sizes = {name: f"{_letter(name)}{number}" for number, name in enumerate(dict.fromkeys(symbols))}
    values |= {name: var(short) for name, short in sizes.items()}
    rewritten = tuple(tuple(substitute(index, values, {}) for index in at) for at in positions)
    predicate = Predicate(replace_variables(tree, values, {}), rewritten, tuple(sizes.values()))
    return MaskPredicate(predicate, tuple(read.source for _, read in used), tuple(sizes))


def _check_read(read: Read, positions: Sequence[Index], ranges: Mapping[str, Size]) -> None:
    """Raise UnknownMask unless a read is of queries or of keys, and within its tensor for all pairs."""
    names = {name for index in positions for name in index.variables}
    if {QUERY, KEY} <= names or HEAD in names:
        raise UnknownMask("it is a tensor that the model is given, or that an operation without a rule makes")
    for index, size in zip(positions, sizes_of(read.source), strict=True):
        if not is_nonnegative(index, ranges) or not is_below(index, size, ranges):
            raise UnknownMask("it reads a tensor at positions that may be outside of it")


def _letter(name: str) -> str:
    """Letter of a size's least value; sizes are never negative, though it may be unknown that a symbol is none."""
    return name[0] if MIN_SYMBOL_VALUES[name[0]] is not None else "u"


def size_dims(node: Node, sizes: Sequence[str]) -> dict[str, tuple[Node, int]]:
    """Return for each size a dimension of an attention call's operands that has it. Raises UnknownMask."""
    operands = [operand for operand in node.all_input_nodes if isinstance(value_of(operand), torch.Tensor)]
    found: dict[str, tuple[Node, int]] = {}
    for name in sizes:
        dims = [(each, n) for each in operands for n, size in enumerate(sizes_of(each)) if as_index(size) == var(name)]
        if not dims:
            raise UnknownMask("it depends on a size that queries and keys do not have")
        found[name] = dims[0]
    return found


# --- constants that change --------------------------------------------------------------------------------------------

_AS_NEW = {"masked_fill_": "masked_fill", "triu_": "triu", "tril_": "tril", "logical_not_": "logical_not"}
"""In-place method -> its functional form, for methods whose result has the tensor's dtype."""
_FILLS = {"fill_": torch.full_like, "zero_": torch.zeros_like}


def change_constants_anew(nest: NestedGraphs) -> int:
    """Functionalize changes of constants in all graphs; return their number.

    A tensor's changes stay if another view of its memory exists before the last one.
    """
    count, memory = 0, _by_memory(nest)
    for graph in nest.graphs:
        for node in list(graph.graph.nodes):
            if (
                node.op == "call_function"
                and getattr(node.target, "__name__", "") in FROM_NUMBERS
                and "out" not in node.kwargs
            ):
                count += _functionalized(node, memory.get(_memory_of(node), []))
    return count


def _by_memory(nest: NestedGraphs) -> dict[Any, list[Node]]:
    """Return memory -> nodes of all graphs whose values are stored there, in order."""
    found: dict[Any, list[Node]] = {}
    for node in nest.nodes():
        if (key := _memory_of(node)) is not None:
            found.setdefault(key, []).append(node)
    return found


def _memory_of(node: Node) -> Any:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not compat.tensors.has_storage(value):
        return None
    return compat.tensors.storage_key(value)


def _functionalized(made: Node, sharing: list[Node]) -> int:
    """Functionalize the changes of one tensor; return their number."""
    changes = [node for node in sharing if _is_change(node)]
    if not changes or any(node.graph is not made.graph for node in changes):
        return 0
    order = {node: place for place, node in enumerate(made.graph.nodes)}
    last = order[changes[-1]]
    own = {made, *changes}
    before = [node for node in sharing if node.graph is made.graph and order[node] < last and node not in own]
    bodies = [user for node in own for user in node.users if compat.dynamo.holds_graphs(user.target)]
    if before or any(node.args[0] not in own for node in changes) or any(order[call] < last for call in bodies):
        return 0
    for change in changes:
        newest = [node for node in own if order[node] < order[change]]
        for node in newest:
            for user in list(node.users):
                if user in order and order[user] > order[change]:
                    user.replace_input_with(node, change)
        _write_anew(change)
    return len(changes)


def _is_change(node: Node) -> bool:
    return node.op == "call_method" and (node.target in _AS_NEW or node.target in _FILLS)


def _write_anew(change: Node) -> None:
    if change.target in _AS_NEW:
        change.target = _AS_NEW[str(change.target)]
        return
    function: Any = _FILLS[str(change.target)]
    change.op, change.target = "call_function", function


# --- causal masks -----------------------------------------------------------------------------------------------------

INSTEAD = {
    "causal": "the kernel's own causal masking takes its place",
    "full": "it hides nothing, so they run without one",
}
"""Kind of a mask -> text for the receipt on the call without it."""


def recognize_causal_masks(gm: GraphModule, tracer: Callable[[], MaskTracer], as_eager: bool = False) -> PassReport:
    """Rewrite attention calls with a causal or full mask in a Dynamo graph and all its subgraphs, in place.

    `tracer`: makes what computes elements. Masks without other users are erased, with the nodes that only they need,
    and as operands of subgraphs.

    `as_eager`: only causal masks that a library makes because it is traced. Eager mode then calls the same kernel as
    the rewritten graph, with shared heads where eager mode shares them, so results have its bits.
    """
    nest = NestedGraphs(gm)
    if not any(map(mask_of, nest.nodes())):
        return PassReport()
    changed = 0 if as_eager else change_constants_anew(nest)
    elements = ElementsOf(nest, Changed(nest), tracer())
    verdict_on = functools.cache(lambda mask, scores: _verdict(elements(mask), scores))  # layers share masks
    done: dict[str, int] = {}
    masks: dict[Node, None] = {}
    repeated: list[Node] = []
    for node in nest.nodes():
        query, key = (sizes_of(argument(node, place, name)) for place, name in ((0, "query"), (1, "key")))
        mask = mask_of(node)
        if mask is None or min(len(query), len(key)) < 2:
            continue
        if as_eager and not made_where_traced(mask, nest, key[-2]):
            continue
        verdict = verdict_on(mask, (*query[:-1], key[-2]))
        if verdict is None or (as_eager and verdict != "causal"):
            continue
        _use_flag(node, causal=verdict == "causal")
        repeated += _share_heads_as_eager(node, nest) if as_eager else []
        masks[mask] = None
        done[verdict] = done.get(verdict, 0) + 1
    nest.erase_unused(masks, elements.is_constant)
    erase_repeated(repeated, nest)
    if done or changed:
        nest.recompile()
    if as_eager:
        notes = [
            f"{n} attention calls run without the mask that is made only where they are traced" for n in done.values()
        ]
    else:
        notes = [
            f"{GAIN}{n} attention calls were given a {kind} mask as a tensor; {INSTEAD[kind]}"
            for kind, n in done.items()
        ]
    return PassReport(sum(done.values()), tuple(notes))


def _share_heads_as_eager(node: Node, nest: NestedGraphs) -> list[Node]:
    """Undo the repetition of heads that transformers needs for a mask; return the repeated keys and values."""
    key, value = (argument(node, place, name) for place, name in ((1, "key"), (2, "value")))
    shared = unrepeated(node, nest)
    if shared is None or not compat.dynamo.shares_heads_without_mask(value_of(key), value_of(value)):
        return []
    share_heads(node, *shared)
    return [key, value]


def made_where_traced(mask: Node, nest: NestedGraphs, length: Size) -> bool:
    """Would transformers have left out a causal mask of `length` keys in eager mode?

    It looks for packed sequences in the values of position ids, which it cannot read where it is traced. A window makes
    a mask in eager mode, too, unless the keys are fewer.
    """
    if mask.op == "placeholder":
        given = nest.sources(mask)
        return bool(given) and all(made_where_traced(source, nest, length) for source in given or ())
    if "transformers/masking_utils.py" not in (mask.meta.get("stack_trace") or "").replace("\\", "/"):
        return False
    made_of = _made_of(mask)
    if any(name_of(node) == "_add_batch_dim" for node in made_of):
        return False  # vmap: of a model's own function, for which eager mode makes a mask
    windows = [node.args[1] for node in made_of if is_call(node, "sub", "floordiv") and len(node.args) > 1]
    sizes = [size for size in windows if isinstance(size, int) and size > 1]
    return not sizes or (isinstance(length, int) and min(sizes) > length)


def _made_of(mask: Node) -> set[Node]:
    """Return a node and all that it is computed from, in its own graph."""
    found, left = {mask}, [mask]
    while left:
        more = [node for node in left.pop().all_input_nodes if node not in found]
        found.update(more)
        left += more
    return found


def mask_of(node: Node) -> Node | None:
    """Return the mask of an attention call, if it has one that is not trained."""
    if node.op != "call_function" or node.target is not ATTENTION or argument(node, CAUSAL, "is_causal"):
        return None
    mask = argument(node, MASK, "attn_mask")
    return mask if isinstance(value_of(mask), torch.Tensor) and not value_of(mask).requires_grad else None


def _verdict(mask: Elements | None, scores: tuple[Size, ...]) -> str | None:
    """Return "causal", "full", or None for any other mask, or an unknown one."""
    try:
        allowed = _allowed(mask, scores)
    except UnknownMask:
        return None
    assert mask is not None, "an unknown mask has raised"
    if allowed is True:
        return "full"
    if mask.shape[-2:] != scores[-2:]:
        return None
    queries, keys = positions_of(mask.shape)[-2:]
    return "causal" if _is_causal(allowed, queries - keys, mask) else None


def _is_causal(allowed: Tree, ahead: Index, mask: Elements) -> bool:
    """Are exactly the keys up to the query's position allowed? `ahead` is the query's position minus the key's."""
    past = leaves(allowed, (ahead,), mask.ranges)
    future = leaves(allowed, (negate_condition(ahead),), mask.ranges)
    return all(leaf is True for leaf in past) and all(leaf is False for leaf in future)


def _use_flag(node: Node, causal: bool) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    if len(args) > MASK:
        args[MASK] = None
    else:
        kwargs["attn_mask"] = None
    if len(args) > CAUSAL:
        args[CAUSAL] = causal
    else:
        kwargs["is_causal"] = causal
    node.args, node.kwargs = tuple(args), kwargs


# --- other masks ------------------------------------------------------------------------------------------------------

NOMINAL_LENGTH = 2048
"""Queries and keys that a symbol counts as in costs: a plan must not depend on the batch that came first."""
DOCUMENTS_PART = 0.5
"""Assumed part of the pairs that documents allow, of those without them."""
BACKWARD_FLOPS = 2.5
"""FLOPs of the backward for one of the forward: five matmuls for two."""
MAX_PART = 0.8
"""Maximum time of attention in blocks, of that with a mask, for which it is chosen: the cost model is rough."""
CALL_US = 100.0
"""Time of one block on a CPU beside its scores: its part of the mask and ATen's call."""
MIN_FLEX_GAIN_US = 200.0
"""Minimum gain of a step on a GPU: TorchInductor takes seconds to compile the kernels."""
MIN_FLEX_QUERIES = 128
"""Minimum number of queries for FlexAttention's kernels for training; it has others for decoding."""
FLEX_WIDTHS = range(16, 257, 8)
"""Widths of heads that FlexAttention's kernels support."""
MIN_NOTED_US = 10.0
"""Minimum price of a mask that the receipt names."""
_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class _Costs:
    """Seconds of a call of attention in one step."""

    with_mask: float
    in_blocks: float
    mask_bytes: int


@dataclass(frozen=True)
class _MaskedCall:
    """An attention call whose mask is a predicate."""

    node: Node
    mask: MaskPredicate
    kind: str
    costs: _Costs
    times: int
    """How often a step makes this call: once for each call of its body."""


def skip_masked_attention(
    gm: GraphModule,
    tracer: Callable[[], MaskTracer],
    planned_for: str | None = None,
    figures: Callable[[str], Figures] = table_figures,
) -> PassReport:
    """Rewrite attention calls with a mask that allows few pairs, in a Dynamo graph and all its subgraphs, in place.

    `tracer`: makes what computes elements. `planned_for`: type of the device that the graph is planned for; nothing is
    rewritten if it is not the graph's own. `figures`: type of a device -> its figures. Relies on: causal masks have
    been recognized. Rows without an allowed key stay 0, as in eager mode.
    """
    nest = NestedGraphs(gm)
    masked = [(node, mask) for node in nest.nodes() if (mask := mask_of(node)) is not None]
    masked = [(node, mask) for node, mask in masked if planned_for in (None, value_of(mask).device.type)]
    if not masked:
        return PassReport()
    elements = ElementsOf(nest, Changed(nest), tracer())
    predicate = functools.cache(lambda mask, scores: predicate_of(elements(mask), elements.reads, scores))
    calls, left = list[_MaskedCall](), _LeftMasks()
    for node, mask in masked:
        kind = value_of(mask).device.type
        times = max(len(nest.calls_of(nest.owner(node))), 1)
        scores = scores_shape(argument(node, 0, "query"), argument(node, 1, "key"))
        if not scores or scores[2] == 1:
            continue  # one query: `decompose_decode_attention`
        try:
            found = predicate(mask, scores)
            costs = _costs(node, mask, found, scores, figures(kind))
            if costs.in_blocks > MAX_PART * costs.with_mask:
                continue
            _check_kernel(node, kind, found, scores)
        except UnknownMask as why:
            left.add(str(why), _costs(node, mask, None, scores, figures(kind)), times)
            continue
        calls.append(_MaskedCall(node, found, traits_of(kind).masked_attention, costs, times))
    flex = [call for call in calls if call.kind == "flex"]
    if sum((call.costs.with_mask - call.costs.in_blocks) * call.times for call in flex) < MIN_FLEX_GAIN_US * 1e-6:
        calls = [call for call in calls if call.kind != "flex"]
    notes = _Rewriting(nest, elements).rewrite(calls)
    return PassReport(len(calls), (*notes, *left.notes()))


def _attention_arguments(node: Node) -> dict[str, Any]:
    return dict(zip(_ATTENTION_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)


def _check_kernel(node: Node, kind: str, mask: MaskPredicate, scores: Sequence[Size]) -> None:
    """Raise UnknownMask if no kernel computes this call under a predicate."""
    given = _attention_arguments(node)
    size_dims(node, mask.sizes)
    operands = [value_of(given[name]) for name in ("query", "key", "value")]
    if any(map(compat.tensors.is_wrapper, operands)):
        raise UnknownMask("queries and keys are distributed tensors")
    if given.get("dropout_p", 0.0) != 0.0:
        raise UnknownMask("attention has dropout")
    if given.get("is_causal") or not isinstance(given.get("scale") or 1.0, float):
        raise UnknownMask("its scale is not a number")
    widths = [sizes_of(given[name])[3] for name in ("query", "key", "value")]
    if len({*widths}) > 1 or not isinstance(widths[0], int):
        raise UnknownMask("keys and values have heads of other widths")
    way = traits_of(kind).masked_attention
    if not way or (way == "blocks" and given.get("enable_gqa")):
        raise UnknownMask("no kernel of this device skips what it forbids")
    if way == "blocks" and any(not isinstance(size, int) for size in scores[2:]) and WINDOW not in mask.predicate.kinds:
        raise UnknownMask("lengths are symbols, and it has no window")
    if way == "flex":
        _check_flex(operands, scores, kind)


def _check_flex(operands: Sequence[torch.Tensor], scores: Sequence[Size], kind: str) -> None:
    short = (torch.float16, torch.bfloat16)
    casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in short
    if not casts and any(operand.dtype not in short for operand in operands):
        raise UnknownMask("attention is not in 16 bits")
    if operands[0].shape[3] not in FLEX_WIDTHS:
        raise UnknownMask(f"its heads have {operands[0].shape[3]} elements")
    if any(not isinstance(size, int) for size in scores):
        raise UnknownMask("sizes are symbols")  # TorchInductor's kernels for these have failed a test on a GPU
    if isinstance(scores[2], int) and scores[2] < MIN_FLEX_QUERIES:
        raise UnknownMask(f"there are only {scores[2]} queries")


# --- costs ------------------------------------------------------------------------------------------------------------


def _costs(node: Node, mask: Node, found: MaskPredicate | None, scores: Sequence[Size], figures: Figures) -> _Costs:
    """Return the costs of a call with its mask, and in blocks if its predicate is known."""
    batch, heads, queries, keys = (
        size if isinstance(size, int) else usual for size, usual in zip(scores, _USUAL, strict=True)
    )
    operands = [value_of(argument(node, place, name)) for place, name in enumerate(_ATTENTION_ARGUMENTS[:3])]
    trains = any(operand.requires_grad for operand in operands)
    widths = [width if isinstance(width := operand.shape[3], int) else 64 for operand in operands[1:]]
    flops = 2 * sum(widths) * (1 + BACKWARD_FLOPS * trains)
    rate = figures.rate(str(operands[0].dtype).removeprefix("torch.")) * figures.attention
    value = value_of(mask)
    dims = (1,) * (4 - value.dim()) + tuple(value.shape)
    numbers = [n if isinstance(n, int) else usual for n, usual in zip(dims, _USUAL, strict=True)]
    nbytes = value.element_size() * numbers[0] * numbers[1] * numbers[2] * numbers[3]
    read = nbytes * (1 + trains) / (figures.memory_gbs * 1e9)
    whole = batch * heads * queries * keys * flops / rate + read
    if found is None:
        return _Costs(whole, whole, nbytes)
    is_host = traits_of(figures.name).is_host
    block = QUERIES_AT_ONCE if is_host else flex_masks.BLOCK
    named = dict.fromkeys(found.predicate.sizes, NOMINAL_LENGTH)
    pairs = allowed_pairs(found.predicate, queries, keys, block, named)
    part = DOCUMENTS_PART if DOCUMENTS in found.predicate.kinds else 1.0
    calls = -(-queries // block) * (batch if found.predicate.by_batch else 1) * (1 + trains) if is_host else 0
    return _Costs(whole, batch * heads * pairs * part * flops / rate + calls * CALL_US * 1e-6, nbytes)


_USUAL = (1, 1, NOMINAL_LENGTH, NOMINAL_LENGTH)
"""What symbols of batch, heads, queries and keys count as."""


class _LeftMasks:
    """Attention calls that keep their mask as a tensor, with its price, by the reason."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float, int]] = {}

    def add(self, reason: str, costs: _Costs, times: int) -> None:
        """Count a call."""
        count, seconds, nbytes = self._found.get(reason, (0, 0.0, 0))
        found = count + times, seconds + costs.with_mask * times, max(nbytes, costs.mask_bytes)
        self._found[reason] = found

    def notes(self) -> Iterable[str]:
        """Yield a line for each reason whose calls take a noticeable time."""
        for reason, (count, seconds, nbytes) in self._found.items():
            if seconds * 1e6 >= MIN_NOTED_US:
                yield (
                    f"{count} attention calls keep their mask as a tensor of {nbytes / 2**20:.1f} MiB, since {reason}; "
                    f"they compute all pairs, for {seconds * 1e6:.0f} us of a step by the cost model"
                )


# --- rewriting --------------------------------------------------------------------------------------------------------


class _Rewriting:
    """Replace attention calls by those under a predicate."""

    def __init__(self, nest: NestedGraphs, elements: ElementsOf) -> None:
        self._nest, self._elements = nest, elements
        self._tables: dict[Any, tuple[Node, ...]] = {}
        """Tables of blocks that calls in one graph share."""

    def rewrite(self, calls: Sequence[_MaskedCall]) -> list[str]:
        """Rewrite calls, and return lines for the receipt."""
        counts: dict[tuple[str, str], int] = {}
        masks, repeated = list[Node](), list[Node]()
        for call in calls:
            operands = [argument(call.node, place, name) for place, name in ((1, "key"), (2, "value"))]
            mask = mask_of(call.node)
            shared = unrepeated(call.node, self._nest) if call.kind == "flex" else None
            self._replace(call, *(operands if shared is None else shared))
            masks += [] if mask is None else [mask]
            repeated += [] if shared is None else operands
            name = ", ".join(call.mask.predicate.kinds) or "general"
            counts[name, call.kind] = counts.get((name, call.kind), 0) + 1
        if calls:
            self._nest.erase_unused(masks, self._elements.is_constant)
            erase_repeated(repeated, self._nest)
            self._nest.recompile()
        return [
            f"{GAIN}{n} attention calls skip what their mask ({name}) forbids: {_HOW[how]}"
            for (name, how), n in counts.items()
        ]

    def _replace(self, call: _MaskedCall, key: Node, value: Node) -> None:
        node = call.node
        graph = node.graph
        given = _attention_arguments(node)
        query, scale = given["query"], given.get("scale")
        width = value_of(query).shape[3]
        scale = width**-0.5 if scale is None else scale
        reads = tuple(self._brought(read, node) for read in call.mask.reads)
        dims = size_dims(node, call.mask.sizes)
        text = str(call.mask.predicate)
        with graph.inserting_before(node):
            sizes = tuple(_size_node(graph, *place) for place in dims.values())
            if call.kind == "flex":
                tables = self._shared_tables(node, (query, key, reads, sizes, text))
                made = graph.call_function(
                    flex_masks.attend_in_blocks, (query, key, value, reads, sizes, tables, text, scale)
                )
            else:
                made = graph.call_function(attention_ops.attend, (query, key, value, reads, sizes, text, scale))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)

    def _shared_tables(self, node: Node, arguments: Any) -> tuple[Node, ...]:
        """Return the tables of blocks for a call: those of an earlier call with the same predicate, or new ones."""
        query, key, reads, sizes, text = arguments
        lengths = tuple(map(str, (*value_of(query).shape[:3], value_of(key).shape[2])))
        shared = (node.graph, text, lengths, reads, tuple(size.args for size in sizes))
        if shared not in self._tables:
            values = torch.fx.map_arg(arguments, value_of)
            with torch.no_grad(), getattr(value_of(query), "fake_mode", nullcontext()):
                found = flex_masks.block_tables(*values)
            made = node.graph.call_function(flex_masks.block_tables, arguments)
            made.meta["example_value"] = found
            self._tables[shared] = tuple(_table_item(made, number, value) for number, value in enumerate(found))
        return self._tables[shared]

    def _brought(self, read: Node, node: Node) -> Node:
        """Return a read's tensor in the graph of an attention call; pass it into bodies."""
        graph = self._nest.owner(node)
        return read if read.graph is graph.graph else self._into(read, graph)

    def _into(self, read: Node, body: GraphModule) -> Node:
        calls = self._nest.calls_of(body)
        operands = [read if call.graph.graph is read.graph else self._into(read, call.graph) for call in calls]
        return self._nest.give(body, operands)


_HOW = {
    "blocks": "blocks of queries read the keys in their reach",
    "flex": "FlexAttention's kernel computes them",
}
"""Kind of a call -> text for the receipt."""


def _size_node(graph: torch.fx.Graph, tensor: Node, dim: int) -> Node:
    made = graph.call_method("size", (tensor, dim))
    made.meta["example_value"] = value_of(tensor).shape[dim]
    return made


def _table_item(tables: Node, number: int, value: torch.Tensor) -> Node:
    made = tables.graph.call_function(operator.getitem, (tables, number))
    made.meta["example_value"] = value
    return made


# --- block masks ------------------------------------------------------------------------------------------------------

BLOCK_MASK = 4
"""Position of the block mask among FlexAttention's arguments."""


def specialize_block_sizes(gm: GraphModule) -> PassReport:
    """Replace symbolic sides of blocks in FlexAttention's calls by numbers, in subgraphs, too.

    Guarantees: a guard of torch's on each side that was a symbol, so that other sides get a graph of their own.
    """
    count = 0
    for module in gm.modules():
        calls = module.graph.nodes if isinstance(module, GraphModule) else ()
        for node in [node for node in calls if compat.inductor.is_flex(node.target)]:
            before: Any = node.args[BLOCK_MASK] if len(node.args) > BLOCK_MASK else ()
            if not compat.flex.is_known_mask(before):
                continue
            sides = [_as_number(item) for item in before[compat.flex.SIDES]]
            count += sides != [*before[compat.flex.SIDES]]
            node.update_arg(BLOCK_MASK, (*before[: compat.flex.SIDES.start], *sides, before[-1]))
    return PassReport(count)


def _as_number(item: Any) -> Any:
    """Return the value of a node that is a size, and everything else as it is."""
    value = value_of(item) if isinstance(item, Node) else None
    return int(value) if isinstance(value, torch.SymInt) else item


# --- elements of masks ------------------------------------------------------------------------------------------------


FROM_NUMBERS = ("ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "empty", "empty_like")
"""Functions that make a tensor with memory of its own."""
LIKE = frozenset(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"))
"""Functions that use only the shape, dtype and device of their first argument."""
AS_OTHER = frozenset(("expand_as", "view_as", "reshape_as", "type_as", "to"))
"""Functions that use only the shape, dtype and device of their other arguments."""
_VMAP = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


class MaskTracer(Protocol):
    """The interface of `codegen.lower.elements.ElementTracer`."""

    reads: Reads

    def tracing(self) -> AbstractContextManager[Any]:
        """Context in which operators are traced; they raise UnknownElements."""

    def bind(self, tensor: torch.Tensor, elements: Elements | None) -> None:
        """Set the elements of a tensor that functions are about to be called with; None for unknown ones."""

    def elements(self, tensor: torch.Tensor) -> Elements | None:
        """Return the elements of a tensor that was traced or bound."""

    def read(self, tensor: torch.Tensor, source: Any) -> Elements | None:
        """Return elements that are reads of `source`; None for dtypes that masks do not have, or unknown sizes."""


class ElementsOf:
    """Elements of the nodes in a nest of graphs, each computed once."""

    def __init__(self, nest: NestedGraphs, changed: Callable[[Node], bool], tracer: MaskTracer) -> None:
        """Start without results. `changed` is true for nodes whose memory is written: these are unknown."""
        self._nest, self._changed, self._tracer = nest, changed, tracer
        self._known: dict[Node, Elements | None] = {}
        self._values: dict[Node, Any] = {}
        """Results of the nodes that were run."""

    @property
    def reads(self) -> Reads:
        return self._tracer.reads

    def __call__(self, node: Node) -> Elements | None:
        """Return the elements of a node's tensor; None if they are unknown.

        Where no rule determines them, those of boolean and integer tensors are reads.
        """
        if node not in self._known:
            needed = self._needed(node)
            with getattr(value_of(node), "fake_mode", None) or nullcontext(), torch.no_grad():
                self._run_graph(node.graph, needed, set())
        return self._known[node]

    def is_constant(self, node: Node) -> bool:
        """Does a node compute without side effects: a tensor by operators with a rule, a new one, or a size?"""
        is_size = isinstance(value_of(node), torch.SymInt) and getattr(node.target, "__module__", "") == "_operator"
        is_new = is_of_torch(node) and name_of(node) in FROM_NUMBERS and "out" not in node.kwargs
        return node in self._values or is_size or is_new

    def _needed(self, node: Node) -> dict[Node, list[Node] | None]:
        """Return the nodes that determine a node's elements, itself among them, each with its operands."""
        found: dict[Node, list[Node] | None] = {}
        pending = [node]
        while pending:
            if (top := pending.pop()) not in found:
                found[top] = self._operands(top)
                pending += found[top] or ()
        return found

    def _operands(self, node: Node) -> list[Node] | None:
        """Return the nodes whose elements determine those of `node`; None if its elements are unknown anyway."""
        if not isinstance(value_of(node), torch.Tensor) or self._changed(node):
            return None
        if node.op == "placeholder":
            return self._nest.sources(node)
        if not is_of_torch(node) or "out" in node.kwargs:
            return None
        inputs = [other for other in node.all_input_nodes if isinstance(value_of(other), torch.Tensor)]
        if name_of(node) in LIKE:
            return [other for other in inputs if other is not inputs[0]]  # the fill value may be a tensor's element
        return inputs[:1] if name_of(node) in AS_OTHER else inputs

    def _run_graph(self, graph: Graph, needed: Mapping[Node, list[Node] | None], done: set[Graph]) -> None:
        """Run the needed nodes of a graph, after those of graphs around it that give it operands."""
        done.add(graph)
        for placeholder in graph.find_nodes(op="placeholder"):
            for operand in needed.get(placeholder) or ():
                if operand.graph not in done:
                    self._run_graph(operand.graph, needed, done)
        levels = 0
        try:
            for node in graph.nodes:
                if name_of(node) in _VMAP:  # nodes up to the end of its level are mapped over a batch, and run anew
                    node.target(*map_arg(node.args, self._value))
                    levels += _VMAP[name_of(node)]
                elif node in needed and (levels or node not in self._known):
                    self._known[node] = self._run(node, needed[node], is_mapped=levels > 0)
        finally:
            compat.dynamo.leave_vmap(levels)

    def _run(self, node: Node, operands: list[Node] | None, *, is_mapped: bool) -> Elements | None:
        """Return a node's elements; None if they are unknown, and for those that are mapped."""
        self._values.pop(node, None)
        if operands is not None:
            found = [self._known[operand] for operand in operands]
            if node.op == "placeholder":
                if found[0] is not None and all(other == found[0] for other in found) and _is_of(node, found[0]):
                    return found[0]
            elif all(known or operand in self._values for known, operand in zip(found, operands, strict=True)):
                try:
                    made = self._computed(node)
                except (UnknownElements, TooManyCases):  # Dynamo has run the node: torch refuses it no more than then
                    made = None
                if isinstance(made, torch.Tensor) and (is_mapped or self._tracer.elements(made) is not None):
                    self._values[node] = made
                    return self._tracer.elements(made)
        return None if is_mapped or self._changed(node) else self._tracer.read(value_of(node), node)

    def _computed(self, node: Node) -> Any:
        for operand in node.all_input_nodes:
            if isinstance(value := self._value(operand), torch.Tensor):
                self._tracer.bind(value, self._known.get(operand))
        args, kwargs = map_arg((node.args, node.kwargs), self._value)
        target: Any = node.target
        with self._tracer.tracing():
            if node.op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    def _value(self, node: Node) -> Any:
        return self._values.get(node, value_of(node))


def _is_of(node: Node, elements: Elements) -> bool:
    return sizes_of(node) == elements.shape and str(value_of(node).dtype) == f"torch.{elements.dtype}"
