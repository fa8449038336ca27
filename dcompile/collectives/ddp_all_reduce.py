"""Insert the all-reduces of gradients into a backward program, each as early as its last gradient allows.

Gradients are assigned to buckets by DDP's rule, from parameter order alone, so that ranks and recompilations agree.
DDP's division by the number of ranks is folded into the GEMMs that write gradients into buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

from dcompile.collectives.contract import BucketRule, ParamInfo
from dcompile.collectives.updates import cut_updates
from dcompile.device_traits import traits_of
from dcompile.ir.buffers import IN_BUCKET, ITEMSIZE, Bucket, Buffer
from dcompile.ir.collective_kinds import PlannedKind, bucket_traits
from dcompile.ir.gemm import MATMUL_OPS, matmul_of
from dcompile.ir.index import Index, as_index, contiguous_strides
from dcompile.ir.library_ops import COPY_EACH
from dcompile.ir.nodes import SCALED, Collective, Extern, Loop, Program, Step, View, Wait

ALIGN_BYTES = 64
"""Alignment of each gradient, a cache line, as of freshly allocated tensors: kernels are fastest on aligned memory."""


@dataclass
class _OpenBucket:
    """A bucket that is being filled."""

    position: int
    limit: int
    nbytes: int = 0
    members: list[ParamInfo] = field(default_factory=list)


def assign_to_buckets(params: Sequence[ParamInfo], rule: BucketRule) -> list[list[ParamInfo]]:
    """Members of each bucket, in the order in which the buckets are reduced.

    It applies torch's `compute_bucket_assignment_by_size` to the parameters in reverse. A bucket holds one dtype of one
    device, and closes once its size reaches the limit. Buckets are ordered by their first member.
    """
    done: list[_OpenBucket] = []
    filling: dict[tuple[str, str, str], _OpenBucket] = {}
    opened: dict[tuple[str, str, str], int] = {}
    limits = rule.limits
    for position, param in enumerate(sorted(params, key=lambda p: -p.number)):
        key = (param.dtype, param.device, param.group)
        if key not in filling:
            count = opened.get(key, 0)
            filling[key] = _OpenBucket(position, limits[min(count, len(limits) - 1)])
            opened[key] = count + 1
        bucket = filling[key]
        bucket.members.append(param)
        bucket.nbytes += prod(param.shape) * ITEMSIZE[param.dtype]
        if bucket.nbytes >= bucket.limit:
            done.append(filling.pop(key))
    done += filling.values()
    return [bucket.members for bucket in sorted(done, key=lambda b: b.position)]


def lay_out(
    members: Sequence[ParamInfo], name: str, buffers: Sequence[str | None], wire: str = "", marks: bool = False
) -> Bucket:
    """Lay out a bucket: aligned gradients, one after the other. Parameters without a buffer (None) are idle.

    `marks`: append presence flags, one for each parameter.
    """
    first = members[0]
    step = ALIGN_BYTES // ITEMSIZE[first.dtype]
    known: list[tuple[int, str, int]] = []
    idle: list[tuple[int, int]] = []
    end = 0
    for param, buffer in zip(members, buffers, strict=True):
        if buffer is None:
            idle.append((param.number, end))
        else:
            known.append((param.number, buffer, end))
        end += -(-prod(param.shape) // step) * step
    return Bucket(
        name=name,
        dtype=first.dtype,
        device=first.device,
        group=first.group,
        params=tuple(number for number, _, _ in known),
        buffers=tuple(buffer for _, buffer, _ in known),
        offsets=tuple(offset for _, _, offset in known),
        numel=end + len(members) * marks,
        wire=first.dtype if wire == "own" else wire,
        idle=tuple(number for number, _ in idle),
        idle_offsets=tuple(offset for _, offset in idle),
        marks=len(members) * marks,
    )


KIND: PlannedKind = "all_reduce"
Output: TypeAlias = View | Index | int | float | bool | None


@dataclass(frozen=True)
class _BucketGradient:
    """One gradient: its position among the outputs, and its buffer in the bucket."""

    output: int
    param: ParamInfo
    view: View
    buffer: str
    copied: bool


def insert_ddp_buckets(program: Program, params: tuple[ParamInfo, ...], rule: BucketRule | None) -> Program:
    """Insert DDP's all-reduces if the program reduces gradients; else keep only gradients of sharded parameters."""
    if rule is None:
        sharded = {param.number for param in params if param.shard is not None}
        return replace(program, grads=tuple(grad for grad in program.grads if grad[1] in sharded))
    return insert_all_reduces(program, params, rule)


def insert_all_reduces(program: Program, params: tuple[ParamInfo, ...], rule: BucketRule) -> Program:
    """Reduce the program's gradients in buckets: each starts right after its last gradient, all waits are at the end.

    Guarantees: the same values before the reduction. The order of starts and waits depends on parameter order alone, so
    it is the same on every rank. A gradient's bucket memory has one writer and no reader.
    Relies on: every buffer has one writer; no storage is planned yet.
    """
    gradients = _gradients(program, {param.number: param for param in params})
    if not gradients:
        return program
    program, updates = cut_updates(program)
    placed = params if rule.covers_all_params else [gradient.param for gradient in gradients]
    buckets, late = lay_out_all(placed, rule, {gradient.param.number: gradient.buffer for gradient in gradients})
    if late:
        program = products_last(program, [bucket.buffers for bucket in late])
    return replace(
        program,
        outputs=_outputs(program, gradients),
        buffers=_buffers(program, gradients, buckets),
        steps=(*_steps(program, gradients, buckets), *updates),
        buckets=tuple(buckets),
    )


def lay_out_all(
    params: Sequence[ParamInfo], rule: BucketRule, buffers: Mapping[int, str]
) -> tuple[list[Bucket], list[Bucket]]:
    """Lay out the buckets of these parameters. Return them in the order of reduction, and the late ones among them.

    `buffers`: parameter number -> the buffer of its gradient, if there is one.
    """
    buckets = []
    for number, members in enumerate(assign_to_buckets(params, rule)):
        marks = rule.covers_all_params or any(param.number in rule.unsure for param in members)
        known = [buffers.get(param.number) for param in members]
        buckets.append(lay_out(members, f"{bucket_traits(KIND).bucket_prefix}{number}", known, rule.wire, marks))
    late = behind_the_last(buckets, {param.number: param for param in params}, rule)
    return [*(bucket for bucket in buckets if bucket not in late), *late], late


def all_idle(params: Sequence[ParamInfo], rule: BucketRule) -> tuple[Bucket, ...]:
    """Buckets of a program without gradients: those of any other, under `BucketRule.covers_all_params`."""
    return tuple(lay_out_all(params, rule, {})[0])


def behind_the_last(buckets: Sequence[Bucket], params: Mapping[int, ParamInfo], rule: BucketRule) -> list[Bucket]:
    """Buckets to reduce after the last one, whose reduction nothing else would hide.

    A model's first parameter is often its largest, an embedding. Its gradient is ready last, and fills a bucket alone.
    Gradients of weights right before it can wait: smaller buckets, in total no larger than the last. Depends on sizes
    of parameters alone.
    """
    if len(buckets) < 3 or rule.wire:
        return []
    last = buckets[-1]
    first = params[min(number for number, _ in last.places)]
    if min(params) != first.number or _nbytes(first) < max(last.numel * ITEMSIZE[last.dtype] // 2, rule.limits[-1]):
        return []
    late: list[Bucket] = []
    for bucket in reversed(buckets[1:-1]):
        if (bucket.dtype, bucket.group) != (last.dtype, last.group):
            break
        if 2 * bucket.numel > last.numel or sum(other.numel for other in (bucket, *late)) > last.numel:
            break
        late.insert(0, bucket)
    return late


def _nbytes(param: ParamInfo) -> int:
    return prod(param.shape) * ITEMSIZE[param.dtype]


def products_last(program: Program, buckets: Sequence[Collection[str]]) -> Program:
    """Move steps that write only these buckets' gradients, without readers, to the program's end, bucket by bucket.

    In their old order, one small late sum (a norm's weight) delayed a bucket until all matmuls had run. That exposed
    1.1 ms of a step on four H200.

    Guarantees: the same steps and values. The order within a bucket, and among the other steps, stays.
    Relies on: every buffer has one writer; the gradients have no readers.
    """
    place = {name: number for number, names in enumerate(buckets) for name in names}
    moved: list[Step] = []
    kept: list[Step] = []
    changed = set[str]()
    """Buffers that later steps write."""
    for step in reversed(program.steps):
        plain = isinstance(step, Loop) or (isinstance(step, Extern) and step.mode == "out" and not step.effect)
        alone = bool(step.writes) and step.writes <= set(place) and not step.writes & step.reads
        # a step that changes an input in place may do so through a view of it
        if plain and alone and not changed & (step.reads | set(program.inputs)):
            moved.insert(0, step)
        else:
            kept.insert(0, step)
            changed |= step.writes
    moved.sort(key=lambda step: min(place[name] for name in step.writes))
    return replace(program, steps=(*kept, *moved))


def _gradients(program: Program, params: Mapping[int, ParamInfo]) -> list[_BucketGradient]:
    """Gradients that exist (an unused parameter has none), each with its buffer in the bucket."""
    found = []
    for position, number in program.grads:
        view = program.outputs[position]
        if number not in params or not isinstance(view, View):
            continue
        copied = not can_place(program, position)
        buffer = f"grad{number}_in_bucket" if copied else view.buffer
        found.append(_BucketGradient(position, params[number], view, buffer, copied))
    return found


def can_place(program: Program, output: int) -> bool:
    """Whether this output's buffer can be placed in a bucket, so that the gradient is never copied.

    The bucket is scaled and summed in place as soon as it is full, so no other step may read the buffer. The compiler
    must place its memory, and one step must fill it densely.
    """
    view = program.outputs[output]
    assert isinstance(view, View)
    buffer = program.table[view.buffer]
    writers = [step for step in program.steps if view.buffer in step.writes]
    if len(writers) != 1 or any(view.buffer in step.reads for step in program.steps if step is not writers[0]):
        return False
    if isinstance(writers[0], Extern):
        if writers[0].mode != "out" or view.buffer in writers[0].reads:
            return False
    elif not isinstance(writers[0], Loop) or view.buffer in writers[0].reads:
        return False
    uses = sum(isinstance(other, View) and other.buffer == view.buffer for other in program.outputs)
    return uses == 1 and buffer.storage is None and _is_dense(view) and _same_memory(view, buffer)


def _is_dense(view: View) -> bool:
    """Whether a view is row-major from the start of its buffer, so that AccumulateGrad takes it without a copy."""
    strides = contiguous_strides(view.shape)
    matters = [
        (have, want) for size, have, want in zip(view.shape, view.strides, strides, strict=True) if size not in (0, 1)
    ]
    return as_index(view.offset).constant == 0 and all(have == want for have, want in matters)


def _same_memory(view: View, buffer: Buffer) -> bool:
    return _numel(view.shape) == _numel(buffer.shape) and buffer.nbytes == _numel(view.shape) * ITEMSIZE[buffer.dtype]


def _numel(shape: tuple[object, ...]) -> int:
    total = 1
    for size in shape:
        assert isinstance(size, int), "a parameter has a static shape"
        total *= size
    return total


def _outputs(program: Program, gradients: list[_BucketGradient]) -> tuple[Output, ...]:
    outputs = list(program.outputs)
    for gradient in gradients:
        if gradient.copied:
            shape = gradient.param.shape
            outputs[gradient.output] = View(gradient.buffer, shape, contiguous_strides(shape))
    return tuple(outputs)


def _buffers(program: Program, gradients: list[_BucketGradient], buckets: list[Bucket]) -> tuple[Buffer, ...]:
    """All buffers, with those of gradients placed in their bucket."""
    places = {
        name: (IN_BUCKET + bucket.name, offset * ITEMSIZE[bucket.dtype])
        for bucket in buckets
        for name, offset in zip(bucket.buffers, bucket.offsets, strict=True)
    }
    copies = []
    for gradient in gradients:
        if gradient.copied:
            param = gradient.param
            shape = param.shape or (1,)
            copies.append(Buffer(gradient.buffer, param.dtype, shape, contiguous_strides(shape), param.device))
    return tuple(
        replace(buffer, storage=places[buffer.name][0], offset=places[buffer.name][1])
        if buffer.name in places
        else buffer
        for buffer in (*program.buffers, *copies)
    )


def _steps(program: Program, gradients: list[_BucketGradient], buckets: list[Bucket]) -> tuple[Step, ...]:
    """Steps, with copies into buckets after their source, starts after the last gradient, and waits at the end."""
    written = {name: position for position, step in enumerate(program.steps) for name in step.writes}
    ready = {g.buffer: written.get(g.view.buffer, -1) for g in gradients}  # -1: an input of the program
    copied = [gradient for gradient in gradients if gradient.copied]
    copies = copies_by_place([(g.buffer, g.view, g.param) for g in copied], ready, program.table, buckets, "its bucket")
    # A communicator runs collectives in the order in which they are started, and every rank must start them in the same
    # order. So bucket i+1 never starts before bucket i, even if its gradients are ready first.
    starts: dict[int, list[Step]] = {}
    waits: list[Step] = []
    earliest = -1
    for bucket in buckets:
        earliest = max([earliest, *(ready[name] for name in bucket.buffers)])
        starts.setdefault(earliest, []).append(Collective(KIND, bucket.name, bucket.group, bucket.buffers))
        waits.append(Wait(bucket.name, bucket.buffers))
    steps: list[Step] = [*copies.get(-1, ()), *starts.get(-1, ())]
    for position, step in enumerate(program.steps):
        steps += [step, *copies.get(position, ()), *starts.get(position, ())]
    return (*steps, *waits)


COPY_ONE = "aten.cat.default"
"""Concatenation of one tensor: the plain copy that has an out= overload."""
JOINED_BYTES = 32 << 20
"""Bytes of gradients that one call copies at most. They live until all of them are there, and with more of them, a call
costs little beside its copies. Nine copies of a layer of 160M take 140 us of an H200 and 156 of its host, one call 25
and 14.
"""


def copies_by_place(
    copied: Sequence[tuple[str, View, ParamInfo]],
    ready: Mapping[str, int],
    table: Mapping[str, Buffer],
    buckets: Iterable[Bucket],
    where: str,
) -> dict[int, list[Step]]:
    """Step -> copies to run after it, of gradients (buffer of the copy, gradient, parameter) into memory of buckets.

    Copies of one bucket between the same dtypes are joined to one call, up to `JOINED_BYTES`.
    """
    bucket_of = {buffer: bucket for bucket in buckets for buffer in bucket.buffers}
    kinds: dict[tuple[str, str], list[tuple[str, View, ParamInfo]]] = {}
    for entry in sorted(copied, key=lambda entry: ready[entry[0]]):
        kinds.setdefault((bucket_of[entry[0]].name, table[entry[1].buffer].dtype), []).append(entry)
    found: dict[int, list[Step]] = {}
    for entries in kinds.values():
        for part in _parts(entries, table):
            step = _copy(part, where)
            found.setdefault(max(ready[buffer] for buffer, *_ in part), []).append(step)
    return found


def _parts(
    entries: Iterable[tuple[str, View, ParamInfo]], table: Mapping[str, Buffer]
) -> Iterator[list[tuple[str, View, ParamInfo]]]:
    """Split entries into lists of at most `JOINED_BYTES`, or of one entry."""
    part: list[tuple[str, View, ParamInfo]] = []
    total = 0
    for entry in entries:
        nbytes = table[entry[1].buffer].typical_bytes
        if part and total + nbytes > JOINED_BYTES:
            yield part
            part, total = [], 0
        part.append(entry)
        total += nbytes
    if part:
        yield part


def _copy(entries: Sequence[tuple[str, View, ParamInfo]], where: str) -> Extern:
    """Copy gradients to their places, and convert them if these have another dtype."""
    name, more = entries[0][2].fqn, len(entries) - 1
    flat = (replace(view, shape=(1,), strides=(1,)) if not view.shape else view for _, view, _ in entries)
    return Extern(
        op=COPY_EACH if more else COPY_ONE,
        args=(tuple(flat),),
        kwargs=(),
        outs=tuple(buffer for buffer, *_ in entries),
        mode="out",
        origin=(f"gradient{'s' if more else ''} of {name}{f' and {more} more' if more else ''}, into {where}",),
    )


EXACTLY_SCALED_DTYPES = ("float32", "float64", "bfloat16")
"""Dtypes whose exponent alone changes by a power of two. float16 has few exponents: DDP divides after overflow and
underflow have happened, and GradScaler checks for that.
"""


def fold_average(program: Program) -> Program:
    """Scale gradients in the GEMMs that write them into a bucket, instead of in a pass over it (29 us per 41 MB).

    Those passes took 1.1 of 104 ms of kernels in a 1B model's DDP step on two H200. On the CPU, dcompile's own GEMM may
    be used, which has no factor.

    Guarantees: the content of a bucket at its reduction is the same, bitwise if the factor is a power of two. For other
    factors, the run time passes 1 and scales those buckets itself. The bucket lists the scaled parameters.
    Relies on: gradients' places in buckets, each with one writer.
    """
    eligible = (b for b in program.buckets if _is_scaled(b) and traits_of(b.device).aten.scales_matmul)
    wanted = {buffer for bucket in eligible for buffer in bucket.buffers}
    products = {n: step for n, step in enumerate(program.steps) if _is_product(step) and step.writes & wanted}
    if not products:
        return program
    done = {name for step in products.values() for name in step.writes}
    steps = tuple(_scale_matmul(step) if n in products else step for n, step in enumerate(program.steps))
    buckets = (
        replace(b, scaled=tuple(p for p, buffer in zip(b.params, b.buffers, strict=True) if buffer in done))
        for b in program.buckets
    )
    return replace(program, steps=steps, buckets=tuple(buckets))


def _is_scaled(bucket: Bucket) -> bool:
    """Whether gradients are scaled in the bucket's own dtype, as DDP does without a hook."""
    return not bucket.carries_units and not bucket.wire and bucket.dtype in EXACTLY_SCALED_DTYPES


def _is_product(step: Step) -> bool:
    """Whether it is a plain matmul whose left operand has an element, for `_scale_matmul`: symbolic sizes may be 0."""
    call = matmul_of(step)
    if call is None or call.op.batched or call.op.wide or call.added is not None:
        return False
    return all(isinstance(size, int) and size > 0 for size in call.left.shape)


def _scale_matmul(step: Step) -> Extern:
    """Add a factor to a matmul. The addend is multiplied by 0 and never read, so any one element in memory will do."""
    assert isinstance(step, Extern)
    left = step.args[0]
    assert isinstance(left, View)
    nothing = replace(left, shape=(1, 1), strides=(1, 1))
    return replace(step, op=MATMUL_OPS[step.op].adding, args=(nothing, *step.args), kwargs=SCALED)
