"""A tensor made of two, with all-gather extensions as FSDP2 takes them: each part is gathered, and cast behind that."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten


class Parts(torch.Tensor):
    """Each operation is done on both parts."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Parts:
        how = {name: getattr(first, name) for name in ("dtype", "device", "layout", "requires_grad")}
        return torch.Tensor._make_wrapper_subclass(cls, first.size(), first.stride(), first.storage_offset(), **how)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def of(name: str) -> Any:
            return tree_map_only(Parts, lambda value: getattr(value, name), (args, kwargs or {}))

        results = [function(*given, **named) for given, named in map(of, ("first", "second"))]
        leaves, form = tree_flatten(results[0])
        pairs = zip(leaves, tree_leaves(results[1]), strict=True)
        whole = [Parts(one, other) if isinstance(one, torch.Tensor) else one for one, other in pairs]
        return return_and_correct_aliasing(function, args, kwargs or {}, tree_unflatten(whole, form))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _meta: Any, _size: Any, _stride: Any) -> Parts:
        return Parts(inner["first"], inner["second"])

    def __repr__(self) -> str:
        return f"Parts({self.first}, {self.second})"

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        """What is gathered."""
        return (self.first, self.second), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        """What the gathered parameter is; from the second time on, its parts are written to."""
        if out is None:
            return Parts(*gathered).to(param_dtype), gathered
        if gathered[0].dtype != param_dtype:
            out.first.copy_(gathered[0])
            out.second.copy_(gathered[1])
        return None
