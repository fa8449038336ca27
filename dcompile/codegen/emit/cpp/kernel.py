"""Kernels of the C++ target: a loop becomes one function of plain loops over plain pointers, which g++ vectorizes.

A row is processed in passes: pass k computes the element values that need reductions of earlier passes. Row values are
computed between passes. A later pass recomputes cheap values, since L1 holds the row by then, and reads the others from
an array on the stack. No pointer is `restrict`, since the memory planner may place an output in the memory of an input.
`omp simd` promises all that the vectorizer needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.cpp.column_sums import open_in_place, print_row_blocks
from dcompile.codegen.emit.cpp.interleave_rows import SUMMED_ROWS, print_summed_rows
from dcompile.codegen.emit.cpp.keep_values import hoisted_computation
from dcompile.codegen.emit.cpp.ops import SPELLING, c_type, memory_type
from dcompile.codegen.emit.cpp.parallelize import COLUMNS_OF_THREAD
from dcompile.codegen.emit.cpp.plan import NestDecision, NestPlan, make_plan
from dcompile.codegen.emit.cpp.prefetch import may_stream
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.row_passes import print_row
from dcompile.codegen.emit.cpp.software_pipeline import open_late_row
from dcompile.codegen.emit.cpp.vector_printer import NO_SUMS
from dcompile.codegen.emit.target import EmitRequest, KernelSource, Target, describe_loop, kernel_name
from dcompile.codegen.nest.loop_nest import make_nest, may_exceed
from dcompile.device_traits import CPU
from dcompile.ir.buffers import Buffer
from dcompile.ir.canonical_names import Nameless, nameless
from dcompile.ir.index import size_product
from dcompile.ir.nodes import Loop, Program


def plan_kernel(
    loop: Loop, table: Mapping[str, Buffer], decisions: Sequence[NestDecision], read_again: frozenset[str] = frozenset()
) -> NestPlan:
    """Return the plan of a kernel after all `decisions`, the rows of `NEST_PASSES`."""
    plan = make_plan(make_nest(loop), table, read_again)
    for decide in decisions:
        plan = decide(plan)
    return plan


def emit(
    loop: Loop, table: Mapping[str, Buffer], decisions: Sequence[NestDecision], read_again: frozenset[str] = frozenset()
) -> KernelSource:
    """Return the source of one kernel. `table`: its buffers; `read_again`: those that later steps read again."""
    p = Printer(plan_kernel(loop, table, decisions, read_again))
    _print_function(p)
    body = "\n".join(p.lines)
    kinds = [f"{'' if name in loop.writes else 'const '}{memory_type(table[name].dtype)}*" for name in p.arguments]
    kinds += ["int64"] * len(p.symbols)
    shorts = (*p.arguments.values(), *p.symbols.values())
    arguments = ", ".join(f"{kind} {short}" for kind, short in zip(kinds, shorts, strict=True))
    text = f"({arguments}) {{\n{body}\n  return {'take_failure()' if p.checked else '0'};\n}}\n"
    name = kernel_name(describe_loop(loop), hashlib.sha256(text.encode()).hexdigest())
    text = f'extern "C" int64 {name}{text}'
    found = ", ".join(f"({kind})*a[{place}]" for place, kind in enumerate(kinds))  # for launch tables
    text += f'extern "C" int64 {name}_at(const int64* const* a) {{ return {name}({found}); }}\n'
    sizes, decided = tuple(p.symbols), tuple(p.plan.decisions())
    cost = len(loop.body) + 4
    return KernelSource(name, text, tuple(p.arguments), cost, p.checked, loop.origin, sizes, plan=decided)


def emit_all(program: Program, request: EmitRequest) -> tuple[KernelSource, ...]:
    """Emit the kernels of a program, one for each of its loops. A backward reads all results of a forward again.

    Loops that differ only in buffer names, such as those of equal layers, are emitted once. For 32 layers of a Llama
    these are 21 of 300 loops, in 0.1 s instead of 0.9.
    """
    table, training = program.table, request.kind == "forward"
    written: dict[tuple[Nameless, tuple[Buffer, ...], frozenset[str]], KernelSource] = {}
    last = {name: at for at, step in enumerate(program.steps) for name in step.reads}
    calls = []
    for at, step in enumerate(program.steps):
        if isinstance(step, Loop):
            names: dict[str, str] = {}
            loop = nameless(step, names)
            buffers = tuple(_numbered(table[name], number) for name, number in names.items())
            stored = (name for name in step.writes if training or last.get(name, at) > at)
            key = (loop, buffers, frozenset(names[name] for name in stored if may_stream(table[name])))
            kernel = written.get(key)
            if kernel is None:
                named = {buffer.name: buffer for buffer in buffers}
                kernel = written[key] = emit(loop[0], named, request.decisions, key[2])
            own = {number: name for name, number in names.items()}
            arguments = tuple(own[number] for number in kernel.arguments)
            calls.append(replace(kernel, arguments=arguments, origin=step.origin))
    return tuple(calls)


def _numbered(buffer: Buffer, number: str) -> Buffer:
    """Return a buffer with the properties that a kernel's text depends on."""
    return Buffer(number, buffer.dtype, buffer.shape, buffer.strides)


def _emit(loop: Loop, table: Mapping[str, Buffer], request: EmitRequest) -> KernelSource:
    return emit(loop, table, request.decisions)


TARGET = Target("c++", SPELLING, CPU, _emit)


# --- the function ----------------------------------------------------------------------------------------------------


def _print_function(p: Printer) -> None:
    """Print a whole function: computations that happen once, then all rows."""
    _print_early_return(p)
    for load in p.plan.next_row if p.plan.late else ():
        p.argument(load.buffer)  # the pipelined pass is printed before the rows, whose loads are numbered first
    if p.plan.hoisted:
        _print_hoisted(p)
    if p.plan.columns and not p.plan.in_place:
        print_row_blocks(p)
        return
    open_in_place(p)
    parallel = p.plan.parallel and not p.plan.columns
    if not p.plan.row_axes:
        _print_only_row(p)
    else:
        _print_rows(p, parallel)


def _print_early_return(p: Printer) -> None:
    """Return at once where a tensor would be multiplied by 1 in its own memory."""
    if (scaling := p.plan.scaling) is None:
        return
    number = p.expression(p.nest.body[scaling.number])
    target, source = p.argument(p.nest.stores[0].buffer), p.argument(scaling.tensor.buffer)
    p.line(f"if ({target} == {source} && {number} == 1) return 0;")


def _print_hoisted(p: Printer) -> None:
    """Compute the hoisted values, for all threads."""
    (axis,) = p.nest.elements
    for ref in p.plan.hoisted:
        p.line(f"alignas(64) {c_type(p.nest.body[ref].dtype)} r{p.number(ref)}[{axis.size}];")
    p.open(f"for (int64 {axis.name} = 0; {axis.name} < {axis.size}; {axis.name}++)")
    for ref in hoisted_computation(p.plan):
        p.declare(ref)
    for ref in p.plan.hoisted:
        p.line(f"r{p.number(ref)}[{axis.name}] = {p.name(ref)};")
    p.close()


def _print_only_row(p: Printer) -> None:
    p.open("")
    print_row(p)
    if p.plan.streamed:
        p.line("finish_streams();")
    p.close()


def _print_rows(p: Printer, parallel: bool) -> None:
    """Print the loop over all rows, shared among threads if `parallel`."""
    plan, rows = p.plan, size_product(axis.count for axis in p.plan.row_axes)
    if plan.shared_columns:
        _open_shared_columns(p)
    parallel = parallel and may_exceed(rows, 1)
    region = parallel and (plan.late is not None or bool(plan.streamed))
    late = None
    if region:  # each thread finishes its own rows
        p.line(f"#pragma omp parallel{p.if_worthwhile()}")
        p.open("")
        late = open_late_row(p)
        p.line("#pragma omp for schedule(static) nowait")
    elif parallel:
        p.parallel_for()
    sums, first, end = NO_SUMS, "0", p.size(rows)
    if plan.interleaved_sum is not None:
        p.open(f"for (int64 r_at = 0; r_at < {rows}; r_at += {SUMMED_ROWS})")
        sums, first, end = print_summed_rows(p, plan.interleaved_sum), "r_at", f"r_at + {SUMMED_ROWS}"
    p.open(f"for (int64 r = {first}; r < {end}; r++)")
    p.name_coordinates("r")
    print_row(p, late, sums)
    p.close(1 + (plan.shared_columns is not None) + (plan.interleaved_sum is not None))
    if late:
        late.close()
    if plan.streamed:
        p.line("finish_streams();")
    p.close(int(region))


def _open_shared_columns(p: Printer) -> None:
    """Open a loop that gives each thread some columns of every row."""
    assert p.plan.shared_columns is not None
    name, size = p.plan.shared_columns.name, p.plan.shared_columns.size
    # as wide as possible: narrow columns read each row in many parts (1.4 times slower at 64 of 768)
    p.line("const int64 threads = omp_get_max_threads();")
    p.line(f"const int64 width = ({size} / threads + {COLUMNS_OF_THREAD}) / {COLUMNS_OF_THREAD} * {COLUMNS_OF_THREAD};")
    p.line(f"const int64 parts = ({size} + width - 1) / width;")
    p.parallel_for()
    p.open("for (int64 c = 0; c < parts; c++)")
    p.line(f"const int64 {name}_low = c * width;")
    p.line(f"const int64 {name}_high = {name}_low + width < {size} ? {name}_low + width : {size};")
