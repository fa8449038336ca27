"""Bucket boundaries: torch's own rule is the reference."""

import random

import pytest
import torch
import torch.distributed as dist

from dcompile.collectives.bucket import ALIGN_BYTES, assign, lay_out
from dcompile.collectives.contract import BucketRule, ParamInfo
from dcompile.ir.buffers import ITEMSIZE


def params(shapes, dtype="float32"):
    return [ParamInfo(i, f"p{i}", shape, dtype, "cpu") for i, shape in enumerate(shapes)]


def torchs_assignment(infos, rule):
    """What torch's compute_bucket_assignment_by_size makes of the parameters in reverse."""
    backwards = infos[::-1]
    tensors = [torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for p in backwards]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, list(rule.limits), [])
    return [[backwards[i].number for i in bucket] for bucket in indices]


@pytest.mark.parametrize("seed", range(20))
def test_same_boundaries_as_torch(seed):
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 40), rng.randint(1, 40)) for _ in range(rng.randint(1, 30))]
    infos = [
        ParamInfo(i, f"p{i}", shape, rng.choice(("float32", "float32", "bfloat16")), "cpu")
        for i, shape in enumerate(shapes)
    ]
    rule = BucketRule(rng.choice((1, 1000, 4000)), rng.choice((2000, 8000)), rng.choice(((), (500,), (3000, 100))))
    assert [[p.number for p in bucket] for bucket in assign(infos, rule)] == torchs_assignment(infos, rule)


def test_first_bucket_is_small_and_holds_the_last_parameters():
    buckets = assign(params([(256,)] * 8), BucketRule(first_bytes=1024, cap_bytes=3072))
    assert [[p.number for p in bucket] for bucket in buckets] == [[7], [6, 5, 4], [3, 2, 1], [0]]


def test_one_dtype_to_a_bucket():
    infos = params([(4,)] * 4)
    infos[1] = ParamInfo(1, "p1", (4,), "bfloat16", "cpu")
    buckets = assign(infos, BucketRule(1 << 20, 1 << 20))
    assert [[p.number for p in bucket] for bucket in buckets] == [[3, 2, 0], [1]]


def test_order_of_the_argument_does_not_matter():
    infos = params([(n,) for n in (5, 900, 3, 80, 700)])
    rule = BucketRule(1000, 2000)
    assert assign(infos, rule) == assign(infos[::-1], rule)


@pytest.mark.parametrize(("wire", "sent"), [("", ""), ("float16", "float16"), ("own", "bfloat16")])
def test_a_bucket_says_what_goes_over_the_wire(wire, sent):
    assert lay_out(params([(3,)], "bfloat16"), "b", ["w"], wire).wire == sent


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_layout_is_aligned_and_free_of_overlap(dtype):
    members = params([(3,), (17, 2), (), (64,)], dtype)
    bucket = lay_out(members, "b", ["w", "x", "y", "z"])
    ends = [offset + n for offset, n in zip(bucket.offsets, (3, 34, 1, 64), strict=True)]
    assert all(offset * ITEMSIZE[dtype] % ALIGN_BYTES == 0 for offset in bucket.offsets)
    assert all(end <= start for end, start in zip(ends, (*bucket.offsets[1:], bucket.numel), strict=True))
    assert bucket.params == (0, 1, 2, 3) and bucket.buffers == ("w", "x", "y", "z")
