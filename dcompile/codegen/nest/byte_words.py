"""Four rows at a time: a transposed matrix of bytes is stored by words.

A tile is read along one dimension and stored along the other, so its values change threads through shared memory. One
by one, bytes take an instruction each there, and more to pack them for a store. The thread that computes the bytes of
four adjacent rows packs them before they move: a copy takes 1.9 instructions a byte in place of 5.9.
"""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.nest.loop_nest import Axis, Nest, reindex, renumber, stride
from dcompile.ir.analysis import inner_names, outer_names, runtime_refs
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import Index, exact_quotient, var
from dcompile.ir.nodes import Const, IndexOf, Load, Loop, Reduce, Ref, Store, Value

WORD = 4
"""Bytes of a word."""
MAX_VALUES = 80
"""Values of a loop that is repeated for four rows: more would take Triton long to compile."""


def by_words(nest: Nest, along: Axis, across: Axis) -> tuple[Nest, tuple[tuple[int, ...], ...]] | None:
    """Repeat the nest's body for four positions of `across`; return that, and the stores that make words.

    `along` is the dimension in which the tile is read. None where no bytes are stored across it, or not in whole words,
    and where values are read across it.
    """
    moving = [n for n, store in enumerate(nest.stores) if _is_across(store.index, along, across)]
    if not isinstance(across.size, int) or across.size % WORD or len(nest.body) > MAX_VALUES or not moving:
        return None
    if not all(_makes_words(nest, nest.stores[n], across) for n in moving):
        return None
    places = [value.index for value in nest.body if isinstance(value, (Load, IndexOf))]
    if any(map(runtime_refs, (*places, *(store.index for store in nest.stores)))):
        return None
    if any(isinstance(value, Load) and _is_across(value.index, along, across) for value in nest.body):
        return None
    groups = tuple(tuple(range(n * WORD, (n + 1) * WORD)) for n in moving)
    return _repeated(nest, across, across.size // WORD), groups


def scatters_bytes(loop: Loop) -> bool:
    """Would a program with whole rows in its registers store bytes across these rows, one or two at a place?

    With RMSNorm's backward of 32768 x 768 elements that takes 230 us, where each alone is below 60 (one H200).
    """
    if not loop.outer or not loop.inner or not any(isinstance(value, Reduce) for value in loop.body):
        return False
    row, element = outer_names(loop)[-1], inner_names(loop)[-1]
    reads_rows = any(
        isinstance(value, Load) and row in value.index.variables and stride(value.index, element) == 1
        for value in loop.body
    )
    return reads_rows and any(
        store.mode == "set"
        and ITEMSIZE[loop.body[store.value].dtype] == 1
        and stride(store.index, row) == 1
        and stride(store.index, element) not in (None, 0, 1)
        for store in loop.stores
    )


def _is_across(index: Index, along: Axis, across: Axis) -> bool:
    return stride(index, across.name) == 1 and stride(index, along.name) != 0


def _makes_words(nest: Nest, store: Store, across: Axis) -> bool:
    """Are four bytes stored to each aligned word?"""
    one = ITEMSIZE[nest.body[store.value].dtype] == 1 and store.mode == "set"
    return one and exact_quotient(store.index - var(across.name), WORD) is not None


def _repeated(nest: Nest, across: Axis, size: int) -> Nest:
    body: list[Value] = []
    known: dict[tuple[Value, str], Ref] = {}
    stores: list[list[Store]] = [[] for _ in nest.stores]
    for row in range(WORD):
        values, placed = reindex(nest.body, nest.stores, {across.name: var(across.name) * WORD + row})
        number: dict[Ref, Ref] = {}
        for ref, value in enumerate(values):
            value = renumber(value, number)
            # 0 and False, 0.0 and -0.0 compare equal: the text distinguishes them
            key = value, repr(value.value) if isinstance(value, Const) else ""
            if key not in known:
                known[key] = len(body)
                body.append(value)
            number[ref] = known[key]
        for made, store in zip(stores, placed, strict=True):
            made.append(replace(store, value=number[store.value]))
    shorter = tuple(replace(axis, size=size) if axis == across else axis for axis in nest.elements)
    every = tuple(store for made in stores for store in made)
    return replace(nest, elements=shorter, body=tuple(body), stores=every, row_stores=(False,) * len(every))
