"""Which calls of modules are copied while one frame is traced: from the third call of equal layers on.

The first call of a layer finds what layers have in common: functions, settings, tables of the whole model. The second
is recorded. Whatever it has not in common with a third call, that one is traced, as without any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile.compat.layer_calls.call_key import describe, surroundings
from dcompile.compat.layer_calls.guard_match import differ_in_index, layer_source
from dcompile.compat.layer_calls.recorder import CallRecord, NotRepeatable, Recorder
from dcompile.compat.layer_calls.replay import Differs, Replay

MAX_RECORDS = 4
"""Kinds of layers of one container: a model may alternate between two kinds of attention, or drop biases."""
MAX_REFUSALS = 3
"""Recordings that find a call to be unfit for copies, before its container is left alone."""

Trace = Callable[..., Any]


@dataclass
class _Container:
    """Calls of a container's layers at one place of the code."""

    records: list[CallRecord] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


class _Attempt:
    """One attempt to trace the frame. Dynamo starts anew where it finds a graph break."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.containers: dict[Any, _Container] = {}
        self.recorder: Recorder | None = None
        self.changes = 0
        """Number of changes of objects that were there before tracing, or that can be reached from such objects."""
        self.reachable: list[Any] = []
        """Variables of changed objects that were there before, and what was stored in them."""
        self.calls = 0
        """Calls that might have been copied."""

    def reaches(self, variable: Any) -> bool:
        """Whether an object was there before tracing, or can be reached from one that was."""
        from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker

        if not isinstance(getattr(variable, "mutation_type", None), AttributeMutationNew | ValueMutationNew):
            return True
        attributes, seen, todo = self.output.side_effects.store_attr_mutations, set[int](), [*self.reachable]

        def see(found: Any) -> None:
            seen.add(id(found))
            todo.extend(attributes.get(found, {}).values())

        visited: dict[int, Any] = {}
        while todo and id(variable) not in seen:
            VariableTracker.visit(see, todo.pop(), visited)
        return id(variable) in seen


class FrameCalls:
    """Calls of modules in a frame."""

    def __init__(self) -> None:
        self._attempt: _Attempt | None = None
        self._copied: list[bool] = []
        """Whether each call was copied in the first attempt. Others must do the same: Dynamo counts traced calls."""
        self._off = False
        self.copies = 0
        """How many calls of the last attempt were copied."""
        self.refusals: list[str] = []
        """Why calls could not stand for others."""

    def call(self, trace: Trace, variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call of a module by `trace`, Dynamo's own function, or copy it."""
        attempt = self._current(translator.output)
        layer = None if self._off or attempt.recorder is not None else _layer(variable, translator)
        if layer is None:
            return trace(variable, translator, args, kwargs)
        place = (layer.base, type(variable.value), _site(translator))
        container = attempt.containers.get(place)
        if container is None:
            attempt.containers[place] = _Container()
        if container is None or len(container.refusals) >= MAX_REFUSALS:
            return trace(variable, translator, args, kwargs)
        arguments = describe(args, kwargs, translator.output.side_effects)
        if arguments is None:
            container.refusals.append("an argument is of an unknown kind")
            return trace(variable, translator, args, kwargs)
        arguments.key = (*arguments.key, surroundings(translator))
        number, attempt.calls = attempt.calls, attempt.calls + 1
        replay = self._replay(container, attempt, variable, translator, layer, arguments)
        copied = False
        if replay is not None:
            try:
                result = replay.run()
                copied = True
            except Differs as reason:
                container.refusals.append(str(reason))
        self._note(number, copied, translator)
        if copied:
            self.copies += 1
            return result
        if len(container.records) >= MAX_RECORDS:
            return trace(variable, translator, args, kwargs)
        recorder = attempt.recorder = Recorder(translator, variable, layer, arguments)
        try:
            with recorder.watching():
                result = trace(variable, translator, args, kwargs)
        finally:
            attempt.recorder = None
        try:
            container.records.append(recorder.record(result, attempt.changes))
        except NotRepeatable as reason:
            container.refusals.append(str(reason))
            self.refusals.append(f"{type(variable.value).__name__}: {reason}")
        return result

    def _current(self, output: Any) -> _Attempt:
        if self._attempt is None or self._attempt.output is not output:
            self._attempt, self.copies = _Attempt(output), 0
        return self._attempt

    def _replay(
        self, container: _Container, attempt: _Attempt, variable: Any, translator: Any, layer: Any, arguments: Any
    ) -> Replay | None:
        """A copy of a recorded call that this call would be traced to."""
        for record in reversed(container.records):
            if (
                record.changes == attempt.changes
                and record.arguments.key == arguments.key
                and differ_in_index(record.layer.source, layer)
            ):
                replay = Replay(record, translator, variable, layer, arguments)
                if replay.check():
                    return replay
        return None

    def _note(self, number: int, copied: bool, translator: Any) -> None:
        """Take note of whether a call is copied. Where another attempt did otherwise, the frame is traced anew."""
        if number == len(self._copied):
            self._copied.append(copied)
        elif self._copied[number] is not copied:
            from torch._dynamo.exc import RestartAnalysis

            self._off = True
            translator.speculation_log.clear()
            raise RestartAnalysis(restart_reason="dcompile: another attempt copied other layers")

    def changed(self, effects: Any, variable: Any, stored: Any = None) -> None:
        """Take note that tracing changes an object; `stored` is what becomes an attribute of it, if anything."""
        attempt = self._attempt
        if attempt is None or attempt.output.side_effects is not effects:
            return
        reachable = attempt.reaches(variable)
        if reachable:
            attempt.changes += 1
            attempt.reachable += [variable, *(() if stored is None else (stored,))]
        if attempt.recorder is not None:
            attempt.recorder.changed(variable, reachable)


def _layer(variable: Any, translator: Any) -> Any:
    """Source of a module whose call may be copied; None for all others."""
    import torch._dynamo.config as config
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    if not isinstance(variable, UnspecializedNNModuleVariable):
        return None
    module: Any = variable.value
    output = translator.output
    if variable.source is None or not module._modules or isinstance(module, torch.fx.GraphModule):
        return None
    if output.export or output.current_tracer.parent is not None or variable.is_state_mutated:
        return None
    if config.use_graph_deduplication or config.track_nodes_for_deduplication or getattr(module, "cls_to_become", None):
        return None
    return layer_source(variable.source)


def _site(translator: Any) -> tuple[Any, ...]:
    """Place in the code of the frame, and of all frames around it that are traced with it."""
    found: list[Any] = []
    while translator is not None:
        found += (translator.f_code, translator.instruction_pointer)
        translator = getattr(translator, "parent", None)
    return tuple(found)
