"""All-reduce of small tensors in one kernel, where the ranks' GPUs reach each other's memory.

Each rank writes its operand into an inbox of every rank, and adds up what arrives in its own. Every 64-bit word that it
writes carries 32 bits of data and the number of the call. So a reader sees by the word itself whether it has arrived,
and no rank waits for a flag after the data. This is the LL protocol of NCCL: Hu, Shen, et al., "Demystifying NCCL",
arXiv:2507.04786 (2025). Words are 64 bits wide, since a GPU writes those undivided.

Two calls in a row use different halves of an inbox. A rank that has finished a call has the operands of all others,
so the others have finished the call before. What was written for that one may be overwritten. A program of a kernel has
the same words in each call, and counts them. So kernels whose programs have other numbers of words use other inboxes.

Sums are computed in float32 in the order of ranks, and rounded once. So all ranks have the same bits.

Where a loop over the sum's rows follows, such as a residual addition with its norm, the kernel ends with it. A program
then has a row. It sends its words of the sum to all ranks. While they arrive, it loads what else the loop reads. The
loop's loads of the sum are the tile of sums in registers, rounded as they would be in memory.

A row of a decoded token is small. Each rank has all of the sum, so it can compute the whole row in the program that has
received it. That saves a launch and a round trip through memory, which take as long as the exchange itself. The loop
stays a step of the program: where ranks use the group's own collective, its own kernel runs after the wait.

Any loop over rows qualifies: RMSNorm, LayerNorm, softmax, or an addition alone. Names of operations do not matter.
`runtime.communication.peer_memory.one_shot` launches the kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dcompile.codegen.emit.target import AllReduceKernel, Kernels, KernelSource, Launch, describe_loop
from dcompile.codegen.emit.triton.kernel import finished, function_text, types_of
from dcompile.codegen.emit.triton.library import AFTER
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.emit.triton.row_passes import ReceivedTile, RowPassWriter
from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.codegen.nest.loop_nest import Axis, stride
from dcompile.codegen.nest.tile_plan import TilePlan, count
from dcompile.ir.buffers import ITEMSIZE, WITHIN, Buffer
from dcompile.ir.index import ZERO, Index, substitute
from dcompile.ir.nodes import Apply, Collective, Load, Loop, Program, View, Wait, views_of
from dcompile.machine_model import MAX_ONE_SHOT_BYTES

MAX_ROW_ELEMENTS = 8192
"""Elements of a row that a program may exchange: with more, its threads have no registers for what else it reads."""


@dataclass(frozen=True, slots=True)
class AllReduceEpilogue:
    """A loop that follows an all-reduce, and how its kernel is tiled: one program for each part of the sum."""

    number: int
    """Position of the loop among the program's loops."""
    step: int
    """Position of the loop among the program's steps."""
    loop: Loop
    plan: TilePlan
    operand: str
    """Buffer of the sum."""
    elements: int
    """Elements of the sum that a program of the kernel has."""
    keeps_sum: bool
    """Whether later steps or the caller read the sum, too."""


def all_reduce_epilogues(program: Program, all_reduces: Collection[str]) -> dict[str, AllReduceEpilogue]:
    """Return the loop of each of these all-reduces, by bucket, that its kernel may end with.

    Relies on: memory is planned. The loop follows the all-reduce and its wait directly, so running it earlier, as part
    of the all-reduce, meets no other step. In its result's memory may be what it reads, row by row.
    """
    found: dict[str, AllReduceEpilogue] = {}
    numbers = [number for number, step in enumerate(program.steps) if isinstance(step, Loop)]
    for place, step in enumerate(program.steps[:-2]):
        if not isinstance(step, Collective) or step.bucket not in all_reduces:
            continue
        wait, loop = program.steps[place + 1 : place + 3]
        if not isinstance(wait, Wait) or wait.bucket != step.bucket or not isinstance(loop, Loop):
            continue
        (operand,) = step.buffers
        if (tiled := _tiled(loop, operand)) is not None:
            plan, elements = tiled
            keeps = _is_read_later(program, place + 3, operand)
            number = numbers.index(place + 2)
            found[step.bucket] = AllReduceEpilogue(number, place + 2, loop, plan, operand, elements, keeps)
    return found


def _tiled(loop: Loop, operand: str) -> tuple[TilePlan, int] | None:
    """Return the tiling of a loop, and a program's elements of the sum, if no other program reads those."""
    if loop.product is not None or operand in loop.writes or any(store.mode != "set" for store in loop.stores):
        return None
    if any(isinstance(value, Apply) and value.op == "philox" for value in loop.body):
        return None
    plan = make_plan(loop)
    loads = [value for value in plan.nest.body if isinstance(value, Load) and value.buffer == operand]
    axes = tuple(axis for dim in plan.dims for axis in dim.axes)
    if not loads or any(load.mask is not None or not _is_in_order(load.index, axes) for load in loads):
        return None
    elements = _elements(plan)
    return None if elements is None else (plan, elements)


def _elements(plan: TilePlan) -> int | None:
    """Return the elements of a program that has a whole row, or a run of elements; None for other tilings."""
    if plan.kind == "flat":
        return plan.dims[0].block
    if plan.kind != "rows" or plan.looped or plan.dims[0].block != 1:
        return None
    size = count(plan.dims[1].axes)
    return size if isinstance(size, int) and size <= MAX_ROW_ELEMENTS else None


def _is_in_order(index: Index, axes: Sequence[Axis]) -> bool:
    """Is an index the position in the space of these variables?"""
    for place, axis in enumerate(axes):
        if stride(index, axis.name) != count(axes[place + 1 :]):
            return False
    return substitute(index, {axis.name: ZERO for axis in axes}, {}) == ZERO


def _is_read_later(program: Program, place: int, operand: str) -> bool:
    """Does a step from `place` on, or the caller, read a buffer or a part of it?"""
    if operand in program.inputs and operand not in program.donated:
        return True
    buffers = program.table
    parts = {name for name, buffer in buffers.items() if buffer.storage == WITHIN + operand}
    home = buffers[operand].storage or ""
    if home.startswith(WITHIN):
        return True  # the rest of it may be read together with this part
    names = {operand, *parts}
    later = any(names & step.reads for step in program.steps[place:])
    return later or any(isinstance(output, View) and output.buffer in names for output in program.outputs)


BLOCK = 128
"""Words of a program: four for each thread of a warp, which looks at them without meeting others."""
POLLS = 4096
"""Looks at a late word between two looks at the host's word that ends the job."""
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of operands."""
NAMES = ("words", "inboxes", "calls", "ended", "count", "rank", "ranks")
TYPES = ("*i32:16", "*i64", "*i32", "*i32", "i64", "i64", "i64")
"""Arguments of the exchange, after those of a loop: the operand's words, the addresses of all ranks' inboxes, the
number of the last call for each program, the host's word, the number of words, this rank, and the number of ranks."""


def sum_in_one_kernel(kernels: Kernels, program: Program) -> Kernels:
    """Emit the kernels of small all-reduces.

    Whether one takes its kernel is decided at run time, by all ranks alike: their GPUs may not reach each other.
    """
    starts = [step for step in program.steps if isinstance(step, Collective)]
    operands = {step.bucket: _operand(step, program.table) for step in starts}
    sources = {bucket: source(buffer.dtype) for bucket, buffer in operands.items() if buffer is not None}
    return replace(kernels, all_reduces={bucket: AllReduceKernel(source, BLOCK) for bucket, source in sources.items()})


def end_all_reduces_with_loops(kernels: Kernels, program: Program) -> Kernels:
    """End the kernels of all-reduces with the loops over rows that follow them."""
    return end_with_loops(kernels, program, kernels.all_reduces.keys(), frozenset(), 0)


def end_with_loops(
    kernels: Kernels, program: Program, buckets: Collection[str], constant: frozenset[str], first: int
) -> Kernels:
    """End the kernels of these all-reduces with the loops that follow them, where they can.

    Buffers in `constant` are written by no kernel that may still run when one starts that is after loop `first`.
    """
    all_reduces = dict(kernels.all_reduces)
    for bucket, found in all_reduce_epilogues(program, buckets).items():
        kernel = emit(found, program.table, constant if found.number > first else frozenset())
        all_reduces |= {} if kernel is None else {bucket: kernel}
    return replace(kernels, all_reduces=all_reduces)


def _operand(step: Collective, table: Mapping[str, Buffer]) -> Buffer | None:
    """Return the tensor that a small all-reduce of the model's own sums in place; None for other collectives."""
    if step.kind != "all_reduce" or step.call is None or len(step.buffers) != 1 or "sum" not in step.call.args:
        return None
    buffer = table[step.buffers[0]]
    (operand, *others) = views_of(step.call.args[0])
    whole = View(buffer.name, buffer.shape, buffer.strides)
    if others or operand != whole or buffer.device == "cpu" or buffer.dtype not in DTYPES:
        return None
    nbytes = buffer.extent * ITEMSIZE[buffer.dtype]
    return buffer if isinstance(nbytes, int) and nbytes <= MAX_ONE_SHOT_BYTES and nbytes % 4 == 0 else None


def source(dtype: str) -> KernelSource:
    """Return the kernel for operands of a dtype. Its arguments are those of the exchange."""
    inside = "inside"
    lines = [f"place = tl.program_id(0) * {BLOCK} + tl.arange(0, {BLOCK})", f"{inside} = place < count"]
    lines += [*own_inbox(), AFTER, *send(inside), *receive(dtype, BLOCK, inside), *store_sum(dtype, inside), *finish()]
    return exchanging("one_shot_all_reduce", lines, (), (), 1, 20)


def exchanging(
    described: str, lines: list[str], arguments: tuple[str, ...], types: tuple[str, ...], warps: int, cost: int
) -> KernelSource:
    """Return the kernel of these lines, whose first arguments are buffers of a loop: `a0`, `a1`, ..."""
    names = (*(f"a{n}" for n in range(len(arguments))), *NAMES)
    launch = Launch("kernel", 0, warps, tuple(range(len(names))), (*types, *TYPES))
    parts = [function_text("kernel", names, [f"    {line}" for line in lines])]
    return finished(described, parts, [launch], arguments, cost, {"kernel": described})


# --- the exchange -----------------------------------------------------------------------------------------------------


def own_inbox() -> list[str]:
    """Return statements that may come before the wait for earlier kernels."""
    return [f"own_inbox = {_inbox('rank')}"]


def send(inside: str = "") -> list[str]:
    """Return statements that send a program's words, at `place`, to all ranks. `inside`: mask of the words."""
    mask = f", mask={inside}" if inside else ""
    other = f"{mask}, other=0" if inside else ""
    return [
        "call = tl.load(calls + tl.program_id(0)) + 1",
        "mark = call.to(tl.int64) << 32",
        "half = (call & 1).to(tl.int64)",
        f"sent = mark | (tl.load(words + place{other}).to(tl.int64) & 0xFFFFFFFF)",
        "for step in range(0, ranks):",
        f"    inbox = {_inbox('(rank + step) % ranks')}",
        f"    tl.store(inbox + (rank * 2 + half) * {_SLOTS} + place, sent{mask})",
    ]


def receive(dtype: str, block: int, inside: str = "") -> list[str]:
    """Return statements that add up `block` words of all ranks: in `low`, and in `high` if a word has two elements."""
    other = f", mask={inside}, other=mark" if inside else ""
    look = [
        f"got = tl.load(box{other}, volatile=True)",
        "late = tl.max(((got >> 32).to(tl.int32) != call).to(tl.int32), 0)",
    ]
    return [
        f"low = tl.zeros([{block}], tl.float32)",
        *([f"high = tl.zeros([{block}], tl.float32)"] if ITEMSIZE[dtype] == 2 else []),
        "for source in range(0, ranks):",
        f"    box = own_inbox + (source * 2 + half) * {_SLOTS} + place",
        *(f"    {line}" for line in look),
        "    polls = 0",
        "    while late > 0:",
        *(f"        {line}" for line in look),
        "        polls += 1",
        f"        if polls % {POLLS} == 0:",
        "            late = tl.where(tl.load(ended, volatile=True) != 0, 0, late)",
        "    word = got.to(tl.int32)",
        *(f"    {line}" for line in _additions(dtype)),
    ]


def store_sum(dtype: str, inside: str = "") -> list[str]:
    """Return statements that write the sums in place of the operand."""
    mask = f", mask={inside}" if inside else ""
    if ITEMSIZE[dtype] == 4:
        return [f"tl.store(words + place, low.to(tl.int32, bitcast=True){mask})"]
    bits = "{0}.to(tl." + dtype + ").to(tl.int16, bitcast=True).to(tl.int32)"
    packed = f"({bits.format('low')} & 0xFFFF) | ({bits.format('high')} << 16)"
    return [f"tl.store(words + place, {packed}{mask})"]


def finish() -> list[str]:
    """Return statements that count the call."""
    return ["tl.store(calls + tl.program_id(0), call)"]


def element_sums(dtype: str, elements: int) -> str:
    """Return the sums of a program as one tile of so many elements, in float32, rounded to the dtype."""
    if ITEMSIZE[dtype] == 4:
        return "low"
    return f"tl.reshape(tl.join(low, high), [{elements}]).to(tl.{dtype}).to(tl.float32)"


_SLOTS = MAX_ONE_SHOT_BYTES // 4


def _inbox(rank: str) -> str:
    return f"tl.multiple_of(tl.load(inboxes + {rank}).to(tl.pointer_type(tl.int64)), 16)"


def _additions(dtype: str) -> list[str]:
    """Return statements that add a word's elements to the sums."""
    if ITEMSIZE[dtype] == 4:
        return ["low += word.to(tl.float32, bitcast=True)"]
    halves = "{0} += ({1}).to(tl.int16).to(tl." + dtype + ", bitcast=True).to(tl.float32)"
    return [halves.format("low", "word & 0xFFFF"), halves.format("high", "word >> 16")]


MAX_WARPS = 16
TILE = "summed"
"""Name of the tile of sums."""


def emit(found: AllReduceEpilogue, table: Mapping[str, Buffer], constant: frozenset[str]) -> AllReduceKernel | None:
    """Return the kernel; None if the loop takes more than addresses, or a program's part is not of whole words.

    Buffers in `constant` are written by no kernel that may still run when this one starts.
    """
    buffer = table[found.operand]
    per_word = 4 // ITEMSIZE[buffer.dtype]
    if found.elements % per_word or found.plan.dims[-1].block < per_word:
        return None
    text = TritonText(found.plan, table, constant, registers={found.operand: TILE})
    RowPassWriter(text, _exchange(found, buffer)).run()
    if text.symbols or text.draws:
        return None
    arguments = tuple(text.arguments)
    types = types_of(arguments, len(arguments), table)
    described = f"all_reduce_{describe_loop(found.loop)}"
    lines = [line.removeprefix("    ") for line in text.lines]
    cost = sum(map(bool, text.classes)) + 20
    source = exchanging(described, lines, arguments, types, _warps(found, per_word), cost)
    return AllReduceKernel(source, found.elements // per_word, found.number)


def _warps(found: AllReduceEpilogue, per_word: int) -> int:
    """Return the warps of a program: few words for each thread, since nothing else hides the way to the peers."""
    return min(max(found.plan.dims[-1].block // per_word // BLOCK, 1), MAX_WARPS)


def _exchange(found: AllReduceEpilogue, operand: Buffer) -> ReceivedTile:
    """Return the statements of the exchange. Results may be in the operand's memory, so stores follow a barrier."""
    dtype, extent = operand.dtype, operand.extent
    assert isinstance(extent, int), "sums of known size"
    per_word = 4 // ITEMSIZE[dtype]
    tile = found.plan.dims[-1].block
    words, block = found.elements // per_word, tile // per_word
    inside = "" if words == block and extent // per_word % words == 0 else "inside"
    place = [f"word = tl.arange(0, {block})", f"place = tl.program_id(0) * {words} + word"]
    place += [f"{inside} = (word < {words}) & (place < count)"] if inside else []
    return ReceivedTile(
        found.operand,
        before_wait=own_inbox(),
        send=[*place, *send(inside)],
        receive=[*receive(dtype, block, inside), f"{TILE} = {element_sums(dtype, tile)}"],
        store=store_sum(dtype, inside) if found.keeps_sum else [],
        finish=finish(),
    )
