"""Programs as text: `show` is for people, `digest` identifies a program; `repr` rebuilds it with `eval`."""

from __future__ import annotations

import hashlib
from collections import Counter

from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.index import Index, Size, contiguous_strides
from dcompile.ir.nodes import (
    Apply,
    Arg,
    Buffer,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Program,
    Reduce,
    Ref,
    Scan,
    Step,
    Value,
    Verbatim,
    View,
    Wait,
)


def digest(program: Program) -> str:
    """SHA-256 of the program's repr: equal on every rank and in every process for equal programs."""
    return hashlib.sha256(repr(program).encode()).hexdigest()


def show(program: Program) -> str:
    """Print a program: its signature, its buffers, its steps."""
    lines = [f"program {program.name}({', '.join(program.inputs)})"]
    lines += [f"  donated: {', '.join(program.donated)}"] if program.donated else []
    lines += [f"  parts: {', '.join(f'{name} {number}' for name, number in program.parts)}"] if program.parts else []
    lines += [f"  {show_buffer(buffer)}" for buffer in program.buffers]
    for number, step in enumerate(program.steps):
        first, *rest = show_step(step).splitlines()
        lines += [f"{number:3} {first}", *(f"    {line}" for line in rest)]
    lines.append(f"return ({', '.join(show_arg(output) for output in program.outputs)})")
    return "\n".join(lines)


def show_buffer(buffer: Buffer) -> str:
    """Print a buffer: `y: float32[4, 8] @ arena+64`, with strides only where they are not row-major."""
    strides = "" if buffer.strides == contiguous_strides(buffer.shape) else f" strides {_sizes(buffer.strides)}"
    device = "" if buffer.device == "cpu" else f" on {buffer.device}"
    place = "" if buffer.storage is None else f" @ {buffer.storage}+{buffer.offset}"
    return f"{buffer.name}: {buffer.dtype}{_sizes(buffer.shape)}{strides}{device}{place}"


def show_step(step: Step) -> str:
    """Print a step; a loop takes several lines."""
    match step:
        case Loop():
            return show_loop(step)
        case Extern():
            return _show_extern(step)
        case Collective(kind, bucket, group, buffers, None):
            return f"start {kind} {bucket} over {group}: {', '.join(buffers)}"
        case Collective(kind, bucket, group, _, call):
            assert call is not None, "the case above"
            return f"start {kind} {bucket} over {group}: {_show_extern(call)}"
        case Wait(bucket, buffers):
            return f"wait {bucket}: {', '.join(buffers)}"


def show_loop(loop: Loop) -> str:
    """Print a loop, with a line for each value and store.

    A value that is used once is printed inside its use if it is a load or a constant, or if a store writes it.
    """
    uses = Counter(ref for value in loop.body for ref in operands(value))
    uses.update(ref for store in loop.stores for ref in store_operands(store))
    stored = {store.value for store in loop.stores}
    words: list[str] = []
    lines = [f"loop {loop.name} {_sizes(loop.outer)} x {_sizes(loop.inner)}{_origin(loop.origin)}"]
    if loop.product is not None:
        lines.append(f"  {_show_extern(loop.product.call)} by {loop.product.tile}")
    named = {name for value in loop.body if isinstance(value, (Load, IndexOf)) for name in value.index.variables}
    named |= {name for store in loop.stores for name in store.index.variables}
    for ref, value in enumerate(loop.body):
        text = _show_value(value, words)
        alone = uses[ref] == 1 and (isinstance(value, (Load, IndexOf)) or ref in stored)
        if (isinstance(value, Const) and uses[ref]) or (alone and f"v{ref}" not in named):
            words.append(text)
        else:
            words.append(f"v{ref}")
            lines.append(f"  v{ref} = {text}")
    for store in loop.stores:
        mode = "=" if store.mode == "set" else f"{store.mode}="
        lines.append(f"  {store.buffer}[{store.index}] {mode} {_word(words, store.value)}")
    return "\n".join(lines)


def _show_value(value: Value, words: list[str]) -> str:
    match value:
        case Const(literal, dtype):
            return f"{literal!r}" if dtype in ("float32", "int64", "bool") else f"{literal!r}:{dtype}"
        case IndexOf(index, dtype):
            return f"index({index})" if dtype == "int64" else f"index({index}):{dtype}"
        case Load(buffer, index, _, mask):
            return f"{buffer}[{index}]" + ("" if mask is None else f" if {_word(words, mask)} else 0")
        case Apply(op, args, dtype):
            arguments = [_word(words, ref) for ref in args]
            return f"{op}({', '.join([*arguments, dtype] if op == 'cast' else arguments)})"
        case Reduce(op, arg, _):
            return f"row_{op}({_word(words, arg)})"
        case Scan(op, arg, _):
            return f"scan_{op}({_word(words, arg)})"


def _word(words: list[str], ref: Ref) -> str:
    """Text of an earlier value. A broken program must print, too, so that its error can be read."""
    return words[ref] if 0 <= ref < len(words) else f"v{ref}?"


def _show_extern(step: Extern) -> str:
    arguments = [show_arg(arg) for arg in step.args] + [f"{name}={show_arg(arg)}" for name, arg in step.kwargs]
    outs = ", ".join("_" if out is None else out for out in step.outs)
    note = " (fallback)" if step.fallback else ""
    return f"{outs} <- {step.op}({', '.join(arguments)}) [{step.mode}]{note}{_origin(step.origin)}"


def show_arg(arg: Arg) -> str:
    """Print an argument of a library call, or an output of the program."""
    match arg:
        case View(buffer, shape, strides, offset):
            layout = "" if strides == contiguous_strides(shape) else f" strides {_sizes(strides)}"
            start = "" if isinstance(offset, int) and offset == 0 else f" from {offset}"
            return f"{buffer}{_sizes(shape)}{layout}{start}"
        case Verbatim(text):
            return text
        case tuple():
            return f"({', '.join(map(show_arg, arg))})"
        case Index():
            return str(arg)
        case _:
            return repr(arg)


def _sizes(sizes: tuple[Size, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _origin(origin: tuple[str, ...]) -> str:
    return f"  # {', '.join(origin)}" if origin else ""
