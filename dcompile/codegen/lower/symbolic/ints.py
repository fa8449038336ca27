"""Lower numbers of the graph that are not tensors: sizes and expressions of them stay expressions where possible."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from dcompile.codegen.lower.context import Lowering
from dcompile.codegen.lower.operator_facts import op_text
from dcompile.compat.size_expressions import Inexpressible, make_real, size_of
from dcompile.ir.buffers import NUMBER
from dcompile.ir.index import Size, as_index, var

OUT_OF_A_TENSOR = "aten._local_scalar_dense.default"
CHECK = "dcompile.check_number"
"""check_number(found, wanted, origin): raise unless a number equals the one that kernels were compiled for."""


def _check(low: Lowering, node: Node, args: Any, size: Size) -> None:
    """Check at run time that a number from a tensor equals the value given to `torch._check`.

    Tracing trusts the check, and simplifies its assertion in the graph to one that always holds.
    """
    view = low.buffer((), NUMBER, name=node.name)
    low.extern(OUT_OF_A_TENSOR, args, [view.buffer], effect=True)
    low.extern(CHECK, [view, size, ", ".join(low.origin) or node.name], [], effect=True)


def scalar(low: Lowering, node: Node, value: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Lower a node with a symbolic number as its value: an expression of sizes if possible, otherwise a call."""
    name = node.name
    if type(value).__name__ == "SymFloat":
        number = make_real(op_text(node.target), args, name, low.known | low.followed)
        if number is not None:
            return number
    try:
        size = size_of(value) if type(value).__name__ == "SymInt" else None
    except Inexpressible:
        size = None
    if size is not None:
        index = as_index(size)
        symbol = str(index)
        if index.variables <= low.known | low.told or index != var(symbol):
            if op_text(node.target) == OUT_OF_A_TENSOR:
                _check(low, node, args, size)
            return size
        name = symbol  # a number from a tensor: this call defines the symbol
    view = low.buffer((), NUMBER, name=name)
    tells = () if size is None else (name,)
    low.extern(op_text(node.target), args, [view.buffer], kwargs=kwargs, effect=True, tells=tells)
    return var(name) if size is not None else view
