"""Lower a graph with each op as a library call: for debugging, symbolic sizes and ops that loops cannot express."""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from dcompile.codegen.lower.context import dtype_name, literal_text
from dcompile.codegen.lower.fx_nodes import has_effect, op_text, origin_of, returns_alias, written_arguments
from dcompile.codegen.lower.library_calls import GraphAttribute, has_no_text, is_region
from dcompile.codegen.lower.opaque_calls import function_name, opaque_call, returns_one_in_a_tuple
from dcompile.compat.size_expressions import opaque_shape
from dcompile.device_traits import HOST
from dcompile.ir.buffers import NUMBER, OBJECT, Buffer
from dcompile.ir.index import Size
from dcompile.ir.nodes import CALL, REGION, Arg, Extern, Program, Verbatim, View


def lower(
    gm: GraphModule, name: str, grads: tuple[tuple[int, int], ...] = (), *, because: str | None = None
) -> tuple[Program, dict[str, Any]]:
    """Return (program, constants). With `because`, every call counts as a fallback for that reason."""
    return _AtenWalk(gm, because).run(name, grads)


class _AtenWalk:
    def __init__(self, gm: GraphModule, because: str | None) -> None:
        self.gm, self.because = gm, because
        self.buffers: dict[str, Buffer] = {}
        self.values: dict[Node, Any] = {}
        self.steps: list[Extern] = []
        self.constants: dict[str, Any] = {}

    def run(self, name: str, grads: tuple[tuple[int, int], ...]) -> tuple[Program, dict[str, Any]]:
        arguments: list[str] = []
        outputs: tuple[Any, ...] = ()
        for node in self.gm.graph.nodes:
            match node.op:
                case "placeholder":
                    self.values[node] = self._buffer(node.name, node.meta.get("val"))
                    arguments.append(node.name)
                case "get_attr":
                    value = operator.attrgetter(str(node.target))(self.gm)
                    is_tensor = isinstance(value, torch.Tensor)
                    self.values[node] = self._constant(node.name, value) if is_tensor else GraphAttribute(value)
                case "call_function":
                    self.values[node] = self._call(node)
                case "output":
                    returned: Any = node.args[0]
                    items = returned if isinstance(returned, (tuple, list)) else (returned,)
                    outputs = tuple(self._output(item) for item in items)
                case _:
                    raise AssertionError(f"{node.op} in a graph from AOTAutograd")
        inputs = (*arguments, *self.constants)
        return Program(name, inputs, outputs, tuple(self.buffers.values()), tuple(self.steps), grads), self.constants

    def _buffer(self, name: str, value: Any) -> View:
        """Add a buffer for a value of the graph; return a view of all of it."""
        dtype, device = OBJECT, HOST
        shape: tuple[Size, ...] = ()
        strides: tuple[Size, ...] = ()
        if isinstance(value, torch.Tensor):
            dtype, device = dtype_name(value.dtype), value.device.type
            shape, strides = opaque_shape(value)
        elif isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            dtype = NUMBER
        self.buffers[name] = Buffer(name, dtype, shape, strides, device)
        return View(name, shape, strides)

    def _constant(self, name: str, value: Any) -> View:
        self.constants[name] = value
        return self._buffer(name, value)

    def _output(self, item: Any) -> Any:
        value = self.values[item] if isinstance(item, Node) else item
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    def _call(self, node: Node) -> Any:
        if node.target is operator.getitem and isinstance(self._argument(node.args[0]), tuple):
            return self._argument(node.args[0])[node.args[1]]
        written = written_arguments(node)
        mode: Literal["alloc", "mutate"] = "alloc"
        if written:
            mode, views = "mutate", [self._argument(argument) for argument in written]
            outs, result = [view.buffer for view in views], views[0] if len(views) == 1 else tuple(views)
        else:
            outs, result = self._results(node)
        if is_region(node):
            return self._region(node, outs, result)
        op, args, kwargs = self._spelled(node)
        origin = (*origin_of(node), *(() if self.because is None else (self.because,)))
        effect, aliases = has_effect(node) or op == CALL, returns_alias(node.target)
        call = Extern(op, args, kwargs, tuple(outs), mode, self.because is not None, origin, effect, aliases)
        self.steps.append(call)
        return result

    def _region(self, node: Node, outs: list[str | None], result: Any) -> Any:
        """Call a region compiled by another compiler; it is no fallback, even if the calls around it are."""
        call: Any = node.target
        function = self._constant(call.__name__, call)
        args = (function, *(self._argument(value) for value in node.args))
        origin, cost_us = (call.what,), call.cost_us
        self.steps.append(Extern(REGION, args, (), tuple(outs), "alloc", False, origin, cost_us=cost_us))
        return result

    def _results(self, node: Node) -> tuple[list[str | None], Any]:
        value = node.meta.get("val")
        if value is None and not node.users:
            return [], None
        if not isinstance(value, (tuple, list)):
            view = self._buffer(node.name, value)
            return [view.buffer], view
        used = {user.args[1] for user in node.users if user.target is operator.getitem}
        whole = any(user.target is not operator.getitem for user in node.users)
        views = [
            self._buffer(f"{node.name}_{number}", item) if whole or number in used else None
            for number, item in enumerate(value)
        ]
        return [None if view is None else view.buffer for view in views], tuple(views)

    def _spelled(self, node: Node) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Return op, arguments and keywords; a call without a text form becomes a function among the constants."""
        everything = (*node.args, *node.kwargs.values())
        fixed = {n: value.value for n in node.all_input_nodes if isinstance(value := self.values[n], GraphAttribute)}
        if not fixed and not returns_one_in_a_tuple(node) and not any(has_no_text(arg) for arg in everything):
            args = tuple(self._spell(arg) for arg in node.args)
            return op_text(node.target), args, tuple((k, self._spell(v)) for k, v in node.kwargs.items())
        function = self._constant(function_name(node), opaque_call(node, fixed))
        return CALL, (function, *(self._argument(n) for n in node.all_input_nodes if n not in fixed)), ()

    def _spell(self, arg: Any) -> Arg:
        match arg:
            case Node():
                return self._argument(arg)  # type: ignore[no-any-return]
            case tuple() | list():
                return tuple(self._spell(item) for item in arg)
            case bool() | int() | float() | str() | None:
                return arg
            case _:
                return Verbatim(literal_text(arg))

    def _argument(self, node: Any) -> Any:
        return self.values[node]
