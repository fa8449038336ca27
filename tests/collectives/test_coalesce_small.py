"""Which units share a message, and what that is worth by the cost model."""

from dataclasses import replace

import pytest

from dcompile.codegen.schedule.order.cost_model import durations
from dcompile.collectives.coalesce_small import coalesce_small, units_to_pack
from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.index import var
from dcompile.ir.nodes import Collective, Const, Loop, Program, Store, Wait
from dcompile.machine_model import CPU, TABLE, GroupSize

H200 = replace(TABLE["h200"], interference=0.35)  # what is tested here does not move with the table
MIB = 1 << 20
LLAMA = (768, 768, *(MIB // 2,) * 4, *(2 * MIB,) * 3)
"""A block of 160M parameters: two norms, matrices."""
GPT = (768,) * 10 + (2 * MIB, 2 * MIB)
"""One with biases."""


def bucket(sizes, kind="all_gather", name="b"):
    units = tuple(range(len(sizes)))
    holders = tuple(f"{name}.{unit}" for unit in units)
    return Bucket(
        name, "bfloat16", "cuda", "fsdp0", units, holders, units, sum(sizes), "", kind, units, holders, tuple(sizes)
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_many_small_units_share_a_message_and_matrices_do_not(kind):
    assert units_to_pack(bucket(GPT, kind), H200, 2, exposed=True) == tuple(range(10))
    assert units_to_pack(bucket((4 * MIB, 8, *GPT), kind), H200, 2, exposed=True) == tuple(range(1, 12))


def test_two_norms_are_not_worth_copies():
    assert units_to_pack(bucket(LLAMA), H200, 2, exposed=True) == ()


def test_copies_beside_a_collective_that_is_hidden_anyway_must_save_more():
    assert units_to_pack(bucket(GPT), H200, 2, exposed=False) == ()
    assert units_to_pack(bucket(GPT * 3), H200, 2, exposed=False) == tuple(n for n in range(36) if n % 12 < 10)


@pytest.mark.parametrize(
    ("what", "figures", "ranks"), [(bucket(GPT, "all_reduce"), H200, 2), (bucket(GPT), CPU, 2), (bucket(GPT), H200, 1)]
)
def test_nothing_is_packed_where_there_is_one_message_anyway(what, figures, ranks):
    assert units_to_pack(what, figures, ranks, exposed=True) == ()


def program(kind="all_gather"):
    """Two collectives, of which one has nothing to hide behind."""
    first, second = bucket(GPT, kind, "first"), bucket(GPT, kind, "second")
    names = (*first.holders, *second.holders)
    work = Loop("work", (4,), (), (Const(1.0, "float32"),), (Store("x", var("i0"), 0),))
    start, wait = (lambda b: Collective(kind, b.name, b.group, b.buffers)), (lambda b: Wait(b.name, b.buffers))
    steps = (start(first), wait(first), start(second), work, wait(second))
    if kind == "reduce_scatter":
        steps = (start(second), work, wait(second), start(first), wait(first))
    buffers = [Buffer(name, "bfloat16", (size,), (1,), "cuda") for name, size in zip(names, GPT * 2, strict=True)]
    return Program("p", (), (), (*buffers, Buffer("x", "float32", (4,), (1,), "cuda")), steps, buckets=(first, second))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_what_is_exposed_is_packed_and_takes_less_time(kind):
    before = program(kind)
    after = coalesce_small(before, H200, {"fsdp0": GroupSize(2)})
    assert [b.packed for b in after.buckets] == [tuple(range(10)), ()]
    assert after == replace(before, buckets=after.buckets)
    seconds = [sum(durations(each, H200, {"fsdp0": GroupSize(2)})) for each in (before, after)]
    assert seconds[0] - seconds[1] == pytest.approx(9 * 2.5e-6)
    assert coalesce_small(before, CPU, {}) is before
