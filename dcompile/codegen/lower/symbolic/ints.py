"""Lower numbers of the graph: sizes and expressions of them stay expressions where possible.

Numbers that depend on program text only, such as `torch.sqrt(torch.tensor(8.0))`, are evaluated while compiling.
Tracing keeps each as a CPU tensor without dimensions. It would cost a kernel there, and on a GPU a copy that the host
waits for. ATen itself evaluates them, so they equal eager's to the last bit. DeBERTa needs that: it rounds up a
quotient of two logarithms that is 1 for the largest distance. With one logarithm off in the last place, a GPU put that
distance into another bucket, and the loss was off by 0.3 %.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.codegen.lower.context import Lowering
from dcompile.codegen.lower.fx_nodes import op_text
from dcompile.compat.size_expressions import Inexpressible, make_real, size_of
from dcompile.ir.buffers import NUMBER
from dcompile.ir.float8 import OPAQUE
from dcompile.ir.index import Size, as_index, var
from dcompile.ir.ops import DTYPES

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
        if index.variables <= low.known | low.defined or index != var(symbol):
            if op_text(node.target) == OUT_OF_A_TENSOR:
                _check(low, node, args, size)
            return size
        name = symbol  # a number from a tensor: this call defines the symbol
    view = low.buffer((), NUMBER, name=name)
    tells = () if size is None else (name,)
    low.extern(op_text(node.target), args, [view.buffer], kwargs=kwargs, effect=True, tells=tells)
    return var(name) if size is not None else view


OWN = ("aten", "prims")
"""Namespaces of operations without effects; a collective, for example, must run with the program."""
LIFTED = "aten.lift_fresh_copy.default"
"""Copy of a constant in the program text: nothing can change the constant itself."""


def numbers_of(gm: GraphModule) -> dict[Node, bool | int | float]:
    """Return the values of nodes that depend only on numbers in the program text."""
    known: dict[Node, torch.Tensor] = {}
    with compat.tensors.real_tensors(), torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "call_function" and _is_number(node.meta.get("val")):
                value = _lifted(gm, node) if str(node.target) == LIFTED else _worked_out(node, known)
                if value is not None:
                    known[node] = value
        return {node: value.item() for node, value in known.items()}


def _is_real(value: Any) -> bool:
    """Return whether it is a number with a value, not a fake one."""
    return _is_number(value) and type(value) is torch.Tensor


def _is_number(value: Any) -> bool:
    return compat.tensors.is_number(value) and str(value.dtype).removeprefix("torch.") in DTYPES.keys() - {*OPAQUE}


def _lifted(gm: GraphModule, node: Node) -> torch.Tensor | None:
    given = node.args[0]
    if not isinstance(given, Node) or given.op != "get_attr":
        return None
    value = operator.attrgetter(str(given.target))(gm)
    return value.detach().clone() if _is_real(value) else None


def _worked_out(node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    """Evaluate a node by ATen, if all inputs are known and it has no effect."""
    inputs = node.all_input_nodes
    target: Any = node.target
    if not inputs or not all(given in known for given in inputs) or getattr(target, "namespace", "") not in OWN:
        return None
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    value = target(*args, **kwargs)
    return value if _is_real(value) and value.dtype == node.meta["val"].dtype else None
