"""Eager regions between the graphs of a model with sharded parameters.

While a call runs, modules show virtual parameters, which have no memory. Compiled graphs gather their parameters; eager
code between them must not use any. So each eager operation is checked. If one gets a parameter, the call restarts with
FSDP's own hooks, after buffers and random states are restored.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import FallBackToStock, ShardedAdapter

_SERIAL = itertools.count()
_TORCH, _OWN = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"


class ForwardSnapshot:
    """Copies of a forward's side effects before a call: buffers, and the states of torch's random generators."""

    def __init__(self, root: torch.nn.Module | None, device: torch.device) -> None:
        self._buffers: list[tuple[dict[str, Any], str, Any]] = []
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for module in () if root is None else root.modules():
            for name, buffer in module._buffers.items():
                self._buffers.append((module._buffers, name, buffer))
                if buffer is not None and id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer, _version(buffer), buffer.detach().clone()
        self._put_back = compat.dispatch_watch.random_states(device)

    def restore(self) -> None:
        """Restore buffers and random states."""
        for table, name, buffer in self._buffers:
            if table.get(name) is not buffer:
                table[name] = buffer
        for buffer, version, copy in self._copies.values():
            # a batch norm's kernel writes its statistics without changing the version
            if _version(buffer) != version or version < 0 or not torch.equal(buffer, copy):
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(copy)
        self._put_back()


def _version(tensor: torch.Tensor) -> int:
    """Return a tensor's version, which counts in-place changes; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class _Call:
    root: torch.nn.Module | None
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    hooks: Any = field(default_factory=compat.dispatch_watch.saved_tensor_hooks)
    gathers: Any = None
    """FSDP's own all-gathers when the call began."""
    kept: ForwardSnapshot | None = None
    watch: compat.dispatch_watch.Watch | None = None
    """Checks operations of eager regions, once the call has one."""
    shown: list[torch.nn.Module] = field(default_factory=list)
    """torch's modules that have a forward of dcompile's during the call."""


class EagerRegionMonitor:
    """Checks the eager regions of one compiled model with sharded parameters."""

    def __init__(self, adapter: ShardedAdapter) -> None:
        self._adapter = adapter
        self._several = False
        """Whether some call was captured with eager regions."""
        self._refusal = ""
        self._call: _Call | None = None
        self._forwards: weakref.WeakKeyDictionary[torch.nn.Module, types.FunctionType] = weakref.WeakKeyDictionary()
        self._stand_ins = [
            (number, tensor) for number in range(len(adapter.param_infos())) for tensor in adapter.stand_ins(number)
        ]

    @contextlib.contextmanager
    def watching(self, root: torch.nn.Module | None) -> Iterator[None]:
        """Check the eager regions of a call.

        Raises FallBackToStock if eager code has used a parameter, after it has restored buffers and random states.
        """
        outer, call = self._call, _Call(root, gathers=self._adapter.gathers_under_way())
        self._call = call
        try:
            with self._at_rest(outer):
                if self._several:
                    self.start()
                try:
                    yield
                    if self._refusal:  # the model has caught the error
                        raise FallBackToStock(self._refusal)
                    if call.watch is not None:
                        self._check_gathers(call, takes_parameters=False, at_the_end=True)
                finally:
                    if call.watch is not None:
                        call.watch.end()
                    for module in call.shown:
                        module.__dict__.pop("forward", None)
        except Exception as error:
            reason = self._why(error)
            if reason and call.kept is not None:
                call.kept.restore()
            if reason and not isinstance(error, FallBackToStock):
                raise FallBackToStock(reason) from None
            raise
        finally:
            self._call = outer

    def _why(self, error: Exception) -> str:
        """Return why the call falls back to FSDP after this error; empty if the error is the model's own."""
        if isinstance(error, FallBackToStock):
            return str(error)
        if self._several and compat.dispatch_watch.NO_MEMORY in str(error):
            return "the memory of a parameter is asked for outside the compiled graphs"
        return self._refusal  # the model may have raised another error from it

    def start(self) -> None:
        """Start to check this call's eager regions. Raises FallBackToStock if the adapter does not allow any."""
        if objection := self._adapter.objection_to_parts():
            raise FallBackToStock(objection)
        if not self._several:
            for _, tensor in self._stand_ins:
                compat.dispatch_watch.forbid_memory(tensor)
        self._several, call = True, self._call
        if call is not None and call.watch is None:
            call.kept = ForwardSnapshot(call.root, self._adapter.device)
            storages = {compat.tensors.storage_key(tensor): number for number, tensor in self._stand_ins}
            watch = compat.dispatch_watch.Watch(storages, self._touched)
            watch.begin()
            call.watch = watch
            self._show_forwards(call)

    def _show_forwards(self, call: _Call) -> None:
        """Let Dynamo compile torch's own layers that eager code calls: it skips their forwards otherwise."""
        for module in self._adapter.owners():
            forward = type(module).forward
            path = getattr(getattr(forward, "__code__", None), "co_filename", "")
            if "forward" not in module.__dict__ and path.startswith(_TORCH):
                if module not in self._forwards:
                    self._forwards[module] = _fresh_forward()
                module.__dict__["forward"] = types.MethodType(self._forwards[module], module)
                call.shown.append(module)

    def resting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that pauses the checks, while Dynamo compiles or a compiled graph runs."""
        return self._at_rest(self._call)

    def undisturbed(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a compiled backward without checks inside it: a forward may run one between its graphs."""

        def backward(args: list[Any]) -> Any:
            if self._call is None:
                return run(args)
            with self.resting():
                return run(args)

        return backward

    @staticmethod
    def _at_rest(call: _Call | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if call is None or call.watch is None else call.watch.resting()

    def around(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a compiled graph as Dynamo calls it, with checks before it; `inputs` are those of the capture."""
        parameters = (isinstance(value, torch.nn.Parameter) and value for value in inputs)
        expected = [(at, p) for at, p in enumerate(parameters) if self._adapter.number_of(p) is not None]

        def run(*args: Any) -> Any:
            call = self._call
            if call is None or call.watch is None:
                return compiled(*args)
            self._check_gathers(call, bool(expected))
            if any(args[at] is not parameter for at, parameter in expected):
                self.refuse("what was compiled for one layer would run with another's parameters")
            with call.watch.resting():
                return compiled(*args)

        return compat.dynamo.no_dynamo(run, "a compiled graph")

    def _check_gathers(self, call: _Call, takes_parameters: bool, at_the_end: bool = False) -> None:
        """Before a graph, and at the end of a call: refuse cases where gathers in graphs differ from FSDP's."""
        if self._adapter.gathers_under_way() != call.gathers:
            self._adapter.shard_again()
            self.refuse("the model gathers parameters in its forward (unshard), after a graph break")
        if at_the_end and any(compat.autograd.has_hooks(tensor) for _, tensor in self._stand_ins):
            self.refuse("a hook was registered on a parameter in the forward, after a graph break")
        if not takes_parameters:
            return
        if call.gradients and not torch.is_grad_enabled():
            self.refuse(
                "a graph break leaves a part of the forward under torch.no_grad, or a checkpoint that runs it again "
                f"(called at {_users_line()})"
            )
        if compat.dispatch_watch.saved_tensor_hooks() != call.hooks:
            self.refuse(
                "a graph break leaves a part of the forward under hooks for saved tensors, as a checkpoint's "
                f"(called at {_users_line()})"
            )

    def _touched(self, number: int, operation: str) -> None:
        name = self._adapter.param_infos()[number].fqn
        self.refuse(f"parameter {name} is used outside the compiled graphs ({operation} at {_users_line()})")

    def refuse(self, reason: str) -> NoReturn:
        """Raise FallBackToStock, and keep the reason: the model may catch the exception."""
        self._refusal = self._refusal or reason
        raise FallBackToStock(reason)


def _forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _fresh_forward() -> types.FunctionType:
    """Return `_forward` with a code object of its own, since Dynamo counts recompilations for each code object."""
    name = f"dcompile_forward_{next(_SERIAL)}"
    return types.FunctionType(_forward.__code__.replace(co_name=name), _forward.__globals__, name)


def _users_line() -> str:
    """Return the innermost line outside torch and dcompile, or else the innermost of torch."""
    frame: Any = sys._getframe(1)
    torchs = ""
    while frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        where = f"{path.rpartition('/')[2]}:{line}"
        if path.startswith(_TORCH):
            torchs = torchs or where
        elif not path.startswith((_OWN, "<")):
            return where
        frame = frame.f_back
    return torchs or "an unknown line"
