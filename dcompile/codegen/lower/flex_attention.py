"""Lower FlexAttention to calls that kernels of ours compute (`emit/triton/flex_attention.py`): forward and backward.

`dcompile_flex_attention.forward` takes query, key, value, a mask's tables, tensors that functions read, both functions,
scale and sides of blocks. It gives out, logsumexp and the largest scores. The arguments of
`dcompile_flex_attention.backward` begin with those. Then come out, logsumexp, the gradients of both, the tables of key
blocks, the function of a score's gradient, and terms of the gradients of tensors that the score function reads. It
gives the gradients of query, key and value, scratch memory of one number for each query, and the gradients of those
tensors. Functions are texts (`ir/pair_function.py`). `ir/attention.py` names the arguments.

Logarithms have base 2, as the operators return them. Other devices, 32-bit inputs, and a few queries of many keys
are left to `opaque_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, from_view, make_lazy
from dcompile.codegen.lower.library_calls import GraphAttribute, buffer_name
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import Shape, contiguous
from dcompile.codegen.nest.loop_nest import renumber
from dcompile.compat.size_expressions import variables_of
from dcompile.ir.attention import FLEX, FLEX_BACKWARD, MAX_WIDTH, MIN_BLOCK
from dcompile.ir.gemm import ALIGNMENT, TENSOR_CORE_DTYPES
from dcompile.ir.index import as_index, as_size, exact_quotient, is_below
from dcompile.ir.nodes import Apply, Load, Loop, Program, Ref, Value, View
from dcompile.ir.pair_function import GRADIENT, PLACES, SCORE, PairFunction
from dcompile.operators.flex_ops import has_scatter, summands

Lower = Callable[..., Any]
_, _BACKWARD = compat.inductor.FLEX
_JOINT = (SCORE, *PLACES, GRADIENT)
"""Arguments of the function of a score's gradient."""
_ALIGNED = ALIGNMENT // 2
"""Elements of 16 bits between addresses that are aligned."""
MIN_QUERIES = 64
MAX_KEYS = 1024
"""Fewer queries of more keys are better split along the keys."""


class _Unfit(Exception):
    """A call that the kernels do not compute; says why."""


def lower_flex_attention(low: Lowering, node: Node, args: Sequence[Any], lower: Lower) -> tuple[Any, ...] | None:
    """Return the results of a call, and add its step; None for other nodes, and for calls that are left.

    `lower`: lowers the graphs of functions.
    """
    if not compat.inductor.is_flex(node.target) or low.traits.masked_attention != "flex":
        return None
    try:
        call = _FlexCall(low, node, args, lower)
        return call.backward() if str(node.target) == _BACKWARD else call.forward()
    except _Unfit as reason:
        low.declined.append(f"{node.target} is left to TorchInductor: {reason}")
        return None


class _FlexCall:
    """One call of either operator, and what both have."""

    def __init__(self, low: Lowering, node: Node, args: Sequence[Any], lower: Lower) -> None:
        self.low, self.node, self.args, self.lower = low, node, args, lower
        self.is_backward = str(node.target) == _BACKWARD
        _require(len(args) == compat.flex.ARGUMENTS[str(node.target)], "its arguments are unknown")
        self.block_mask = args[9 if self.is_backward else 4]
        _require(compat.flex.is_known_mask(self.block_mask), "its block mask is unknown")
        self.score_buffers, self.mask_buffers = args[-2:]
        self._check()

    def _check(self) -> None:
        options = self.args[11 if self.is_backward else 6]
        chosen = options.value if isinstance(options, GraphAttribute) else options
        _require(not compat.flex.chosen_options(chosen), "it asks for options of its kernel")
        query, key, value = self.args[:3]
        _require(
            query.dtype in TENSOR_CORE_DTYPES and query.dtype == key.dtype == value.dtype,
            f"its inputs are {query.dtype}",
        )
        tensors = (query, key, value, *_tensors(self.score_buffers), *_tensors(self.mask_buffers))
        tables = [item for item in self.block_mask if isinstance(item, LazyTensor)]
        devices = {self.low.device_of(tensor) for tensor in (*tensors, *tables)}
        _require(devices <= {None, self.low.device}, "its function reads a tensor of the CPU")
        sizes = [size for tensor in tensors for size in (*tensor.shape, *tensor.strides)]
        _require(variables_of(sizes) <= self.low.known, "its sizes are known only after a library call")
        shapes = [size for tensor in (query, key, value) for size in (tensor.shape[1], tensor.shape[3])]
        _require(all(isinstance(size, int) for size in shapes), "its heads are a symbol")
        _require(0 not in (*query.shape, *key.shape, *value.shape), "it is empty")
        _require(int(query.shape[1]) % int(key.shape[1]) == 0, "its heads share keys unevenly")
        widths = query.shape[3], value.shape[3]
        _require(max(widths) <= MAX_WIDTH, f"heads of {max(widths)} elements")
        _require(query.shape[0] == key.shape[0] or not self.is_backward, "its batches share keys")
        queries, keys = query.shape[2], key.shape[2]
        few = isinstance(queries, int) and queries < MIN_QUERIES and not is_below(as_index(keys), MAX_KEYS, {})
        _require(not few, f"{queries} queries of {keys} keys, which it splits")
        sides = tuple(self.block_mask[compat.flex.SIDES])
        _require(all(isinstance(side, int) for side in sides), "the sides of its blocks are symbols")
        _require(all(side >= MIN_BLOCK and side & (side - 1) == 0 for side in sides), f"blocks of {sides}")

    def forward(self) -> tuple[Any, ...]:
        """Add the step of the forward."""
        given, value = self._given(), self.node.meta["val"]
        outs = [self.low.result(fake, f"{self.node.name}_{n}") for n, fake in enumerate(value[:3])]
        self.low.extern(FLEX, given, [*map(buffer_name, outs)], mode="out")
        return (*outs, *value[3:])

    def backward(self) -> tuple[Any, ...]:
        """Add the step of the backward."""
        low, (out, logsumexp, grad, grad_logsumexp) = self.low, self.args[3:7]
        joint, blocks, given = self._graph(8), compat.flex.key_tables(self.block_mask), self._given()
        _require(grad is not None, "its result has no gradient")
        _require(blocks is not None, "its block mask has no tables for keys")
        function = self._function(joint, _JOINT, self.score_buffers)
        terms, sums = self._captured(joint)
        extra = [
            self._rows(out),
            logsumexp,
            self._rows(grad),
            grad_logsumexp,
            tuple(blocks or ()),
            str(function),
            terms,
        ]
        value: Any = self.node.meta["val"]
        outs = [low.result(fake, f"{self.node.name}_{n}") for n, fake in enumerate(value[:3])]
        levels = low.buffer(self.args[0].shape[:3], "float32", name=f"{self.node.name}_levels")
        written = [*map(buffer_name, outs), levels.buffer, *(view.buffer for view in sums.values())]
        low.extern(FLEX_BACKWARD, [*given, *extra], written, mode="out")
        return (*outs, tuple(_captured_gradient(sums.get(n), fake) for n, fake in enumerate(value[3])))

    def _captured(self, joint: GraphModule) -> tuple[tuple[Any, ...], dict[int, View]]:
        """Return the terms of captured tensors' gradients, and memory for each tensor's sum.

        A term is the number of a sum, the function of its values, and one for each dimension that they are added along.
        """
        terms: list[Any] = []
        sums: dict[int, View] = {}
        for place, node in enumerate(compat.flex.gradients_of_captured(joint)):
            if node is None:
                continue
            _require(not self.low.deterministic, "gradients of what its function reads would be added in any order")
            buffer = self.score_buffers[place]
            _require(
                buffer.dtype in ("float32", *TENSOR_CORE_DTYPES),
                f"its function reads a {buffer.dtype}, and needs a gradient",
            )
            for item in summands(node):
                found = compat.flex.scattered(item)
                _require(found is not None or not (buffer.shape or has_scatter(item)), "a gradient has an unknown form")
                indices, values = found or ((), item)
                names = _JOINT, self.score_buffers
                texts = [str(self._function(_graph_of(joint, part), *names)) for part in (values, *indices)]
                terms.append((len(sums), texts[0], tuple(texts[1:])))
            sums[place] = self.low.buffer(buffer.shape, "float32", name=f"{self.node.name}_of_{place}")
        return tuple(terms), sums

    def _given(self) -> list[Any]:
        """Return the arguments that both have."""
        blocks = compat.flex.tables(self.block_mask)
        score = self._function(self._graph(7 if self.is_backward else 3), (SCORE, *PLACES), self.score_buffers)
        mask = self._function(blocks.mask_mod.value, PLACES, self.mask_buffers)
        tables = (blocks.partial_counts, blocks.partial, blocks.whole_counts, blocks.whole)
        scale = self.args[10 if self.is_backward else 5]
        _require(isinstance(scale, (int, float)), "its scale is no number")
        factors = [self._rows(tensor) for tensor in self.args[:3]]
        buffers = [tuple(map(self._exact, _tensors(held))) for held in (self.score_buffers, self.mask_buffers)]
        return [*factors, tables, *buffers, str(score), str(mask), scale, (blocks.query_block, blocks.key_block)]

    def _exact(self, tensor: LazyTensor) -> View:
        """Return a tensor in memory, with the strides that functions were lowered for."""
        view = self.low.exact(tensor)
        pairs = zip(view.shape, view.strides, tensor.strides, strict=True)
        _require(
            all(size == 1 or own == torchs for size, own, torchs in pairs), "its function reads overlapping memory"
        )
        return view

    def _rows(self, tensor: LazyTensor) -> View:
        """Return a tensor in memory, whose last dimension is contiguous and is read 16 bytes at a time."""
        view = self.low.memory(tensor).view
        assert view is not None, "a stored tensor is in memory"
        steps = (*view.strides[:-1], view.offset)
        if view.strides[-1] == 1 and all(exact_quotient(step, _ALIGNED) is not None for step in steps):
            return view
        made = self.low.store(self.low.memory(tensor), _spaced_rows(tensor.shape)).view
        assert made is not None, "a stored tensor is in memory"
        return made

    def _graph(self, place: int) -> GraphModule:
        held = self.args[place]
        _require(isinstance(held, GraphAttribute) and isinstance(held.value, GraphModule), "its function is no graph")
        return held.value  # type: ignore[no-any-return]

    def _function(self, graph: GraphModule, names: Sequence[str], buffers: Sequence[Any]) -> PairFunction:
        """Return the function of a graph whose first arguments have these names, and whose others are captured."""
        _require(isinstance(graph, GraphModule), "its function is no graph")
        traced = _traced(graph, names, buffers)
        names = (*names, *(f"c{number}" for number in range(len(_tensors(buffers)))))
        program: Program = self.lower(traced, "function", positions_in_loops=True).program
        inputs = [name for name in program.inputs if name in program.table]
        loops = [step for step in program.steps if isinstance(step, Loop)]
        _require(not any(loop.outer or loop.inner for loop in loops), "its function combines elements of a tensor")
        _require(len(loops) == len(program.steps), f"its function calls {_library_call(program)}")
        _require(len(inputs) == len(names), "its function holds tensors")
        (result,) = program.outputs
        _require(isinstance(result, View), "its function does not depend on the score")
        assert isinstance(result, View), "as is required"
        dtype = program.table[result.buffer].dtype
        found = _joined(loops, dict(zip(inputs, names, strict=True)), result, dtype)
        return replace(found, body=tuple(map(_unrounded, found.body))) if GRADIENT in names else found


def _spaced_rows(shape: Shape) -> Shape:
    """Return strides of rows one after another, each of which starts at a multiple of 16 bytes."""
    width = -(-int(shape[-1]) // _ALIGNED) * _ALIGNED  # type: ignore[arg-type]
    return (*(as_size(as_index(step) * width) for step in contiguous(shape[:-1])), 1)


def _graph_of(graph: GraphModule, result: Node) -> GraphModule:
    """Return a graph that has another node's value as its result."""
    found, copies = Graph(), dict[Node, Node]()
    found.graph_copy(graph.graph, copies)
    found.output(copies[result])
    return GraphModule(graph, found)


def _captured_gradient(total: View | None, fake: Any) -> LazyTensor | None:
    """Return the gradient of what a function reads, by its sum in float32; without one it is 0."""
    if not isinstance(fake, torch.Tensor):
        return None
    dtype = dtype_name(fake.dtype)
    if total is None:
        return constant(0, shape_of(fake), dtype)
    whole = from_view(total, "float32")
    return make_lazy(whole.shape, dtype, lambda body, at: to_dtype(body, body.trace(whole, at), dtype), (whole,))


def _tensors(buffers: Sequence[Any]) -> list[LazyTensor]:
    """Return the tensors among what a function captures. TorchDynamo captures sizes, too, where they are symbols."""
    return [held for held in buffers if isinstance(held, LazyTensor)]


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise _Unfit(reason)


def _library_call(program: Program) -> str:
    return next((str(getattr(step, "op", "")) for step in program.steps if not isinstance(step, Loop)), "")


def _traced(graph: GraphModule, names: Sequence[str], captured: Sequence[Any]) -> GraphModule:
    """Return a graph's first result, traced again with scores and gradients in float32, as eager math has them.

    Of the numbers that it captures, those that are symbols and that it reads stay arguments. They are sizes, whose
    symbols are the program's.
    """
    places = graph.graph.find_nodes(op="placeholder")
    _require(len(places) == len(names) + len(captured), "its function has other arguments")
    given: list[Any] = [node.meta.get("val", held) for node, held in zip(places, (*names, *captured), strict=True)]
    for place, name in enumerate(names):
        if name in (SCORE, GRADIENT):
            given[place] = given[place].float()

    def first(*values: Any) -> Any:
        found = graph(*values)
        return found[0] if isinstance(found, (tuple, list)) else found

    try:
        with compat.inductor.outside_tracing():
            made: GraphModule = compat.aot.traced_again(first, given, table(fallback_random=False))
    except Exception as error:  # the user's function, with other dtypes
        raise _Unfit(f"{type(error).__name__} as its function is traced: {error}".splitlines()[0][:200]) from error
    made.graph.eliminate_dead_code()
    for node, held in zip(made.graph.find_nodes(op="placeholder")[len(names) :], captured, strict=True):
        if not isinstance(held, LazyTensor) and not node.users:
            made.graph.erase_node(node)
        elif not isinstance(held, LazyTensor):
            _require(isinstance(node.meta.get("val"), torch.SymInt), "its functions read numbers that are no sizes")
    return made


def _joined(loops: Sequence[Loop], names: dict[str, str], result: View, dtype: str) -> PairFunction:
    """Return the bodies of loops over nothing as one: what a loop stores, later ones use."""
    body: list[Value] = []
    stored: dict[str, Ref] = {}
    for loop in loops:
        number: dict[Ref, Ref] = {}
        for ref, value in enumerate(loop.body):
            if isinstance(value, Load) and value.buffer in stored:
                number[ref] = stored[value.buffer]
                continue
            number[ref] = len(body)
            body.append(_renamed(renumber(value, number), names))
        stored |= {store.buffer: number[store.value] for store in loop.stores}
    if result.buffer not in stored:  # an argument as it is
        body.append(Load(names[result.buffer], as_index(result.offset), dtype))
        return PairFunction(tuple(body), len(body) - 1)
    return PairFunction(tuple(body), stored[result.buffer])


def _unrounded(value: Value) -> Value:
    """Return a conversion to 16 bits as one to float32. Graphs of gradients have them where scores were of 16 bits."""
    rounds = isinstance(value, Apply) and value.op == "cast" and value.dtype in TENSOR_CORE_DTYPES
    return replace(value, dtype="float32") if rounds else value


def _renamed(value: Value, names: dict[str, str]) -> Value:
    return replace(value, buffer=names[value.buffer]) if isinstance(value, Load) else value
