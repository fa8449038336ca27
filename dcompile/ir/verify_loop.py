"""Rules of `ir.verify` for one loop: its values, its stores, and that indices stay in bounds and never collide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeAlias

import numpy as np

from dcompile.ir.analysis import inner_names, is_row_store, operands, outer_names, sizes
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.float8 import OPAQUE
from dcompile.ir.index import Index, as_index, evaluate_on, upper_bound
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Reduce, Ref, Scan, Store, Value
from dcompile.ir.ops import COMPUTE_DTYPES, DTYPES, OPS, REDUCTIONS, SCANS

Known: TypeAlias = Mapping[str, int]
"""Extent of each loop variable whose extent is a number."""
POINTS = 1 << 16
"""Number of points up to which a space is enumerated if the algebra cannot prove an index. Larger spaces
are trusted.
"""


class BrokenRule(Exception):
    """A rule does not hold; `verify` adds the location."""


def require(condition: bool, message: str) -> None:
    """Raise BrokenRule unless the condition holds."""
    if not condition:
        raise BrokenRule(message)


def check_loop(loop: Loop, table: Mapping[str, Buffer], symbols: frozenset[str], inputs: frozenset[str]) -> None:
    """Check rules 1 to 4."""
    for size in (*loop.outer, *loop.inner):
        require(as_index(size).variables <= symbols, f"size {size} of {loop.name} uses an unknown symbol")
    known = {name: size for name, size in sizes(loop).items() if isinstance(size, int)}
    empty = 0 in known.values()
    allowed = symbols | sizes(loop).keys()
    for ref, value in enumerate(loop.body):
        try:
            _check_value(loop, ref, value, table, allowed)
            if isinstance(value, Load) and value.mask is None and not empty:
                _check_bounds(value.index, table[value.buffer], known)
        except BrokenRule as broken:
            raise BrokenRule(f"value {ref} of {loop.name}: {broken}") from None
    require(bool(loop.stores), f"{loop.name} stores nothing")
    for store in loop.stores:
        _check_store(loop, store, table, allowed)
        if not empty:
            _check_bounds(store.index, table[store.buffer], known)
    _check_coverage(loop, table, known, inputs)


def _check_value(
    loop: Loop, ref: Ref, value: Value, table: Mapping[str, Buffer], allowed: frozenset[str] | set[str]
) -> None:
    def dtype_of(other: Ref) -> str:
        require(0 <= other < ref, f"refers to value {other}, which is not earlier")
        return loop.body[other].dtype

    require(value.dtype in DTYPES, f"a loop cannot compute {value.dtype}")
    match value:
        case Const(_, dtype):
            require(dtype in COMPUTE_DTYPES, f"a constant in {dtype}: make it float32 and cast")
        case IndexOf(index, dtype):
            _check_index(index, allowed, ref, loop)
            require(DTYPES[dtype] == "int", f"an index in {dtype}")
        case Load(buffer, index, dtype, mask):
            require(buffer in table, f"loads unknown buffer {buffer}")
            require(table[buffer].dtype == dtype, f"loads {buffer}, {table[buffer].dtype}, as {dtype}")
            _check_index(index, allowed, ref, loop)
            require(mask is None or dtype_of(mask) == "bool", "the mask is not a truth value")
        case Apply(op, args, dtype):
            require(op in OPS, f"unknown operation {op}")
            require(len(args) == OPS[op].arity, f"{op} takes {OPS[op].arity} arguments, not {len(args)}")
            _check_apply(op, tuple(dtype_of(arg) for arg in args), dtype)
        case Reduce(op, arg, dtype):
            require(op in REDUCTIONS, f"unknown reduction {op}")
            _check_reduce(op, dtype_of(arg), dtype)
        case Scan(op, arg, dtype):
            require(op in SCANS, f"unknown scan {op}")
            require(bool(loop.inner), "a scan needs an inner space")
            _check_scan(op, dtype_of(arg), dtype)


def _check_apply(op: str, args: tuple[str, ...], dtype: str) -> None:
    if op == "cast":
        require(not {*args, dtype} & {*OPAQUE}, f"a cast of {args[0]} to {dtype}: bytes that loops only copy")
        return
    require({*args, dtype} <= COMPUTE_DTYPES, f"{op} on {args}: arithmetic in 8 or 16 bits; cast to float32 first")
    if op == "where":
        require(args == ("bool", dtype, dtype), f"where({', '.join(args)}) gives {dtype}")
        return
    require(len(set(args)) == 1, f"{op} mixes {args}")
    require(DTYPES[args[0]] in OPS[op].kinds, f"{op} is not for {args[0]}")
    rule = OPS[op].rule
    expected = rule if rule in ("bool", "int32") else args[0]
    require(dtype == expected, f"{op} on {args[0]} gives {expected}, not {dtype}")


def _check_reduce(op: str, arg: str, dtype: str) -> None:
    require(arg in COMPUTE_DTYPES, f"{op} over {arg}: cast to float32 first")
    combine = REDUCTIONS[op].combine
    if op == "sum_exp":
        require(dtype == arg and DTYPES[arg] == "float", f"{op} over {arg} cannot give {dtype}")
        return
    if combine is None:
        require(dtype == "int64", f"{op} gives int64, not {dtype}")
        return
    kinds = frozenset(("bool",)) if op in ("any", "all") else OPS[combine].kinds
    require(dtype == arg and DTYPES[arg] in kinds, f"{op} over {arg} cannot give {dtype}")


def _check_scan(op: str, arg: str, dtype: str) -> None:
    combine = SCANS[op].combine
    require(arg in COMPUTE_DTYPES, f"a scan over {arg}: cast to float32 first")
    require(dtype == arg and combine is not None and DTYPES[arg] in OPS[combine].kinds, f"{op} over {arg} in a scan")


def _check_index(index: Index, allowed: frozenset[str] | set[str], ref: Ref, loop: Loop) -> None:
    for name in index.variables - allowed:
        number = name[1:]
        require(name[0] == "v" and number.isdigit() and int(number) < ref, f"[{index}] uses unknown {name}")
        require(DTYPES[loop.body[int(number)].dtype] == "int", f"[{index}] uses {name}, which is not an integer")


def _check_store(loop: Loop, store: Store, table: Mapping[str, Buffer], allowed: frozenset[str] | set[str]) -> None:
    where = f"the store to {store.buffer} in {loop.name}"
    require(store.buffer in table, f"{where}: unknown buffer")
    require(0 <= store.value < len(loop.body), f"{where}: unknown value {store.value}")
    dtype = loop.body[store.value].dtype
    require(table[store.buffer].dtype == dtype, f"{where}: {dtype} into {table[store.buffer].dtype}")
    _check_index(store.index, allowed, len(loop.body), loop)
    if store.mode == "set":
        varies = set(store.index.variables) & {f"v{ref}" for ref in _varying(loop)}
        require(not varies, f"{where}: [{store.index}] is known only at run time, and may be the same for two elements")
        return
    reduction = REDUCTIONS.get(store.mode)
    require(reduction is not None and reduction.combine is not None, f"{where}: unknown mode {store.mode}")
    _check_reduce(store.mode, dtype, dtype)


def _varying(loop: Loop) -> set[Ref]:
    """Values that may differ within a loop: all but those computed from constants and from loads at a fixed index."""
    names, found = sizes(loop).keys(), set[Ref]()
    for ref, value in enumerate(loop.body):
        own = value.index.variables & names if isinstance(value, (Load, IndexOf)) else ()
        if own or found.intersection(operands(value)):
            found.add(ref)
    return found


# --- indices ----------------------------------------------------------------------------------------------------------


def extent_of(buffer: Buffer) -> int | None:
    """Elements from the first to the last; None if the shape is dynamic."""
    if not all(isinstance(size, int) for size in (*buffer.shape, *buffer.strides)):
        return None
    return buffer.nbytes // ITEMSIZE[buffer.dtype]


def _check_bounds(index: Index, buffer: Buffer, known: Known) -> None:
    extent = extent_of(buffer)
    if extent is None or not index.variables <= known.keys():
        return  # a dynamic shape, or an integer known only at run time
    highest = upper_bound(index, known)
    lowest = upper_bound(index * -1, known)
    assert highest is not None and lowest is not None
    if highest < extent and lowest <= 0:
        return
    values = _all_values(index, known)  # bounds ignore that terms vary together: enumerate
    if values is not None:
        require(
            int(values.min()) >= 0 and int(values.max()) < extent,
            f"[{index}] runs from {values.min()} to {values.max()}, outside {buffer.name} of {extent} elements",
        )


def _grid(names: Iterable[str], known: Known) -> dict[str, np.ndarray] | None:
    """Every point of the space of `names`, one flat array for each variable; None if it is too large to enumerate."""
    names = tuple(names)
    shape = tuple(known[name] for name in names)
    if prod(shape) > POINTS:
        return None
    return {name: axis.reshape(-1) for name, axis in zip(names, np.indices(shape), strict=True)}


def _all_values(index: Index, known: Known, names: Iterable[str] | None = None) -> np.ndarray | None:
    if not known.keys() >= index.variables:  # a stride may be a symbol where all of the loop's sizes are numbers
        return None
    grid = _grid(sorted(index.variables) if names is None else names, known)
    if grid is None:
        return None
    points = len(next(iter(grid.values()))) if grid else 1
    return np.broadcast_to(np.asarray(evaluate_on(index, grid)), (points,))


def _check_coverage(loop: Loop, table: Mapping[str, Buffer], known: Known, inputs: frozenset[str]) -> None:
    """Check rule 4 for each buffer over all `set` stores to it, if sizes are static and the space is small enough."""
    groups: dict[str, list[Store]] = defaultdict(list)
    for store in loop.stores:
        groups[store.buffer].append(store)
    for name, stores in groups.items():
        modes = {store.mode for store in stores}
        require(modes == {"set"} or len(stores) == 1, f"{loop.name} stores to {name} in more than one way")
        if modes != {"set"} or len(known) != len(loop.outer) + len(loop.inner):
            continue
        if name in inputs and _is_filled(loop, stores):
            continue
        spaces = [_space_of(loop, store) for store in stores]
        for store, space in zip(stores, spaces, strict=True):
            empty = 0 in (known[v] for v in space)
            missing = [v for v in space if known[v] > 1 and v not in store.index.variables and not empty]
            require(not missing, f"{loop.name} writes {name}[{store.index}] again for every {', '.join(missing)}")
        written = sum(prod(known[v] for v in space) for space in spaces)
        numel = prod(size for size in table[name].shape if isinstance(size, int))
        if name not in inputs and extent_of(table[name]) is not None:
            require(written >= numel, f"{loop.name} writes {written} of the {numel} elements of {name}")
        _check_injective(loop, name, stores, spaces, known)


def _is_filled(loop: Loop, stores: list[Store]) -> bool:
    """Whether all stores write one constant, which may be written twice: `zero_` of a view with overlaps (`unfold`)."""
    values = {loop.body[store.value] for store in stores}
    return len(values) == 1 and isinstance(values.pop(), Const)


def _space_of(loop: Loop, store: Store) -> tuple[str, ...]:
    return outer_names(loop) if is_row_store(loop, store) else (*outer_names(loop), *inner_names(loop))


def _check_injective(loop: Loop, name: str, stores: list[Store], spaces: list[tuple[str, ...]], known: Known) -> None:
    if len(stores) == 1 and _is_injective(stores[0].index, spaces[0], known):
        return
    values = [_all_values(store.index, known, space) for store, space in zip(stores, spaces, strict=True)]
    if any(value is None for value in values):
        return
    places = np.concatenate([value for value in values if value is not None])
    require(len(np.unique(places)) == len(places), f"{loop.name} writes an element of {name} twice")


def _is_injective(index: Index, names: tuple[str, ...], known: Known) -> bool:
    """Prove injectivity of the common form: an affine index whose strides exceed the reach of all smaller ones."""
    strides: list[tuple[int, int]] = []
    for name in names:
        if known[name] > 1:
            factor = index.coefficient(name)
            constant = None if factor is None else factor.constant
            if constant is None:
                return False
            strides.append((abs(constant), known[name]))
    reach = 0
    for stride, size in sorted(strides):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
