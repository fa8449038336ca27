"""A weight that is gathered as 8-bit floats, with FSDP2's all-gather extensions as float8 training has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.utils._pytree import tree_map_only

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
KEEPS = ("detach", "empty_like", "new_zeros", "slice", "copy_", "view", "as_strided", "_to_copy", "split", "clone")
"""Operations whose results are such weights, too: those with which FSDP2 shards a parameter."""
LAYOUTS = ("detach", "t", "transpose", "view", "as_strided")


def _wrapped(cls: Any, like: torch.Tensor, dtype: torch.dtype) -> Any:
    how = {"dtype": dtype, "device": like.device, "layout": like.layout, "requires_grad": like.requires_grad}
    return torch.Tensor._make_wrapper_subclass(cls, like.size(), like.stride(), like.storage_offset(), **how)


class Gathered(torch.Tensor):
    """8-bit floats and their scale; all but changes of layout compute with the quotients."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, scale: torch.Tensor, of: torch.dtype) -> Gathered:
        return _wrapped(cls, held, of)

    def __init__(self, held: torch.Tensor, scale: torch.Tensor, of: torch.dtype) -> None:
        self.held, self.scale, self.of = held, scale, of

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in LAYOUTS:
            first, *rest = args
            return Gathered(function(first.held, *rest, **kwargs or {}), first.scale, first.of)
        plain = tree_map_only(Gathered, lambda w: (w.held.float() / w.scale).to(w.of), (args, kwargs or {}))
        return function(*plain[0], **plain[1])

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["held", "scale"], self.of

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], of: torch.dtype, _size: Any, _stride: Any) -> Gathered:
        return Gathered(inner["held"], inner["scale"], of)

    def __repr__(self) -> str:
        return f"Gathered({self.held}, {self.scale})"

    __torch_function__ = torch._C._disabled_torch_function_impl


class Scaled(torch.Tensor):
    """A weight whose shards are sent times a scale, as 8-bit floats."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Any:
        return _wrapped(cls, inside, inside.dtype)

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside
        self._precomputed_scale: torch.Tensor | None = None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(Scaled, lambda value: value.inside, (args, kwargs or {}))
        result = function(*plain[0], **plain[1])
        keeps = function.overloadpacket.__name__ in KEEPS
        return tree_map_only(torch.Tensor, cls, result) if keeps else result

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], _meta: Any, _size: Any, _stride: Any) -> Any:
        return cls(inner["inside"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inside})"

    def scale(self, mesh: Any) -> torch.Tensor:
        """The scale of the whole weight, of which this is a shard."""
        amax = functional.all_reduce(self.inside.abs().max(), "MAX", mesh.get_group())
        return scale_of(functional.wait_tensor(amax))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """What is gathered."""
        given = self._precomputed_scale
        scale = self.scale(mesh) if given is None else given
        return ((self.inside.float() * scale).clamp(-LARGEST, LARGEST).to(FLOAT8),), (scale,)

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        """What the gathered parameter is; from the second time on, only its scale is new."""
        if out is not None:
            out.scale = metadata[0]
            return None
        return Gathered(gathered[0], metadata[0], param_dtype), gathered


class ScaledByPowers(Scaled):
    """Its scales are powers of two."""

    def scale(self, mesh: Any) -> torch.Tensor:
        return torch.exp2(torch.floor(torch.log2(super().scale(mesh))))


class Shifted(Scaled):
    """Sends more than what is scaled and cast."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        (sent,), metadata = super().fsdp_pre_all_gather(mesh)
        return ((sent.float() + 1).to(FLOAT8),), metadata


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The scale at which the largest magnitude is the largest 8-bit number."""
    return (LARGEST / amax.double().clamp(min=1e-12)).float()


def precompute_scales(module: nn.Module) -> None:
    """Compute all scales behind an optimizer's step, with one all-reduce, as users of float8 training do."""
    weights: list[Any] = [p for p in module.parameters() if isinstance(getattr(p, "_local_tensor", None), Scaled)]
    amax = torch.stack([weight._local_tensor.inside.abs().max() for weight in weights])
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX)
    for weight, scale in zip(weights, scale_of(amax), strict=True):
        weight._local_tensor._precomputed_scale = scale


class Layers(nn.Module):
    """Two blocks of a norm and two layers, whose weights are of a class; `rows` of the inner ones.

    Stock FSDP2 gathers bytes where a group has weights of several dtypes; Gloo takes no 8-bit floats.
    """

    def __init__(self, weight: Any, rows: int = 40, dtype: torch.dtype = torch.bfloat16, again: bool = False) -> None:
        super().__init__()
        self.again = again
        parts = [(nn.Linear(12, rows, bias=False), nn.Linear(rows, 12, bias=False)) for _ in range(2)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.RMSNorm(12), up, nn.SiLU(), down) for up, down in parts)
        self.to(dtype)
        for layer in (layer for part in parts for layer in part if weight is not None):
            layer.weight = nn.Parameter(weight(layer.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return x
