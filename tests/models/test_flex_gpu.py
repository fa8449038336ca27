"""FlexAttention on a GPU: results and gradients against float64's, by functions and layouts as users have them.

`pytest -m gpu`. An error may be 1.2 times eager's own, of what a score function reads three times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import dcompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings(
        "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute", "ignore:return_lse is"
    ),
]


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < 256)


def documents(b, h, q, k):
    return (q // 300 == k // 300) & (q >= k)


def everything(b, h, q, k):
    return q >= -k


def prefix(b, h, q, k):
    return (k < 70 + 50 * b) | (q >= k)


def rounded(x):
    """`x` to bfloat16, with the gradient of `x`: eager rounds gradients where it has rounded values, kernels do not."""
    return x + (x.to(torch.bfloat16).to(x.dtype) - x).detach()


SCORES = {
    "doubled": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "trigonometric": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
    "relative": lambda s, b, h, q, k: s + (q - k) / 100,
    "forbidden": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "alibi of powers": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 4)),
    "capped": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "capped in 16 bits": lambda s, b, h, q, k: (20 * torch.tanh(s.to(torch.bfloat16) / 20)).float(),
    "capped in 16 bits, exactly": lambda s, b, h, q, k: rounded(20 * rounded(torch.tanh(rounded(rounded(s) / 20)))),
    "slopes": lambda s, b, h, q, k, slopes: s + slopes[h] * (k - q),
    "offsets": lambda s, b, h, q, k, offsets: s * offsets[h],
    "pairs": lambda s, b, h, q, k, bias: s + bias[b, h, q, k],
    "buckets": lambda s, b, h, q, k, table: s + table[h, (q - k).clamp(-31, 31) + 31],
    "negative places": lambda s, b, h, q, k, table: s + table[h, -1 - q % 7],
    "rows and columns": lambda s, b, h, q, k, rows, columns: s * rows[b, q] + columns[h, k],
}


@dataclass(frozen=True)
class Case:
    """One call and its gradients."""

    score: str = ""
    reads: tuple[tuple[int, ...], ...] = ()
    trains: bool = False
    mask: object = causal
    batch: int = 2
    heads: int = 4
    shared: int = 4
    queries: int = 1024
    keys: int = 1024
    width: int = 64
    value_width: int = 64
    block: object = 128
    dtype: torch.dtype = torch.bfloat16
    layout: str = "heads first"
    exact: str = ""
    """The function that its results are compared with in float64; empty for its own."""
    left: str = ""
    """Part of the receipt's notes for what TorchInductor computes."""


CASES = {
    **{name: Case(name) for name, _ in zip(SCORES, range(7), strict=False)},
    "capped in 16 bits": Case("capped in 16 bits", dtype=torch.float16, exact="capped in 16 bits, exactly"),
    **{f"{name} learned": Case(name, ((4,),), True) for name in ("slopes", "offsets")},
    "slopes": Case("slopes", ((4,),)),
    "pairs": Case("pairs", ((2, 4, 512, 512),), queries=512, keys=512),
    "pairs learned": Case("pairs", ((2, 4, 512, 512),), True, queries=512, keys=512),
    "buckets learned": Case("buckets", ((4, 63),), True, mask=everything),
    "negative places learned": Case("negative places", ((4, 9),), True),
    "rows and columns learned": Case("rows and columns", ((2, 1024), (4, 1024)), True, mask=window),
    **{f"{mask.__name__} {width}": Case(mask=mask, width=width, value_width=width)
       for mask in (window, documents) for width in (64, 128)},
    "prefix": Case(mask=prefix),
    "heads of 16": Case(width=16, value_width=16),
    "heads of 80": Case(width=80, value_width=80),
    "heads of 256": Case(width=256, value_width=256, mask=window),
    "values of 128": Case(value_width=128),
    "float16": Case(dtype=torch.float16, mask=window),
    "float32": Case(dtype=torch.float32, left="its inputs are float32"),
    "grouped heads": Case(heads=8, shared=2, mask=window),
    "one shared head": Case(heads=8, shared=1, width=128, value_width=128),
    "lengths that no block divides": Case(queries=1000, keys=777, mask=everything),
    "more keys than queries": Case(queries=256, keys=1536, mask=everything),
    "few queries of many keys": Case(queries=16, keys=2048, mask=everything, left="which it splits"),
    "blocks of 64": Case(block=64, mask=window),
    "blocks of 128 and 256": Case(block=(128, 256), mask=documents),
    "positions first": Case(layout="positions first"),
    "a packed projection": Case(layout="packed"),
}  # fmt: skip


def inputs(case, seed=0):
    """Queries, keys, values, the result's gradient and what the score function reads."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    if case.layout == "packed":
        packed = random(case.batch, case.queries, 3, case.heads, case.width).to(case.dtype)
        first = [part.transpose(1, 2) for part in packed.unbind(2)]
    else:
        sizes = ((case.heads, case.queries, case.width), (case.shared, case.keys, case.width))
        first = [random(case.batch, *size).to(case.dtype) for size in sizes]
        first.append(random(case.batch, case.shared, case.keys, case.value_width).to(case.dtype))
    if case.layout == "positions first":
        first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in first]
    grad = random(case.batch, case.heads, case.queries, case.value_width).to(case.dtype)
    return first, grad, [random(*shape) * 0.3 for shape in case.reads]


def mask_of(case):
    by_batch = case.batch if case.mask is prefix else None
    return create_block_mask(case.mask, by_batch, None, case.queries, case.keys, device="cuda", BLOCK_SIZE=case.block)


def call_of(case, mask):
    function = SCORES.get(case.score)

    def call(q, k, v, *reads):
        score = None if function is None else lambda s, b, h, i, j: function(s, b, h, i, j, *reads)
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=case.heads != case.shared)

    return call


def trained(call, case, dtype=None):
    """The result and all gradients; `dtype` of all tensors, if not their own."""
    first, grad, reads = inputs(case)
    given = [tensor.detach() if dtype is None else tensor.detach().to(dtype) for tensor in (*first, *reads)]
    wanted = [tensor.requires_grad_() for tensor in given[: None if case.trains else 3]]
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_not_above_eagers_own(name):
    case = CASES[name]
    mask = mask_of(case)
    exactly = call_of(replace(case, score=case.exact or case.score), mask)
    compiled = dcompile.compile(call_of(case, mask), options={"receipt": False})
    exact, ours = trained(exactly, case, torch.float64), trained(compiled, case)
    eager = trained(call_of(case, mask), case)
    for place, (found, theirs, true) in enumerate(zip(ours, eager, exact, strict=True)):
        assert found.shape == theirs.shape and found.dtype == theirs.dtype
        limit = 1.2 * (theirs - true).abs().mean() + 1e-6 * true.abs().mean()
        if case.dtype == torch.float32:  # sums of other orders
            limit = 1e-3 * true.abs().mean()
        elif place > 3:  # a sum of a million terms of both signs
            limit = 3 * (theirs - true).abs().mean() + 1e-3 * true.abs().mean()
        assert (found - true).abs().mean() <= limit, f"result {place}"
    receipt = dcompile.receipt(compiled)
    notes = [note for note in receipt.notes if "flex" in note]
    assert any(case.left in note for note in notes) if case.left else not notes and not receipt.fallbacks


def test_one_program_is_for_all_lengths():
    compiled = dcompile.compile(
        lambda q, k, v, ids, mask: flex_attention(
            q, k, v, block_mask=mask, score_mod=lambda s, b, h, i, j: torch.where(ids[b, i] == ids[b, j], s, s - 2)
        ),
        dynamic=True,
        options={"receipt": False},
    )
    for batch, length in ((2, 512), (3, 768), (4, 1000)):
        case = Case(batch=batch, queries=length, keys=length)
        ids = torch.arange(length, device="cuda").expand(batch, -1) // 100
        mask = create_block_mask(causal, None, None, length, length, device="cuda")

        def call(q, k, v, ids=ids, mask=mask):
            return compiled(q, k, v, ids, mask)

        def eager(q, k, v, ids=ids, mask=mask):
            return flex_attention(
                q, k, v, block_mask=mask, score_mod=lambda s, b, h, i, j: torch.where(ids[b, i] == ids[b, j], s, s - 2)
            )

        exact, theirs, ours = trained(eager, case, torch.float64), trained(eager, case), trained(call, case)
        for found, near, true in zip(ours, theirs, exact, strict=True):
            assert (found - true).abs().mean() <= 1.2 * (near - true).abs().mean()
    receipt = dcompile.receipt(compiled)
    assert not receipt.fallbacks and not [note for note in receipt.notes if "flex" in note]


def test_inference_shares_keys_among_batches_and_returns_logarithms():
    q = torch.randn(3, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask: BlockMask = create_block_mask(causal, 3, None, 512, 512, device="cuda")

    def call(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, return_lse=True)

    compiled = dcompile.compile(call, options={"receipt": False})
    with torch.no_grad():
        exact, theirs, ours = call(q.double(), k.double(), v.double()), call(q, k, v), compiled(q, k, v)
    for found, near, true in zip(ours, theirs, exact, strict=True):
        assert (found - true).abs().mean() <= 1.2 * (near - true).abs().mean()
    assert not dcompile.receipt(compiled).fallbacks


def test_a_second_start_loads_the_kernels(tmp_path):
    """And has nothing compiled by TorchInductor for the calls in the graph that is loaded."""
    q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(causal, None, None, 512, 512, device="cuda")
    results = []
    for start in range(2):
        torch._dynamo.reset()
        options = {"receipt": False, "cache_dir": str(tmp_path), "verify": False}
        compiled = dcompile.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask) * 2, options=options)
        with torch.no_grad():
            results.append(compiled(q, k, v))
        receipt = dcompile.receipt(compiled)
        assert receipt.graphs_cached == start and not receipt.fallbacks
        assert not [note for note in receipt.notes if "flex" in note]
    assert torch.equal(*results)
