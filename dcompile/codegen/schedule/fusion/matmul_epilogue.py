"""Matmuls and the loops around them: epilogue fusion, accumulated sums, and choices for few rows.

Epilogue fusion makes one kernel of a matmul and the pointwise loop after it. A sum of matmuls is accumulated: each adds
to the previous result, instead of a loop that adds up all results. Matmuls of few rows are loops from the start
(`lower/rules/small_matmul.py`), with a tile that follows from their sizes.

Kernels and tiles are measured on the program before these passes (`autotune.py`), against the library's matmul and a
separate loop. This file finds the candidates and rewrites the chosen ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from dcompile.codegen.nest.contraction import Contraction, find_contraction
from dcompile.codegen.nest.loop_nest import Axis, Nest, flatten_loop, reindex, renumber, renumber_values, stride
from dcompile.codegen.schedule.fusion.merge import without
from dcompile.codegen.schedule.order.dependences import edges
from dcompile.device_traits import MAX_INT32_ELEMENTS, loop_traits, traits_of
from dcompile.ir.analysis import is_row_store, operands, runtime_refs, sizes
from dcompile.ir.buffers import Buffer
from dcompile.ir.canonical_names import buffers_in, nameless, rename_buffers
from dcompile.ir.gemm import MATMUL_OPS, TENSOR_CORE_DTYPES, gemm_layout, matmul_of
from dcompile.ir.index import ZERO, Index, as_size, substitute, var
from dcompile.ir.nodes import (
    Apply,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Matmul,
    Program,
    Reduce,
    Ref,
    Scan,
    Step,
    Store,
    Tile,
    Value,
    View,
    map_arguments,
)
from dcompile.ir.symbols import used_symbols

MIN_EPILOGUE_FLOPS = 1 << 30
"""A matmul of fewer floating point operations takes two microseconds, and fusion gains nothing."""
ANY = Tile(0, 0, 0, 0, 0)
"""Placeholder for a tile that is not chosen yet."""


@dataclass(frozen=True, slots=True)
class EpilogueCandidate:
    """A matmul and a loop that can be its epilogue, by position among the steps."""

    product: int
    position: int
    joint: Loop
    """Both as one loop, with the tile `ANY`."""

    @property
    def kind(self) -> Loop:
        """The joint loop without names: the key of a choice, which equal layers share."""
        return _nameless(self.joint)

    @property
    def flops(self) -> int:
        assert self.joint.product is not None, "an ending has a product"
        return flops(self.joint.product)


def flops(product: Matmul) -> int:
    """Return the floating point operations of a matmul, static sizes only."""
    *_, left, right = product.call.views
    known = [size for size in (*left.shape, right.shape[1]) if isinstance(size, int)]
    return 2 * prod(known)


def fuse_matmul_epilogues(program: Program, chosen: Mapping[Loop, Tile]) -> Program:
    """Fuse matmuls with the loops after them, where a tile was chosen.

    Guarantees: the same values, up to the order of summation in these matmuls, which move to the place of their loops.
    Relies on: `chosen` is the same on every rank.
    """
    found = {e.position: (e, chosen[e.kind]) for e in epilogues(program) if e.kind in chosen} if chosen else {}
    if not found:
        return program
    gone = {ending.product for ending, _ in found.values()}
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        if position in found:
            steps.append(with_tile(found[position][0].joint, found[position][1]))
        elif position not in gone:
            steps.append(step)
    written = {name for step in steps for name in step.reads | step.writes}
    unwritten = {name for n in gone for name in program.steps[n].writes} - written
    return replace(program, steps=tuple(steps), buffers=tuple(b for b in program.buffers if b.name not in unwritten))


def with_tile(joint: Loop, tile: Tile) -> Loop:
    """Return the joint loop with this tile."""
    assert joint.product is not None, "a joint loop has a product"
    return replace(joint, product=replace(joint.product, tile=tile))


def epilogues(program: Program) -> list[EpilogueCandidate]:
    """Return all matmuls that have an epilogue candidate, each with one loop."""
    table = program.table
    products = {n: out for n, step in enumerate(program.steps) if (out := _result(step, table)) is not None}
    if not products:
        return []
    before = edges(program.steps)
    found: dict[int, EpilogueCandidate] = {}
    for at, out in products.items():
        behind = (n for n in range(at + 1, len(program.steps)) if at in before[n])
        position = next(behind, None)  # no other step may need the result, or overwrite the matmul's inputs, before
        joint = None if position is None else _fuse_epilogue(program, at, position, out)
        if position is None or joint is None:
            continue
        ending = EpilogueCandidate(at, position, joint)
        if position not in found or ending.flops >= found[position].flops:
            found[position] = ending  # of two matmuls that a loop reads: the larger, or on ties the later
    return [found[position] for position in sorted(found)]


def _result(step: Step, table: Mapping[str, Buffer]) -> Buffer | None:
    """Return the result buffer of a matmul that dcompile's kernel can compute; None for other steps."""
    call = matmul_of(step)
    if call is None or call.op.batched or call.op.wide or call.kwargs:
        return None
    buffer = table[call.out]
    if (added := call.added) is not None:
        known = isinstance(added.offset, int) and added.strides and isinstance(added.strides[-1], int)
        whole = added.shape[-1:] == call.right.shape[1:] and not any(added.strides[:-1])
        if not known or not whole or table[added.buffer].dtype != buffer.dtype:
            return None
    result = View(call.out, buffer.shape, buffer.strides)
    if (
        buffer.dtype not in TENSOR_CORE_DTYPES
        or not traits_of(buffer.device).has_matmul_epilogues
        or buffer.extent != _elements(result)
    ):
        return None
    if any(table[view.buffer].dtype != buffer.dtype for view in (call.left, call.right)):
        return None
    fits = all(
        gemm_layout(view, buffer.dtype) is not None and _reach(view) < MAX_INT32_ELEMENTS
        for view in (call.left, call.right, result)
    )
    return buffer if fits and gemm_layout(result, buffer.dtype) == (False, buffer.shape[1]) else None


def _elements(view: View) -> int:
    """Return the number of elements of a view of static size; -1 otherwise."""
    return prod(n for n in view.shape if isinstance(n, int)) if all(isinstance(n, int) for n in view.shape) else -1


def _reach(view: View) -> int:
    numbers = [n for n in (*view.shape, *view.strides, view.offset) if isinstance(n, int)]
    rows, columns, down, right, offset = numbers  # seen by `gemm_layout`
    return offset + (rows - 1) * down + (columns - 1) * right + 1


def _fuse_epilogue(program: Program, at: int, position: int, out: Buffer) -> Loop | None:
    """Return matmul and loop as one, if the loop covers the result element by element."""
    call, loop = program.steps[at], program.steps[position]
    assert isinstance(call, Extern), "found by _result"
    if not isinstance(loop, Loop) or loop.product is not None or not _is_pointwise(loop, program.table):
        return None
    if used_symbols(loop) or loop.writes & call.reads or any(b.holder == out.name for b in program.buffers):
        return None
    product = Matmul(call, out.dtype, ANY)
    if flops(product) < MIN_EPILOGUE_FLOPS:
        return None
    ordered = by_rows(loop, out)
    if ordered is None:
        return None
    if is_seen(program, out.name, (at, position)):
        load = next(n for n, value in enumerate(ordered.body) if isinstance(value, Load) and value.buffer == out.name)
        kept = Store(out.name, _of_load(ordered, load), load)
        ordered = replace(ordered, stores=(kept, *ordered.stores))
    origin = tuple(dict.fromkeys((*call.origin, *loop.origin)))
    return replace(ordered, origin=origin, product=product)


def _of_load(loop: Loop, ref: int) -> Index:
    value = loop.body[ref]
    assert isinstance(value, Load), "a load of the product"
    return value.index


def _is_pointwise(loop: Loop, table: Mapping[str, Buffer]) -> bool:
    """Does each iteration compute one element of each store independently, at an index known in advance on a GPU?"""
    if any(isinstance(value, (Reduce, Scan)) for value in loop.body):
        return False
    names = {name for name, size in sizes(loop).items() if size != 1}
    return all(
        store.mode == "set"
        and not runtime_refs(store.index)
        and names <= store.index.variables
        and not (loop.inner and is_row_store(loop, store))
        and traits_of(table[store.buffer].device).has_matmul_epilogues
        for store in loop.stores
    )


def by_rows(loop: Loop, out: Buffer) -> Loop | None:
    """Rewrite the loop over rows and columns of the matrix `out`, of which each iteration reads one element; else None.

    Variables may be in any order. Several may make up the rows or the columns, and one may span both.
    """
    loads = [value for value in loop.body if isinstance(value, Load) and value.buffer == out.name]
    columns, lengths = out.shape[1], sizes(loop)
    if len({load.index for load in loads}) != 1 or any(load.mask is not None for load in loads):
        return None
    assert isinstance(columns, int), "seen by _result"
    found = {name: stride(loads[0].index, name) for name, size in lengths.items() if size != 1}
    steps = {name: step for name, step in found.items() if isinstance(step, int)}
    if len(steps) != len(found):
        return None
    outer, inner, flat, whole = list[Piece](), list[Piece](), ZERO, 1
    for name in sorted(steps, key=lambda name: steps[name]):
        size = lengths[name]
        if steps[name] != whole or not isinstance(size, int):
            return None
        flat = flat + var(name) * whole
        within = columns // whole if whole < columns else 1
        if whole < columns and (columns % whole or (size % within if size > within else within % size)):
            return None
        inner += [(name, min(size, within))] if whole < columns else []
        outer += [(name, size // within)] if size > within else []
        whole *= size
    if whole != out.extent or flat != loads[0].index:
        return None
    return _in_order(loop, outer[::-1], inner[::-1])


Piece: TypeAlias = "tuple[str, int]"
"""A variable, or its upper or lower part, and its length."""


def _in_order(loop: Loop, outer: list[Piece], inner: list[Piece]) -> Loop:
    """Rewrite the loop over these variables; `outer` has the upper part of a variable that is in both."""
    bounds = {f"i{k}": size for k, (_, size) in enumerate(outer)} | {f"j{k}": size for k, (_, size) in enumerate(inner)}
    moved = dict.fromkeys(sizes(loop), ZERO)
    for k, (name, _) in enumerate(outer):
        moved[name] = var(f"i{k}") * dict(inner).get(name, 1)
    for k, (name, _) in enumerate(inner):
        moved[name] = moved[name] + var(f"j{k}")

    def at(index: Index) -> Index:
        return substitute(index, moved, bounds)

    body = tuple(replace(v, index=at(v.index)) if isinstance(v, (Load, IndexOf)) else v for v in loop.body)
    stores = tuple(replace(store, index=at(store.index)) for store in loop.stores)
    return replace(loop, outer=tuple(n for _, n in outer), inner=tuple(n for _, n in inner), body=body, stores=stores)


def is_seen(program: Program, name: str, but: tuple[int, int]) -> bool:
    """Return whether a step other than these two needs a buffer, or an output or storage refers to it."""
    used = any(name in step.reads | step.writes for n, step in enumerate(program.steps) if n not in but)
    shown = any(isinstance(output, View) and output.buffer == name for output in program.outputs)
    return used or shown or program.table[name].storage is not None


# --- names ------------------------------------------------------------------------------------------------------------


def _nameless(joint: Loop) -> Loop:
    """Return the joint loop with buffers numbered in order of use, and without its origin."""
    assert joint.product is not None, "a joint loop has a product"
    call, out = joint.product.call, joint.product.out
    names: dict[str, str] = {}
    for name in (*(view.buffer for view in call.views), out, *buffers_in(joint)):
        names.setdefault(name, f"b{len(names)}")
    call = map_arguments(call, lambda arg: replace(arg, buffer=names[arg.buffer]) if isinstance(arg, View) else arg)
    bare = replace(call, outs=(names[out],), origin=())
    product = replace(joint.product, call=bare)
    return replace(rename_buffers(joint, names), name="", origin=(), product=product)


DTYPES = ("float32", "float64")  # narrower ones round after each addition, and an accumulating matmul does not


@dataclass(frozen=True, slots=True)
class SummedMatmuls:
    """A loop that adds up matmul results, and at most one other value first. Steps are given by position."""

    loop: int
    start: str
    """Buffer of the first addend."""
    begun: int
    """Step that writes the first addend."""
    products: tuple[int, ...]
    """Steps of the other addends' matmuls, in order."""


def accumulate_matmuls(program: Program) -> Program:
    """Accumulate matmuls into one another where a loop would only add up their results.

    A weight used many times, such as a recurrent layer's, gets as many gradients. They then need the memory of one, and
    no loop reads them again.
    Guarantees: the same values, up to the order and rounding of these sums.
    Relies on: no step is fused yet, so a loop that only adds is recognized.
    """
    sums = find_sums(program)
    if not sums:
        return program
    gone = {found.loop for found in sums}
    instead: dict[int, list[Step]] = defaultdict(list)
    buffers = list(program.buffers)
    table = program.table
    for found in sums:
        total = table[_stored_sum(program.steps[found.loop])]
        so_far, at = found.start, found.begun
        for number, position in enumerate(found.products):
            gone.add(position)
            last = number == len(found.products) - 1
            into = total if last else replace(total, name=f"{total.name}_so_far{number}")
            buffers += [] if last else [into]
            at = max(at, position)
            instead[at].append(_added_matmul(program.steps[position], table[so_far], into))
            so_far = into.name
            table[so_far] = into
    kept = [[*([] if n in gone else [step]), *instead[n]] for n, step in enumerate(program.steps)]
    steps = tuple(step for group in kept for step in group)
    used = {name for step in steps for name in step.reads | step.writes} | set(program.inputs)
    return replace(program, steps=steps, buffers=tuple(buffer for buffer in buffers if buffer.name in used))


def find_sums(program: Program) -> list[SummedMatmuls]:
    """Find loops that add up matmul results without other readers, and at most one value without later readers."""
    writers: dict[str, list[int]] = defaultdict(list)
    readers: dict[str, list[int]] = defaultdict(list)
    for number, step in enumerate(program.steps):
        for name in step.writes:
            writers[name].append(number)
        for name in step.reads:
            readers[name].append(number)
    shown = program.returned
    table, found = program.table, []
    for number, step in enumerate(program.steps):
        addends = _addends(step, table) if isinstance(step, Loop) else None
        if addends is None or not all(
            len(writers[name]) == 1 and readers[name][-1] == number and name not in shown for name in addends
        ):
            continue
        products = [name for name in addends if len(readers[name]) == 1 and _is_product(program, writers[name][0])]
        others = [name for name in addends if name not in products]
        read = frozenset().union(*(program.steps[writers[name][0]].reads for name in products))
        changes = any(len(writers[name]) > (name not in program.inputs) for name in read)
        if len(others) > 1 or not products or changes:  # the matmul may move later, so its inputs must not change
            continue
        products.sort(key=lambda name: writers[name][0])
        start, *rest = [*others, *products]
        found.append(SummedMatmuls(number, start, writers[start][0], tuple(writers[name][0] for name in rest)))
    return found


def _stored_sum(step: Step) -> str:
    (name,) = step.writes
    return name


def _addends(loop: Loop, table: Mapping[str, Buffer]) -> list[str] | None:
    """Return the buffers that a loop adds up, if it does nothing else and all have the layout of the result."""
    if len(loop.stores) != 1 or loop.stores[0].mode != "set" or len(loop.body) < 3:
        return None
    (store,) = loop.stores
    target = table[store.buffer]
    loads = [value for value in loop.body if isinstance(value, Load)]
    adds = [value for value in loop.body if isinstance(value, Apply) and value.op == "add"]
    used = sorted(ref for add in adds for ref in add.args)
    each_once = used == [ref for ref in range(len(loop.body)) if ref != store.value]
    if len(loads) + len(adds) != len(loop.body) or not each_once or target.dtype not in DTYPES:
        return None
    layout = (target.shape, target.strides, target.dtype, target.device)
    for load in loads:
        buffer = table[load.buffer]
        lies_so = (buffer.shape, buffer.strides, buffer.dtype, buffer.device) == layout
        if not lies_so or load.index != store.index or load.mask is not None:
            return None
    names = [load.buffer for load in loads]
    return names if len(set(names)) == len(names) and store.buffer not in names else None


def _is_product(program: Program, position: int) -> bool:
    call = matmul_of(program.steps[position])
    return call is not None and call.added is None and not call.op.wide


def _added_matmul(step: Step, start: Buffer, into: Buffer) -> Extern:
    assert isinstance(step, Extern)
    whole = View(start.name, start.shape, start.strides)
    return replace(step, op=MATMUL_OPS[step.op].adding, args=(whole, *step.args), outs=(into.name,))


LIBRARY = Tile(0, 0, 0, 0, 0)
"""Choice of the library's GEMM in place of a tile."""


@dataclass(frozen=True, slots=True)
class LibraryForm:
    """A loop's products as library calls, and the loop that uses their results, unless that only copies them."""

    calls: tuple[Extern, ...]
    rest: Loop | None
    buffers: tuple[Buffer, ...]
    """The calls' results."""


def choose_skinny_matmuls(program: Program, chosen: Mapping[Loop, Tile]) -> Program:
    """Give products of few rows the tiles that were chosen for them, or to the library.

    Guarantees: the same values, up to the order of summation in these products.
    Relies on: `chosen` is the same on every rank.
    """
    if not any(loop.product is None for loop in chosen):
        return program
    table = dict(program.table)
    steps: list[Step] = []
    for step in program.steps:
        tile = chosen.get(kind_of(step)) if isinstance(step, Loop) and step.product is None else None
        if tile is None or not isinstance(step, Loop):
            steps.append(step)
        elif tile != LIBRARY:
            steps.append(replace(step, tile=tile))
        else:
            form = library_form(step, table)
            assert form is not None, "the library was measured"
            steps += [*form.calls, *([] if form.rest is None else [form.rest])]
            table |= {buffer.name: buffer for buffer in form.buffers}
    return replace(program, steps=tuple(steps), buffers=tuple(table.values()))


def skinny_loops(program: Program) -> dict[Loop, list[Loop]]:
    """Return the loops that are products of few rows on GPUs, by kind: equal layers share one."""
    table = program.table
    found: dict[Loop, list[Loop]] = {}
    for step in program.steps:
        if isinstance(step, Loop) and loop_traits(step, table).has_row_matmul and contraction_of(step) is not None:
            found.setdefault(kind_of(step), []).append(step)
    return found


def contraction_of(loop: Loop) -> Contraction | None:
    """Return the products of a loop, if it has only such."""
    return find_contraction(flatten_loop(loop)) if loop.product is None else None


def kind_of(loop: Loop) -> Loop:
    """Return a loop without names and tile: the key of a choice."""
    return replace(nameless(loop, {})[0], tile=None)


def library_form(loop: Loop, table: Mapping[str, Buffer]) -> LibraryForm | None:
    """Return a loop with its products as library calls; None where rows have no common stride, or sums are not rounded.

    A sum that a bias is added to before rounding would be rounded twice.
    """
    nest = flatten_loop(loop)
    found = find_contraction(nest)
    if found is None or found.batch or len(found.rows) != 1 or len(found.columns) != 1 or not _are_rounded(nest, found):
        return None
    rows, columns, depth = found.row_count, found.column_count, found.depth
    names = {axis.name: var(f"i{place}") for place, axis in enumerate(nest.rows)}
    place = names[found.rows[0].name] * columns + names[found.columns[0].name]
    calls: list[Extern] = []
    results: dict[Ref, Load] = {}
    for number, product in enumerate(found.products):
        left, right = _load(nest, product.left), _load(nest, product.right)
        if {left.dtype, right.dtype} != {product.dtype}:
            return None  # the library would need the integers' casts in memory
        name = _new_name(f"{loop.name}_product{number or ''}", table)
        factors = (
            _view(left, (rows, depth), (found.rows[0], *nest.elements)),
            _view(right, (depth, columns), (*nest.elements, found.columns[0])),
        )
        calls.append(Extern("aten.mm.default", factors, (), (name,), "out", origin=loop.origin))
        results[product.reduce] = Load(name, place, left.dtype)
    device = table[loop.stores[0].buffer].device
    made = [Buffer(load.buffer, load.dtype, (rows, columns), (columns, 1), device) for load in results.values()]
    rest = _with_results(loop, nest, names, results)
    if _only_copies(rest, made, table):
        return LibraryForm((replace(calls[0], outs=(rest.stores[0].buffer,)),), None, ())
    return LibraryForm(tuple(calls), rest, tuple(made))


def _only_copies(rest: Loop, made: Sequence[Buffer], table: Mapping[str, Buffer]) -> bool:
    """Could the only product be written where the loop copies it to?"""
    loads = [value for value in rest.body if isinstance(value, Load)]
    if len(rest.stores) != 1 or len(loads) != 1 or loads[0].index != rest.stores[0].index:
        return False
    into = table[rest.stores[0].buffer]
    same = (into.dtype, into.shape, into.strides) == (made[0].dtype, made[0].shape, made[0].strides)
    return same and all(
        isinstance(value, Load) or (isinstance(value, Apply) and value.op == "cast") for value in rest.body
    )


def _are_rounded(nest: Nest, found: Contraction) -> bool:
    """Is every use of a sum a cast to the factors' dtype?"""
    sums = {product.reduce: product.dtype for product in found.products}
    users = [(value, ref) for value in nest.body for ref in operands(value) if ref in sums]
    stored = any(store.value in sums for store in nest.stores)
    return not stored and all(isinstance(v, Apply) and v.op == "cast" and v.dtype == sums[ref] for v, ref in users)


def _view(load: Load, shape: tuple[int, int], axes: tuple[Axis, ...]) -> View:
    """Return what a load reads along two variables as a matrix."""
    strides = tuple(stride(load.index, axis.name) for axis in axes)
    offset = as_size(substitute(load.index, {axis.name: ZERO for axis in axes}, {}))
    assert None not in strides, "loads of a contraction are affine"
    return View(load.buffer, shape, tuple(step for step in strides if step is not None), offset)


def _with_results(loop: Loop, nest: Nest, names: Mapping[str, Index], results: Mapping[Ref, Load]) -> Loop:
    """Return the loop over rows and columns that loads its sums."""
    body, stores = reindex(nest.body, nest.stores, dict(names))
    number: dict[Ref, Ref] = {}
    values: list[Value] = []
    for ref, value in enumerate(body):
        if ref in results:
            values += [results[ref], Apply("cast", (len(values),), "float32")]
        else:
            values.append(Const(0.0, value.dtype) if isinstance(value, Reduce) else renumber(value, number))
        number[ref] = len(values) - 1
    stores = tuple(replace(s, value=number[s.value], index=renumber_values(s.index, number)) for s in stores)
    sizes = tuple(axis.size for axis in nest.rows)
    kept = without(replace(loop, outer=sizes, inner=(), body=tuple(values), stores=stores, tile=None), frozenset())
    assert kept is not None, "a loop stores something"
    return kept


def _load(nest: Nest, ref: Ref) -> Load:
    load = nest.body[ref]
    assert isinstance(load, Load), "factors are loads"
    return load


def _new_name(name: str, table: Mapping[str, Buffer]) -> str:
    """Return a name that no buffer has."""
    while name in table:
        name += "_"
    return name
