"""The table of ATen ops that AOTAutograd decomposes before lowering.

List operations, as optimizers use them, become one operation for each tensor, which fuse. Some backward ops have
another decomposition for tensors without elements. A rank whose batch is empty must exchange what other ranks do. So
its results depend on the same arguments as theirs: zeros out of nothing would have neither a gradient behind them nor
need of a sharded weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from dcompile import compat
from dcompile.codegen.lower import registry
from dcompile.codegen.lower.decompositions import aten as decompositions_aten
from dcompile.codegen.lower.decompositions import embedding_bag, grid_sample, random, symbolic_scalars
from dcompile.device_traits import traits_of

_ALSO = (
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "native_batch_norm", "_batch_norm_with_update_functional", "batch_norm_backward", "native_group_norm",
    "elu", "elu_backward", "hardsigmoid", "hardswish", "hardswish_backward", "hardsigmoid_backward", "softplus",
    "log_sigmoid_forward", "mish", "mish_backward", "glu", "sgn", "heaviside", "nan_to_num", "dist",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
    "nll_loss2d_forward", "nll_loss2d_backward", "linspace", "logspace", "eye", "std_mean", "nansum", "count_nonzero",
    "upsample_nearest2d", "rot90", "xlogy", "diag_embed",
    "special_xlog1py", "erfc", "copysign", "dot", "mv", "addmv", "addr", "split_with_sizes_copy",
    "rrelu_with_noise_backward",
    # decomposed: the partitioner saves a row's maximum and sum rather than all logits again
    "_log_softmax",
)  # fmt: skip
"""Ops decomposed in addition to torch's core set: into pointwise operations and reductions."""


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    also = [getattr(torch.ops.aten, name) for name in _ALSO if hasattr(torch.ops.aten, name)]
    found, whole = compat.aot.decompositions(also), registry.whole_ops() - {*also}
    own = {
        torch.ops.aten.native_dropout.default: native_dropout,
        torch.ops.aten.convolution.default: convolution,
        torch.ops.aten.convolution_backward.default: convolution_backward,
        torch.ops.aten.nll_loss_backward.default: nll_loss_backward,
        torch.ops.aten.nll_loss2d_backward.default: nll_loss_backward,
        **foreach_table(),
        **decompositions_aten.table(),
        **embedding_bag.table(),
        **grid_sample.table(),
    }
    return {op: rule for op, rule in found.items() if getattr(op, "overloadpacket", op) not in whole} | own


def table(*, fallback_random: bool = False) -> dict[Any, Any]:
    """Return op to decomposition, for AOTAutograd, as a copy that it may change.

    With `fallback_random` ATen draws every random number, as in eager mode.
    """
    own = random.table()
    found = {**_table(), **symbolic_scalars.table(), torch.ops.aten.ldexp.Tensor: ldexp}
    found[torch.ops.aten.as_strided_scatter.default] = as_strided_scatter
    index_add, unpool = torch.ops.aten.index_add.default, torch.ops.aten.max_unpool2d.default
    norm = torch.ops.aten.native_group_norm.default
    found[norm] = decompositions_aten.by_parts(found[norm])
    found[index_add] = decompositions_aten.fitting_slices(found[index_add])
    found[unpool] = decompositions_aten.laid_out_as_input(found[unpool])
    aten = torch.ops.aten
    for pad in (aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default):
        found[pad] = decompositions_aten.replication_pad(found[pad])
    if fallback_random:
        drawn = own.keys() - {torch.ops.aten.native_dropout.default, torch.ops.aten.rrelu_with_noise_functional.default}
        found = {op: rule for op, rule in found.items() if op not in drawn}
    else:
        found |= own
    for packet in (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward):
        found[packet.default] = instead_of(found[packet.default], loss_backward)
    norm_backward = aten.native_layer_norm_backward.default
    found[norm_backward] = instead_of(found[norm_backward], layer_norm_backward)
    return found


def with_random(found: dict[Any, Any], *, fallback_random: bool = False) -> dict[Any, Any]:
    """Return another compiler's table with dcompile's random operations, which stay outside its regions.

    With `fallback_random` ATen draws random numbers, as in eager mode.
    """
    own = random.table()
    left = {op: rule for op, rule in found.items() if op not in own}
    return left if fallback_random else left | own


def ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Compute ldexp as eager does: the power of two in the default dtype, so that it may overflow."""
    return x * torch.pow(2.0, exponent)


def as_strided_scatter(
    x: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    """Return `values` if they replace every element in order, as in functionalized `squeeze_` and `resize_`."""
    if offset or list(size) != list(values.shape) or x.storage_offset() or values.numel() != x.numel():
        return NotImplemented
    places = torch.empty_strided(size, stride, device="meta")
    return values.reshape(x.shape).clone() if places.is_contiguous() and x.is_contiguous() else NotImplemented


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> Any:
    """Add the bias separately on GPUs, where cuDNN's caller would launch a kernel for it: here it fuses."""
    if bias is None or not traits_of(x.device.type).aten.adds_bias_apart:
        return NotImplemented
    found = torch.ops.aten.convolution.default(x, weight, None, *how)
    return found + bias.view(-1, *[1] * (x.dim() - 2))


def convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, *how: Any) -> Any:
    """Sum the gradient of the bias in a loop, which fuses with the one that computes `grad`.

    The library reads `grad` again: on CPUs in places on one core, on GPUs far below their bandwidth. Where filters are
    converted, the gradient of large depthwise ones is a separate call, as it is inside the library. Its workspace is
    large, and it can run later (`schedule/memory/reorder_for_peak.py`). `how` ends with the mask of requested
    gradients.
    """
    *more, mask = how
    groups, traits = more[-1], traits_of(grad.device.type).aten
    large = weight.shape[0] == groups and weight.shape[1] == 1 and weight.numel() > 9 * groups
    apart = mask[0] and mask[1] and large and traits.converts_filters
    if not traits.sums_bias_gradient_apart or not (mask[2] or apart):
        return NotImplemented

    def gradients(*wanted: bool) -> Any:
        return torch.ops.aten.convolution_backward.default(grad, x, weight, bias, *more, [*wanted, False])

    sums = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    if apart:
        return gradients(True, False)[0], gradients(False, True)[1], sums
    rest = gradients(mask[0], mask[1]) if mask[0] or mask[1] else (None, None)
    return rest[0], rest[1], sums


def native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Decompose dropout into ATen's mask and a multiplication: it draws from the generator as eager does.

    On a GPU eager has one kernel for both, which draws other numbers than one for the mask alone, so dropout is left
    whole. It is also left whole for arguments that are not row-major: `bernoulli` draws in row-major order, eager in
    the argument's memory order.
    """
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    if not traits_of(x.device.type).aten.draws_dropout_masks or not compat.sizes.is_known_contiguous(x):
        return NotImplemented
    mask = torch.ops.aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1 - p)
    return x * mask * (1 / (1 - p)), mask


def nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Compare every class with the target: no scatter, and no bounds to check again, since the forward did.

    Other classes get zeros even if the gradient is infinite. A row's sum of this is one element of it.
    """
    dim = 0 if x.dim() < 2 else 1
    if reduction == _MEAN:
        grad = grad / total_weight
    if x.dim() == 1 and target.dim() > 0:
        target = target[0]
    along = [-1 if d == dim else 1 for d in range(x.dim())]
    if x.dim() > grad.dim() > 0:
        grad = grad.unsqueeze(dim)
    target = target.unsqueeze(dim)
    if weight is not None:
        grad = grad * weight.view(along)
    value = torch.where(target != ignore_index, -grad, 0)
    classes = torch.arange(x.shape[dim], device=x.device).view(along)
    return torch.where(classes == target, value, 0).to(x.dtype)


_MEAN = 1
"""ATen's number of torch.nn.functional's reduction="mean"."""


_UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma",
    "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
)  # fmt: skip
_SAME_NAME = {
    **dict.fromkeys(_UNARY, ("default",)),
    **dict.fromkeys(("add", "sub", "mul", "div"), ("Scalar", "List", "ScalarList", "Tensor")),
    "pow": ("Scalar", "List", "ScalarList", "ScalarAndTensor"),
    "lerp": ("Scalar", "List", "ScalarList"),
    "addcmul": ("Scalar", "ScalarList"),
    "addcdiv": ("Scalar", "ScalarList"),
    "maximum": ("List",),
    "minimum": ("List",),
}
_OTHER_NAME = {
    ("clamp_min", "List"): "maximum", ("clamp_max", "List"): "minimum",
    ("clamp_min", "Scalar"): "clamp_min", ("clamp_max", "Scalar"): "clamp_max",
    ("maximum", "Scalar"): "clamp_min", ("minimum", "Scalar"): "clamp_max",
    ("norm", "Scalar"): "linalg_vector_norm",
}  # fmt: skip
_KEYWORDS = {"alpha": "alpha", "value": "value", "scalars": "value", "dtype": "dtype"}
"""Keyword arguments of the single-tensor operation, by their names in the list operation."""


def foreach_table() -> dict[Any, Callable[..., list[torch.Tensor]]]:
    """Return each list operation that has a single-tensor counterpart, with its decomposition."""
    names = {(name, overload): name for name, overloads in _SAME_NAME.items() for overload in overloads}
    found = {}
    for (name, overload), single in (names | _OTHER_NAME).items():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        if packet is not None and overload in packet.overloads():
            op = getattr(packet, overload)
            found[op] = _each(op, getattr(torch.ops.aten, single))
    return found


def _each(op: Any, single: Any) -> Callable[..., list[torch.Tensor]]:
    """Apply `single` to each element of the list operation `op`'s lists; other arguments go to every call."""
    parameters = [argument.name for argument in op._schema.arguments]
    by_keyword = _KEYWORDS if "addc" in op.__name__ else {n: k for n, k in _KEYWORDS.items() if n != "scalars"}

    def each(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        count = next(len(value) for value in given.values() if isinstance(value, (list, tuple)))
        results = []
        for number in range(count):
            one = {name: v[number] if isinstance(v, (list, tuple)) else v for name, v in given.items()}
            rest = [value for name, value in one.items() if name not in by_keyword]
            results.append(single(*rest, **{by_keyword[name]: v for name, v in one.items() if name in by_keyword}))
        return results

    return each


def instead_of(rule: Callable[..., Any], without_elements: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's `rule` of a backward to call `without_elements` where the forward's input is known to be empty."""

    def chosen(grad: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen_rule = without_elements if compat.sizes.is_known_empty(x) else rule
        return chosen_rule(grad, x, *args, **kwargs)

    return chosen


def loss_backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor:
    """Return the empty gradient of a loss. Torch's decompositions divide by the number of elements."""
    return ((x - target) * grad).to(x.dtype)


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return an empty gradient, and sums over no rows."""
    rows = list(range(x.dim() - len(normalized_shape)))
    normal = (x - mean) * rstd

    def summed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return (value.sum(rows) if rows else value).to(like.dtype)

    return (
        (normal * (grad if weight is None else grad * weight)).to(x.dtype) if mask[0] else None,
        summed(grad * normal, weight) if mask[1] and weight is not None else None,
        summed(grad, bias) if mask[2] and bias is not None else None,
    )
