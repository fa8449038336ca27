"""Vectorize loops over elements explicitly where g++ does not find the best instructions by itself.

These are rounding to bfloat16, float16's conversions (F16C), and functions such as exp that end in a multiplication by
a power of two. With AVX-512, rounding takes 3 instructions instead of 5, and the multiplication 1 instead of 9. The
loops call functions of the library on vectors (`library/simd.py`). Each gives an element the same result as the
function on one float, so its place in a loop does not matter. A plain loop follows for remaining elements, and for
machines without these instructions. A chain of four operations in bfloat16 took 0.65 of the plain loop's time
(docs/lab/constants.md, K14).

Where all memory is bfloat16, even and odd elements are separate vectors, and four vectors are taken at a time. With
AVX-512 this took 0.62 to 0.76 of the time of single vectors.

Reductions of little work have several accumulators. g++ gives them one vector, in which each addition waits for the one
before.
"""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import FLOATS
from dcompile.codegen.emit.cpp.plan import NO_SCANS, NestPlan, VectorLoop
from dcompile.codegen.emit.cpp.prefetch import updates_slowly
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Ref
from dcompile.ir.ops import OPS

WIDTH = 16
"""Elements of the widest vectors; narrower ones divide it."""
STEP_ELEMENTS = {"": WIDTH, "pair": 2 * WIDTH, "quad": 4 * WIDTH, "two": 2 * WIDTH}
"""Elements of a step: one widest vector; a pair of vectors from bfloat16 memory; two pairs; two consecutive vectors.

A polynomial's operations wait for each other, and those of a second vector fill the time (exp 0.9, GELU 0.87).
"""
MAX_QUAD_VALUES = 64
"""Values up to which a loop takes two pairs at a time: each value is four vectors, and there are sixteen registers."""
MAX_SHORT_ROW = 8 * WIDTH
"""Length up to which a row must be whole vectors: a remainder takes as long as the vectors."""
PAIR_ACCUMULATORS = 2
"""Number of accumulators that are pairs of vectors."""
ACCUMULATORS = 4
"""Accumulators of a reduction of little work: an addition takes 3 to 4 cycles, and two can start in each cycle."""
MAX_WAITING_COST = 8
"""Work up to which a reduction waits for its accumulator, in additions for each element."""
KEPT_AS = {"float32": "float32", "bfloat16": "float32", "float16": "float32", "bool": "bool"}
"""Dtypes in which values kept from pass to pass are stored."""
FOLDED = frozenset(("max", "min", "sum"))
"""Reductions with vector accumulators."""


def vectorize(plan: NestPlan) -> NestPlan:
    """Write passes in vectors where that is possible and faster."""
    if plan.nest.lane or plan.shared_elements:
        return plan
    found = {number: loop for number in range(plan.pass_count) if (loop := _vector_loop(plan, number))}
    return replace(plan, vectors=found) if found or plan.vectors else plan


def _vector_loop(plan: NestPlan, number: int) -> VectorLoop | None:
    """Return the vectorization of a pass; None for a plain loop."""
    (reduces, stores), last = plan.pass_roots[number], plan.nest.elements[-1]
    scans = plan.scans.get(number, NO_SCANS)
    if scans.serial or scans.held or (plan.copies and plan.streamed.issuperset(stores)):
        return None
    if any(not plan.can_store_at_once(n, last.name) or plan.is_scalar_column(n, last.name) for n in stores):
        return None
    if isinstance(last.size, int) and last.size % WIDTH and last.size <= MAX_SHORT_ROW:
        return None
    if (searched := find_searched(plan, number)) is not None:
        can = all(has_vector(plan, ref, number, last.name) for ref in plan.needed(number, [searched]))
        return VectorLoop("VECTORS", searched=searched) if can else None
    if not (reduces or stores) or not has_vectors(plan, number):
        return None
    gains = any(gains_from_vectors(plan, ref) for ref in plan.new_vector_values(number))
    if not (gains or _gains_anyway(plan, number) or updates_slowly(plan, number, last.name)):
        return None
    step = step_of_pass(plan, number)
    accumulators = _accumulators(plan, number)
    return VectorLoop(_guard(plan, number, gains), step, min(accumulators, PAIR_ACCUMULATORS) if step else accumulators)


def has_vectors(plan: NestPlan, number: int) -> bool:
    """Can everything in a pass be done with vectors?"""
    (reduces, stores), last = plan.pass_roots[number], plan.nest.elements[-1].name
    return (
        all(has_vector(plan, ref, number, last) for ref in plan.vector_values(number))
        and all(plan.reduce(ref).op in FOLDED and plan.reduce(ref).dtype == "float32" for ref in reduces)
        and all(stores_vector(plan, n, last) for n in stores)
    )


def _gains_anyway(plan: NestPlan, number: int) -> bool:
    """Is the pass faster in vectors for a reason other than its operations?"""
    streams = any(n in plan.streamed for n in plan.pass_roots[number][1])
    several = _accumulators(plan, number) > 1 or _sums_whole_pairs(plan, number)
    return several or streams or number == plan.next_row_pass


def _sums_whole_pairs(plan: NestPlan, number: int) -> bool:
    """Are rows of bfloat16 summed in whole vectors? g++ takes two to four times as long to widen and add."""
    (reduces, stores), last = plan.pass_roots[number], plan.nest.elements[-1]
    whole = isinstance(last.size, int) and last.size % WIDTH == 0
    return whole and bool(reduces) and not stores and _reads_pairs(plan, number)


def _guard(plan: NestPlan, number: int, gains: bool) -> str:
    """Return the macro of machines on which it is faster. AVX2 rounds no faster than g++, except pure bfloat16."""
    functions = _has_functions(plan, number)
    functions = functions or any(_converts_half(plan, ref) for ref in plan.new_vector_values(number))
    if functions or _gains_anyway(plan, number) or _is_paired(plan, number):
        return "VECTORS"
    return "VECTORS_ROUND" if gains else "VECTORS_FAR"


def _has_functions(plan: NestPlan, number: int) -> bool:
    """Does a pass compute functions that are faster on vectors?"""
    values = (plan.nest.body[ref] for ref in plan.new_vector_values(number))
    return any(isinstance(value, Apply) and OPS[value.op].vector == "function" for value in values)


def _is_paired(plan: NestPlan, number: int) -> bool:
    """Are all loads and stores of the pass bfloat16, or equal for all elements of a vector?"""
    narrow = (plan.table[plan.nest.stores[n].buffer].dtype == "bfloat16" for n in plan.pass_roots[number][1])
    return _reads_pairs(plan, number) and all(narrow)


def _reads_pairs(plan: NestPlan, number: int) -> bool:
    """Are all loads of the pass bfloat16, or equal for all elements of a vector?"""
    needed, last = plan.vector_values(number), plan.nest.elements[-1].name
    counter = plan.counters.get(number)
    if plan.tile or any(ref in plan.kept for ref in needed) or (counter and counter.positions):
        return False
    values = [plan.nest.body[ref] for ref in needed]
    if any(value.dtype == "float16" for value in values):
        return False
    steps = [(v.dtype, plan.constant_stride(v.index, last)) for v in values if isinstance(v, Load)]
    return all(dtype == "bfloat16" or (dtype == "float32" and step == 0) for dtype, step in steps)


def step_of_pass(plan: NestPlan, number: int) -> str:
    """Return the vectors that a pass takes at a time, and their layout (STEP_ELEMENTS).

    A tile consists of whole steps: a narrower tile fits no step, and what follows the last one belongs to no tile.
    """
    last = plan.nest.elements[-1]
    found = _widest_step(plan, number)
    tile = max((row.tile for row in plan.nest.rows if row.name == last.name), default=1)
    return found if tile == 1 or tile % STEP_ELEMENTS[found] == 0 else ""


def _widest_step(plan: NestPlan, number: int) -> str:
    """Return the widest step of an axis without tiles."""
    last = plan.nest.elements[-1]
    if not _is_paired(plan, number):
        return "two" if _has_functions(plan, number) and _accumulators(plan, number) == 1 else ""
    if isinstance(last.size, int) and last.size <= MAX_SHORT_ROW and last.size % STEP_ELEMENTS["pair"]:
        return ""  # the remainder of such a row takes as long as all pairs
    if plan.pass_roots[number][0]:
        return "pair"
    fits = not isinstance(last.size, int) or last.size > 2 * MAX_SHORT_ROW or last.size % STEP_ELEMENTS["quad"] == 0
    tiled = any(row.name == last.name and 1 < row.tile < MAX_SHORT_ROW for row in plan.nest.rows)
    return "quad" if fits and not tiled and len(plan.vector_values(number)) <= MAX_QUAD_VALUES else "pair"


def find_searched(plan: NestPlan, number: int) -> Ref | None:
    """Return the condition, if the pass only searches for its first position, as argmax's second pass does."""
    (reduces, stores), last, counter = plan.pass_roots[number], plan.nest.elements[-1], plan.counters.get(number)
    if stores or len(reduces) != 1 or not counter or not isinstance(last.size, int):
        return None
    reduce = plan.reduce(reduces[0])
    match plan.nest.body[reduce.arg]:
        case Apply("where", (hit, place, end), "int32") if reduce.op == "min" and place in counter.positions:
            behind = plan.nest.body[end]
            beyond = isinstance(behind, Const) and behind.value >= last.size
            return hit if beyond and plan.levels.element[hit] else None
    return None


def _accumulators(plan: NestPlan, number: int) -> int:
    """Return the number of accumulators of each reduction of a pass."""
    reduces, stores = plan.pass_roots[number]
    if not reduces or stores or not may_exceed(plan.nest.elements[-1].size, MAX_SHORT_ROW):
        return 1
    return ACCUMULATORS if plan.cost(plan.new_vector_values(number)) <= MAX_WAITING_COST else 1


# --- values -----------------------------------------------------------------------------------------------------------


def gains_from_vectors(plan: NestPlan, ref: Ref) -> bool:
    """Is a value faster in explicit vectors than in g++'s?"""
    match plan.nest.body[ref]:
        case Apply("cast", (arg,), "bfloat16"):
            return arg not in plan.exact["bfloat16"]
        case Apply("cast"):
            return _converts_half(plan, ref)
        case Apply(op, _, _):
            return OPS[op].vector == "function"
    return False


def _converts_half(plan: NestPlan, ref: Ref) -> bool:
    """Is the value rounded to float16, or loaded from it? Without special instructions both take several."""
    match plan.nest.body[ref]:
        case Apply("cast", (arg,), "float16"):
            return arg not in plan.exact["float16"]
        case Apply("cast", (arg,), _):
            return isinstance(load := plan.nest.body[arg], Load) and load.dtype == "float16"
    return False


def has_vector(plan: NestPlan, ref: Ref, number: int, name: str) -> bool:
    """Can this value be a vector along `name` in a pass?"""
    value, counter = plan.nest.body[ref], plan.counters.get(number)
    if ref in plan.kept:
        if value.dtype not in KEPT_AS:
            return False
        if plan.kept[ref] < number:
            return True
    if counter and (ref in counter.positions or ref in counter.matches):
        return True
    match value:
        case Load(_, _, dtype, _) if plan.tile and ref in plan.tile.loads:
            return dtype in FLOATS
        case Load(_, index, dtype, mask):
            readable = (dtype in FLOATS or dtype == "bool") and (mask is None or ref in plan.selected_rows)
            return readable and plan.constant_stride(index, name) in (0, 1)
        case Apply("philox", (key, position, _), _):
            return not plan.levels.element[key] and random_stride(plan, position, name) is not None
        case Apply():
            return _has_result_vector(plan, value)
    return False


def _has_result_vector(plan: NestPlan, value: Apply) -> bool:
    """Can an op's result be a vector, if its arguments are?"""
    body, element = plan.nest.body, plan.levels.element
    match value:
        case Apply(op, (first, *others), _) if body[first].dtype == "int32":
            return OPS[op].on_random_bits and element[first] and all(isinstance(body[ref], Const) for ref in others)
        case Apply("cast", (arg,), dtype):
            source = body[arg].dtype
            return (source, dtype) == ("bool", "float32") or {source, dtype} <= FLOATS
        case Apply("where", _, dtype):
            return dtype in FLOATS
    match OPS[value.op].vector:
        case "logic":
            return value.dtype == "bool" and all(element[arg] for arg in value.args)
        case "comparison":
            return all(body[arg].dtype == "float32" for arg in value.args)
        case "arithmetic" | "function":
            return value.dtype == "float32"
        case None:
            return False


def random_stride(plan: NestPlan, position: Ref, name: str) -> int | None:
    """Return the constant distance between the numbers of neighbouring elements, for random bits, or None."""
    value = plan.nest.body[position]
    return plan.constant_stride(value.index, name) if isinstance(value, IndexOf) else None


def stores_vector(plan: NestPlan, number: int, name: str) -> bool:
    """Can a store write vectors along `name`?"""
    store = plan.nest.stores[number]
    dtype, value = plan.table[store.buffer].dtype, plan.nest.body[store.value]
    in_order = plan.is_transposed(number) or plan.constant_stride(store.index, name) == 1
    if not in_order or value.dtype != dtype:
        return False
    if store.mode == "sum":
        return dtype == "float32"
    return store.mode == "set" and (dtype in FLOATS or (dtype == "bool" and plan.levels.element[store.value]))
