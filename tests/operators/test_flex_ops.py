"""Parts of FlexAttention's loop: equal rows and neighbouring blocks are joined, and nothing else is computed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import (
    _permute_strides,
    create_fw_bw_graph,
    flex_attention,
    flex_attention_backward,
)
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import _create_empty_block_mask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from dcompile.compat import flex as compat
from dcompile.compat.flex import BlockTables
from dcompile.operators import flex_ops
from dcompile.operators.flex_ops import KeyTile, Part, parts


def table(rows):
    """Counts and places of lists of blocks, by batch, head and row. Unused places name a block that does not exist."""
    width = max(len(row) for batch in rows for head in batch for row in head) + 1
    counts = torch.tensor([[[len(row) for row in head] for head in batch] for batch in rows], dtype=torch.int32)
    places = [[[[*row, *[99] * (width - len(row))] for row in head] for head in batch] for batch in rows]
    return counts, torch.tensor(places, dtype=torch.int32)


def described(found: list[Part]):
    """(batches, heads, queries, keys of each tile, which are whole) of each part, as lists of numbers."""

    def numbers(place):
        return [*range(place.start, place.stop)] if isinstance(place, slice) else place.tolist()

    def tile(given: KeyTile):
        whole = given.whole if isinstance(given.whole, bool) else given.whole.tolist()
        return numbers(given.keys), whole

    return [(*map(numbers, part.rows), [tile(item) for item in part.tiles]) for part in found]


def test_blocks_are_joined_in_order_and_cut_at_the_length():
    partial, whole = table([[[[2, 0], [], [3]]]]), table([[[[1], [], []]]])
    found = parts(BlockTables(*partial, *whole, 2, 4, None), (1, 1, 5, 8), 14)
    assert described(found) == [
        ([0], [0], [0, 1], [([*range(12)], [False] * 4 + [True] * 4 + [False] * 4)]),
        ([0], [0], [4], [([12, 13], False)]),
    ]
    assert isinstance(found[0].tiles[0].keys, slice)


def test_blocks_apart_are_positions():
    found = parts(BlockTables(*table([[[[3, 0]]]]), None, None, 4, 2, None), (1, 1, 4, 8), 8)
    assert described(found) == [([0], [0], [0, 1, 2, 3], [([0, 1, 6, 7], False)])]


def test_equal_rows_heads_and_batches_are_joined():
    same, other = [[0], [0]], [[1], [0]]
    found = parts(
        BlockTables(*table([[same, same, other], [same, same, other]]), None, None, 2, 2, None), (2, 3, 4, 8), 4
    )
    assert described(found) == [
        ([0, 1], [0, 1], [0, 1], [([0, 1], False)]),
        ([0, 1], [2], [0, 1], [([2, 3], False)]),
        ([0, 1], [0, 1, 2], [2, 3], [([0, 1], False)]),
    ]
    found = parts(BlockTables(*table([[same] * 3] * 2), None, None, 2, 2, None), (2, 3, 4, 8), 4)
    assert described(found) == [([0, 1], [0, 1, 2], [0, 1, 2, 3], [([0, 1], False)])]


def test_large_blocks_are_cut(monkeypatch):
    monkeypatch.setattr(flex_ops, "QUERIES_AT_ONCE", 2)
    monkeypatch.setattr(flex_ops, "KEYS_AT_ONCE", 3)
    monkeypatch.setattr(flex_ops, "SCORES_AT_ONCE", 12)
    found = parts(BlockTables(*table([[[[0]]]]), None, None, 1 << 30, 1 << 30, None), (1, 3, 3, 8), 4)
    tiles = [([0, 1, 2], False), ([3], False)]
    assert described(found) == [
        ([0], [0, 1], [0, 1], tiles),
        ([0], [2], [0, 1], tiles),
        ([0], [0, 1, 2], [2], tiles),
    ]


WIDTH, SCALE = 16, 0.25


@dataclass(frozen=True)
class Call:
    """What a call is made of. `mask` and `score` are functions as users write them."""

    mask: object = None
    score: object = None
    buffers: tuple = ()
    queries: int = 300
    keys: int = 300
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    key_batch: int = 2
    block: int | tuple = 128
    by_batch_and_head: tuple = (None, None)
    dtype: torch.dtype = torch.float64
    value_width: int = WIDTH
    is_transposed: bool = False
    seed: int = 0
    options: dict = field(default_factory=dict)

    def operands(self):
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.batch, self.heads, self.queries, WIDTH),
            (self.key_batch, self.key_heads, self.keys, WIDTH),
            (self.key_batch, self.key_heads, self.keys, self.value_width),
        )
        found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found] if self.is_transposed else found

    def block_mask(self, query, key):
        if self.mask is None:
            mask = _create_empty_block_mask(query, key)
        else:
            size = (*self.by_batch_and_head, self.queries, self.keys)
            mask = create_block_mask(self.mask, *size, device="cpu", BLOCK_SIZE=self.block)
        *tables, function = mask.as_tuple()
        places = [torch.zeros((), dtype=torch.int) for _ in range(4)]
        with TransformGetItemToIndex():
            return (*tables, make_fx(function)(*places))

    def graphs(self):
        """The score function and its gradient, as graphs."""
        places = [torch.zeros((), dtype=torch.int) for _ in range(4)]
        score = torch.zeros((), dtype=self.dtype, requires_grad=True)
        function = self.score or (lambda score, *places: score)
        with TransformGetItemToIndex():
            _, joint = create_fw_bw_graph(function, (score, *places), self.buffers)
            return make_fx(function)(score, *places, *self.buffers), joint


def forwards(call, query, key, value, mask, score):
    """What the loop finds, and what eager math does."""
    given = (query, key, value, score, mask, SCALE, call.options, call.buffers, ())
    with torch.no_grad():
        return flex_ops.attend(*given), flex_attention(*given)


def backwards(call, operands, results, grads, mask, score, joint):
    given = (*operands, *results, *grads, score, joint, mask, SCALE, call.options, call.buffers, ())
    with torch.no_grad():
        return flex_ops.differentiate(*given), flex_attention_backward(*given)


def both(call, operands=None, with_logsumexp=True):
    """(ours, eager's) of each result: those of the forward, then the gradients."""
    query, key, value = operands or call.operands()
    mask, (score, joint) = call.block_mask(query, key), call.graphs()
    ours, eagers = forwards(call, query, key, value, mask, score)
    pairs = [*zip(ours, eagers, strict=True)]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(eagers[0].shape, generator=generator, dtype=torch.float64).to(call.dtype)
    by_sum = torch.randn(eagers[1].shape, generator=generator, dtype=torch.float64).to(eagers[1].dtype)
    by_sum = by_sum.masked_fill(eagers[1].isinf(), 0) if with_logsumexp else None
    found, expected = backwards(call, (query, key, value), eagers[:2], (grad, by_sum), mask, score, joint)
    pairs += zip(found[:3], expected[:3], strict=True)
    pairs += [pair for pair in zip(found[3], expected[3], strict=True) if pair[1] is not None]
    return pairs


def check(call, **how):
    for place, (found, expected) in enumerate(both(call, **how)):
        if place in (1, 2):
            assert found.dtype == torch.float32
            expected = expected.float()
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        torch.testing.assert_close(found, expected)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < 100)


def soft_cap(s, b, h, q, k):
    return 20 * torch.tanh(s / 20)


def by_head(b, h, q, k):
    return (q - k < 60 * (h + 1)) & (k - q <= 30 * h)


def by_batch(b, h, q, k):
    return (k < 130 + 140 * b) & (q >= k)


def no_keys_at_first(b, h, q, k):
    return (q >= k) & (q > 140)


DOCUMENTS = torch.arange(1000) // 170


def document(b, h, q, k):
    return (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k])


def alibi(s, b, h, q, k, slopes):
    return s + slopes[h] * (k - q)


def biased(s, b, h, q, k, bias, slopes):
    """A tensor that is read twice, and one by the distance."""
    return s + bias[h, q, k] * 2 + bias[h, k, q] + slopes[h + q % 2]


def lone(s, b, h, q, k, slope, constant):
    return s * slope[0] + constant[q]


def learned(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


SLOPES = learned(8)
CASES = {
    "no mask": Call(),
    "no mask, long": Call(queries=600, keys=1100, batch=1, key_batch=1),
    "causal": Call(causal),
    "1000 with blocks of 128": Call(causal, queries=1000, keys=1000, batch=1, key_batch=1),
    "window": Call(window, queries=1000, keys=1000, batch=1, key_batch=1),
    "small blocks": Call(window, block=(16, 32)),
    "large blocks": Call(causal, block=(512, 1024), queries=700, keys=700, batch=1, key_batch=1),
    "document": Call(document, queries=1000, keys=1000, batch=1, key_batch=1),
    "alibi": Call(causal, alibi, (SLOPES,)),
    "alibi without a mask": Call(None, alibi, (SLOPES,)),
    "bias": Call(causal, biased, (learned(4, 300, 300), SLOPES), batch=1, key_batch=1),
    "one slope and a constant": Call(causal, lone, (learned(1), learned(300).detach())),
    "soft cap": Call(window, soft_cap),
    "every third block": Call(lambda b, h, q, k: (k // 32) % 3 == 0, block=32),
    "shared heads": Call(causal, alibi, (SLOPES,), heads=8, key_heads=2),
    "shared heads, mask by head": Call(by_head, heads=6, key_heads=2, by_batch_and_head=(None, 6), block=32),
    "by head": Call(by_head, by_batch_and_head=(None, 4), block=32),
    "by batch": Call(by_batch, by_batch_and_head=(2, None)),
    "equal tables by batch and head": Call(window, by_batch_and_head=(2, 4)),
    "shared batch": Call(by_batch, key_batch=1, by_batch_and_head=(2, None)),
    "rows without keys": Call(no_keys_at_first, alibi, (SLOPES,)),
    "cross attention": Call(lambda b, h, q, k: k < 3 * q, queries=130, keys=500),
    "wide values": Call(causal, value_width=24),
    "transposed": Call(causal, is_transposed=True),
    "transposed, shared batch": Call(by_batch, key_batch=1, by_batch_and_head=(2, None), is_transposed=True),
    "masked by its score": Call(None, lambda s, b, h, q, k: torch.where(q - k >= 5, s, -math.inf)),
}


@pytest.mark.parametrize("name", CASES)
def test_float64(name):
    check(CASES[name])


def test_without_a_gradient_of_the_logsumexp():
    check(CASES["causal"], with_logsumexp=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "window", "alibi", "soft cap", "shared heads", "rows without keys"])
def test_as_near_to_float64_as_eagers(name, dtype):
    short = replace(CASES[name], dtype=dtype)
    short = replace(short, buffers=tuple(learned(8, dtype=dtype) for _ in short.buffers))
    wide = replace(CASES[name], buffers=tuple(x.detach().double().requires_grad_() for x in short.buffers))
    exact = [theirs for _, theirs in both(wide, [x.double() for x in short.operands()])]
    for (mine, theirs), true in zip(both(short), exact, strict=True):
        true = true.masked_fill(true.isinf(), 0)
        mine, theirs = mine.masked_fill(mine.isinf(), 0), theirs.masked_fill(theirs.isinf(), 0)
        near = torch.finfo(mine.dtype).eps * true.abs().max() * 4
        assert (mine - true).abs().max() <= 1.5 * (theirs - true).abs().max() + near


class _Largest(TorchDispatchMode):
    """The largest memory of a tensor that an operator has made, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for item in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return found


def run(call, operands, watch=None):
    """Results and gradients of the sum, by the loop."""
    mask, (score, joint) = call.block_mask(*operands[:2]), call.graphs()
    rest = (mask, SCALE, {}, call.buffers, ())
    with watch or contextlib.nullcontext():
        found = flex_ops.attend(*operands, score, *rest)
        grads = flex_ops.differentiate(*operands, *found[:2], torch.ones_like(found[0]), None, score, joint, *rest)
    return [*found, *grads[:3], *grads[3]]


LONG = Call(window, queries=4096, keys=4096, batch=1, key_batch=1, heads=2, key_heads=2, dtype=torch.float32)


@pytest.mark.parametrize(
    "call", [LONG, replace(LONG, mask=causal), replace(LONG, mask=None), replace(LONG, score=alibi, buffers=(SLOPES,))]
)
def test_no_tensor_is_as_large_as_a_tenth_of_the_scores(call):
    largest = _Largest()
    run(call, call.operands(), largest)
    assert 0 < largest.elements < 2 * 4096 * 4096 / 10


def test_a_piece_is_bounded_for_many_heads():
    call = Call(None, queries=300, keys=600, batch=8, key_batch=8, heads=16, key_heads=16, dtype=torch.float32)
    operands, largest = call.operands(), _Largest()
    run(call, operands, largest)
    assert largest.elements <= max(1 << 21, operands[1].numel()) < 8 * 16 * 300 * 600 / 5


def test_blocks_that_the_mask_leaves_out_are_not_computed():
    """Rows of the second half attend to keys of the second half: neither half reads the other's operands."""
    call = Call(lambda b, h, q, k: (q < 256) == (k < 256), queries=512, keys=512)
    operands = call.operands()
    expected = run(call, operands)
    half = [x.clone() for x in operands]
    for tensor in half[1:]:
        tensor[:, :, 256:] = torch.nan
    for found, true in zip(run(call, half), expected, strict=True):
        assert torch.equal(found[:, :, :256], true[:, :, :256])
    assert not torch.isnan(expected[0]).any()


def test_the_score_function_gets_pairs_of_named_blocks_alone(monkeypatch):
    call, shapes = Call(window, soft_cap, queries=1000, keys=1000, batch=1, key_batch=1), []
    whole = flex_ops.over_pairs

    def noted(function, before, after, *outs):
        mapped = whole(function, before, after, *outs)
        counted = before and not outs  # gradient graphs name their results
        return lambda *given: (shapes.append(given[0].shape) if counted else None, mapped(*given))[1]

    monkeypatch.setattr(flex_ops, "over_pairs", noted)
    run(call, call.operands())
    pairs = 128 * 128 * (1 + 2 * 6) + 104 * (128 + 104)
    assert sum(shape[2] * shape[3] for shape in shapes) == pairs * 3  # float64's sums are made again in the backward


def test_captured_tensors_without_a_dimension_and_gradients_that_are_no_sum():
    """Eager math cannot sum the first: the graph has its gradient for each pair. It cannot write the third's, which is
    none."""
    slope, table, dead = learned(), learned(5), learned(3)

    def score(s, b, h, q, k, slope, table, dead):
        return s * slope + (table * 2)[q % 5] + dead.detach()[h % 3]

    call = Call(causal, score, (slope, table, dead))
    query, key, value = (x.requires_grad_() for x in call.operands())
    q, k = torch.arange(300)[:, None], torch.arange(300)
    scores = (query @ key.mT) * SCALE * slope + (table * 2)[q % 5] + dead.detach()[torch.arange(4) % 3, None, None]
    out = torch.where(q >= k, scores, -math.inf).softmax(-1) @ value
    expected = torch.autograd.grad(out.sum(), [query, key, value, slope, table])
    found = run(call, [x.detach() for x in (query, key, value)])
    for mine, theirs in zip(found[3:8], expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(found[8], torch.zeros(3, dtype=torch.float64))


def test_a_score_that_is_no_function_of_the_product():
    """Later versions of torch refuse to differentiate it; earlier ones have a graph without a gradient."""
    call = Call(causal, queries=130, keys=130)
    query, key, value = call.operands()
    graph = Graph()
    for place in range(6):
        graph.placeholder(f"given{place}")
    graph.output([None] * 5)
    joint = GraphModule(torch.nn.Module(), graph)
    rest = (lambda s, b, h, q, k: (q - k) * 0.1, call.block_mask(query, key), SCALE, {})
    found = flex_ops.attend(query, key, value, *rest)
    q, k = torch.arange(130)[:, None], torch.arange(130)
    weights = torch.where(q >= k, (q - k) * 0.1, -math.inf).to(torch.float64).softmax(-1)
    torch.testing.assert_close(found[0], weights @ value)
    grad = torch.ones_like(value)
    grads = flex_ops.differentiate(query, key, value, *found[:2], grad, None, rest[0], joint, *rest[1:])
    assert not grads[0].any() and not grads[1].any()
    torch.testing.assert_close(grads[2], weights.mT @ grad)


def test_a_mask_of_too_few_rows_is_an_error():
    call = Call(causal, queries=256, keys=256)
    query, key, value = call.operands()
    mask, (score, _) = call.block_mask(query, key), call.graphs()
    longer = torch.cat([query, query], 2)
    with pytest.raises(ValueError, match="2 rows of 128 queries; there are 512"):
        flex_ops.attend(longer, key, value, score, mask, SCALE, {})


def test_a_callers_autocast_and_autograd_stay_outside():
    operands = [x.float().requires_grad_() for x in Call().operands()]
    call = Call(causal, dtype=torch.float32)
    expected = run(call, [x.detach() for x in operands])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(call, operands)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs) and not mine.requires_grad


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 0, 1, 2), (0, 3, 1, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 5, 7), (2, 1, 1, 7)])
def test_layouts_are_eagers(shape, order):
    given = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    assert given.shape == shape
    expected = _permute_strides(torch.empty(shape), given.stride())
    assert compat.laid_out_as(given, shape).stride() == expected.stride()
    if shape[0] == 1:
        summed = _permute_strides(torch.empty(4, *shape[1:]), given.stride()).sum(0, keepdim=True)
        assert compat.laid_out_as(given, shape, batch=4).stride() == summed.stride()
