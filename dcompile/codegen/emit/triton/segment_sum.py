"""Segment sums of rows on GPUs: without a sort, and in a deterministic order.

`dcompile.sum_groups(values, index, chunk) -> sums, keys, order, parts` adds up the rows of `values` that have the same
index, as the gradient of an embedding does. Row `p` of `sums` is the sum of its group where `p` is the last row of one;
others are not written. The other results are scratch memory. There are three kernels.

rank: computes a row's position in sorted order. It is the number of rows with a lower index, and of earlier rows with
the same one. Every row is compared with all: 8192 rows are 67 million comparisons, about 10 us of a GPU, where sorting
takes a dozen kernels. `keys` are the indices in that order, `order` their rows.
collect: each program adds up the groups in a run of `chunk` sorted rows, one row after another, with all loads at once.
Sums of groups that extend beyond the run are parts. parts[0] has that of the group that began before it, parts[1] that
of the group that continues after it.
join: the program of the run in which a long group begins adds up the group's parts, in order. So thousands of equal
rows cost as much as different ones.

Atomic additions of floats would come in any order. For the 8192 x 1024 gradients of Llama's table of 32000 words they
took 0.29 ms on an H200. That is four times the time of the memory traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcompile.codegen.emit.target import Kernels, KernelSource, Launch, LibraryReplacement
from dcompile.codegen.emit.triton.kernel import finished
from dcompile.codegen.emit.triton.ops import POINTERS
from dcompile.codegen.nest.tile_plan import power_of_two
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.index import contiguous_strides, exact_quotient
from dcompile.ir.nodes import Extern, Program, View

OP = "dcompile.sum_groups"
"""Name of the call in `lower/rules/embedding_backward.py`."""
RANKED, COMPARED = 32, 128
"""Rows that a program ranks, and the rows that it compares them with at a time."""
ENDS = 1024
"""Runs of a long group that are checked at a time."""
WARPS = 4
OUTSIDE = 2**31 - 1
"""A key above every index; it also differs from the negative numbers that stand for no key."""


def sum_groups(kernels: Kernels, program: Program) -> Kernels:
    """Emit the kernels of calls of `sum_groups`."""
    calls = ((n, step) for n, step in enumerate(program.steps) if isinstance(step, Extern) and step.op == OP)
    return kernels.with_products({n: LibraryReplacement(source(step, program.table)) for n, step in calls})


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes and dtypes that the text depends on."""

    rows: int
    width: int
    chunk: int
    block: int
    """Columns of a program: 16 bytes for each thread, if there are enough."""
    dtype: str
    compute: str

    @property
    def blocks(self) -> int:
        return -(-self.width // self.block)

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk)

    @classmethod
    def of(cls, values: View, dtype: str, compute: str, chunk: int) -> _Sizes:
        rows, width = values.shape
        assert isinstance(rows, int) and isinstance(width, int), "groups are summed of known sizes"
        block = min(WARPS * 32 * 16 // ITEMSIZE[dtype], power_of_two(width))
        return cls(rows, width, chunk, block, dtype, compute)


def source(step: Extern, table: Mapping[str, Buffer]) -> KernelSource:
    """Return the kernels of one call."""
    whole, found, chunk = step.args
    assert isinstance(whole, View) and isinstance(found, View) and isinstance(chunk, int), f"{OP} of {step.args}"
    arguments = (_start(whole), _start(found), *(name for name in step.outs if name is not None))
    values, index, sums, keys, order, parts = arguments
    sizes = _Sizes.of(whole, table[values].dtype, table[parts].dtype, chunk)
    assert table[sums].dtype == sizes.dtype, "sums are rounded to what they are summed of"
    grids = {"rank": -(-sizes.rows // RANKED), "collect": sizes.chunks * sizes.blocks}
    grids["join"] = grids["collect"] if sizes.chunks > 1 else 0
    warps = {"rank": WARPS, "collect": warps_of(sizes), "join": warps_of(sizes)}
    used = {"rank": (index, keys, order), "collect": (values, sums, keys, order, parts)}
    used["join"] = (sums, keys, order, parts)
    types = {name: _type(table[name]) for name in arguments}
    launches = [
        Launch(name, grids[name], warps[name], tuple(map(arguments.index, given)), tuple(types[b] for b in given))
        for name, given in used.items()
    ]
    texts = [_rank(sizes), _collect(sizes), _join(sizes)]
    return finished("segment_sum", texts, launches, arguments, 60, {name: name for name in used}, step.origin)


def _start(view: View) -> str:
    """Return the buffer that a view starts with."""
    dense = view.offset == 0 and view.strides == contiguous_strides(view.shape)
    assert dense, f"groups are summed of rows one after another, not of {view}"
    return view.buffer


def _type(buffer: Buffer) -> str:
    return POINTERS[buffer.dtype] + ("" if exact_quotient(buffer.offset, 16) is None else ":16")


def warps_of(sizes: _Sizes) -> int:
    return max(min(WARPS, sizes.block * ITEMSIZE[sizes.dtype] // 512), 1)


def _below(place: str, size: int, block: int) -> str:
    """Return a mask where the last block exceeds the size, else nothing."""
    return f"{place} < {size}" if size % block else ""


def _load(pointer: str, *masks: str, other: str = "0") -> str:
    found = " & ".join(f"({mask})" for mask in masks if mask)
    return f"tl.load({pointer}, mask={found}, other={other})" if found else f"tl.load({pointer})"


def _function(name: str, arguments: str, lines: list[str]) -> str:
    return f"@triton.jit\ndef {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


def _key(index: str) -> str:
    """Return an index as a key; indices outside every table form one group, which nobody reads."""
    return f"tl.where(({index} >= 0) & ({index} < {OUTSIDE}), {index}, {OUTSIDE}).to(tl.int32)"


def _rank(sizes: _Sizes) -> str:
    rows = sizes.rows
    inside = f", mask=p < {rows}" if rows % RANKED else ""
    other = _load("index + q", _below("q", rows, COMPARED), other=str(OUTSIDE))
    lines = [
        f"p = tl.program_id(0) * {RANKED} + tl.arange(0, {RANKED})",
        f"own = {_load('index + p', _below('p', rows, RANKED))}",
        f"own = {_key('own')}",
        f"before = tl.zeros([{RANKED}, {COMPARED}], tl.int32)",
        f"for start in range(0, {rows}, {COMPARED}):",
        f"    q = start + tl.arange(0, {COMPARED})",
        f"    other = {other}",
        f"    other = {_key('other')}",
        "    lower = other[None, :] < own[:, None]",
        "    equal = (other[None, :] == own[:, None]) & (q[None, :] < p[:, None])",
        "    before += (lower | equal).to(tl.int32)",
        "place = tl.sum(before, 1)",
        f"tl.store(keys + place, own{inside})",
        f"tl.store(order + place, p{inside})",
    ]
    return _function("rank", "index, keys, order", lines)


def _columns(sizes: _Sizes) -> list[str]:
    """Return statements for the columns and the run of rows of a program."""
    inside = [f"inside = x < {sizes.width}"] if sizes.width % sizes.block else []
    return [
        f"run = tl.program_id(0) // {sizes.blocks}",
        f"x = tl.program_id(0) % {sizes.blocks} * {sizes.block} + tl.arange(0, {sizes.block})",
        *inside,
        f"first = run * {sizes.chunk}",
    ]


def _store(pointer: str, value: str, *masks: str) -> str:
    found = " & ".join(f"({mask})" for mask in masks if mask)
    return f"tl.store({pointer}, {value}{f', {found}' if found else ''})"


def _collect(sizes: _Sizes) -> str:
    rows, width, chunk, wide = sizes.rows, sizes.width, sizes.chunk, f".to(tl.{sizes.compute})"
    lines = _columns(sizes)
    lines.append(f"before = {_load('keys + first - 1', 'first > 0', other='-1')}")
    for n in range(chunk):
        known = _below(f"first + {n}", rows, chunk)
        lines.append(f"k{n} = {_load(f'keys + first + {n}', known, other='-2')}")
        lines.append(f"p{n} = {_load(f'order + first + {n}', known)}")
    lines.append(f"k{chunk} = {_load(f'keys + first + {chunk}', f'first + {chunk} < {rows}', other='-2')}")
    inside = "inside" if width % sizes.block else ""
    for n in range(chunk):
        known = _below(f"first + {n}", rows, chunk)
        lines.append(f"g{n} = {_load(f'values + p{n} * {width} + x', inside, known)}{wide}")
    lines += ["total = g0", "early = g0"]
    last = chunk - 1
    for n in range(chunk):
        if n:
            lines.append(f"total = tl.where(k{n} == k{n - 1}, total, 0.0) + g{n}")
            lines.append(f"early = tl.where(k{n} == before, total, early)")
        ends = f"(k{n} != k{n + 1}) & (k{n} != before)"
        lines.append(_store(f"sums + p{n} * {width} + x", f"total.to(tl.{sizes.dtype})", inside, ends))
    # a rare branch: it converts the layout of registers for the wider type
    lines += [
        f"if (k0 == before) & ((k{last} != before) | (k{last} != k{chunk})):",
        f"    {_store(f'parts + run * {width} + x', 'early', inside)}",
        f"if k{last} == k{chunk}:",
        f"    {_store(f'parts + (run + {sizes.chunks}) * {width} + x', 'total', inside)}",
    ]
    return _function("collect", "values, sums, keys, order, parts", lines)


def _join(sizes: _Sizes) -> str:
    rows, width, chunk, chunks = sizes.rows, sizes.width, sizes.chunk, sizes.chunks
    last, inside = chunk - 1, "inside" if width % sizes.block else ""
    lines = _columns(sizes)
    lines += [
        f"key = {_load(f'keys + first + {last}', _below(f'first + {last}', rows, chunk), other='-1')}",
        f"behind = {_load(f'keys + first + {chunk}', f'first + {chunk} < {rows}', other='-2')}",
        f"before = {_load('keys + first - 1', 'first > 0', other='-2')}",
        "if (key == behind) & (key != before):",
        f"    more = tl.zeros([{ENDS}], tl.int32)",
        f"    for start in range(0, {chunks}, {ENDS}):",
        f"        r = start + tl.arange(0, {ENDS})",
        f"        begins = tl.load(keys + r * {chunk}, mask=(r > run) & (r < {chunks}), other=-1)",
        "        more += (begins == key).to(tl.int32)",
        "    end = run + tl.sum(more, 0)",  # the run that the group ends in
        f"    total = {_load(f'parts + (run + {chunks}) * {width} + x', inside)}",
        f"    for start in range(run + 1, end, {chunk}):",
    ]
    # several loads in flight, added in order
    for n in range(chunk):
        place = f"parts + (start + {n + chunks}) * {width} + x"
        lines.append(f"        g{n} = {_load(place, inside, f'start + {n} < end', other='0.0')}")
    lines += [f"        total += g{n}" for n in range(chunk)]
    lines += [
        f"    total += {_load(f'parts + end * {width} + x', inside)}",
        f"    r = end * {chunk} + tl.arange(0, {chunk})",
        f"    own = tl.load(keys + r, mask=r < {rows}, other=-1)",
        f"    place = end * {chunk} + tl.sum((own == key).to(tl.int32), 0) - 1",
        "    row = tl.load(order + place)",
        f"    {_store(f'sums + row * {width} + x', f'total.to(tl.{sizes.dtype})', inside)}",
    ]
    return _function("join", "sums, keys, order, parts", lines)
