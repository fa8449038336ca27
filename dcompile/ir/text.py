"""Programs as text: `show` prints what `ir.parse.parse` reads back, `digest` names a program's meaning.

The text is for people first: what follows from the rest, as an op's dtype or row-major strides, is left out.
`repr` rebuilds a program, too, with `eval`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.index import Index, Size, contiguous_strides
from dcompile.ir.loop_text import show_values
from dcompile.ir.names import quoted, show_name
from dcompile.ir.nodes import Arg, Collective, Extern, Loop, Matmul, Program, Step, Tile, Verbatim, View, Wait

VERBATIM = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\([^()`\n]*\))?"
"""Text of a library call's argument that can be nothing else."""
BUCKET_HEAD = ("name", "kind", "dtype", "numel", "device", "group")


def digest(program: Program) -> str:
    """SHA-256 of the program's repr: equal on every rank and in every process for equal programs."""
    return hashlib.sha256(repr(program).encode()).hexdigest()


def show(program: Program) -> str:
    """Print a program: its signature, its buffers, its steps."""
    lines = [f"program {show_name(program.name)}({_names(program.inputs)})"]
    lines += [f"  {line}" for line in _show_facts(program)]
    lines += [f"  {show_buffer(buffer)}" for buffer in program.buffers]
    dtypes = {buffer.name: buffer.dtype for buffer in program.buffers}
    for number, step in enumerate(program.steps):
        first, *rest = show_step(step, dtypes).splitlines()
        lines += [f"{number:3} {first}", *(f"    {line}" for line in rest)]
    lines.append(f"return ({', '.join(show_arg(output) for output in program.outputs)})")
    return "\n".join(lines)


def _show_facts(program: Program) -> Iterator[str]:
    """What a program says of itself besides its buffers and steps."""
    if program.donated:
        yield f"donated: {_names(program.donated)}"
    if program.parts:
        yield f"parts: {', '.join(f'{show_name(name)} {number}' for name, number in program.parts)}"
    if program.sizes:
        yield f"sizes: {', '.join(f'{show_name(name)} = {value}' for name, value in program.sizes)}"
    if program.grads:
        yield f"gradients: {', '.join(f'output {at} of parameter {number}' for at, number in program.grads)}"
    if program.arena_bytes != 0:
        yield f"arena: {program.arena_bytes} bytes"
    for bucket in program.buckets:
        yield _show_bucket(bucket)


def _show_bucket(bucket: Bucket) -> str:
    """`bucket b0: all_reduce float32[96] on cpu over ddp, params (0, 1), ...`; empty fields are left out."""
    place = f"on {show_name(bucket.device)} over {show_name(bucket.group)}"
    text = f"bucket {show_name(bucket.name)}: {bucket.kind} {bucket.dtype}[{bucket.numel}] {place}"
    for field in fields(bucket):
        value = getattr(bucket, field.name)
        if field.name not in BUCKET_HEAD and value:
            inside = f"({', '.join(map(show_name, value))})" if isinstance(value, tuple) else show_name(value)
            text += f", {field.name} {inside}"
    return text


def show_buffer(buffer: Buffer) -> str:
    """Print a buffer: `y: float32[4, 8] @ arena+64`, with strides only where they are not row-major."""
    strides = "" if buffer.strides == contiguous_strides(buffer.shape) else f" strides {_sizes(buffer.strides)}"
    device = "" if buffer.device == "cpu" else f" on {show_name(buffer.device)}"
    place = "" if buffer.storage is None else f" @ {show_name(buffer.storage)}+{buffer.offset}"
    return f"{show_name(buffer.name)}: {buffer.dtype}{_sizes(buffer.shape)}{strides}{device}{place}"


def show_step(step: Step, dtypes: Mapping[str, str] | None = None) -> str:
    """Print a step; a loop takes several lines. With `dtypes` of buffers, loads of other dtypes are marked."""
    match step:
        case Loop():
            return show_loop(step, dtypes)
        case Extern():
            return _show_extern(step)
        case Collective(kind, bucket, group, buffers, None, made):
            into = f" into {_names(made)}" if made else ""
            return f"start {kind} {show_name(bucket)} over {show_name(group)}{into}: {_names(buffers)}"
        case Collective(kind, bucket, group, buffers, call):
            assert call is not None, "the case above"
            into = "" if buffers == call.outs else f" into {_names(buffers)}"
            return f"start {kind} {show_name(bucket)} over {show_name(group)}{into}: {_show_extern(call)}"
        case Wait(bucket, buffers, sent):
            return f"wait {show_name(bucket)}: {_names(buffers)}" + (f" sent {_names(sent)}" if sent else "")


def show_loop(loop: Loop, dtypes: Mapping[str, str] | None = None) -> str:
    """Print a loop, with a line for each value and store; see `show_values` for the values inside lines."""
    tile = f" by {show_tile(loop.tile)}" if loop.tile is not None else ""
    lines = [f"loop {show_name(loop.name)} {_sizes(loop.outer)} x {_sizes(loop.inner)}{tile}{_origin(loop.origin)}"]
    if loop.product is not None:
        lines.append(f"  {_show_product(loop.product)}")
        dtypes = None if dtypes is None else {**dtypes, loop.product.out: loop.product.dtype}
    return "\n".join([*lines, *(f"  {line}" for line in show_values(loop, dtypes))])


def _show_product(product: Matmul) -> str:
    call = _show_call(product.call)
    return f"{call} in {product.dtype} by {show_tile(product.tile)}{_origin(product.call.origin)}"


def show_tile(tile: Tile) -> str:
    """`128x64x32, 4 warps, 3 stages`, and what else a tile asks for."""
    words = [f"{tile.rows}x{tile.columns}x{tile.depth}", f"{tile.warps} warps", f"{tile.stages} stages"]
    words += [f"{tile.parts} parts"] if tile.parts != 1 else []
    words += [f"{tile.programs} programs"] if tile.programs else []
    words += [word for word in ("flat", "descriptors") if getattr(tile, word)]
    return ", ".join(words)


def _show_extern(step: Extern) -> str:
    return f"{_show_call(step)}{_origin(step.origin)}"


def _show_call(step: Extern) -> str:
    arguments = [show_arg(arg) for arg in step.args] + [f"{name}={show_arg(arg)}" for name, arg in step.kwargs]
    outs = ", ".join("_" if out is None else show_name(out) for out in step.outs)
    facts = [step.mode, *(word for word in ("effect", "aliases") if getattr(step, word))]
    facts += [f"tells {' '.join(map(show_name, step.tells))}"] if step.tells else []
    facts += [f"{step.cost_us!r} us"] if step.cost_us else []
    note = " (fallback)" if step.fallback else ""
    return f"{outs} <- {show_name(step.op)}({', '.join(arguments)}) [{', '.join(facts)}]{note}"


def show_arg(arg: Arg) -> str:
    """Print an argument of a library call, or an output of the program."""
    match arg:
        case View(buffer, shape, strides, offset):
            layout = "" if strides == contiguous_strides(shape) else f" strides {_sizes(strides)}"
            start = "" if isinstance(offset, int) and offset == 0 else f" from {offset}"
            return f"{show_name(buffer)}{_sizes(shape)}{layout}{start}"
        case Verbatim(text):
            return text if re.fullmatch(VERBATIM, text) else quoted(text)
        case tuple():
            return f"({', '.join(map(show_arg, arg))}{',' if len(arg) == 1 else ''})"
        case Index():
            return str(arg) if arg.constant is None else f"index({arg})"
        case _:
            return repr(arg)


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(show_name, names))


def _sizes(sizes: tuple[Size, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _origin(origin: tuple[str, ...]) -> str:
    """Where a step came from, after a `#`; an entry that could be taken for two is quoted."""
    entries = [entry if entry.strip() == entry and _is_one_entry(entry) else quoted(entry) for entry in origin]
    return f"  # {', '.join(entries)}" if entries else ""


def _is_one_entry(text: str) -> bool:
    return bool(text) and text[0] != "`" and ", " not in text and text.isprintable()
