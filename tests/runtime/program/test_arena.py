"""Lasting memory: alignment, dtypes, and that a result's memory comes back only when nobody can see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from dcompile.runtime.program.arena import (
    ALIGNMENT,
    RECYCLE_BYTES,
    Arena,
    RecycledResultMemory,
    ReusedResultMemory,
    like,
    seen_in,
)
from dcompile.runtime.program.workspace import HostProgramServices


def test_views_of_the_arena_lie_where_they_were_planned():
    arena = Arena(1000)
    assert arena.address % ALIGNMENT == 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        view = arena.view(dtype, (2, 3), (1, 2), 64)
        assert view.data_ptr() == arena.address + 64
        assert (view.shape, view.stride(), view.dtype) == ((2, 3), (1, 2), dtype)
    assert arena.view(torch.float32, (4,), (1,), 128).fill_(7).sum() == 28


def test_an_unaligned_view_is_a_bug_of_the_plan():
    with pytest.raises(AssertionError, match="not aligned"):
        Arena(64).view(torch.float32, (1,), (1,), 2)


def test_an_empty_arena():
    assert Arena(0).view(torch.float32, (0,), (1,), 0).numel() == 0


def test_memory_comes_back_when_autograd_has_let_go():
    fresh = ReusedResultMemory(torch.float32, (100,), (1,))
    x = fresh().fill_(2)
    address = x.data_ptr()
    weight = torch.ones(100, requires_grad=True)
    loss = (x * weight).sum()  # autograd saves x
    del x
    assert fresh().data_ptr() != address
    loss.backward()
    assert torch.equal(weight.grad, torch.full((100,), 2.0))
    fresh = ReusedResultMemory(torch.float32, (100,), (1,))
    addresses = {fresh().data_ptr() for _ in range(3)}
    assert len(addresses) == 1


def test_what_a_storage_object_or_an_array_holds_is_not_given_out():
    fresh = ReusedResultMemory(torch.float32, (100,), (1,))
    storage = fresh().fill_(3).untyped_storage()
    address = storage.data_ptr()
    other = fresh()
    assert other.data_ptr() != address
    exported = torch.utils.dlpack.to_dlpack(other)
    address = other.data_ptr()
    del other
    assert fresh().data_ptr() != address
    assert torch.utils.dlpack.from_dlpack(exported).data_ptr() == address


def test_a_result_is_a_tensor_of_its_own():
    fresh = ReusedResultMemory(torch.float32, (100,), (1,))
    first = fresh()
    address = first.data_ptr()
    first.add_(1)
    assert not first._is_view() and first._version == 1
    del first
    second = fresh()
    assert second.data_ptr() == address and second._version == 0
    held = second[3:]
    del second
    assert fresh().data_ptr() != address, "a view of the last result is still there"
    assert held.storage_offset() == 3


def recycled() -> Callable[[], torch.Tensor]:
    return RecycledResultMemory().of(torch.uint8, (RECYCLE_BYTES,), (1,))


@pytest.mark.parametrize("memory", [lambda: ReusedResultMemory(torch.uint8, (RECYCLE_BYTES,), (1,)), recycled])
@pytest.mark.parametrize("lose", [lambda s: s.resize_(0), lambda s: s.resize_(8), lambda s: s.share_memory_()])
def test_memory_that_was_freed_or_is_shared_with_other_processes_is_not_given_out(memory, lose):
    make = memory()
    address = make().data_ptr()
    assert make().data_ptr() == address, "else this would show nothing"
    lose(make().untyped_storage())
    for _ in range(2):
        x = make()
        assert x.untyped_storage().nbytes() >= RECYCLE_BYTES and not x.is_shared()
        assert x.fill_(3).sum() == 3 * RECYCLE_BYTES
        del x


def test_inference_tensors_serve_no_other_mode():
    fresh = ReusedResultMemory(torch.float32, (100,), (1,))
    with torch.inference_mode():
        assert fresh().is_inference()
    assert not fresh().is_inference()
    with torch.inference_mode():
        assert fresh().is_inference()


def test_results_have_their_strides():
    made = ReusedResultMemory(torch.bfloat16, (3, 4), (1, 3))()
    assert made.shape == (3, 4) and made.stride() == (1, 3) and made.dtype == torch.bfloat16


def test_the_arena_takes_no_more_than_it_needs(monkeypatch):
    """Unless an allocator gives memory that is not aligned."""
    arena = Arena(1000)
    assert arena._memory.nbytes == 1000 and arena.address % ALIGNMENT == 0
    given, empty = [], torch.empty

    def unaligned(nbytes, **keywords):
        given.append(empty(nbytes + 1, **keywords))
        return given[-1][1:]

    monkeypatch.setattr(torch, "empty", unaligned)
    arena = Arena(1000)
    assert arena.address % ALIGNMENT == 0 and arena.address + 1000 <= given[-1].data_ptr() + given[-1].nbytes


def test_what_looks_at_a_copy_is_seen_in_what_it_is_a_copy_of():
    given = torch.arange(24.0).view(3, 8)[:, 1:5]
    copy = like(given).copy_(given)
    moved = {copy.untyped_storage().data_ptr(): (given, 0)}
    assert seen_in(moved, copy) is given
    part = seen_in(moved, copy[1:].t())
    assert torch.equal(part, given[1:].t()) and part.data_ptr() == given[1:].data_ptr()
    assert part.stride() == given[1:].t().stride()
    other = torch.randn(3)
    assert seen_in(moved, other) is other and seen_in(moved, None) is None and seen_in(moved, 3) == 3


def test_copies_of_misaligned_arguments_are_held_through_the_call():
    """The memory of one that was given up would go to a result, which would be taken for a look at the argument."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    given = torch.arange(9.0)[1:].as_subclass(OnGpu)

    def call(args, buckets, sync):
        copy = weakref.ref(args.pop())
        assert copy() is not None and copy().data_ptr() % 16 == 0
        return [copy()[2:]]

    (result,) = HostProgramServices.realigned(call, [given], (), None, False)
    assert result.data_ptr() == given[2:].data_ptr()


def _on_gpu(tensor):
    """As a misaligned tensor of a GPU is."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    return tensor.as_subclass(OnGpu)


@pytest.mark.parametrize(
    "part", [lambda b: b[1:], lambda b: b[3:20:2], lambda b: b.view(5, 8)[1:, 3:6], lambda b: b[5:6]]
)
def test_a_misaligned_argument_is_copied_with_what_lies_around_it(part):
    """`as_strided` of it counts from where its storage begins, and sees what is no element."""
    base = torch.arange(40.0)
    given, seen = _on_gpu(part(base)), []

    def call(args, buckets, sync):
        (copy,) = args
        assert copy.data_ptr() % 16 == 0 and torch.equal(copy, given) and copy.stride() == given.stride()
        seen.append(copy.as_strided((40,), (1,), 0).clone())
        copy.mul_(2)
        return [copy, copy.as_strided((2,), (3,), 1)]

    everything, look = HostProgramServices.realigned(call, [given], (0,), None, False, (0,))
    assert torch.equal(seen[0], torch.arange(40.0))
    assert everything.data_ptr() == given.data_ptr() and look.data_ptr() == base[1:].data_ptr()
    want = torch.arange(40.0)
    part(want).mul_(2)
    assert torch.equal(base, want)


def test_a_misaligned_argument_is_copied_with_what_lies_between_its_elements():
    given = _on_gpu(torch.arange(40.0).view(5, 8)[1:, 3:6])

    def call(args, buckets, sync):
        (copy,) = args
        return [copy.as_strided((27,), (1,), copy.storage_offset()).clone()]

    (result,) = HostProgramServices.realigned(call, [given], (), None, False)
    assert torch.equal(result, torch.arange(11.0, 38.0))
