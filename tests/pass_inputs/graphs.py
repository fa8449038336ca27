"""Graphs for the rows of `DYNAMO_PASSES` and `JOINT_PASSES`: small functions, and how they are captured."""

from __future__ import annotations

import contextlib
import enum
import operator
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import chunked_cross_entropy
from dcompile.capture.passes.joint.saved_values import OFFLOADED
from dcompile.capture.passes.run_passes import GraphRequest
from dcompile.codegen.lower.decompositions.table import table
from dcompile.config import Config

aten = torch.ops.aten


@dataclass(frozen=True)
class GraphInput:
    """Makes a graph, and says what the pass is told besides."""

    graph: Callable[[], GraphModule]
    options: Mapping[str, Any] = field(default_factory=dict)
    planned_for: str | None = None
    sharded_parameters: Callable[[Any], Any] = lambda gm: ()

    def request(self) -> GraphRequest:
        """The request of a run with these settings."""
        config = Config.make(options={"receipt": False, **self.options})
        return GraphRequest(config, "graph0", self.planned_for, sharded_parameters=self.sharded_parameters)


# --- how graphs come about --------------------------------------------------------------------------------------------


def captured(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The graph that Dynamo captures."""
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, dynamic=False, fullgraph=True)(*args)
    (found,) = graphs
    return found


def joint(function: Callable[..., Any], *args: Any) -> GraphModule:
    """Forward and backward in one graph, as AOTAutograd traces them, with the first result's gradient taken."""
    graphs: list[GraphModule] = []

    class Found(Exception):
        """The graph is known: nothing has to be compiled."""

    def keep(gm: GraphModule, *_args: Any, **_how: Any) -> Any:
        graphs.append(gm)
        raise Found

    with contextlib.suppress(Found):
        aot_function(function, make_boxed_func, make_boxed_func, partition_fn=keep)(*args)
    (found,) = graphs
    return found


def traced(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The operators that a function calls, taken apart as for kernels of ours, without gradients."""
    return make_fx(function, table(), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def zeros(*shape: int, dtype: torch.dtype = torch.float32, learns: bool = False) -> torch.Tensor:
    """An input."""
    return torch.zeros(shape, dtype=dtype, requires_grad=learns)


# --- graphs that Dynamo captures --------------------------------------------------------------------------------------


def experts() -> GraphModule:
    """A call of transformers' operator, which need not be installed."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("rows", "weights", "offsets")]

    def fallback() -> None:
        """Stands for the operator, by its name."""

    class Operator:
        """Has the operator's name."""

        __name__ = "grouped_mm_fallback"
        __module__ = "transformers"

        def __call__(self, *args: Any) -> None:
            """Is never called."""

        def __str__(self) -> str:
            return "transformers.grouped_mm_fallback.default"

    graph.output(graph.call_function(Operator(), tuple(inputs)))
    return GraphModule({}, graph)


def recurrent() -> GraphModule:
    """A call of torch's GRU, as Dynamo captures it where that is allowed."""
    graph = torch.fx.Graph()
    value, hidden, *weights = [graph.placeholder(name) for name in ("x", "h", "w_ih", "w_hh", "b_ih", "b_hh")]
    value.meta["example_value"] = zeros(5, 2, 4)
    graph.output(graph.call_function(torch._VF.gru, (value, hidden, weights, True, 1, 0.0, True, False, False)))
    return GraphModule({}, graph)


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    """Traced once, however often it is called."""
    return x.sin() * 2


def nested(x: torch.Tensor) -> torch.Tensor:
    """A region that is called twice."""
    return region(region(x))


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    """A function that is run again in the backward."""
    return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False)


def changed_windows(x: torch.Tensor) -> torch.Tensor:
    """Windows of 4, which are changed in place."""
    y = x * 1
    y.unfold(1, 4, 4).mul_(2)
    return y


def doubled(x: torch.Tensor) -> torch.Tensor:
    """An image of twice the size."""
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A mask that hides what comes later."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(12, 12, dtype=torch.bool).tril())


def grouped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two heads of keys and values for six of queries."""
    k, v = (x[:, :, None].expand(2, 2, 3, *x.shape[2:]).reshape(2, 6, *x.shape[2:]) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def head(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a linear layer's result."""
    return F.cross_entropy(F.linear(hidden, weight), target)


def sparse_attention(size: int = 128) -> GraphModule:
    """FlexAttention whose blocks' sides are a symbol, as torch 2.11 captures it with `dynamic=True`."""
    graph, environment = torch.fx.Graph(), ShapeEnv()
    tensors = [graph.placeholder(name) for name in ("q", "k", "v", "counts", "places", "score", "mask")]
    side = graph.placeholder("side")
    symbol = environment.create_symbol(size, ConstantSource("side"), dynamic_dim=DimDynamic.DYNAMIC)
    side.meta["example_value"] = environment.create_symintnode(symbol, hint=size)
    q, k, v, counts, places, score, mask = tensors
    table = (512, 512, counts, places, *(None,) * 6, side, side, mask)
    graph.output(graph.call_function(flex_attention, (q, k, v, score, table, 0.25, {}, (), ())))
    return GraphModule({}, graph)


TARGET = torch.zeros(6, dtype=torch.int64)
DYNAMO_INPUTS: Mapping[str, GraphInput] = {
    "inline_nested_regions": GraphInput(lambda: captured(nested, zeros(4))),
    "group_experts": GraphInput(experts),
    "keep_recurrent_layers_whole": GraphInput(recurrent),
    "specialize_block_sizes": GraphInput(sparse_attention),
    "view_unfold_by_slices": GraphInput(lambda: captured(changed_windows, zeros(3, 12))),
    "gather_upsampling_gradients": GraphInput(
        lambda: captured(doubled, zeros(1, 2, 4, 4, learns=True)), planned_for="cuda"
    ),
    "recognize_causal_masks": GraphInput(lambda: captured(masked_attention, *(zeros(2, 3, 12, 8) for _ in range(3)))),
    "decompose_decode_attention": GraphInput(
        lambda: captured(grouped_attention, zeros(2, 6, 1, 8), zeros(2, 2, 10, 8), zeros(2, 2, 10, 8))
    ),
    "skip_masked_attention": GraphInput(
        lambda: captured(windowed_attention, *(zeros(1, 2, 2048, 16) for _ in range(3)))
    ),
    "use_grouped_query_attention": GraphInput(
        lambda: captured(grouped_attention, *(zeros(2, heads, 8, 16, dtype=torch.bfloat16) for heads in (6, 2, 2))),
        planned_for="cuda",
    ),
    "chunk_losses": GraphInput(
        lambda: captured(head, zeros(6, 8, learns=True), zeros(70, 8, learns=True), TARGET), {"chunked_loss": 2}
    ),
    "compute_loss_gradient_in_forward": GraphInput(
        lambda: captured(F.cross_entropy, zeros(6, 1500, learns=True), TARGET)
    ),
    "inline_checkpoints": GraphInput(lambda: captured(checkpointed, zeros(4, learns=True)), {"layers_once": True}),
}
"""By name of the pass."""


# --- joint graphs -----------------------------------------------------------------------------------------------------


def product_of_sizes() -> GraphModule:
    """A size as the product of three, which torch writes as one call."""
    graph = torch.fx.Graph()
    sizes = [graph.placeholder(name) for name in ("s0", "s1", "s2")]
    for number, size in enumerate(sizes):
        size.meta["val"] = number + 2
    graph.output(graph.call_function(operator.mul, tuple(sizes)))
    return GraphModule({}, graph)


def freed() -> GraphModule:
    """An input that is written and freed again, as a gathered parameter, the way AOTAutograd notes it."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_function(aten.mul.Tensor, (x, w))
    graph.call_function(torch.ops.inductor.resize_storage_bytes_.default, (y, 0))
    graph.call_function(aten.copy_.default, (x, y))
    graph.output((graph.call_function(aten.sin.default, (w,)),))
    return GraphModule({}, graph)


def counted(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A buffer that is changed, and what the backward needs of it."""
    n.add_(1)
    return x * n


def enlarged(x: torch.Tensor) -> torch.Tensor:
    """An image in 16 bits, which torch enlarges in 32."""
    places = torch.arange(8) // 2
    return aten._unsafe_index(x.to(torch.float32), [None, None, places[:, None], places]).to(x.dtype)


def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A convolution and what follows it."""
    return torch.conv2d(x, w, padding=1).relu()


def heard(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Features over time, with their position, normalized for each point of time."""
    return F.layer_norm(x.permute(0, 2, 1) + places, (32,))


def sorted_rows(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Rows in the order of their keys."""
    return x[keys.sort()[1]]


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Dropout, which is taken apart to random numbers of ours."""
    return aten.native_dropout(x, 0.4, True)[0]


def gated(x: torch.Tensor) -> torch.Tensor:
    """Values and their gate, of one result: the gate begins at 20 bytes."""
    values, gate = x.exp().split([5, 1], 1)
    return values * gate


def drawn_again() -> GraphModule:
    """The library's random numbers in a checkpointed function, as AOTAutograd marks them."""
    gm = joint(lambda x: x * torch.poisson(x), learning(4))
    for node in gm.graph.find_nodes(op="call_function", target=aten.poisson.default):
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return gm


class Policy(enum.Enum):
    """What `CheckpointPolicy` has in newer versions than torch 2.11."""

    MUST_CPU_OFFLOAD = 4


def offloaded() -> GraphModule:
    """A function of which selective checkpointing offloads a value."""
    gm = joint(lambda x, w: (x @ w).tanh().sin(), learning(4, 3), learning(3, 2))
    for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
        node.meta["recompute"] = Policy.MUST_CPU_OFFLOAD
    return gm


def chunked(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss by two parts of the classes."""
    settings: dict[str, Any] = {"dtype": torch.float32, "result": torch.float32, "grad": True, "ignore_index": -100}
    settings |= {"reduction": "mean", "label_smoothing": 0.0}
    return chunked_cross_entropy(hidden, weight, None, target, None, chunks=2, by_rows=False, begun=0, **settings)


def windowed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention to the last 64 positions."""
    at = torch.arange(query.shape[2])
    near = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 64)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=near)


def weighted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention written out, with its softmax in float32."""
    return F.softmax(query @ key.mT, -1, dtype=torch.float32).to(value.dtype) @ value


def rotated(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A rotary embedding by complex numbers."""
    return torch.view_as_real(torch.view_as_complex(x.view(2, 3, 4, 2)) * factors[None]).flatten(-2)


def biased(bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Attention's weights, with a bias for each head and key."""
    scores = torch.baddbmm(bias, query, key, alpha=0.5).view(2, 2, 8, 8)
    return F.softmax(scores, -1, dtype=torch.float32)


def first_input(gm: GraphModule) -> Any:
    """The first placeholder."""
    return gm.graph.find_nodes(op="placeholder")[:1]


def learning(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An input with a gradient."""
    return zeros(*shape, dtype=dtype, learns=True)


JOINT_INPUTS: Mapping[str, GraphInput] = {
    "multiply_pairwise": GraphInput(product_of_sizes),
    "assign_rng_keys": GraphInput(lambda: traced(dropped, zeros(8, 6))),
    "resize_only_inputs": GraphInput(freed),
    "copy_changed_inputs": GraphInput(lambda: joint(counted, learning(4), zeros(4))),
    "save_as_strided_views": GraphInput(lambda: joint(lambda x: x.as_strided((2, 3), (1, 4)).sin(), learning(12))),
    "remove_clones": GraphInput(lambda: joint(lambda x: x.relu().clone().sin(), learning(3, 4))),
    "pair_complex_numbers": GraphInput(lambda: traced(rotated, zeros(2, 3, 8), zeros(3, 4, dtype=torch.complex64))),
    "separate_broadcast_addends": GraphInput(
        lambda: traced(biased, *(zeros(*size, dtype=torch.bfloat16) for size in ((4, 1, 8), (4, 8, 6), (4, 6, 8))))
    ),
    "gather_permutation_gradients": GraphInput(lambda: joint(sorted_rows, learning(6, 3), zeros(6))),
    "pad_matmuls": GraphInput(
        lambda: traced(torch.mm, zeros(640, 512, dtype=torch.bfloat16), zeros(512, 1001, dtype=torch.bfloat16))
    ),
    "narrow_gathers": GraphInput(lambda: traced(enlarged, zeros(2, 3, 4, 4, dtype=torch.bfloat16))),
    "use_channels_last": GraphInput(lambda: traced(convolved, zeros(2, 8, 6, 6), zeros(16, 8, 3, 3))),
    "pad_groups": GraphInput(
        lambda: traced(
            lambda x, w: torch.conv2d(x.movedim(-1, 1), w.movedim(-1, 1), groups=2),
            zeros(2, 6, 6, 48, dtype=torch.bfloat16),
            zeros(48, 3, 3, 24, dtype=torch.bfloat16),
        )
    ),
    "keep_rows_contiguous": GraphInput(lambda: traced(heard, zeros(2, 32, 40), zeros(40, 32))),
    "drop_saved_pool_inputs": GraphInput(lambda: joint(lambda x: F.avg_pool2d(x, 2), learning(2, 3, 4, 4))),
    "offload_by_policy": GraphInput(offloaded),
    "recompute_softmax": GraphInput(
        lambda: joint(weighted, *(learning(8, 256, 8, dtype=torch.bfloat16) for _ in range(3)))
    ),
    "recompute_loss_chunks": GraphInput(lambda: joint(chunked, learning(6, 4), learning(10, 4), TARGET)),
    "save_random_values": GraphInput(drawn_again),
    "recompute_misaligned_views": GraphInput(lambda: joint(gated, learning(2, 6))),
    "recompute_views": GraphInput(
        lambda: joint(lambda w, x: x @ w.t(), learning(3, 4), learning(2, 4)), sharded_parameters=first_input
    ),
}
"""By name of the pass."""


# --- text -------------------------------------------------------------------------------------------------------------


def graph_text(gm: GraphModule) -> str:
    """A line for each node: what it computes, what tracing says of its result, and marks for the partitioner.

    Behind them the graphs that it holds.
    """
    bodies = [(name, part) for name, part in gm.named_children() if isinstance(part, GraphModule)]
    texts = [f"{name}:\n{textwrap.indent(graph_text(part), '  ')}" for name, part in bodies]
    return "\n".join([*map(_node_text, gm.graph.nodes), *texts])


def _node_text(node: Any) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    said = ", ".join(filter(None, (_value_text(node), _mark_text(node))))
    said = f"  # {said}" if said else ""
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name}{'' if node.op == 'placeholder' else f' = {node.target}'}{said}"
    arguments = [repr(arg) for arg in node.args] + [f"{name}={value!r}" for name, value in node.kwargs.items()]
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else target
    return f"{node.name} = {'.' if node.op == 'call_method' else ''}{target}({', '.join(arguments)}){said}"


def _value_text(node: Any) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return ""
    strides = "" if value.is_contiguous() else f" strides {[*value.stride()]}"
    return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}{strides}"


def _mark_text(node: Any) -> str:
    policy = node.meta.get("recompute")
    where = ", in host memory" if OFFLOADED in node.meta else ""
    return "" if policy is None else policy.name.lower().replace("_", " ") + where
