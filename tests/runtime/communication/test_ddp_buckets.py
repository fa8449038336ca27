"""Bucket memory: what is reused, what is never overwritten, and how accumulated gradients enter the reduction."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dcompile.collectives.contract import SharedBuckets
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.ddp_buckets import MAX_KEPT_STORAGES, BucketSet, average


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make(*shapes, scale=1.0, scaled=()):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    offsets = tuple(range(0, 16 * len(params), 16))
    numbers = tuple(range(len(params)))
    bucket = Bucket("b", "float32", "cpu", "ddp", numbers, tuple("xyz"[: len(params)]), offsets, 16 * len(params))
    bucket = replace(bucket, scaled=scaled)
    buckets = BucketSet((bucket,), {n: weakref.ref(p) for n, p in enumerate(params)}, dist.group.WORLD)
    buckets._scale = scale
    return params, buckets


class Step(torch.autograd.Function):
    """A compiled step in small: its backward fills the bucket with `value` and returns views of it."""

    @staticmethod
    def forward(ctx, buckets, value, sync, *params):
        ctx.rest = buckets, value, sync
        return sum(p.sum() for p in params)

    @staticmethod
    def backward(ctx, _):
        buckets, value, sync = ctx.rest
        memory = buckets.acquire("b")
        views = [buckets._view(number, memory) for number in buckets.buckets[0].params]
        for number, view in enumerate(views):
            view.fill_(value * (buckets.scale(sync) if number in buckets.buckets[0].scaled else 1))
        if sync:
            buckets.begin()
            buckets.start("b", memory)
            buckets.wait("b", memory)
        return None, None, None, *views


def step(buckets, params, value, sync=True, **keywords):
    Step.apply(buckets, value, sync, *params).backward(**keywords)


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def test_gradients_are_views_of_one_storage():
    params, buckets = make((2, 3), (4,))
    step(buckets, params, 5.0)
    assert storage_of(params[0].grad) == storage_of(params[1].grad)
    assert params[0].grad.tolist() == [[5.0] * 3] * 2


def test_memory_is_used_again_once_gradients_are_dropped():
    params, buckets = make((2,))
    step(buckets, params, 1.0)
    first = storage_of(params[0].grad)
    for value in (2.0, 3.0):
        params[0].grad = None
        step(buckets, params, value)
        assert storage_of(params[0].grad) == first and params[0].grad.tolist() == [value] * 2


def test_gradients_that_someone_keeps_are_not_overwritten():
    params, buckets = make((2,))
    kept = []
    for value in range(6):
        step(buckets, params, float(value))
        kept.append(params[0].grad)
        params[0].grad = None
    assert [g.tolist() for g in kept] == [[float(v)] * 2 for v in range(6)]
    assert len(buckets._kept["b"]) == MAX_KEPT_STORAGES


def test_a_view_that_someone_keeps_counts_too():
    params, buckets = make((2, 2))
    step(buckets, params, 1.0)
    row = params[0].grad[0].detach().numpy()
    params[0].grad = None
    step(buckets, params, 9.0)
    assert row.tolist() == [1.0, 1.0]


def test_views_that_a_program_built_do_not_count():
    params, buckets = make((2,))
    memory = buckets.acquire("b")
    memory.tensors["target"] = memory.flat[:2].view(2)
    assert memory.is_free() and buckets.acquire("b") is memory
    outside = memory.flat[:2]
    assert not memory.is_free() and buckets.acquire("b") is not memory
    del outside
    assert params and memory.is_free()


def test_accumulated_gradient_enters_before_scaling():
    params, buckets = make((2,), scale=0.5)
    params[0].grad = torch.full((2,), 4.0)
    step(buckets, params, 10.0)
    assert params[0].grad.tolist() == [7.0, 7.0]


def test_two_synced_backwards_add_up_as_under_ddp():
    params, buckets = make((2,), scale=0.5)
    step(buckets, params, 8.0)  # 4
    step(buckets, params, 2.0)  # (4 + 2) / 2
    assert params[0].grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_written_scaled_are_the_same_as_those_scaled_later(exact):
    params, buckets = make((2,), (2,), scale=0.5 if exact else 1 / 3, scaled=(1,))
    buckets._exact = exact
    assert [buckets.scale(sync) for sync in (True, False)] == [0.5 if exact else 1.0, 1.0]
    step(buckets, params, 6.0, sync=False)
    assert [p.grad.tolist() for p in params] == [[6.0, 6.0]] * 2
    step(buckets, params, 18.0)
    assert [p.grad.tolist() for p in params] == [[12.0, 12.0] if exact else [8.0, 8.0]] * 2


def test_without_sync_gradients_accumulate_and_are_not_scaled():
    params, buckets = make((2,), scale=0.5)
    step(buckets, params, 8.0, sync=False)
    step(buckets, params, 2.0, sync=False)
    assert params[0].grad.tolist() == [10.0, 10.0]


def test_zeroed_gradients_that_stay():
    params, buckets = make((2,))
    for value in (3.0, 4.0, 5.0):
        if params[0].grad is not None:
            params[0].grad.zero_()
        step(buckets, params, value)
        assert params[0].grad.tolist() == [value] * 2


@pytest.mark.parametrize(
    "old", [torch.full((2, 3), 2.0, dtype=torch.float64), torch.full((3, 2), 2.0).t(), torch.full((2, 3), 2.0)]
)
def test_old_gradients_of_any_layout_and_type(old):
    params, buckets = make((2, 3))
    params[0].grad = None
    if old.dtype != torch.float32:
        params[0].grad_dtype = None  # lets .grad have a type of its own
    params[0].grad = old
    step(buckets, params, 1.0)
    assert params[0].grad.tolist() == [[3.0] * 3] * 2


def test_autograd_grad_leaves_grad_alone():
    params, buckets = make((2,))
    params[0].grad = torch.full((2,), 4.0)
    (found,) = torch.autograd.grad(Step.apply(buckets, 10.0, True, *params), params)
    assert found.tolist() == [10.0, 10.0] and params[0].grad.tolist() == [4.0, 4.0]


def test_a_parameter_that_is_gone_is_skipped():
    params, buckets = make((2,), (2,))
    del params[1]
    memory = buckets.acquire("b")
    memory.flat.fill_(4.0)
    buckets.start("b", memory)
    buckets.wait("b", memory)
    assert memory.flat[:2].tolist() == [4.0, 4.0] and params


def test_reduced_gives_the_last_synced_values():
    params, buckets = make((2,), (3,))
    step(buckets, params, 6.0)
    assert buckets.reduced() == {n: p.grad.data_ptr() for n, p in enumerate(params)}
    assert [buckets.reduced_gradient(n).tolist() for n in (0, 1)] == [[6.0] * 2, [6.0] * 3]


def test_what_a_run_has_reduced_stays_until_nobody_keeps_the_run():
    params, buckets = make((2,), (3,))
    step(buckets, params, 1.0)
    run = buckets.last_run()
    for param in params:
        param.grad = None
    step(buckets, params, 2.0)
    assert [run.gradient(number).tolist() for number in (0, 1)] == [[1.0] * 2, [1.0] * 3]
    del run
    assert sum(memory.is_free() for memory in buckets._kept["b"]) == 1, "params[...].grad shows the other one"


def one_idle(pool=None):
    """Two parameters, of which the program has a gradient of the first."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    bucket = Bucket("b", "float32", "cpu", "ddp", (0,), ("x",), (0,), 34, idle=(1,), idle_offsets=(16,), marks=2)
    refs = {n: weakref.ref(p) for n, p in enumerate(params)}
    return params, BucketSet((bucket,), refs, dist.group.WORLD, pool or SharedBuckets())


def test_a_run_has_reduced_what_its_program_uses():
    params, buckets = one_idle()
    assert 0 not in buckets.last_run()
    step(buckets, params[:1], 5.0)
    run = buckets.last_run()
    assert 0 in run and 1 not in run and 2 not in run


@pytest.mark.parametrize("old", [None, 3.0])
def test_a_parameter_that_no_rank_has_a_gradient_of_stays_as_it_is(old):
    params, buckets = one_idle()
    params[1].grad = before = None if old is None else torch.full((2,), old)
    step(buckets, params[:1], 5.0)
    buckets.settle_idle(())
    assert params[1].grad is before and params[0].grad.tolist() == [5.0, 5.0]
    assert buckets.reduced().keys() == {0}


def test_a_parameter_that_another_rank_has_a_gradient_of_gets_it():
    params, buckets = one_idle()
    step(buckets, params[:1], 5.0)
    flat = buckets._reduced["b"].flat
    flat[16:18], flat[33] = 2.0, 0.5  # as if it had come by the all-reduce
    buckets.settle_idle(())
    assert params[1].grad.tolist() == [2.0, 2.0] and storage_of(params[1].grad) == storage_of(params[0].grad)
    assert buckets.reduced()[1] == params[1].grad.data_ptr()


def test_a_gradient_that_an_earlier_backward_has_left_is_marked():
    params, buckets = one_idle()
    params[1].grad = torch.full((2,), 3.0)
    memory = buckets.acquire("b")
    buckets.begin([1])
    buckets.start("b", memory)
    buckets.wait("b", memory)
    buckets.settle_idle(())
    assert params[1].grad.tolist() == [3.0, 3.0] and storage_of(params[1].grad) == storage_of(memory.flat)


def test_later_parts_of_a_backward_add_no_gradient_a_second_time():
    params, buckets = one_idle()
    params[1].grad = torch.full((2,), 3.0)
    for first in (True, False):
        memory = buckets.acquire("b")
        buckets.begin([1] if first else (), "task", first)
        buckets.start("b", memory)
        buckets.wait("b", memory)
    buckets.settle_idle(())
    assert params[1].grad.tolist() == [3.0, 3.0]


def test_programs_of_one_layout_share_memory():
    pool, kept = SharedBuckets(), []
    storages = set()
    for _ in range(3):
        params, buckets = one_idle(pool)
        step(buckets, params[:1], 1.0)
        storages.add(storage_of(params[0].grad))
        buckets._reduced["b"].flat[33] = 1.0  # as if another rank had a gradient of what is idle here
        buckets.settle_idle(())
        buckets.forget()
        params[0].grad = params[1].grad = None
        kept.append(buckets)
    assert len(storages) == 1


def test_what_is_not_settled_yet_is_not_given_to_another_program():
    pool = SharedBuckets()
    params, buckets = one_idle(pool)
    step(buckets, params[:1], 1.0)
    params[0].grad = None
    memory = buckets._reduced["b"]
    assert one_idle(pool)[1].acquire("b") is not memory
    buckets.settle_idle(())
    assert one_idle(pool)[1].acquire("b") is memory


def test_average_of_one_rank_is_the_value():
    tensors = [torch.full((2,), 3.0), torch.full((1,), 5.0)]
    average(dist.group.WORLD, tensors)
    assert [t.tolist() for t in tensors] == [[3.0, 3.0], [5.0]]


@pytest.mark.parametrize("wire", ["own", "float32", "bfloat16"])
def test_average_over_the_wire_rounds_to_its_dtype(wire):
    tensors = [torch.tensor([1 / 3, 5.0])]
    average(dist.group.WORLD, tensors, wire)
    want = torch.tensor([1 / 3, 5.0])
    assert torch.equal(tensors[0], want.bfloat16().float() if wire == "bfloat16" else want)


def test_a_compressed_bucket_adds_in_full_precision_and_hands_on_what_was_sent():
    params = [torch.nn.Parameter(torch.ones(2))]
    bucket = Bucket("b", "float32", "cpu", "ddp", (0,), ("x",), (0,), 16, wire="bfloat16")
    buckets = BucketSet((bucket,), {0: weakref.ref(params[0])}, dist.group.WORLD)
    step(
        buckets, params, 1 + 2**-9, sync=False
    )  # one bfloat16 between 1 and 2 is 2**-7: rounded alone, it would be lost
    step(buckets, params, 2**-8 + 2**-9)
    assert params[0].grad.tolist() == [1 + 2**-7] * 2 and params[0].grad.dtype == torch.float32


def absent_in_one_call(old, mark, scaled=()):
    """Both parameters have gradients in the program, the second one not in this call. What another rank has of it."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    bucket = Bucket("b", "float32", "cpu", "ddp", (0, 1), ("x", "y"), (0, 16), 34, marks=2, scaled=scaled)
    buckets = BucketSet((bucket,), {n: weakref.ref(p) for n, p in enumerate(params)}, dist.group.WORLD)
    buckets._scale = 0.5
    params[1].grad = None if old is None else torch.full((2,), old)
    memory = buckets.acquire("b")
    memory.flat[16:18] = torch.nan  # what comes of zeros need not be zero
    buckets.begin(absent=[1])
    assert buckets.accumulated(), "not what a recording does"
    buckets.start("b", memory)
    assert memory.flat[32:].tolist() == [0.5, 0.0], "scaled in every program, whose flags are added"
    buckets.wait("b", memory)
    if mark:
        memory.flat[16:18] += 2.0
        memory.flat[33] = 0.5
    buckets.settle_idle(())
    return params[1], buckets


@pytest.mark.parametrize("old", [None, 3.0])
@pytest.mark.parametrize("scaled", [(), (1,)])
def test_what_is_absent_in_one_call_is_idle_in_it(old, scaled):
    param, buckets = absent_in_one_call(old, mark=False, scaled=scaled)
    assert (None if param.grad is None else param.grad.tolist()) == (None if old is None else [old] * 2)
    assert buckets.reduced().keys() == {0}
    param, buckets = absent_in_one_call(old, mark=True, scaled=scaled)
    assert param.grad.tolist() == [2.0 + (0 if old is None else old / 2)] * 2
    assert buckets.reduced()[1] == param.grad.data_ptr()


def test_what_is_absent_in_one_call_may_come_from_another_rank_behind_a_backward():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    bucket = Bucket("b", "float32", "cpu", "ddp", (0, 1), ("x", "y"), (0, 16), 34, marks=2)
    for mark in (False, True):
        buckets = BucketSet((bucket,), {n: weakref.ref(p) for n, p in enumerate(params)}, dist.group.WORLD)
        params[0].grad, params[1].grad = torch.full((2,), 4.0), None
        buckets.begin(absent=[1])
        buckets._landed = lambda name, memory, mark=mark: memory.flat[33:].fill_(mark)
        buckets.reduce_behind({0}, ())
        assert params[0].grad.tolist() == [4.0, 4.0]
        assert (None if params[1].grad is None else params[1].grad.tolist()) == ([0.0, 0.0] if mark else None)
