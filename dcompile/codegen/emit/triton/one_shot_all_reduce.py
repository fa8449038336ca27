"""All-reduce of small tensors in one kernel, where the ranks' GPUs reach each other's memory.

Each rank writes its operand into an inbox of every rank, and adds up what arrives in its own. Every 64-bit word that it
writes carries 32 bits of data and the number of the call. So a reader sees by the word itself whether it has arrived,
and no rank waits for a flag behind the data. This is the LL protocol of NCCL: Hu, Shen, et al., "Demystifying NCCL",
arXiv:2507.04786 (2025). Words are 64 bits wide, since a GPU writes those undivided.

Two calls in a row use different halves of an inbox. A rank that has finished a call has the operands of all others,
so the others have finished the call before. What was written for that one may be overwritten.

Sums are computed in float32 in the order of ranks, and rounded once. So all ranks have the same bits.

`runtime.communication.peer_memory.one_shot` launches it.
"""

from __future__ import annotations

import hashlib

from dcompile.codegen.emit.kernel_name import kernel_name
from dcompile.codegen.emit.target import KernelSource, Launch
from dcompile.codegen.emit.triton.library import HEADER, used_functions
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.nodes import Collective, Program, View, views_of
from dcompile.machine_model import MAX_ONE_SHOT_BYTES

BLOCK = 128
"""Words of a program: four for each thread of a warp, which looks at them without meeting others."""
POLLS = 4096
"""Looks at a late word between two looks at the host's word that ends the job."""
SUMMED = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
"""Dtypes of operands -> Triton's names."""
TYPES = ("*i32", "*i64", "*i32", "*i32", "i64", "i64", "i64")


def sources(program: Program) -> dict[str, KernelSource]:
    """Return the kernel of each collective that may be one kernel, by the name of its bucket.

    Whether it is one is decided at run time, by all ranks alike: their GPUs may not reach each other.
    """
    table = {buffer.name: buffer for buffer in program.buffers}
    found: dict[str, KernelSource] = {}
    for step in program.steps:
        if isinstance(step, Collective) and (buffer := _operand(step, table)) is not None:
            found[step.bucket] = source(buffer.dtype)
    return found


def _operand(step: Collective, table: dict[str, Buffer]) -> Buffer | None:
    """Return the tensor that a small all-reduce of the model's own sums in place; None for other collectives."""
    if step.kind != "all_reduce" or step.call is None or len(step.buffers) != 1 or "sum" not in step.call.args:
        return None
    buffer = table[step.buffers[0]]
    (operand, *others) = views_of(step.call.args[0])
    whole = View(buffer.name, buffer.shape, buffer.strides)
    if others or operand != whole or buffer.device == "cpu" or buffer.dtype not in SUMMED:
        return None
    nbytes = buffer.extent * ITEMSIZE[buffer.dtype]
    return buffer if isinstance(nbytes, int) and nbytes <= MAX_ONE_SHOT_BYTES and nbytes % 4 == 0 else None


def source(dtype: str) -> KernelSource:
    """Return the kernel for operands of a dtype.

    Its arguments: the operand's words, the addresses of all ranks' inboxes, the number of the last call for each
    program, the host's word, the number of words, this rank, and the number of ranks.
    """
    body = _TEXT.format(block=BLOCK, polls=POLLS, most=MAX_ONE_SHOT_BYTES // 4, **_sums(dtype))
    text = f"{HEADER}\n\n{used_functions(body)}\n\n{body}"
    digest = hashlib.sha256(f"{text}\n{TYPES}".encode()).hexdigest()[:24]
    entry = f"dcompile_one_shot_all_reduce_{digest[:8]}"
    text = text.replace("def all_reduce(", f"def {entry}(")
    launch = Launch(entry, 0, 1, tuple(range(len(TYPES))), TYPES)
    return KernelSource(kernel_name("one_shot_all_reduce", digest), text, (), 20, False, launches=(launch,))


def _sums(dtype: str) -> dict[str, str]:
    """Return the statements that depend on the dtype: what a word adds, and the word of the sums."""
    if ITEMSIZE[dtype] == 4:
        add = "low += word.to(tl.float32, bitcast=True)"
        return {"add": add, "pack": "low.to(tl.int32, bitcast=True)"}
    halves = "{0} += ({1}).to(tl.int16).to(tl." + SUMMED[dtype] + ", bitcast=True).to(tl.float32)"
    add = f"{halves.format('low', 'word & 0xFFFF')}\n        {halves.format('high', 'word >> 16')}"
    bits = "{0}.to(tl." + SUMMED[dtype] + ").to(tl.int16, bitcast=True).to(tl.int32)"
    return {"add": add, "pack": f"({bits.format('low')} & 0xFFFF) | ({bits.format('high')} << 16)"}


_TEXT = """
@triton.jit
def all_reduce(words, inboxes, calls, ended, count, rank, ranks):
    place = tl.program_id(0) * {block} + tl.arange(0, {block})
    inside = place < count
    own_inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64))
    after_others_()
    call = tl.load(calls + tl.program_id(0)) + 1
    mark = call.to(tl.int64) << 32
    half = (call & 1).to(tl.int64)
    sent = mark | (tl.load(words + place, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF)
    for step in range(0, ranks):
        inbox = tl.load(inboxes + (rank + step) % ranks).to(tl.pointer_type(tl.int64))
        tl.store(inbox + (rank * 2 + half) * {most} + place, sent, mask=inside)
    low = tl.zeros([{block}], tl.float32)
    high = tl.zeros([{block}], tl.float32)
    for source in range(0, ranks):
        box = own_inbox + (source * 2 + half) * {most} + place
        got = tl.load(box, mask=inside, other=mark, volatile=True)
        late = tl.max(((got >> 32).to(tl.int32) != call).to(tl.int32), 0)
        polls = 0
        while late > 0:
            got = tl.load(box, mask=inside, other=mark, volatile=True)
            late = tl.max(((got >> 32).to(tl.int32) != call).to(tl.int32), 0)
            polls += 1
            if polls % {polls} == 0:
                late = tl.where(tl.load(ended, volatile=True) != 0, 0, late)
        word = got.to(tl.int32)
        {add}
    tl.store(words + place, {pack}, mask=inside)
    tl.store(calls + tl.program_id(0), call)
"""
