"""Decompositions of ATen's random operations into dcompile's (`random_ops.py`), for AOTAutograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dcompile.codegen.lower.decompositions import aten as decompositions_aten
from dcompile.device_traits import HOST, traits_of
from dcompile.operators import random_ops

ours = torch.ops.dcompile_random
aten = torch.ops.aten


def _is_ours(device: torch.device) -> bool:
    """Whether a target spells Philox: elsewhere random numbers stay ATen's."""
    return traits_of(device.type).is_compiled


def _float(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which uniform and normal numbers are generated, or None."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return dtype if str(dtype).removeprefix("torch.") in random_ops.DIGITS else None


def _made(op: Any, size: Any, dtype: torch.dtype | None, device: Any, layout: Any = None, generator: Any = None) -> Any:
    device = torch.device(HOST if device is None else device)
    dtype = _float(dtype)
    if dtype is None or generator is not None or not _is_ours(device) or layout not in (None, torch.strided):
        return NotImplemented
    return op(size, dtype, device)


def _rand(op: Any) -> Callable[..., Any]:
    def decomposition(
        size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> Any:
        return NotImplemented if pin_memory else _made(op, size, dtype, device, layout)

    return decomposition


def _like(op: Any) -> Callable[..., Any]:
    def decomposition(
        x: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Any:  # fmt: skip
        made = _made(op, x.shape, dtype or x.dtype, device or x.device, layout)
        if made is NotImplemented or memory_format not in (None, torch.preserve_format):
            return made if made is NotImplemented else made.contiguous(memory_format=memory_format)
        return _as(made, x)

    return decomposition


def _as(values: Any, like: Any) -> Any:
    """Return `values` in the layout of `like`."""
    if like.is_contiguous():
        return values
    like = torch.empty_like(like, memory_format=torch.preserve_format)  # dense, where `like` may overlap or have gaps
    order = sorted(range(like.dim()), key=lambda dim: -like.stride(dim))
    back = [order.index(dim) for dim in range(like.dim())]
    return values.permute(order).contiguous().permute(back)


def _from(op: Any, finish: Callable[..., Any]) -> Callable[..., Any]:
    """Decompose the functional form of an in-place operation: generate numbers and transform them."""

    def decomposition(x: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        compute = decompositions_aten.compute_dtype(x) if op is ours.normal else x.dtype
        made = _made(op, x.shape, compute, x.device, generator=generator)
        return made if made is NotImplemented else _as(finish(made, *args, **kwargs).to(x.dtype), x)

    return decomposition


def _uniform(u: Any, low: float = 0.0, high: float = 1.0) -> Any:
    return u * (high - low) + low


def _normal(z: Any, mean: float = 0.0, std: float = 1.0) -> Any:
    return z * std + mean


def _exponential(u: Any, rate: float = 1.0) -> Any:
    # never 0, as in eager: callers may take the logarithm
    return torch.clamp(torch.log(1 - u), max=-torch.finfo(u.dtype).eps / 2) * (-1 / rate)


def _geometric(u: Any, p: float) -> Any:
    return torch.clamp(torch.ceil(torch.log1p(-u) / math.log1p(-p)), min=1) if p < 1 else torch.ones_like(u)


def _cauchy(u: Any, median: float = 0.0, sigma: float = 1.0) -> Any:
    return median + sigma * torch.tan(math.pi * (u - 0.5))


def _log_normal(z: Any, mean: float = 1.0, std: float = 2.0) -> Any:
    return torch.exp(z * std + mean)


def _bernoulli_p(x: Any, p: float = 0.5, generator: Any = None) -> Any:
    if generator is not None or not _is_ours(x.device):
        return NotImplemented
    return _as(ours.less(x.shape, p, x.device).to(x.dtype), x)


def _bernoulli(x: Any, p: Any = None, generator: Any = None) -> Any:
    """Draw with probabilities from a tensor: `x` itself, or `p` where that is given."""
    shares = x if p is None else p.expand(x.shape)
    compute = torch.float64 if shares.dtype == torch.float64 else torch.float32
    made = _made(ours.uniform, x.shape, compute, x.device, generator=generator)
    return made if made is NotImplemented else _as((made < shares).to(x.dtype), x)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    if not _is_ours(x.device):
        return NotImplemented
    mask = ours.less(x.shape, 1 - p, x.device)
    return x * mask * (1 / (1 - p)), mask


def _rrelu(
    x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Return (result, noise): noise is the factor of each element, 1 where it is positive."""
    if not training:
        return decompositions_aten.rrelu(x, noise, lower, upper)
    made = _made(ours.uniform, x.shape, x.dtype, x.device, generator=generator)
    if made is NotImplemented:
        return made
    slope = torch.where(x <= 0, _uniform(_as(made, x), lower, upper), 1).to(x.dtype)
    return x * slope, slope


def _integers(low: int, high: int, size: Any, dtype: Any, device: Any) -> Any:
    device = torch.device(HOST if device is None else device)
    span = high - low
    if not _is_ours(device) or not 0 < span < 2**62:
        return NotImplemented
    # multiply and shift where that needs no division: as even as eager's remainder
    share = aten.bitwise_right_shift.Tensor_Scalar
    drawn = share(ours.bits(size, 32, device) * span, 32) if span < 2**31 else ours.bits(size, 63, device) % span
    return (drawn + low).to(torch.int64 if dtype is None else dtype)


def _randint(*args: Any, dtype: Any = torch.int64, device: Any = None, **_: Any) -> Any:
    low, high, size = args if len(args) == 3 else (0, *args)
    return _integers(low, high, size, dtype, device)


def _randint_like(x: Any, *bounds: int, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    made = _integers(low, high, x.shape, dtype or x.dtype, device or x.device)
    return made if made is NotImplemented else _as(made, x)


def _random_from(x: Any, low: int, high: int | None, generator: Any = None) -> Any:
    if high is None or generator is not None:
        return NotImplemented
    made = _integers(low, high, x.shape, x.dtype, x.device)
    return made if made is NotImplemented else _as(made, x)


def _random_to(x: Any, high: int, generator: Any = None) -> Any:
    return _random_from(x, 0, high, generator)


def table() -> dict[Any, Callable[..., Any]]:
    """Return ATen op to decomposition."""
    return {
        aten.native_dropout.default: _native_dropout,
        aten.bernoulli.default: _bernoulli,
        aten.bernoulli.Tensor: _bernoulli,
        aten.bernoulli.p: _bernoulli_p,
        aten.rand.default: _rand(ours.uniform),
        aten.rand_like.default: _like(ours.uniform),
        aten.randn.default: _rand(ours.normal),
        aten.randn_like.default: _like(ours.normal),
        aten.uniform.default: _from(ours.uniform, _uniform),
        aten.normal_functional.default: _from(ours.normal, _normal),
        aten.exponential.default: _from(ours.uniform, _exponential),
        aten.geometric.default: _from(ours.uniform, _geometric),
        aten.cauchy.default: _from(ours.uniform, _cauchy),
        aten.log_normal.default: _from(ours.normal, _log_normal),
        aten.rrelu_with_noise_functional.default: _rrelu,
        aten.randint.default: _randint,
        aten.randint.low: _randint,
        aten.randint_like.default: _randint_like,
        aten.randint_like.low_dtype: _randint_like,
        getattr(aten.random, "from"): _random_from,  # a keyword of Python
        aten.random.to: _random_to,
    }
