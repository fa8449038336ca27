"""Cost model: the duration of each step is its work over the machine's rate for it, and at least a fixed minimum.

It is a roofline (Williams, Waterman, Patterson, CACM 52, 2009) for each step alone: the longer of moving its bytes and
doing its arithmetic. Its purpose is to choose which computation hides which collective. It does not model caches, tile
sizes or concurrent work.

`simulate` runs a sequence of steps of given durations on one compute stream and one stream for each communicator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dcompile.codegen.nest.contraction import multiplies_few_rows
from dcompile.device_traits import loop_traits, main_device, traits_of
from dcompile.ir import functional_collectives
from dcompile.ir.analysis import operands, row_values, sizes
from dcompile.ir.buffers import ITEMSIZE, Bucket, Buffer
from dcompile.ir.collective_kinds import COLLECTIVES
from dcompile.ir.functional_collectives import kind_of
from dcompile.ir.gemm import MATMUL_OPS
from dcompile.ir.index import Index, Size, typical
from dcompile.ir.library_ops import extern_flops, packet_of
from dcompile.ir.nodes import Apply, Collective, Const, Extern, IndexOf, Load, Loop, Program, Step, View, Wait
from dcompile.ir.ops import OPS
from dcompile.machine_model import Figures, GroupSize, collective_seconds, copying_seconds, host_copy_seconds
from dcompile.operators import host_copies


def durations(program: Program, figures: Figures, groups: Mapping[str, GroupSize]) -> list[float]:
    """Return the seconds of each step on its resource; waits take time only for groups with replicas.

    A group missing in `groups` counts as two ranks.
    """
    table = program.table
    started = {step.bucket: step for step in program.steps if isinstance(step, Collective)}
    tile = traits_of(main_device(buffer.device for buffer in program.buffers)).matmul_tile
    buckets = {bucket.name: bucket for bucket in program.buckets}
    found = []
    for step in program.steps:
        if isinstance(step, Wait):
            found.append(_among_replicas(started[step.bucket], table, figures, groups))
            continue
        seconds = step_seconds(step, table, figures, groups, tile)
        if isinstance(step, Collective) and step.bucket in buckets and not is_copied_gather(step, groups):
            seconds += members(buckets[step.bucket]) * figures.member_us * 1e-6
        found.append(seconds)
    return found


def members(bucket: Bucket) -> int:
    """Return the number of messages that a collective sends after its first one."""
    together = len(bucket.packed)
    return max(len(bucket.units) - together + (together > 0) - 1, 0)


def _among_replicas(
    step: Collective, table: Mapping[str, Buffer], figures: Figures, groups: Mapping[str, GroupSize]
) -> float:
    """Return the seconds of a wait's own work: an all-reduce of a reduce-scatter's shards among replicas (HSDP)."""
    group = groups.get(step.group, GroupSize())
    traits = COLLECTIVES[step.kind].bucket
    if traits is None or traits.among_replicas is None or group.replicas == 1:
        return 0.0
    shard = collective_bytes(step, table) // group.ranks
    return collective_seconds(figures, traits.among_replicas, shard, group.replicas, stride=group.ranks)


def step_seconds(
    step: Step, table: Mapping[str, Buffer], figures: Figures, groups: Mapping[str, GroupSize], tile: int = 1
) -> float:
    """Return the seconds of one step."""
    match step:
        case Loop():
            moved = loop_bytes(step, table) / (figures.memory_gbs * 1e9)
            by_tensor_cores = loop_traits(step, table).has_row_matmul and multiplies_few_rows(step)
            done = 0.0 if by_tensor_cores else loop_operations(step) / (figures.arithmetic_gops * 1e9)
            product = 0.0 if step.product is None else extern_seconds(step.product.call, table, figures, tile)
            return max(moved, done) + product + figures.kernel_us * 1e-6
        case Extern() if (kind := functional_collectives.kind_of(step.op)) is not None:
            ranks = (
                functional_collectives.ranks_of(step)
                or groups.get(functional_collectives.group_of(step), GroupSize()).ranks
            )
            return collective_seconds(figures, kind, functional_collectives.whole_bytes(step, table), ranks)
        case Extern():
            return extern_seconds(step, table, figures, tile)
        case Collective():
            group, nbytes = groups.get(step.group, GroupSize()), collective_bytes(step, table)
            if step.copies_by_host:
                return host_copy_seconds(figures, nbytes)
            if is_copied_gather(step, groups) and figures.copy_gbs:
                return copying_seconds(figures, nbytes, group.ranks)
            return collective_seconds(figures, step.kind, nbytes, group.ranks)
        case Wait():
            return 0.0


# --- own kernels ------------------------------------------------------------------------------------------------------


def loop_bytes(loop: Loop, table: Mapping[str, Buffer]) -> int:
    """Return the bytes that a loop moves to and from memory; an element accessed repeatedly counts once."""
    lengths = sizes(loop)
    reached: dict[tuple[str, bool], int] = {}
    at_hand = None if loop.product is None else loop.product.out
    loads = [value for value in loop.body if isinstance(value, Load) and value.buffer != at_hand]
    accesses = [(value.buffer, value.index, False) for value in loads]
    accesses += [(store.buffer, store.index, True) for store in loop.stores]
    for buffer, index, written in accesses:
        key = (buffer, written)
        reached[key] = min(reached.get(key, 0) + _places(index, lengths), _extent(table[buffer]))
    return sum(count * ITEMSIZE[table[buffer].dtype] for (buffer, _), count in reached.items())


def _places(index: Index, lengths: Mapping[str, Size]) -> int:
    """Return the most elements that an index reaches; with a value of the body in it, one for each iteration."""
    names = index.variables
    if any(name not in lengths and name[0] == "v" for name in names):
        names = frozenset(lengths)
    return prod(typical(lengths[name]) for name in names if name in lengths)


def _extent(buffer: Buffer) -> int:
    return typical(buffer.extent)


def loop_operations(loop: Loop) -> int:
    """Return a loop's arithmetic in additions; transcendental functions count by their cost in the op table."""
    rows = row_values(loop)
    outer, inner = (prod(map(typical, space)) for space in (loop.outer, loop.inner))
    per_row = per_element = 0
    for value, is_row in zip(loop.body, rows, strict=True):
        if isinstance(value, (Const, Load, IndexOf)):
            continue
        cost = OPS[value.op].cost if isinstance(value, Apply) else 1
        # a reduction's result belongs to the row, its work to the elements
        of_row = is_row and (isinstance(value, Apply) or all(rows[ref] for ref in operands(value)))
        if of_row:
            per_row += cost
        else:
            per_element += cost
    return outer * (per_row + inner * per_element)


# --- library calls ----------------------------------------------------------------------------------------------------


def extern_seconds(step: Extern, table: Mapping[str, Buffer], figures: Figures, tile: int = 1) -> float:
    """Return the seconds of a library call, from its FLOPs where they are known and from its bytes otherwise."""
    if step.cost_us:
        return step.cost_us * 1e-6
    views = step.views
    moved = sum(_view_bytes(view, table) for view in views)
    moved += sum(table[name].typical_bytes for name in step.writes if name in table)
    if _is_view(step) or functional_collectives.is_wait(step.op):
        return 0.0
    flops = extern_flops(step, table, tile=tile)
    if not flops:
        return moved / (figures.memory_gbs * 1e9) + figures.library_us * 1e-6
    matmul = MATMUL_OPS.get(step.op)
    factors = views[-2:] if matmul is not None and matmul.wide else views
    dtype = next((table[view.buffer].dtype for view in factors if view.buffer in table), "float32")
    rate = figures.rate(dtype) * (figures.attention if "attention" in step.op else 1.0)
    return max(flops / rate, moved / (figures.memory_gbs * 1e9)) + figures.library_us * 1e-6


def fused_seconds(program: Program, figures: Figures) -> float:
    """Return the seconds of a program of library calls under perfect fusion of everything between heavy calls.

    Inputs and results of the whole program move once. Matmuls, convolutions and attention count each with their own
    bytes.
    """
    table = program.table
    tile = traits_of(main_device(buffer.device for buffer in program.buffers)).matmul_tile
    calls = [step for step in program.steps if isinstance(step, Extern)]
    heavy = sum(extern_seconds(call, table, figures, tile) for call in calls if extern_flops(call, table))
    outside = program.returned | {*program.inputs} & table.keys()
    moved = sum(table[name].typical_bytes for name in outside)
    return heavy + moved / (figures.memory_gbs * 1e9) + figures.library_us * 1e-6


def _view_bytes(view: View, table: Mapping[str, Buffer]) -> int:
    """Return the bytes that a view reaches: dimensions of stride 0 repeat the same elements."""
    pairs = zip(view.shape, view.strides, strict=True)
    count = prod(typical(size) for size, stride in pairs if stride != 0)
    return count * (ITEMSIZE[table[view.buffer].dtype] if view.buffer in table else 4)


def _is_view(step: Extern) -> bool:
    """Does the call only return a view of its argument? Such results have no memory of their own to fill."""
    return packet_of(step.op).removeprefix("aten.") in _VIEWS


_VIEWS = frozenset(
    (
        "view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "slice", "select", "squeeze",
        "unsqueeze", "detach", "alias", "as_strided", "split", "split_with_sizes", "unbind", "diagonal",
    )
)  # fmt: skip


# --- collectives ------------------------------------------------------------------------------------------------------


def collective_bytes(step: Collective, table: Mapping[str, Buffer]) -> int:
    """Return the bytes of a collective's whole buffer: the output of a gather, the input of a reduction."""
    if step.call is not None:
        return functional_collectives.whole_bytes(step.call, table)
    names = step.reads or step.writes
    return sum(table[name].typical_bytes for name in names)


def offloaded_bytes(program: Program) -> int:
    """Return the bytes that a program copies to host memory."""
    calls = (step.call if isinstance(step, Collective) else step for step in program.steps)
    offloads = (call for call in calls if isinstance(call, Extern) and host_copies.KINDS.get(call.op) == "offload")
    return sum(functional_collectives.whole_bytes(call, program.table) for call in offloads)


# --- simulation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """One step on its resource, in seconds from the start; `held_up`: how long its wait delays later steps."""

    step: int
    resource: str
    start: float
    duration: float
    held_up: float = 0.0


@dataclass(frozen=True, slots=True)
class PredictedTimeline:
    """Spans of all steps except waits, in the order of steps."""

    spans: tuple[PredictedSpan, ...]
    total: float
    exposed: float
    """Seconds in which computation waits for a collective."""


def timeline(
    steps: Sequence[Step],
    seconds: Sequence[float],
    groups: Mapping[str, GroupSize],
    interference: float = 0.0,
    crowding: float = 0.0,
) -> PredictedTimeline:
    """Simulate the steps in their order; `groups` maps each group to its communicator.

    A collective begins when all steps before it are computed and its communicator is free. Computation continues until
    a wait, which delays it until its collective is complete. While a collective runs, computation takes longer by the
    fraction `interference`, and the collective by the fraction `crowding`. Gathers by peer copies have a stream of
    their own and cause neither; nor do copies to and from host memory.
    """
    now = exposed = 0.0
    free: dict[str, float] = {}
    started = (step for step in steps if isinstance(step, Collective))
    quiet = {lane_of(step, groups) for step in started if step.copies_by_host or is_copied_gather(step, groups)}
    flying: dict[str, int] = {}
    spans: list[PredictedSpan] = []
    for number, (step, duration) in enumerate(zip(steps, seconds, strict=True)):
        match step:
            case Collective():
                lane = lane_of(step, groups)
                start = max(now, free.get(lane, 0.0))
                free[lane] = start + duration
                flying[step.bucket] = len(spans)
                spans.append(PredictedSpan(number, lane, start, duration))
            case Wait():
                at = flying.pop(step.bucket)
                span = spans[at]
                late = max(span.start + span.duration - now, 0.0) + duration
                spans[at] = PredictedSpan(span.step, span.resource, span.start, span.duration, late)
                exposed += late
                now += late
            case _:
                loud = max((end for lane, end in free.items() if lane not in quiet), default=0.0)
                beside = max(loud - now, 0.0) * (1 + crowding)
                slowed = min(duration * (1 + interference), beside)
                took = slowed + max(duration - slowed / (1 + interference), 0.0)
                spans.append(PredictedSpan(number, "compute", now, took))
                if beside and crowding:
                    crowded = [at for at in flying.values() if spans[at].resource not in quiet]
                    for at in crowded:
                        spans[at] = _crowd(spans[at], now, took, crowding)
                    ends = {lane: _slowed_progress(end, now, took, crowding) for lane, end in free.items()}
                    free |= {lane: end for lane, end in ends.items() if lane not in quiet}
                now += took
                if isinstance(step, Extern) and kind_of(step.op) is not None:
                    exposed += took  # the model's own collective, whose wait follows it
    return PredictedTimeline(tuple(spans), now, exposed)


def _crowd(span: PredictedSpan, now: float, took: float, crowding: float) -> PredictedSpan:
    """Return a collective in flight as computation slows it for `took` s from `now` on."""
    start = _slowed_progress(span.start, now, took, crowding)
    end = _slowed_progress(span.start + span.duration, now, took, crowding)
    return PredictedSpan(span.step, span.resource, start, end - start, span.held_up)


def _slowed_progress(moment: float, now: float, took: float, crowding: float) -> float:
    """Return when a collective reaches its state of `moment` if computation slows it for `took` s from `now` on."""
    ahead = max(moment - now, 0.0)
    return moment + crowding * min(ahead, took / (1 + crowding))


def lane_of(step: Collective, groups: Mapping[str, GroupSize]) -> str:
    """Return the communicator of a collective; a group missing in `groups` has one of its own."""
    lane = groups[step.group].lane if step.group in groups else step.group
    return f"{lane} copies" if is_copied_gather(step, groups) else lane


def is_copied_gather(step: Collective, groups: Mapping[str, GroupSize]) -> bool:
    """Return whether a collective is a gather that copies from the other ranks' memory."""
    return step.gathers_parameters and step.group in groups and groups[step.group].copies
