"""What a rank has captured, as lines that ranks compare before they compile.

In the lines: versions, settings, parameters in their order, and each call of the captured graph that makes a tensor.
Not in them: shapes of inputs, and numbers in calls, which may differ between ranks (a ragged batch, a rank's own scale)
without any harm to the collectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dcompile.machine import own_source, own_version

if TYPE_CHECKING:
    from dcompile.capture.model import CompiledModel

Line = tuple[str, str]
"""(what is compared, the line of the user's model, for people)."""


def compare_capture(model: CompiledModel, gm: Any, number: int) -> list[str]:
    """Compare a graph of the first call between ranks; notes. Raises PlanMismatchError, on all ranks."""
    subject = f"graph {number} of model {model.number}"
    note = model.toolbox.captured(model.peers, subject, [(subject, ""), *_surroundings(model), *_calls(gm)])
    return [note] if note else []


def compare_surroundings(model: CompiledModel, gm: Any) -> tuple[bool, list[str]]:
    """The same where ranks may run other graphs: compare all but its calls. Whether these are rank 0's too; notes."""
    subject = f"settings of model {model.number}"
    note = model.toolbox.captured(model.peers, subject, [(subject, ""), *_surroundings(model)])
    same = not note and model.toolbox.same_as_first(model.peers, f"graph 0 of model {model.number}", [*_calls(gm)])
    return same, [note] if note else []


def _surroundings(model: CompiledModel) -> Iterator[Line]:
    yield f"torch {torch.__version__}, dcompile {own_version()} (source {own_source()[:12]})", ""
    yield f"settings {model.settings.config.key()}", ""
    for info in model.adapter.param_infos():
        yield f"parameter {info.fqn} {list(info.shape)} {info.dtype} {info.kind}", ""


def _calls(gm: Any) -> Iterator[Line]:
    names: dict[Any, str] = {}
    calls = 0
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            names[node] = node.name
        elif _makes_tensor(node):  # numbered by itself: names count calls that compute sizes too
            names[node] = f"%{calls}"
            calls += 1
            arguments = ", ".join(_argument(arg, names) for arg in node.args)
            yield f"{names[node]} = {_target(gm, node)}({arguments})", _line_of(node)


def _makes_tensor(node: Any) -> bool:
    """Calls that compute sizes are as many as the sizes that vary, on this rank."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return not isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def _target(gm: Any, node: Any) -> str:
    if node.op == "call_module":
        return f"{node.target}: {type(gm.get_submodule(node.target)).__name__}"
    if isinstance(node.target, str):
        return f".{node.target}"
    module = getattr(node.target, "__module__", None) or ""
    return f"{module}.{getattr(node.target, '__name__', type(node.target).__name__)}"


def _argument(value: Any, names: dict[Any, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return names.get(value, "_")
    if isinstance(value, tuple | list):
        return f"[{', '.join(_argument(item, names) for item in value)}]"
    return "_"


def _line_of(node: Any) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{found[-1][0].rpartition('/')[2]}:{found[-1][1]}" if found else ""
