"""Layers that are traced in another form than their own code: recurrent layers, experts, and SyncBatchNorm.

AOTAutograd would decompose recurrent layers into single time steps. They stay whole, as dcompile's operators.

While a model is traced, transformers calls `torch.nn.functional.grouped_mm` only for bfloat16 weights, since Inductor
supports no others. Otherwise it calls its own operator, which loops over the experts. Up to transformers 5.18 the
operator's backward reads the offsets on the host while AOTAutograd traces. That fails, and Dynamo breaks the graph at
each call. dcompile's operator has a backward that can be traced. It uses PyTorch's grouped GEMM if that supports the
operands. Otherwise it reads the offsets once for all calls that share them.

The loop (`experts_implementation="eager"`) iterates over the experts with tokens, which no tracer captures. The grouped
form is traced in its place. It computes the same values according to transformers, in the dtype of the loop's linear
layers, which is autocast's where that is on.

torch's function for SyncBatchNorm drops ranks with empty batches by a boolean index. Its result has a data-dependent
size, which breaks the graph in every layer. Its kernels exist only for GPUs. Here such ranks have weight zero. The
collectives are the same: one all-gather of statistics in the forward, one all-reduce of two sums for each channel in
the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.device_traits import traits_of
from dcompile.operators import rnn_ops
from dcompile.operators.grouped_ops import ALIGNMENT_BYTES, autocast_grouped_mm, grouped_mm
from dcompile.passes import GAIN, PassReport


def keep_recurrent_layers_whole(gm: Any) -> PassReport:
    """Replace torch's recurrent functions in a graph by dcompile's operators, in place."""
    found = 0
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in rnn_ops.KINDS or len(node.args) != 9 or node.kwargs:
            continue
        value, hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = node.args
        device = node.args[0].meta["example_value"].device.type
        if isinstance(hidden, torch.fx.Node) and name == "lstm":  # a packed sequence, or states in one object
            continue
        # the state of a GPU's generator is no tensor that a program could use
        if dropout and train and not traits_of(device).is_host:
            continue
        states = list(hidden) if name == "lstm" else [hidden]
        how = has_biases, layers, dropout, train, bidirectional, batch_first
        with gm.graph.inserting_before(node):
            arguments = (name, value, states, list(weights), *how)
            whole = gm.graph.call_function(torch.ops.dcompile_rnn.forward.default, arguments)
        whole.meta.update(node.meta)
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
        found += 1
    if not found:
        return PassReport()
    gm.recompile()
    return PassReport(found, (f"recurrent layers are library calls, whose backward runs the forward again: {found}",))


FALLBACK = "transformers.grouped_mm_fallback"


def group_experts(gm: GraphModule, autocast: bool = False) -> PassReport:
    """Replace calls of the fallback operator in a Dynamo graph and its subgraphs, in place.

    With `autocast`, the new calls follow autocast as linear layers do.
    """
    count = 0
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        calls = [node for node in module.graph.nodes if _is_fallback(node)]
        for node in calls:
            input, weight, offsets = _arguments(node)
            node.target = autocast_grouped_mm if autocast else grouped_mm
            node.args, node.kwargs = (input, weight, offsets), {}
        if calls:
            module.recompile()
        count += len(calls)
    notes = (f"{GAIN}{count} grouped matmuls of experts were captured with their gradients",)
    return PassReport(count, notes if count else ())


def _is_fallback(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).removesuffix(".default") == FALLBACK


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    names = ("input", "weight", "offs")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given["offs"]


class ExpertsInDtype:
    """View of a module of experts with its matrices in another dtype."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if name in MATRICES else value


MATRICES = frozenset(("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"))
"""Attributes that autocast casts in a linear layer."""


def group_loop(loop: Callable[..., Any], grouped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of a module of experts for tracing: `grouped` if it supports the matrices, else `loop`."""

    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        kind = hidden_states.device.type
        dtype = self.down_proj.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        wide = ALIGNMENT_BYTES // dtype.itemsize
        if any(size % wide for size in self.down_proj.shape[1:]):
            return loop(self, hidden_states, top_k_index, top_k_weights)
        experts = self if dtype == self.down_proj.dtype else ExpertsInDtype(self, dtype)
        return grouped(experts, hidden_states, top_k_index, top_k_weights)

    return forward


def sync_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    eps: float,
    momentum: float,
    group: Any,
    world: int,
) -> Any:
    """Normalize each channel of `x` (N, C, ...) over all ranks of `group`, times `weight`, plus `bias` (C, or None).

    Updates `running_mean` and `running_var` (C) as BatchNorm does. Statistics are float32 (float64 for float64).
    """
    size = x.numel() // x.shape[1]
    if size == 1 and world < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    y, mean, var, count = _SyncBatchNorm.apply(x, weight, bias, eps, group, world)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = var * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return y


class _SyncBatchNorm(torch.autograd.Function):
    """Return (result, mean, biased variance, elements of a channel over all ranks); only the result has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, group: Any, world: int) -> Any:
        channels, dims = x.shape[1], _all_but_channels(x)
        wide = _wide(x)
        own = x.numel() // channels
        if own:
            var, mean = torch.var_mean(wide, dims, correction=0)
        else:
            var = mean = wide.new_zeros(channels)
        count = wide.new_full((1,), float(own))
        gathered = compat.groups.traced_all_gather(torch.cat([mean, var, count]), group).view(world, 2 * channels + 1)
        means, variances, counts = gathered.split([channels, channels, 1], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean).square()) * counts).sum(0) / total
        invstd = torch.rsqrt(var + eps)
        y = (wide - _along(mean, x)) * _along(invstd, x)
        if weight is not None:
            y = y * _along(_as(weight, y.dtype), x)
        if bias is not None:
            y = y + _along(_as(bias, y.dtype), x)
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, invstd, total)
        ctx.mark_non_differentiable(mean, var, total)
        return _as(y, x.dtype), mean, var, total

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        x, weight, mean, invstd, total = ctx.saved_tensors
        dims = _all_but_channels(x)
        wide = _wide(grad)
        centred = _wide(x) - _along(mean, x)
        sums = torch.cat([wide.sum(dims), (wide * centred).sum(dims)])
        own_sum, own_product = sums.chunk(2)
        every_sum, every_product = compat.groups.traced_all_reduce(sums, ctx.group).chunk(2)
        slope = every_product / total * invstd.square()
        grad_x = (wide - _along(every_sum / total, x) - centred * _along(slope, x)) * _along(invstd, x)
        grad_weight = grad_bias = None
        if weight is not None:
            grad_x = grad_x * _along(_as(weight, grad_x.dtype), x)
            grad_weight = _as(own_product * invstd, weight.dtype)
            grad_bias = _as(own_sum, weight.dtype)
        return _as(grad_x, x.dtype), grad_weight, grad_bias, None, None, None


def _wide(x: Any) -> Any:
    """Convert to the dtype of statistics."""
    return x if x.dtype == torch.float64 else _as(x, torch.float32)


def _as(x: Any, dtype: Any) -> Any:
    """Convert if dtypes differ: where `to` returns its argument itself, torch 2.11 traces the gradient as zeros."""
    return x if x.dtype == dtype else x.to(dtype)


def _all_but_channels(x: Any) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(values: Any, x: Any) -> Any:
    """View one value for each channel so that it broadcasts against `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
