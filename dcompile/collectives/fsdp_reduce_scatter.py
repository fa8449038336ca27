"""Insert the reduce-scatters of sharded parameters' gradients into a backward program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from dcompile.collectives.contract import ParamInfo
from dcompile.collectives.ddp_all_reduce import COPY_ONE, can_place, copies_by_place, products_last
from dcompile.collectives.fsdp_units import APART_BYTES, holder_of_unit, shard_of, unit_buckets
from dcompile.collectives.updates import cut_updates
from dcompile.ir.buffers import IN_BUCKET, ITEMSIZE, WITHIN, Bucket, Buffer
from dcompile.ir.index import contiguous_strides
from dcompile.ir.library_ops import COPY_EACH
from dcompile.ir.nodes import Collective, Extern, Program, Step, View, Wait


@dataclass(frozen=True, slots=True)
class _ShardGradient:
    """One gradient: its position among the outputs, and its buffer within its unit."""

    output: int
    param: ParamInfo
    view: View
    buffer: str
    copied: bool

    @property
    def holder(self) -> str:
        return holder_of_unit("reduce_scatter", shard_of(self.param).unit)


def insert_reduce_scatters(program: Program, params: tuple[ParamInfo, ...], flying: int = 1) -> Program:
    """Reduce gradients of sharded parameters, with one reduce-scatter for those of a group that are ready together.

    Guarantees: the same values before the reduction. Gradients are written directly into the memory that is reduced,
    unless their dtype differs or the library allocates them. The program returns None in their place. At most `flying`
    reductions are in flight, so that memory of full gradients is freed early.
    Relies on: every buffer has one writer; no storage is planned yet.
    """
    infos = {param.number: param for param in params if param.shard is not None}
    gradients = [_gradient(program, at, infos[n]) for at, n in program.grads if n in infos and _exists(program, at)]
    if not gradients:
        return program
    program, updates = cut_updates(program)
    ready, buckets = _reductions(program, gradients)
    if weights := products_to_hide_the_last(program, gradients, buckets):
        later = products_last(program, [weights])
        moved = _reductions(later, gradients)
        if len(moved[1]) == len(buckets):  # otherwise, the steps between two reductions of a group have moved
            program, (ready, buckets) = later, moved
    placed = {gradient.output for gradient in gradients}
    return replace(
        program,
        outputs=tuple(None if at in placed else output for at, output in enumerate(program.outputs)),
        grads=tuple((at, n) for at, n in program.grads if at not in placed),
        buffers=_buffers(program, gradients, [bucket for _, bucket in buckets]),
        steps=(*_steps(program, gradients, ready, buckets, flying), *updates),
        buckets=(*program.buckets, *(bucket for _, bucket in buckets)),
    )


def _reductions(
    program: Program, gradients: Sequence[_ShardGradient]
) -> tuple[dict[str, int], list[tuple[int, Bucket]]]:
    """Step at which each gradient is ready, by its buffer, and the buckets that follow from that."""
    written = {name: position for position, step in enumerate(program.steps) for name in step.writes}
    ready = {g.buffer: written.get(g.view.buffer, -1) for g in gradients}  # -1: an input of the program
    return ready, _buckets(gradients, ready)


def products_to_hide_the_last(
    program: Program, gradients: Sequence[_ShardGradient], buckets: Sequence[tuple[int, Bucket]]
) -> frozenset[str]:
    """Gradients to compute after the start of the last reduction, which nothing else would hide.

    The last reduction is an embedding's, whose gradient is ready last. With the first layer's right before it, 1.0 of a
    1B model's 106 ms on two H200 were exposed. The first layer's weights can wait: then only their own reduction is
    exposed. Depends on parameters and program alone, as the order of reductions must.
    """
    if len(buckets) < 3:  # later layers must hold more memory than is kept for these matmuls
        return frozenset()
    (before, previous), (end, last) = buckets[-2:]
    hides = any(isinstance(step, Extern) and not _embeds(step) for step in program.steps[before + 1 : end + 1])
    if hides or last.numel * ITEMSIZE[last.dtype] < APART_BYTES:
        return frozenset()
    read = frozenset().union(*(step.reads for step in program.steps))
    names = {g.view.buffer for g in gradients if g.param.number in previous.params}
    return frozenset(names - read)


def _embeds(step: Extern) -> bool:
    return step.op.startswith("aten.embedding")


def _exists(program: Program, output: int) -> bool:
    return isinstance(program.outputs[output], View)


def _gradient(program: Program, output: int, param: ParamInfo) -> _ShardGradient:
    view = program.outputs[output]
    assert isinstance(view, View)
    same = program.table[view.buffer].dtype == shard_of(param).reduce_dtype
    copied = not (same and can_place(program, output))
    return _ShardGradient(output, param, view, f"grad{param.number}" if copied else view.buffer, copied)


def _buckets(gradients: Sequence[_ShardGradient], ready: Mapping[str, int]) -> list[tuple[int, Bucket]]:
    """(step after which its last gradient is ready, bucket), in the order of that step."""
    places: dict[int, int] = {}
    for gradient in gradients:
        unit = shard_of(gradient.param).unit
        places[unit] = max(ready[gradient.buffer], places.get(unit, -1))
    buffer_of = {gradient.param.number: gradient.buffer for gradient in gradients}
    return unit_buckets("reduce_scatter", [gradient.param for gradient in gradients], places, buffer_of)


def _buffers(program: Program, gradients: Sequence[_ShardGradient], buckets: Sequence[Bucket]) -> tuple[Buffer, ...]:
    """All buffers, with gradients as parts of their units."""
    copies = [
        Buffer(g.buffer, shard_of(g.param).reduce_dtype, shape, contiguous_strides(shape), g.param.device)
        for g in gradients
        if g.copied and (shape := g.param.shape or (1,))
    ]
    units = [
        Buffer(name, bucket.dtype, (size,), (1,), bucket.device)
        for bucket in buckets
        for name, size in zip(bucket.holders, bucket.sizes, strict=True)
    ]
    place = {g.buffer: g for g in gradients}
    parts = (
        replace(buffer, storage=f"{WITHIN}{g.holder}", offset=shard_of(g.param).offset * ITEMSIZE[buffer.dtype])
        if (g := place.get(buffer.name)) is not None
        else buffer
        for buffer in (*program.buffers, *copies)
    )
    return (*parts, *units)


def _steps(
    program: Program,
    gradients: Sequence[_ShardGradient],
    ready: Mapping[str, int],
    buckets: Sequence[tuple[int, Bucket]],
    most: int,
) -> tuple[Step, ...]:
    """Steps, with copies after their source.

    The oldest of `most` reductions is waited for before another one starts.
    """
    copied = [(g.buffer, g.view, g.param) for g in gradients if g.copied]
    after = copies_by_place(copied, ready, program.table, [bucket for _, bucket in buckets], "its unit")
    flying: list[Wait] = []
    for at, bucket in buckets:
        if len(flying) == most:
            after.setdefault(at, []).append(flying.pop(0))
        after.setdefault(at, []).append(Collective("reduce_scatter", bucket.name, bucket.group, bucket.buffers))
        flying.append(Wait(bucket.name, bucket.buffers))
    steps: list[Step] = [*after.get(-1, ())]
    for position, step in enumerate(program.steps):
        steps += [step, *after.get(position, ())]
    return (*steps, *flying)


def copied_bytes(program: Program) -> int:
    """Bytes of gradients that a call copies or converts only to move them to where they are reduced."""
    within = {
        buffer.name: prod(size for size in buffer.shape if isinstance(size, int)) * ITEMSIZE[buffer.dtype]
        for buffer in program.buffers
        if (buffer.storage or "").startswith((WITHIN, IN_BUCKET))
    }
    copies = (step for step in program.steps if getattr(step, "op", "") in (COPY_ONE, COPY_EACH))
    return sum(within.get(name, 0) for step in copies for name in step.writes)
