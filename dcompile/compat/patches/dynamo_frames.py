"""What differs while Dynamo compiles a frame: calls that it traces otherwise, and the flag that says that it compiles.

Some calls stay in the graph, or leave it where tracing them fails: calls of modules, autograd Functions, methods and
library functions come first, then branches, and calls that torch 2.11 cannot trace.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import operator
import sys
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import _utils
from torch._prims_common import is_contiguous_or_false
from torch.fx import _symbolic_trace
from torch.nn import functional
from torch.nn.modules._functions import SyncBatchNorm
from torch.optim import optimizer

from dcompile.compat.patches.torch_patch import replaced_attribute

if TYPE_CHECKING:  # importing dcompile loads no torch
    from dcompile.compat.layer_calls.frame import FrameCalls

_TRANSLATORS = ("InstructionTranslator", "InliningInstructionTranslator", "InliningGeneratorInstructionTranslator")
_MIRRORED = {operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le}
"""Comparison -> the same one of swapped operands."""


@contextlib.contextmanager
def repeated_layers_once(wanted: bool = True) -> Iterator[FrameCalls]:
    """Copy calls of equal layers in the frame that is traced in this context, if that is `wanted`."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Module

    from dcompile.compat.layer_calls.frame import FrameCalls

    frame = FrameCalls()
    if not wanted:
        yield frame
        return
    trace, mutation, store = Module.call_function, SideEffects.mutation, SideEffects.store_attr

    def call_function(variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        return frame.call(trace, variable, translator, args, kwargs)

    def mutating(effects: Any, variable: Any) -> None:
        frame.changed(effects, variable)
        mutation(effects, variable)

    def storing(effects: Any, item: Any, name: str, value: Any, *more: Any, **keywords: Any) -> None:
        frame.changed(effects, item, value)
        store(effects, item, name, value, *more, **keywords)

    with (
        unittest.mock.patch.object(Module, "call_function", call_function),
        unittest.mock.patch.object(SideEffects, "mutation", mutating),
        unittest.mock.patch.object(SideEffects, "store_attr", storing),
    ):
        yield frame


def traced_sync_batch_norm(sync_batch_norm: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """Trace another function where Dynamo meets `apply` of SyncBatchNorm's autograd Function."""
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    original = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if sync_batch_norm is None or self.fn_cls is not SyncBatchNorm:
            return original(self, tx, args, kwargs)
        return UserFunctionVariable(sync_batch_norm).call_function(tx, args, kwargs)  # type: ignore[arg-type, unused-ignore]

    return unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", call_apply)


@contextlib.contextmanager
def functions_told_of_absence_in_eager() -> Iterator[None]:
    """Leave a Function to eager where it has asked to be told which of its results have no gradient.

    Dynamo traces its backward with a tensor for each result that may have one, and AOTAutograd passes zeros.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable

    apply, attribute = AutogradFunctionVariable.call_apply, AutogradFunctionContextVariable.var_getattr
    asked = list[Any]()

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name == "set_materialize_grads":
            asked.append(self)
        return attribute(self, tx, name)

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        asked.clear()
        found: Any = apply(self, tx, args, kwargs)
        results = [part for part in getattr(found, "items", ()) if part.is_tensor()]
        if asked and len(results) > 1:  # a single one always has a gradient
            unimplemented(
                gb_type="absent gradients in an autograd Function",
                context=self.fn_cls.__name__,
                explanation=f"{self.fn_cls.__name__} calls set_materialize_grads and has several results; "
                "which of them have no gradient is known in the backward only",
                hints=[],
            )
        return found

    with (
        unittest.mock.patch.object(AutogradFunctionContextVariable, "var_getattr", var_getattr),
        unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", call_apply),
    ):
        yield


def experts_grouped(group_experts: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """Trace `group_experts(loop, grouped)` where transformers chooses its loop over experts ("eager").

    The loop runs once per used expert, on as many rows as the expert has. TorchDynamo captures neither number.
    """
    experts = sys.modules.get("transformers.integrations.moe")
    choose = getattr(getattr(experts, "ExpertsInterface", None), "get_interface", None)
    grouped = getattr(experts, "grouped_mm_experts_forward", None)
    if group_experts is None or choose is None or grouped is None:
        return contextlib.nullcontext()
    from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable

    original = UserMethodVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is not choose or len(args) != 2 or not args[0].is_python_constant():
            return original(self, tx, args, kwargs)
        if args[0].as_python_constant() != "eager":
            return original(self, tx, args, kwargs)
        return UserFunctionVariable(group_experts).call_function(  # type: ignore[arg-type, unused-ignore]
            tx, [args[1], UserFunctionVariable(grouped)], {}
        )

    return unittest.mock.patch.object(UserMethodVariable, "call_function", call_function)


def library_functions_whole() -> contextlib.AbstractContextManager[Any]:
    """Trace through the graph breaks that torch.optim puts around every optimizer's step, and that a loss makes.

    They let AOTAutograd see that nothing in the step needs gradients, which it now finds by itself. With them, a step
    is three frames, two of which search for the optimizer's tensors in guards. Functions of fused optimizers, which are
    hidden from Dynamo, are replaced.

    `linear_cross_entropy` warns that torch.compile keeps its gradients, or that it has no chunks for these arguments,
    and its warnings break the graph. Here neither is so: `chunked_cross_entropy` computes such losses.
    """
    import torch._dynamo
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable

    from dcompile.compat.fused_optimizers import STAND_INS

    original = SkipFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch._dynamo.graph_break and tx.f_code.co_filename == optimizer.__file__:
            return ConstantVariable.create(None)
        is_of_loss = "linear_cross_entropy" in tx.f_code.co_name and tx.f_code.co_filename == functional.__file__
        if self.value is warnings.warn and is_of_loss:
            return ConstantVariable.create(None)
        stand_in = STAND_INS.get(getattr(self.value, "__name__", ""))
        if stand_in is not None and str(getattr(self.value, "__module__", "")).startswith("torch.optim."):
            return UserFunctionVariable(stand_in).call_function(tx, args, kwargs)  # type: ignore[arg-type, unused-ignore]
        return original(self, tx, args, kwargs)

    return unittest.mock.patch.object(SkipFunctionVariable, "call_function", call_function)


def strided_results_written() -> contextlib.AbstractContextManager[Any]:
    """Trace `op(x, out=tile)` as `tile.copy_(op(x))`, where Dynamo would break the graph.

    Eager mode refuses `out=` where an argument requires gradients, and resizes or casts a result that does not fit.
    Such calls are left to Dynamo.
    """
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable as Function

    original = Function.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        tile = _strided_tensor(kwargs.get("out"))
        if tile is None or _require_gradients(args):
            return original(self, tx, args, kwargs)
        found = original(self, tx, args, {name: value for name, value in kwargs.items() if name != "out"})
        result = _traced_value(found)
        if result is None or (result.shape, result.dtype) != (tile.shape, tile.dtype):
            return original(self, tx, args, kwargs)
        kwargs["out"].call_method(tx, "copy_", [found], {})
        return kwargs["out"]

    return unittest.mock.patch.object(Function, "call_function", call_function)


def _strided_tensor(variable: Any) -> Any:
    """The traced tensor of a variable, if it is one that is not contiguous."""
    value = None if variable is None else _traced_value(variable)
    return None if value is None or is_contiguous_or_false(value) else value


def _traced_value(variable: Any) -> Any:
    from torch._dynamo.variables.tensor import TensorVariable

    variable = variable.realize()
    return variable.as_proxy().node.meta.get("example_value") if isinstance(variable, TensorVariable) else None


def _require_gradients(args: Any) -> bool:
    values = (_traced_value(variable) for variable in args) if torch.is_grad_enabled() else ()
    return any(value is not None and value.requires_grad for value in values)


def absent_gradients_passed() -> contextlib.AbstractContextManager[Any]:
    """Call the backward of a custom Function where results are None, or were not used and stay absent.

    Dynamo asks each gradient for its contiguous form, None too, and finds an AttributeError in what eager mode runs.
    """
    module = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")

    def rewritten(original: Any) -> Any:
        def new_backward(ctx: Any, *grads: Any) -> Any:
            return original(ctx, *[grad if grad is None else grad.contiguous() for grad in grads])

        return new_backward

    return replaced_attribute(module, "autograd_function_backward_rewritten", lambda _: rewritten)


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
                table = [_if_certain(dis.opname[code], run) for code, run in enumerate(translator.dispatch_table)]
                stack.enter_context(unittest.mock.patch.object(translator, "dispatch_table", table))
        yield


def _if_certain(instruction: str, run: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Replace a certain comparison on the stack by its outcome before an instruction that asks whether it is true."""
    if run is None or not instruction.endswith(("IF_TRUE", "IF_FALSE", "TO_BOOL")):
        return run  # others leave the comparison on the stack

    def decide(self: Any, inst: Any) -> Any:
        outcome = _certain_outcome(self.stack[-1]) if self.stack else None
        if outcome is not None:
            from torch._dynamo.variables import ConstantVariable

            self.stack[-1] = ConstantVariable.create(outcome)
        return run(self, inst)

    return decide


def _certain_outcome(value: Any) -> bool | None:
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
    if getattr(node, "target", None) is not torch.rand:
        return False
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype in (torch.float32, torch.float64)


@contextlib.contextmanager
def packed_sequences_apart() -> Iterator[None]:
    """Break the graph where a packed sequence is padded: torch 2.11 fails to trace that; later ones break, too."""
    from torch._dynamo import disallow_in_graph, trace_rules

    padded = getattr(torch._VF, "_pad_packed_sequence", None)
    if padded is None or not torch.__version__.startswith("2.11."):
        yield
        return
    known = id(padded) in trace_rules._disallowed_callable_ids
    disallow_in_graph(padded)
    try:
        with warnings.catch_warnings():  # torch warns that it cannot trace the function
            warnings.filterwarnings("ignore", message="(?s).*_pad_packed_sequence")
            yield
    finally:
        if not known:
            trace_rules._disallowed_callable_ids.remove(id(padded))


def writes_to_scalars_kept() -> contextlib.AbstractContextManager[Any]:
    """Keep in-place writes to float64 CPU tensors without dimensions in Dynamo's graph.

    Dynamo removes inputs that only `item()` reads. It also takes such a write (`buffer.add_(1)`), whose result is
    unused, for one of them, so that the buffer stays unchanged with any backend. This patch shows it inputs only.
    """
    from torch._dynamo.output_graph import OutputGraph

    def showing_inputs(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def inputs_alone(self: Any) -> None:
            others = [node for node in self.graph.nodes if node.op != "placeholder" and not node.users]
            hidden = [(node, node.meta.pop("example_value")) for node in others if "example_value" in node.meta]
            original(self)
            for node, value in hidden:
                node.meta["example_value"] = value

        return inputs_alone

    return replaced_attribute(OutputGraph, "remove_tensorify_specialized_graphargs", showing_inputs)


@contextlib.contextmanager
def reordered_gathers_traced() -> Iterator[None]:
    """While frames are compiled, have Dynamo trace that function, where it has no rule for it.

    Within itself it changes nothing.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.functions import UserFunctionVariable

    function: Any = getattr(_utils, "_maybe_view_chunk_cat", None)
    rules: Any = trace_rules.get_torch_obj_rule_map()
    if function is None or function in rules:
        yield
        return
    rules[function] = UserFunctionVariable
    try:
        yield
    finally:
        rules.pop(function, None)


def compiling_in_one_thread() -> contextlib.AbstractContextManager[Any]:
    """Let other threads see that they compile nothing.

    torch sets one flag for all threads. An optimizer that steps in another one then stacks its numbers as for a graph,
    and fails. Until torch 2.13, fx's flag of a trace is one for all threads, too. While it is set, only threads that
    seem to compile may call compiled code: so all of them do.
    """
    return replaced_attribute(torch.compiler, "_compile_session_context", lambda _: _compiling_session)


@contextlib.contextmanager
def _compiling_session() -> Iterator[None]:
    with unittest.mock.patch.object(torch.compiler, "_is_compiling_flag", _FlagOfThisThread(True)):
        yield


class _FlagOfThisThread(int):
    """A flag that is true in the thread that has made it, and elsewhere while fx traces for all threads."""

    def __init__(self, _value: bool) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread or bool(getattr(_symbolic_trace, "_is_fx_tracing_flag", False))

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))
