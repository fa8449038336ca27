"""Branches on a random number that can go only one way do not break the graph."""

from __future__ import annotations

import contextlib
import dis
import operator
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

_TRANSLATORS = ("InstructionTranslator", "InliningInstructionTranslator", "InliningGeneratorInstructionTranslator")
_MIRRORED = {operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le}
"""Comparison -> the same one of swapped operands."""


@contextlib.contextmanager
def certain_branches_taken(wanted: bool = True) -> Iterator[None]:
    """Take branches on `torch.rand(()) < p` without a graph break where p is at most 0, or at least 1.

    Models with LayerDrop compare a new random number with a probability before each layer, in training. That breaks the
    graph inside a loop, so Dynamo compiles layer by layer. Where the probability is 0, no number is below it. Then the
    number is not drawn, as nothing else reads it.
    """
    from torch._dynamo import symbolic_convert

    with contextlib.ExitStack() as stack:
        for name in _TRANSLATORS if wanted else ():
            translator: Any = getattr(symbolic_convert, name, None)
            if hasattr(translator, "dispatch_table"):
                table = [_deciding(dis.opname[code], run) for code, run in enumerate(translator.dispatch_table)]
                stack.enter_context(unittest.mock.patch.object(translator, "dispatch_table", table))
        yield


def _deciding(instruction: str, run: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Replace a certain comparison on the stack by its outcome before an instruction that asks whether it is true."""
    if run is None or not instruction.endswith(("IF_TRUE", "IF_FALSE", "TO_BOOL")):
        return run  # others leave the comparison on the stack

    def decide(self: Any, inst: Any) -> Any:
        outcome = _certain(self.stack[-1]) if self.stack else None
        if outcome is not None:
            from torch._dynamo.variables import ConstantVariable

            self.stack[-1] = ConstantVariable.create(outcome)
        return run(self, inst)

    return decide


def _certain(value: Any) -> bool | None:
    """Return the outcome of a comparison with a random number where it is the same for all numbers in [0, 1)."""
    from torch._dynamo.variables import TensorVariable

    node = value.as_proxy().node if isinstance(value, TensorVariable) else None
    if node is None or node.op != "call_function" or node.target not in _MIRRORED or len(node.args) != 2:
        return None
    (left, right), compare = node.args, node.target
    if isinstance(left, (int, float)):
        left, right, compare = right, left, _MIRRORED[compare]
    if not isinstance(right, (int, float)) or not _is_random_number(left):
        return None
    if right <= 0:
        return {operator.lt: False, operator.ge: True}.get(compare, None if right == 0 else compare is operator.gt)
    if right >= 1:
        return compare in (operator.lt, operator.le)
    return None


def _is_random_number(node: Any) -> bool:
    """Is a node's value one number from [0, 1)? In 16 bits, numbers may be rounded to 1."""
    import torch

    if getattr(node, "target", None) is not torch.rand:
        return False
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype in (torch.float32, torch.float64)
