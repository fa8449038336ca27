"""References for results: ATen's evaluation of a graph or a program, in its own dtypes and in float64.

In float64, every operation is the same function of inputs that are converted first, so that the result is exact for
this purpose. What has no float64 form (8-bit products, some custom operators) runs in float32. Random numbers are drawn
in their own dtypes: the same ones, where the generators start from the same state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode

from dcompile.compat.autograd import backward_task
from dcompile.compat.dispatch_watch import computing
from dcompile.compat.pytree import map_only
from dcompile.compat.tensors import converts
from dcompile.ir.float8 import BYTES
from dcompile.ir.interpret import Machine
from dcompile.ir.library_ops import COPY_EACH
from dcompile.ir.nodes import Arg, Extern, IndexOf, Loop, Program, Verbatim, View
from dcompile.ir.ops import DTYPES
from dcompile.operators.random_ops import is_random

FLOATS = frozenset(name for name, kind in DTYPES.items() if kind in ("float", "opaque"))
"""Names of the dtypes that become float64 in the exact evaluation of a program."""
Function = Callable[..., Any]
OwnFunction = Callable[[str], Function]
"""The function of an op that is not in `torch.ops`: `runtime.program.workspace.function`."""


def copied(values: Sequence[Any]) -> list[Any]:
    """Copy tensors with their strides, and so that those that share memory share it in the copies."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return value.detach().clone()
        held = value.untyped_storage()
        if (known := storages.get(held.data_ptr())) is None or not held.nbytes():
            known = storages[held.data_ptr()] = held.clone()  # type: ignore[no-untyped-call]
        same = torch.empty(0, dtype=value.dtype, device=value.device)
        return same.set_(known, value.storage_offset(), value.shape, value.stride())

    return [copy(value) for value in values]


def with_roundings(values: Sequence[Any], but: Collection[int] = ()) -> list[Any]:
    """Copy float32 and float64 tensors so that elements differ by about a rounding: what that changes is no error.

    A rounding to 16 bits is large enough to change which of two numbers is the larger. `but`: positions of values that
    stay as they are.
    """

    def rounded(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
        if not wide or value.layout != torch.strided:
            return value
        signs = (torch.arange(value.numel(), device=value.device).reshape(value.shape) % 3).clamp(max=1) * 2 - 1
        return value.detach() * (1 + torch.finfo(value.dtype).eps * signs).to(value.dtype)

    return [value if place in but else rounded(value) for place, value in enumerate(values)]


# --- graphs -----------------------------------------------------------------------------------------------------------


CONVOLUTIONS = frozenset(getattr(torch, f"conv{way}{number}d") for way in ("", "_transpose") for number in (1, 2, 3))
"""What asks its arguments for one dtype before it calls an operation."""


class _Float64Convolutions(TorchFunctionMode):
    """Convolutions take float64 for every argument where they are called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CONVOLUTIONS:
            args, kwargs = map_only(torch.Tensor, _widened, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def in_float64(*, trains: bool = False) -> Iterator[None]:
    """Return a context in which ATen's operations take and give float64 in place of every smaller floating dtype.

    A tensor that is written in place, or looked at by a view, keeps its own dtype. With `trains`, eager code may run
    backward inside: gradients of leaves get the dtypes of these, as autograd demands.
    """

    def compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if trains and converts(op) and backward_task() >= 0:
            return op(*args, **kwargs)
        return _exactly(op, args, kwargs)

    with _Float64Convolutions() if trains else contextlib.nullcontext(), computing(compute):
        yield


def _exactly(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation in float64."""
    if _keeps_dtypes(op):
        return op(*args, **kwargs)
    wide = map_only(torch.Tensor, _widened, (args, kwargs))
    wide = map_only(torch.dtype, lambda dtype: torch.float64 if dtype.is_floating_point else dtype, wide)
    try:
        results = op(*wide[0], **wide[1])
    except (RuntimeError, NotImplementedError, TypeError):  # no kernel for float64
        narrow = map_only(torch.Tensor, lambda t: t.float() if t.dtype == torch.float64 else t, (args, kwargs))
        results = op(*narrow[0], **narrow[1])
    return map_only(torch.Tensor, _widened, results)


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() and value.dtype != torch.float64 else value


def _keeps_dtypes(op: Any) -> bool:
    """Whether an operation must see its arguments themselves, or draws numbers that depend on their dtype."""
    schema = getattr(op, "_schema", None)
    if schema is None or is_random(op) or torch.Tag.nondeterministic_seeded in op.tags:
        return True
    return schema.is_mutable or any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))


class NodeValues(Interpreter):
    """Interpreter that keeps a copy of each node's value: a later operation may write into it."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = map_only(torch.Tensor, torch.clone, value)
        return value


def changed_inputs(gm: GraphModule) -> set[int]:
    """Positions of the inputs that a graph may change, or hand out as results or views of these."""
    found = set()
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        mutable = (user for user in node.users if user.op == "output" or _keeps_dtypes(user.target))
        if next(mutable, None) is not None:
            found.add(place)
    return found


def evaluate(
    gm: GraphModule, inputs: Sequence[Any], *, exact: bool, keep: bool = True, changed: Collection[int] | None = None
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Evaluate a graph of ATen operations: (results, inputs afterwards, value of each node by its name if `keep`).

    `inputs` are not changed. `changed`: positions of those that the graph may change; None is all. Results have the
    dtypes that tracing has found, which a few of ATen's kernels ignore: the statistics of a LayerNorm of 16-bit numbers
    with float32 weights are traced in 16 bits, and computed in float32.
    """
    given = copied([value if changed is None or at in changed else None for at, value in enumerate(inputs)])
    given = [value if changed is not None and at not in changed else given[at] for at, value in enumerate(inputs)]
    run = NodeValues(gm) if keep else Interpreter(gm)
    with torch.no_grad():
        if exact:
            with in_float64():
                results = run.run(*given)
        else:
            results = run.run(*given)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    returned: Any = gm.graph.output_node().args[0]
    traced = [
        getattr(node, "meta", {}).get("val")
        for node in (returned if isinstance(returned, (tuple, list)) else [returned])
    ]
    if not exact:
        results = [
            value.to(fake.dtype) if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor) else value
            for value, fake in zip(results, traced, strict=True)
        ]
    return results, given, getattr(run, "values", {})


# --- programs ---------------------------------------------------------------------------------------------------------


class AtenMachine(Machine):
    """The interpreter of programs, with ATen for library calls. With `exact`, every number is in float64.

    Gradients are averaged over one rank.
    """

    def __init__(self, program: Program, inputs: Mapping[str, Any], own: OwnFunction, *, exact: bool = False) -> None:
        self._own, self._exact = own, exact
        self._names = {"torch": torch, "inf": math.inf, "nan": math.nan, "_scale": 1.0}
        program = in_float64_program(program) if exact else program
        super().__init__(program, {name: to_array(value, exact=exact) for name, value in inputs.items()}, {})

    def extern(self, step: Extern) -> None:
        """Call ATen on tensors of the buffers' dtypes."""
        given: dict[View, torch.Tensor] = {}
        arguments = tuple(self._given(arg, given) for arg in step.args)
        named = {name: self._given(arg, given) for name, arg in step.kwargs}
        if step.op == COPY_EACH:
            results = arguments[0]
        elif step.op.split(".", 1)[0] in _OUTSIDE:
            results = self._own(step.op)(*arguments, **named)
        else:
            function = operator.attrgetter(step.op)(torch.ops)
            results = _exactly(function, arguments, named) if self._exact else function(*arguments, **named)
        places = self._places(step)
        if places:  # the call has written its arguments
            results = [None if name is None else given[places[name]] for name in step.outs]
        results = results if isinstance(results, (tuple, list)) else (results,)
        for name, value in zip(step.outs, results, strict=False):
            if name is not None:
                self.write(places.get(name, self._all_of(name)), to_array(value, exact=self._exact))

    def _given(self, arg: Arg, given: dict[View, torch.Tensor]) -> Any:
        match arg:
            case View():
                given[arg] = to_tensor(self.read(arg), self.table[arg.buffer].dtype)
                return given[arg]
            case tuple():
                return [self._given(item, given) for item in arg]
            case Verbatim(text):
                return eval(text, self._names)  # the compiler's own text, as the host program has it
            case _:
                return self._argument(arg)

    def tensor(self, name: str) -> torch.Tensor:
        """Content of a buffer."""
        return to_tensor(self.whole(name), self.table[name].dtype)

    def laid_out(self, name: str) -> torch.Tensor:
        """Content of a buffer in its own strides, as a program expects it."""
        buffer = self.table[name]
        flat = torch.from_numpy(self.memory[name].view(np.uint8).copy()).view(getattr(torch, buffer.dtype))
        return flat.as_strided(self.sizes(buffer.shape), self.sizes(buffer.strides)).to(buffer.device)

    def tensors(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Outputs of the program, and the content of its inputs."""
        result = self.result()
        views = [out.buffer if isinstance(out, View) else "" for out in self._program.outputs]
        outputs = [
            to_tensor(value, self.table[name].dtype) if name else value
            for name, value in zip(views, result.outputs, strict=True)
        ]
        return outputs, {name: to_tensor(value, self.table[name].dtype) for name, value in result.inputs.items()}


_OUTSIDE = frozenset(("dcompile", "operator", "math", "builtins", "torch"))
"""First words of ops that are not in `torch.ops`."""


def in_float64_program(program: Program) -> Program:
    """The same program with float64 in place of every other floating dtype."""
    buffers = tuple(dataclasses.replace(buffer, dtype=_wide(buffer.dtype)) for buffer in unplanned(program).buffers)
    steps = tuple(_wide_loop(step) if isinstance(step, Loop) else step for step in program.steps)
    return dataclasses.replace(program, buffers=buffers, steps=steps)


def unplanned(program: Program) -> Program:
    """The same program before memory planning: each buffer has memory of its own, unless it is a part of another."""
    buffers = (
        buffer if buffer.holder is not None else dataclasses.replace(buffer, storage=None, offset=0)
        for buffer in program.buffers
    )
    return dataclasses.replace(program, buffers=tuple(buffers), arena_bytes=0)


def _wide_loop(loop: Loop) -> Loop:
    body = tuple(
        value if isinstance(value, IndexOf) else dataclasses.replace(value, dtype=_wide(value.dtype))
        for value in loop.body
    )
    product = loop.product and dataclasses.replace(loop.product, dtype=_wide(loop.product.dtype))
    return dataclasses.replace(loop, body=body, product=product)


def _wide(dtype: str) -> str:
    return "float64" if dtype in FLOATS else dtype


def to_array(value: Any, *, exact: bool = False) -> Any:
    """Elements of a tensor as the interpreter holds them: bfloat16 as float32, 8-bit floats as bytes."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu().resolve_conj().resolve_neg()
    if exact and value.is_floating_point():
        return value.double().numpy()
    name = str(value.dtype).removeprefix("torch.")
    if name in BYTES:
        return value.view(torch.uint8).numpy()
    return (value.float() if name == "bfloat16" else value).numpy()


def to_tensor(array: Any, dtype: str) -> torch.Tensor:
    """Inverse of `to_array`, for a buffer's dtype."""
    value = torch.from_numpy(np.array(array))
    return value.view(getattr(torch, dtype)) if dtype in BYTES else value.to(getattr(torch, dtype))
