"""Lower an FX graph of functional ATen ops to a program of unfused steps, node by node in graph order.

Numbers of the graph, sizes and expressions of them, stay expressions where possible. Numbers that depend on program
text only, such as `torch.sqrt(torch.tensor(8.0))`, are evaluated while compiling. Tracing keeps each as a CPU tensor
without dimensions. It would cost a kernel there, and on a GPU a copy that the host waits for. ATen itself evaluates
them, so they equal eager's to the last bit. DeBERTa needs that: it rounds up a quotient of two logarithms that is 1 for
the largest distance. With one logarithm off in the last place, a GPU put that distance into another bucket, and the
loss was off by 0.3 %.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.codegen.lower import all_aten, lazy_tensor
from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.dtypes import fits_a_loop
from dcompile.codegen.lower.flex_attention import lower_flex_attention
from dcompile.codegen.lower.fx_nodes import Kind, Uses, find_uses, in_order, op_text, origin_of
from dcompile.codegen.lower.lazy_tensor import MAX_LOADS, MAX_OPS, LazyTensor, constant, from_view
from dcompile.codegen.lower.library_calls import (
    GraphAttribute,
    Unsupported,
    call_library,
    call_region,
    is_region,
    lower_collective,
    lower_host_copy,
)
from dcompile.codegen.lower.registry import PRODUCTS, RULES
from dcompile.codegen.lower.rules.input_mutation import OVERWRITES, overwrite_input, put_in_place, with_shared_data
from dcompile.codegen.lower.rules.slice_scatter_chains import find_assembled, read_from
from dcompile.codegen.lower.symbolic.strides import same_layout
from dcompile.compat.size_expressions import (
    Inexpressible,
    Real,
    is_symbolic,
    make_real,
    opaque_shape,
    size_of,
    variables_of,
)
from dcompile.ir.buffers import NUMBER
from dcompile.ir.float8 import OPAQUE
from dcompile.ir.index import Index, Size, as_index, as_size, typical, var
from dcompile.ir.nodes import PART, Program, View
from dcompile.ir.ops import DTYPES


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program and the values of its last inputs: tensors held by the graph module, by input name.

    `declined` lists the reasons why calls became library calls only because of their sizes.
    """

    program: Program
    constants: dict[str, Any] = field(default_factory=dict)
    declined: tuple[str, ...] = ()


def lower(
    gm: GraphModule,
    name: str,
    grads: tuple[tuple[int, int], ...] = (),
    *,
    aten: bool = False,
    own_rows: bool = True,
    deterministic: bool = False,
    saved_from: int | None = None,
    positions_in_loops: bool = False,
) -> Lowered:
    """Return the program of `gm`; with `aten` every op is a library call, with results bit-identical to `gm`'s.

    Without `own_rows`, matmuls of one row are library calls, as all others are. With `deterministic`, every sum has a
    fixed order. Results from `saved_from` on are those that a forward saves. `positions_in_loops`: see `Lowering`.

    Guarantees: each FX value is rounded to its own dtype, whether stored or not; ops with effects keep their order.
    """
    if aten:
        return Lowered(*all_aten.lower(gm, name, grads))
    try:
        walk = _Walk(gm, name, saved_from)
        walk.low.own_rows, walk.low.deterministic = own_rows, deterministic
        walk.low.positions_in_loops = positions_in_loops
        return walk.run(grads)
    except (Unsupported, Inexpressible) as reason:
        because = str(reason).removeprefix("dcompile: ")
        return Lowered(
            *all_aten.lower(gm, name, grads, because=str(reason)), declined=(f"every operation is ATen's: {because}",)
        )


def kind_of(node: Node) -> Kind:
    """Return how a node takes its arguments."""
    if node.target is operator.getitem:
        return "view"
    if str(node.target) in OVERWRITES:
        return "loop"
    rule = RULES.get(str(node.target)) if node.op == "call_function" else None
    return rule.kind if rule is not None else "memory"


class _Walk:
    """One pass over the nodes of a graph."""

    def __init__(self, gm: GraphModule, name: str, saved_from: int | None) -> None:
        self.gm, self.saved_from = gm, saved_from
        self.low = Lowering(name)
        self.low.groups = compat.groups.named_groups(gm)
        self.uses: dict[Node, Uses] = find_uses(gm.graph, kind_of)
        self.numbers = numbers_of(gm)
        self.assembled = find_assembled(gm.graph)
        self.values: dict[Node, Any] = self.low.values
        self.arguments: list[str] = []
        self.storages: set[int] = set()
        """Storage keys of the (fake) inputs."""

    def run(self, grads: tuple[tuple[int, int], ...]) -> Lowered:
        outputs: tuple[Any, ...] = ()
        for position, node in enumerate(self.gm.graph.nodes):
            self.low.position, self.low.node = position, node.name
            match node.op:
                case "placeholder":
                    self.values[node] = self._placeholder(node)
                case "get_attr" if all(user in self.numbers for user in node.users):
                    pass  # becomes a literal in kernels
                case "get_attr":
                    self.values[node] = self._attribute(node)
                case "call_function" if node in self.numbers:
                    number = constant(self.numbers[node], (), dtype_name(node.meta["val"].dtype))
                    self.values[node] = self._settled(node, number)
                case "call_function" if node in self.assembled.needless:
                    pass
                case "call_function":
                    self.low.origin = origin_of(node)
                    self.values[node] = self._settled(node, self._lowered(node))
                case "output":
                    outputs = self._outputs(node)
                case _:
                    raise Unsupported(f"dcompile: a node of kind {node.op}")
        low = self.low
        returned: Any = self.gm.graph.output_node().args[0]
        steps = with_shared_data(low, returned, outputs[: self.saved_from])
        inputs = (*self.arguments, *low.constants)
        sizes = tuple(low.given.items())
        buffers = tuple(low.buffers.values())
        program = Program(low.name, inputs, outputs, buffers, steps, grads, sizes=sizes, parts=tuple(self._parts()))
        return Lowered(program, low.constants, tuple(dict.fromkeys(low.declined)))

    def _parts(self) -> Iterator[tuple[str, int]]:
        for node in self.gm.graph.nodes:
            number = (node.meta.get("custom") or {}).get(PART)
            in_backward = node.meta.get("partitioner_tag") == "is_backward"  # copied from its forward op
            if number is not None and not in_backward and node.name in self.low.buffers:
                yield node.name, number

    # --- inputs and outputs ---

    def _placeholder(self, node: Node) -> Any:
        """Lower an argument of the graph: a tensor, or a number that sizes are computed from."""
        value: Any = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self.arguments.append(node.name)
            self.storages.add(compat.tensors.storage_key(value))
            return self._input(node.name, value)
        if not isinstance(value, torch.SymInt):
            raise Unsupported(f"dcompile: input {node.name} is a {type(value).__name__}, not a tensor")
        size = as_index(size_of(value))
        name = str(size)
        if size != var(name) or name in self.arguments:
            self.low.given[node.name] = size
            name = node.name
        self.low.known |= size.variables
        self.arguments.append(name)
        return as_size(size)

    def _input(self, name: str, value: torch.Tensor) -> LazyTensor:
        self.low.device = value.device.type
        view = self.low.buffer(shape_of(value), dtype_name(value.dtype), strides_of(value), name)
        self.low.inputs[view.buffer] = None
        self.low.known |= variables_of((*view.shape, *view.strides))
        return from_view(view, dtype_name(value.dtype))

    def _attribute(self, node: Node) -> Any:
        value = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(value, torch.Tensor):
            return GraphAttribute(value)
        self.low.constants[node.name] = value
        return self._input(node.name, value)

    def _outputs(self, node: Node) -> tuple[View | Index | int | float | bool | None, ...]:
        returned: Any = node.args[0]
        result: list[View | Index | int | float | bool | None] = []
        for place, item in enumerate(returned if isinstance(returned, (tuple, list)) else (returned,)):
            value = self.values[item] if isinstance(item, Node) else item
            if isinstance(value, LazyTensor):
                self.low.node = item.name if isinstance(item, Node) else "output"
                result.append(view := self.low.exact(value))
                self._check_alias(item, view)
                if self.saved_from is not None and place >= self.saved_from:
                    self._check_layout(value, view)
            elif isinstance(value, Real):
                result.append(self.low.number(value))
            else:
                result.append(value)
        return tuple(result)

    def _check_alias(self, item: Any, view: View) -> None:
        """Refuse a result that shares memory with an input in eager mode but not here: AOTAutograd reads its offset.

        Where sizes are static, AOTAutograd recreates such views by itself.
        """
        fake = item.meta.get("val") if isinstance(item, Node) else None
        if view.buffer in self.low.inputs or not isinstance(fake, torch.Tensor) or not is_symbolic(fake):
            return
        if compat.tensors.storage_key(fake) in self.storages:
            raise Unsupported(f"dcompile: {item.target} returns a part of an input, and where it lies is not known")

    def _check_layout(self, value: LazyTensor, view: View) -> None:
        """Refuse a saved tensor whose layout differs from tracing's: the backward's kernels would read other memory."""
        if value.dtype in DTYPES and not same_layout(view.shape, view.strides, value.strides):
            raise Unsupported(f"dcompile: {self.low.node} is to be saved with strides that cannot be told apart")

    # --- one node ---

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            return self.values[arg]
        if isinstance(arg, (tuple, list)):
            return [self._argument(item) for item in arg]
        return arg

    def _lowered(self, node: Node) -> Any:
        if (whole := self.assembled.whole.get(node)) is not None:
            assert whole.source is not None, "what is whole is read from somewhere"
            return read_from(self.low, node.meta["val"], self.values[whole.source], whole.lines)
        args = [self._argument(arg) for arg in node.args]
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        if node.target is operator.getitem:
            if not isinstance(args[0], (tuple, list)):
                raise Unsupported(f"dcompile: {node.args[0]} has no parts that tracing knows")
            return args[0][args[1]]
        if is_region(node):
            return call_region(self.low, node, args)
        args = in_order(node.target, args, kwargs)
        value: Any = node.meta.get("val")
        if value is None and node.users:  # such as calls that restore a generator's state
            raise Unsupported(f"dcompile: tracing did not say what {node.target} returns")
        if compat.sizes.invents_sizes(node.target):
            raise Unsupported(f"dcompile: tracing made up the size of what {node.target} returns")
        self.low.device = _device_of(value) or self.low.device
        if (exchanged := lower_collective(self.low, node, args)) is not None:
            return exchanged
        if (copied := lower_host_copy(self.low, node, args)) is not None:
            return copied
        if (attended := lower_flex_attention(self.low, node, args, lower)) is not None:
            return attended
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return scalar(self.low, node, value, args, kwargs)
        if str(node.target) in OVERWRITES:
            return overwrite_input(self.low, value, args[0], *map(self._brought, args[1:]))
        if (put := put_in_place(self.low, node, args)) is not None:
            return put
        rule = None if _looks_behind_a_slice(node) else RULES.get(str(node.target))
        if rule is not None and fits_a_loop(node.target, value, args, self.low.device):
            try:
                self._require_known(value, args)
                result = rule.lower(self.low, value, *self._small([self._brought(arg) for arg in args]), **kwargs)
                if result is not NotImplemented:
                    return result
            except Inexpressible as reason:
                if str(node.target) not in PRODUCTS:  # most matmuls are library calls anyway
                    self.low.declined.append(f"{node.target} is left to the library: {reason}")
        elif rule is not None and rule.kind == "view" and _is_strided(value):
            try:
                result = rule.lower(self.low, value, *args, **kwargs)
                if result is not NotImplemented and _in_memory(result):
                    return result  # a view needs no loop, so any dtype will do
            except Inexpressible as reason:
                self.low.declined.append(f"{node.target} is left to the library: {reason}")
        return call_library(self.low, node, args, kwargs)

    def _brought(self, arg: Any) -> Any:
        """Return a loop's argument on the device of its result."""
        if isinstance(arg, list):
            return [self._brought(item) for item in arg]
        return self.low.brought(arg, self.low.device) if isinstance(arg, LazyTensor) else arg

    def _require_known(self, value: Any, args: Any) -> None:
        """Raise Inexpressible unless every size is defined by the arguments or by an earlier library call."""
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, torch.Tensor):
                self._require_sizes(shape_of(item))
        for arg in args:
            if isinstance(arg, LazyTensor):
                self._require_sizes(arg.shape)
            elif isinstance(arg, list):
                self._require_known(None, arg)
            elif isinstance(arg, Index):
                self._require_sizes((arg,))

    def _require_sizes(self, sizes: tuple[Size, ...]) -> None:
        unknown = variables_of(sizes) - self.low.known - self.low.defined
        if unknown:
            raise Inexpressible(f"the size {', '.join(sorted(unknown))} is known only after a library call")

    def _small(self, args: list[Any]) -> list[Any]:
        """Store the largest arguments until the ops and loads inlined into one body stay within limits."""
        lazy = [
            arg for item in args for arg in (item if isinstance(item, list) else [item]) if isinstance(arg, LazyTensor)
        ]
        for arg in sorted(lazy, key=lambda t: -t.ops - t.loads):
            if sum(t.ops for t in lazy) <= MAX_OPS and sum(t.loads for t in lazy) <= MAX_LOADS:
                break
            if arg.view is None:
                stored = self.low.memory(arg)
                lazy = [stored if t is arg else t for t in lazy]
                args = [_replaced(item, arg, stored) for item in args]
        return args

    def _settled(self, node: Node, result: Any) -> Any:
        """Return the node's value: a tensor is stored now unless it is better computed at its uses."""
        value: Any = node.meta.get("val")
        if isinstance(result, (tuple, list)):
            return tuple(
                self._torch_layout(item, fake) if isinstance(item, LazyTensor) else item
                for item, fake in zip(result, value, strict=True)
            )
        if not isinstance(result, LazyTensor):
            return result
        tensor = self._torch_layout(result, value)
        if tensor.view is None and self._is_stored(node, tensor):
            return self.low.memory(tensor, anew=not self.uses[node].memory)
        if tensor.view is None:
            self.low.lazy[id(tensor)] = (tensor, self.uses[node].last)
        return tensor

    def _torch_layout(self, tensor: LazyTensor, value: torch.Tensor) -> LazyTensor:
        (shape, strides), dtype = opaque_shape(value), dtype_name(value.dtype)
        symbolic = any(isinstance(size, Index) for size in (*shape, *tensor.shape))
        same = len(tensor.shape) == len(shape) if symbolic else tensor.shape == shape
        assert same and tensor.dtype == dtype, f"{self.low.node}: {tensor.shape} {tensor.dtype}"
        if tensor.shape != shape:
            tensor = _of_equal_shape(tensor, shape)
        if not tensor.reads and tensor.device != value.device.type:
            tensor = replace(tensor, device=value.device.type)
        return tensor if tensor.strides == strides else replace(tensor, strides=strides)

    def _is_stored(self, node: Node, tensor: LazyTensor) -> bool:
        uses = self.uses[node]
        if tensor.base is not None:
            return False  # a view of a tensor that is computed at its uses
        if tensor.loads == 0:  # constants and ranges are stored for library calls, and as tables
            return self.low.traits.many_threads and lazy_tensor.is_worth_a_table(tensor, uses.numel)
        if uses.memory:
            return True
        if lazy_tensor.is_cheap_to_repeat(tensor, many_threads=self.low.traits.many_threads):
            return False  # one computation for each row is cheaper than a kernel and memory
        if not tensor.heavy and uses.total <= typical(tensor.numel):
            return False
        return not tensor.is_cheap and (uses.count > 1 or uses.numel > typical(tensor.numel))


def _of_equal_shape(tensor: LazyTensor, shape: tuple[Size, ...]) -> LazyTensor:
    """Return `tensor` with torch's expressions for its sizes, which a guard of torch's makes equal."""
    if tensor.view is not None:
        return from_view(replace(tensor.view, shape=shape), tensor.dtype)
    return replace(tensor, shape=shape)


def _device_of(value: Any) -> str | None:
    """Return the device type of a tensor, or of the first of several."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(_device_of, value)), None)
    return None


def _looks_behind_a_slice(node: Node) -> bool:
    """Return whether an op uses an offset from the start of a storage whose first elements its argument skips."""
    if not compat.storage_offsets.has_offset(node):
        return False
    around = compat.storage_offsets.storage_input(node, scattered=True)
    if around is not None and compat.storage_offsets.is_part(around.meta["val"]):
        return True
    of: Any = node.args[0]
    offset = of.meta["val"].storage_offset()
    return not isinstance(offset, int) or offset > 0


def _replaced(item: Any, old: LazyTensor, new: LazyTensor) -> Any:
    if isinstance(item, list):
        return [_replaced(part, old, new) for part in item]
    return new if item is old else item


def _is_strided(value: Any) -> bool:
    return all(v.layout == torch.strided for v in (value if isinstance(value, (tuple, list)) else [value]))


def _in_memory(result: LazyTensor | Sequence[LazyTensor]) -> bool:
    return all(t.view is not None for t in (result if isinstance(result, Sequence) else [result]))


# --- sizes ------------------------------------------------------------------------------------------------------------


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
