"""What in a program may give other bits than stock: sums in another order, functions with own approximations.

The receipt names it for each program, under the tier that option `numerics` promises (docs/guide/numerics.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.target import Kernels
from dcompile.ir.nodes import REGION, Apply, Collective, Extern, Loop, Program, Reduce, Scan
from dcompile.ir.ops import DTYPES, OPS
from dcompile.machine_model import GroupSize

SUMS = "sums in another order"
FUNCTIONS = "functions that differ in their last places"
RANKS = "sums over more than two ranks, whose order follows from places in buckets"
OTHERS = "regions that another compiler rounds"
MATMULS = "matmuls and attention with sums in another order"

_ORDERED = frozenset(("sum", "prod", "sum_exp", "logsumexp"))
"""Reductions and scans whose result depends on the order."""


def weaker_than_bitwise(program: Program, kernels: Kernels, groups: Mapping[str, GroupSize]) -> dict[str, list[str]]:
    """Return how results may differ from stock's in their bits -> names of kernels, functions, library calls, groups.

    `groups`: size of each process group that collectives of dcompile's name.
    """
    loops = [step for step in program.steps if isinstance(step, Loop)]
    replaced = [step for at, step in enumerate(program.steps) if at in kernels.products and isinstance(step, Extern)]
    found = {
        SUMS: [loop.name for loop in loops if _has_sum(loop)],
        MATMULS: [call.op for call in replaced] + [loop.name for loop in loops if loop.product is not None],
        OTHERS: [step.op for step in program.steps if isinstance(step, Extern) and step.op == REGION],
        RANKS: [step.group for step in program.steps if isinstance(step, Collective) and _sums_many(step, groups)]
        + [*kernels.all_reduces],
        FUNCTIONS: [name for loop in loops for name in _functions(loop)],
    }
    return {how: sorted(set(names)) for how, names in found.items() if names}


def _sums_many(step: Collective, groups: Mapping[str, GroupSize]) -> bool:
    size = groups.get(step.group, GroupSize(1))
    reduces = step.kind in ("all_reduce", "reduce_scatter") and step.call is None
    return reduces and max(size.ranks, size.replicas) > 2


def _has_sum(loop: Loop) -> bool:
    reduced = [value for value in loop.body if isinstance(value, Reduce | Scan) and value.op in _ORDERED]
    stored = [loop.body[store.value] for store in loop.stores if store.mode in _ORDERED]
    return any(DTYPES[value.dtype] == "float" for value in (*reduced, *stored))


def _functions(loop: Loop) -> list[str]:
    applied = [value for value in loop.body if isinstance(value, Apply) and DTYPES[value.dtype] == "float"]
    return [value.op for value in applied if not OPS[value.op].exact]
