"""TorchInductor as a compiler of parts of a graph: regions, and single calls of FlexAttention.

FlexAttention's kernels are templates of TorchInductor's. `dcompile` has no rule for it yet, and its eager form computes
all scores, masked ones included.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import tracing
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils._pytree import tree_leaves

FLEX = ("flex_attention", "flex_attention_backward")
"""Names of higher-order operators."""


def is_flex(target: Any) -> bool:
    """Whether an operator is FlexAttention, forward or backward."""
    return getattr(target, "namespace", "") == "higher_order" and str(target) in FLEX


def compiled_flex(node: Node, fixed: Mapping[Node, Any]) -> Callable[..., Any] | str:
    """Function of the node's inputs, without those in `fixed`, that returns its results as a flat list.

    Returns the reason instead, if TorchInductor has no kernel for it: on the CPU, or after an error of its own.
    """
    values = [n.meta.get("val") for n in node.all_input_nodes if n not in fixed]
    if not any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values):
        return "not on a GPU"
    try:
        return _compiled(_graph_of_one(node, fixed), values)
    except Exception as error:  # whatever fails there, the eager form is correct
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _graph_of_one(node: Node, fixed: Mapping[Node, Any]) -> GraphModule:
    """Graph of this call alone."""
    graph, root = Graph(), torch.nn.Module()
    given: dict[Node, Node] = {}
    for place, source in enumerate(n for n in node.all_input_nodes if n not in fixed):
        given[source] = graph.placeholder(f"input{place}")
        given[source].meta["val"] = source.meta.get("val")
    for place, (source, value) in enumerate(fixed.items()):
        setattr(root, f"part{place}", _decomposed(value) if isinstance(value, GraphModule) else value)
        given[source] = graph.get_attr(f"part{place}")
    arguments = map_arg((node.args, node.kwargs), lambda n: given[n])
    call = graph.call_function(node.target, *arguments)  # type: ignore[arg-type]
    call.meta |= {"val": node.meta.get("val")}
    used = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    found: list[Node | None] = []
    for place, item in enumerate(node.meta["val"]):
        found += _leaves(graph, call, place, item, place in used)
    graph.output(tuple(found))
    return GraphModule(root, graph)


def _decomposed(part: GraphModule) -> GraphModule:
    """Decompose a function of scores or positions into operators that TorchInductor knows inside a kernel."""
    from torch._inductor.decomposition import select_decomp_table

    from dcompile.compat.aot import traced_again

    given = [node.meta["val"] for node in part.graph.nodes if node.op == "placeholder"]
    made: GraphModule = traced_again(part, given, select_decomp_table())
    return made


def _leaves(graph: Graph, whole: Node, place: int, value: Any, is_used: bool) -> list[Node | None]:
    """Leaves of one part of a result, in order; None for unused ones."""
    if not is_used:
        return [None] * len(tree_leaves(value))
    part = graph.call_function(operator.getitem, (whole, place))
    part.meta["val"] = value
    if not isinstance(value, (tuple, list)):
        return [part]
    return [leaf for n, item in enumerate(value) for leaf in _leaves(graph, part, n, item, True)]


def _compiled(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx_inner

    from dcompile.compat.sizes import adding_no_guards
    from dcompile.compat.tensors import in_memory_of_their_own, real_tensors

    # without the context of the surrounding graph, whose strides and guards do not concern this call
    with tracing(None):
        with real_tensors(), adding_no_guards(gm):
            inputs = in_memory_of_their_own(inputs)
        boxed: Any = compile_fx_inner(gm, inputs, cudagraphs=False)  # type: ignore[arg-type, call-arg, unused-ignore]

    def call(*values: Any) -> Any:
        return boxed([*values])

    return call


# --- regions ----------------------------------------------------------------------------------------------------------


def decompositions() -> dict[Any, Any]:
    """TorchInductor's decomposition table, which its lowering relies on."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Leave the context of the surrounding graph, whose strides and guards do not concern its parts."""
    with tracing(None):
        yield


def compile_region(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph that `decompositions` was applied to. The result takes its inputs as a list.

    It first runs torch.compile's passes for inference graphs. Results keep their strides.
    """
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner

    gm = _recursive_joint_graph_passes(gm)
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = [*range(len(returned))]
    compiled: Any = compile_fx_inner(gm, list(example_inputs), cudagraphs=False, is_inference=True)  # type: ignore[arg-type, call-arg, unused-ignore]

    def call(values: list[Any]) -> Any:
        return compiled(values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
