"""Find the first stage of one program that spoils its result: a lowering rule, a pass, a kernel, or an op in it.

The program after each pass is interpreted, so that no pass has to be left out for finding it, and required ones are
found, too. If the last of these programs is right, what was made of it is wrong: each of its steps is then built and
run by itself, on the values that the interpreter has at that point.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile.bisect.recording import WrongCall, sharded_results
from dcompile.codegen.lower.fx_nodes import has_effect, op_text, origin_of
from dcompile.codegen.lower.lower import lower
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.compiler.driver import Pipeline
from dcompile.ir.analysis import inner_names, outer_names, row_values
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import as_index, var
from dcompile.ir.nodes import SCALE, Apply, Extern, Loop, Program, Reduce, Scan, Step, Store, View, map_arguments
from dcompile.passes import Row
from dcompile.pipeline import launch_passes, loop_passes, nest_passes
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.executable import HostProgram
from dcompile.runtime.program.workspace import function
from dcompile.verify.compare import Miss, compare
from dcompile.verify.reference import AtenMachine, copied, evaluate, unplanned, with_roundings


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the compiler that makes a result wrong."""

    kind: str
    """"pass", "lowering rule", "kernel", "op in a kernel", "library call", "collective", "host program", ..."""
    name: str
    miss: Miss
    """What differs there."""
    result: str = ""
    """The buffer, value or output that differs."""
    origin: tuple[str, ...] = ()
    """The ATen operations it came from, with lines of the user's."""
    notes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes of the program's graph for a repro; empty: all."""


def first_wrong(names: Sequence[str], is_wrong: Callable[[str], bool]) -> str | None:
    """Name of the first that is wrong, by halving, if all after a wrong one are so; None if the last is right."""
    if not names or not is_wrong(names[-1]):
        return None
    low, high = 0, len(names) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_wrong(names[middle]) else (middle + 1, high)
    return names[low]


class ProgramSearch:
    """Search in one program that was wrong in a recorded call."""

    def __init__(self, call: WrongCall) -> None:
        self.call, self.gm, self.request, self.pipeline = call, call.gm, call.request, call.pipeline
        call.restore()
        self._same, self._same_inputs, self.values = evaluate(self.gm, call.inputs, exact=False)
        call.restore()
        self._exact, self._exact_inputs, self.exact_values = evaluate(self.gm, call.inputs, exact=True)
        plan = self.pipeline.plan(self.gm, self.request)
        self.stages = dict(self.pipeline.stages(plan.lowered.program, self.request))
        self._constants = plan.lowered.constants

    def find(self) -> Place:
        """Return the first place that is wrong."""
        return self._stage() or self._step() or self._rest()

    def _rest(self) -> Place:
        """What is left where all that one process can check by itself is right."""
        call, (*_, program) = self.call, self.stages.values()
        parameter = call.parameter
        if parameter is None and call.gathers:
            return Place("collective", "all_gather of its parameters", call.miss, call.result)
        if parameter is None:
            return Place("host program", self.request.name, call.miss, call.result)
        bucket = next((bucket for bucket in program.buckets if parameter.number in bucket.params), None)
        kind, name = ("collective", "") if bucket is None else (bucket.kind, bucket.name)
        what = f"{kind} of {name}" if parameter.shard is None else "reduce_scatter of gradients"
        notes = (f"gradient of {parameter.fqn}", "the program is right up to its collectives")
        return Place("collective", what, call.miss, call.result, notes=notes)

    def _stage(self) -> Place | None:
        """The first pass over the program after which it is wrong, or the lowering."""
        name = first_wrong([*self.stages], lambda stage: self._miss(self.stages[stage]) is not None)
        if name == "lower":
            return self._rule()
        if name is not None:
            found = self._miss(self.stages[name])
            assert found is not None, "it was wrong just now"
            row = next(row for row in loop_passes() if row.name == name)
            return Place("pass", name, found[1], found[0], notes=self._confirmed(name, required=row.required))
        return None

    # --- the program after each pass ---

    def _inputs(self, program: Program) -> dict[str, Any]:
        given = dict(zip(program.inputs, self.call.inputs, strict=False))
        return given | {name: self._constants[name] for name in program.inputs if name in self._constants}

    def _run(self, program: Program) -> AtenMachine:
        self.call.restore()
        machine = AtenMachine(program, self._inputs(program), function)
        for step in program.steps:
            machine.run(step)
        return machine

    def _miss(self, program: Program) -> tuple[str, Miss] | None:
        """First output, or input that was changed, that differs from ATen's."""
        outputs, contents = self._run(program).tensors()
        names = [str(node) for node in self.gm.graph.output_node().args[0]]
        sharded = sharded_results(self.request)
        rows = [
            row
            for place, row in enumerate(zip(names, outputs, self._same, self._exact, strict=True))
            if place not in sharded
        ]
        written = frozenset().union(*(step.writes for step in program.steps)) - {*program.donated}
        for place, name in enumerate(program.inputs[: len(self._same_inputs)]):
            if name in written:
                rows.append((name, contents[name], self._same_inputs[place], self._exact_inputs[place]))
        for name, got, same, exact in rows:
            if isinstance(same, torch.Tensor) and (miss := compare(got, same, exact)) is not None:
                return name, miss
        return None

    def _confirmed(self, name: str, *, required: bool) -> tuple[str, ...]:
        """Say whether the program is right without the pass."""
        if required:
            return ("the pass cannot be skipped",)
        config = replace(self.pipeline.config, skip=",".join(filter(None, (self.pipeline.config.skip, name))))
        *_, (_, program) = Pipeline(config).stages(self.stages["lower"], self.request)
        right = self._miss(program) is None
        return (f"with DCOMPILE_SKIP={name} the program is right" if right else "it is wrong without the pass, too",)

    # --- lowering ---

    def _rule(self) -> Place:
        """The first operation whose lowering by itself is wrong; else the first buffer that is."""
        for node in self.gm.graph.nodes:
            if node.op != "call_function" or has_effect(node) or not node.all_input_nodes:
                continue
            single, inputs = self.part((node,))
            values = [self.values[name] for name in inputs]
            lowered = lower(single, "single", own_rows=self.pipeline.config.matmul != "aten")
            try:
                machine = AtenMachine(
                    lowered.program, {**dict(zip(inputs, values, strict=True)), **lowered.constants}, function
                )
                for step in lowered.program.steps:
                    machine.run(step)
            except (TypeError, KeyError, NotImplementedError):
                continue  # of dtypes that the interpreter has not
            (got,) = machine.tensors()[0]
            (same,), _, _ = evaluate(single, values, exact=False)
            (exact,), _, _ = evaluate(single, values, exact=True)
            if isinstance(same, torch.Tensor) and (miss := compare(got, same, exact)) is not None:
                return Place(
                    "lowering rule", op_text(node.target), miss, node.name, origin_of(node), nodes=(node.name,)
                )
        return self._lowered_buffer()

    def _lowered_buffer(self) -> Place:
        """The first buffer of the lowered program, named after its node, that is wrong."""
        program = self.stages["lower"]
        self.call.restore()
        machine = AtenMachine(program, self._inputs(program), function)
        for step in program.steps:
            machine.run(step)
            for name in sorted(step.writes):
                same, exact, got = self.values.get(name), self.exact_values.get(name), machine.tensor(name)
                alike = isinstance(same, torch.Tensor) and same.shape == got.shape
                if alike and (miss := compare(got, same, exact)) is not None:
                    return Place("lowering", name, miss, name, getattr(step, "origin", ()))
        found = self._miss(program)
        assert found is not None, "the lowered program was wrong just now"
        return Place("lowering", self.request.name, found[1], found[0])

    @property
    def given(self) -> dict[str, Any]:
        """Value of each node, and of each input before the call."""
        places = (node.name for node in self.gm.graph.find_nodes(op="placeholder"))
        return {**self.values, **dict(zip(places, self.call.inputs, strict=True))}

    def part(self, nodes: Sequence[Node], outputs: Any = None) -> tuple[GraphModule, list[str]]:
        """A graph of some nodes alone, and the names of its inputs.

        Its results are those of `outputs` that it has; without them, the result of the last node.
        """
        graph, known = Graph(), dict[Node, Node]()
        inputs = [given for node in nodes for given in node.all_input_nodes if given not in nodes]
        for given in dict.fromkeys(inputs):
            known[given] = (
                graph.get_attr(str(given.target)) if given.op == "get_attr" else graph.placeholder(given.name)
            )
            known[given].meta = dict(given.meta)
        for node in nodes:
            known[node] = graph.node_copy(node, known.__getitem__)
        results = [known[node] for node in (outputs or nodes[-1:]) if isinstance(node, Node) and node in known]
        if isinstance(value := results[-1].meta.get("val"), (tuple, list)):
            place = next(place for place, item in enumerate(value) if isinstance(item, torch.Tensor))
            results[-1] = graph.call_function(operator.getitem, (results[-1], place))
            results[-1].meta["val"] = value[place]
        graph.output(tuple(results))
        return GraphModule(self.gm, graph), [node.name for node in graph.find_nodes(op="placeholder")]

    # --- kernels ---

    def _step(self) -> Place | None:
        """The first step whose code, by itself, differs from what the interpreter makes of it."""
        *_, program = self.stages.values()
        self.call.restore()
        machine = AtenMachine(program, self._inputs(program), function)
        for step in program.steps:
            alone = _alone(program, step, machine) if isinstance(step, (Loop, Extern)) else None
            given = {} if alone is None else {name: _given(machine, name) for name in alone.inputs}
            machine.run(step)
            if alone is None or (isinstance(step, Extern) and (step.effect or step.op in _CALLS)):
                continue
            if (found := self._differs(alone, given, self.pipeline)) is not None:
                return self._kernel(step, alone, given, *found)
        return None

    def _differs(self, alone: Program, given: dict[str, Any], pipeline: Pipeline) -> tuple[str, Miss] | None:
        """The first buffer of a program of one step that its code makes wrong."""
        same, exact = (_interpreted(alone, given, exact=exact) for exact in (False, True))
        cache, request = KernelCache.open(pipeline.config), replace(self.request, name=alone.name)
        run = HostProgram(alone.name, pipeline.load(plan_memory(alone), request, cache))
        args = copied([given[name] for name in alone.inputs])
        held = dict(zip(alone.inputs, args, strict=True))
        got = dict(zip((out.buffer for out in alone.outputs if isinstance(out, View)), run(args), strict=True))
        names = dict.fromkeys(name for step in alone.steps for name in _in_order(step))
        shown = {name: (got.get(name, held.get(name)), same.tensor(name), exact.tensor(name)) for name in names}
        if all(compare(*values) is None for values in shown.values()):
            return None
        # as for results of a whole program: what inputs that differ by a rounding change is no error
        rounded = _interpreted(alone, dict(zip(given, with_roundings([*given.values()]), strict=True)))
        misses = ((name, compare(*values, rounded.tensor(name))) for name, values in shown.items())
        return next(((name, miss) for name, miss in misses if miss is not None), None)

    def _kernel(self, step: Step, alone: Program, given: dict[str, Any], result: str, miss: Miss) -> Place:
        """Name the pass over kernels that makes this one wrong, or else the op in it."""
        kernels = self.pipeline.emit(plan_memory(alone), self.request)
        origin, named = getattr(step, "origin", ()), ", ".join(kernel.name for kernel in kernels.sources)
        nodes = tuple(name for name in step.writes if name in self.values)
        config = self.pipeline.config
        *_, last = loop_passes()
        rows: list[Row] = [last, *nest_passes(), *(row for row in launch_passes() if row.when(config))]
        until = first_wrong(
            [row.name for row in rows],
            lambda name: self._differs(alone, given, Pipeline(replace(config, until=name))) is not None,
        )
        if until is not None and until != last.name:
            skipping = Pipeline(replace(config, skip=",".join(filter(None, (config.skip, until)))))
            right = self._differs(alone, given, skipping) is None
            notes = (
                f"in kernel {named}",
                f"with DCOMPILE_SKIP={until} it is right" if right else "it is wrong without the pass, too",
            )
            return Place("pass", until, miss, result, origin, notes, nodes)
        if not named:
            return Place("library call", step.op if isinstance(step, Extern) else "", miss, result, origin, nodes=nodes)
        ops = self._op(step, alone, given) if isinstance(step, Loop) else ()
        return Place("kernel", named, miss, result, origin, ops, nodes)

    def _op(self, loop: Loop, alone: Program, given: dict[str, Any]) -> tuple[str, ...]:
        """Say which value of a kernel is the first that is wrong, by a kernel that stores every value."""
        if not all(isinstance(size, int) for size in (*loop.outer, *loop.inner)):
            return ()
        shown, made = _with_values_stored(loop, alone)
        found = self._differs(shown, given | made, self.pipeline)
        if found is None:
            return ("each value in it is right: what is wrong is how it stores them",)
        if not found[0].startswith(VALUE):
            return ()
        value = loop.body[int(found[0].removeprefix(VALUE))]
        kind = getattr(value, "op", type(value).__name__.lower())
        return (f"first wrong in it: op {kind} on {value.dtype}: {found[1]}",)


def _interpreted(alone: Program, given: dict[str, Any], *, exact: bool = False) -> AtenMachine:
    machine = AtenMachine(alone, given, function, exact=exact)
    for step in alone.steps:
        machine.run(step)
    return machine


VALUE = "value"
_CALLS = ("dcompile.call", "dcompile.region", "dcompile.set_data")
"""Library calls that are functions of this process, or that change more than their results."""


def _in_order(step: Step) -> Iterator[str]:
    """Buffers that a step writes, in order."""
    if isinstance(step, Loop):
        yield from (store.buffer for store in step.stores)
    elif isinstance(step, Extern):
        yield from filter(None, step.outs)


def _given(machine: AtenMachine, name: str) -> Any:
    return machine.laid_out(name) if name in machine.table else machine.symbols[name]


def _alone(program: Program, step: Loop | Extern, machine: AtenMachine) -> Program | None:
    """A program of one step. None for a step that works on numbers or other values of the host program.

    What a kernel writes is an input, because it may leave a part of it as it was; a library call makes its results.
    """
    table = unplanned(program).table
    written = [*dict.fromkeys(_in_order(step))]
    made = [] if isinstance(step, Loop) or step.mode == "mutate" else written
    names = [name for name in (*sorted(step.reads), *written) if name not in made]
    if not all(table[name].is_tensor for name in (*names, *made)):
        return None
    buffers = tuple(replace(table[name], storage=None) for name in dict.fromkeys((*names, *made)))
    views = tuple(View(name, table[name].shape, table[name].strides) for name in made)
    inputs = (*machine.symbols, *dict.fromkeys(names))
    if isinstance(step, Extern):  # of the average over one rank
        step = map_arguments(step, lambda arg: 1.0 if arg == SCALE else arg)
    return Program(f"{program.name}_step", inputs, views, buffers, (step,))


def _with_values_stored(loop: Loop, alone: Program) -> tuple[Program, dict[str, torch.Tensor]]:
    """The program of a loop with a buffer for each of its values, in place of its own stores; and their memory."""
    buffers, stores, made = dict[str, Buffer](), list[Store](), dict[str, torch.Tensor]()
    device, rows = alone.buffers[0].device, row_values(loop)
    for place, value in enumerate(loop.body):
        if not isinstance(value, (Apply, Reduce, Scan)):
            continue
        names = outer_names(loop) if rows[place] else (*outer_names(loop), *inner_names(loop))
        shape = [int(str(size)) for size in (loop.outer if rows[place] else (*loop.outer, *loop.inner))]
        name, memory = f"{VALUE}{place}", torch.zeros(shape, dtype=getattr(torch, value.dtype), device=device)
        made[name], strides = memory, memory.stride()
        buffers[name] = Buffer(name, value.dtype, tuple(shape), strides, device)
        terms = (var(axis) * stride for axis, stride in zip(names, strides, strict=True))
        stores.append(Store(name, sum(terms, as_index(0)), place))
    step = replace(loop, stores=tuple(stores))
    kept = tuple(buffer for buffer in alone.buffers if buffer.name in loop.reads)
    inputs = (*(name for name in alone.inputs if name not in loop.writes - loop.reads), *buffers)
    return replace(alone, inputs=inputs, buffers=(*kept, *buffers.values()), steps=(step,)), made
