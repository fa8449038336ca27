"""Find the steps of a GPU program that a CUDA graph cannot record, and why.

The host program marks them in its text. A recording is split there: pieces before and after them are recorded, and the
marked statements run as they are (`runtime/program/graph_partition.py`). Calls that fail in a recording without being
marked here are learned then.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dcompile.codegen.emit.host.extern_calls import in_torch, resolve
from dcompile.ir.buffers import NUMBER
from dcompile.ir.index import Index
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Step
from dcompile.ir.symbols import used_symbols, valued_symbols

TAGS: Mapping[torch.Tag, str] = {
    torch.Tag.cudagraph_unsafe: "is tagged cudagraph_unsafe",
    torch.Tag.dynamic_output_shape: "waits for the size of its result",
    torch.Tag.data_dependent_output: "waits for a value of the device",
}
"""Tags of operators that no CUDA graph can record, and what they say."""


def unrecordable_steps(program: Program) -> dict[int, str]:
    """Return the positions of the steps that cannot be recorded, each with its operation and the reason."""
    if all(buffer.device == "cpu" for buffer in program.buffers):
        return {}
    read = {name for step in program.steps for name in step.reads}
    on_host = {buffer.name for buffer in program.buffers if buffer.device == "cpu" and buffer.is_tensor}
    numbers = {buffer.name for buffer in program.buffers if buffer.dtype == NUMBER}
    late = valued_symbols(program)
    sized = {
        buffer.name for buffer in program.buffers if not late.isdisjoint(_symbols((*buffer.shape, *buffer.strides)))
    }
    told = set[str]()
    found: dict[int, str] = {}
    for position, step in enumerate(program.steps):
        touched = step.reads | step.writes
        constant = isinstance(step, Loop) and not step.reads and step.writes.isdisjoint(read)
        if tagged := _tag(step):
            reason = tagged
        elif not constant and not on_host.isdisjoint(touched):
            reason = "works on the CPU"
        elif not sized.isdisjoint(touched) or not late.isdisjoint(used_symbols(step)) or _tells(step, late):
            reason = "has sizes that depend on values"
        elif not told.isdisjoint(step.reads):
            reason = "reads a number that depends on values"
        else:
            continue
        told |= step.writes & numbers
        found[position] = f"{_name(step)} {reason}"
    return found


def _symbols(sizes: tuple[object, ...]) -> frozenset[str]:
    return frozenset(name for size in sizes if isinstance(size, Index) for name in size.variables)


def _tells(step: Step, late: frozenset[str]) -> bool:
    return isinstance(step, Extern) and not late.isdisjoint(step.tells)


def _tag(step: Step) -> str:
    """Return what a tag says about a call; empty without one."""
    call = step.call if isinstance(step, Collective) else step
    if not isinstance(call, Extern) or not in_torch(call.op):
        return ""
    tags = getattr(resolve(call.op), "tags", ())
    return next((reason for tag, reason in TAGS.items() if tag in tags), "")


def _name(step: Step) -> str:
    """Return the operation of a step as people know it."""
    match step:
        case Loop():
            return ", ".join(name.removesuffix(".default") for name in step.origin) or "a kernel"
        case (Extern() as call) | Collective(call=Extern() as call):
            return call.op.removesuffix(".default")
    return "a wait"
