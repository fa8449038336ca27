"""FSDP2's all-gather extensions: parameters that say themselves what is gathered, and what becomes of it.

A parameter's class may have `fsdp_pre_all_gather`, which returns what this rank sends and metadata, and
`fsdp_post_all_gather`, which makes the parameter of what arrives and of the metadata. One kind is taken over: the shard
is multiplied by a scale and cast to 8-bit floats. torchao makes such parameters
(`Float8LinearConfig(enable_fsdp_float8_all_gather=True)`).

An extension is recognised by what it does and not by its name. It is tried on numbers in the shard's place, the same on
every rank, once with a scale in its attribute `_precomputed_scale` and once without. It must then send exactly the
bytes of `tensors.scaled_cast`, have the scale as the only tensor in its metadata, and find the scale of `scales_of`
itself.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dcompile.compat import absent_ranks
from dcompile.compat.tensors import is_wrapper, real_tensors, scaled_cast

PRECOMPUTED = "_precomputed_scale"
"""Attribute of a shard with the scale that the user has computed for it, or None."""
SMALLEST_AMAX = 1e-12
"""Least magnitude that a scale is computed of, so that zeros have one."""
TRIED_SIDE = 16
"""Size of each dimension of what extensions are tried on."""
TRIED_PAST_THE_LARGEST = 1.5
"""Extensions are tried with a scale at which some numbers become too large."""
SENT = ("torch.float8_e4m3fn", "torch.float8_e5m2")
"""Dtypes that shards are cast to."""
_KNOWN = "_dcompile_scaled_gather"
"""Attribute of FSDP's state of a parameter: what its extension was found to do."""


@dataclass(frozen=True, slots=True)
class ScaledGather:
    """An extension that casts a shard, multiplied by a scale, to `dtype`."""

    dtype: torch.dtype
    metadata: tuple[Any, Any]
    """(leaves, structure) of its metadata; the scale's leaf is None."""

    def with_scale(self, scale: torch.Tensor) -> Any:
        """Metadata of a gather with this scale."""
        leaves, structure = self.metadata
        return tree_unflatten([scale if leaf is None else leaf for leaf in leaves], structure)


def is_extended(param: Any) -> bool:
    """Whether the parameter has extensions. `param`: FSDP's state of it, here and below."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside a subclass that wraps one; others as they are."""
    if not is_wrapper(tensor):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inside: torch.Tensor = getattr(tensor, names[0])
    return inside


def objection(param: Any) -> str:
    """Why only FSDP's own hooks can gather a parameter with extensions; empty if programs can."""
    known = vars(param).get(_KNOWN)
    if known is None:
        with real_tensors():
            try:
                known = _recognised(param)
            except Exception as error:  # whatever the user's class raises where it is tried
                known = f"all-gather extensions (fsdp_pre_all_gather) fail where they are tried alone: {error}"
        vars(param)[_KNOWN] = known
    return known if isinstance(known, str) else ""


def scaled_gather(param: Any) -> ScaledGather | None:
    """What the extension of a parameter does to its shard; None if it has none. `objection` was asked before."""
    known: ScaledGather | None = vars(param).get(_KNOWN)
    return known


def given_scale(param: Any) -> torch.Tensor | None:
    """Scale that the user has computed for the parameter, for example after the optimizer's step; None if nobody has.

    It has shape () and dtype float32.
    """
    return getattr(param._sharded_local_tensor, PRECOMPUTED, None)


def received(param: Any, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return what the extension makes of the gathered bytes: a tensor that computes as one of `dtype`.

    `data` has the parameter's shape.
    """
    gather = scaled_gather(param)
    assert gather is not None, "the extension was recognised"
    return param._sharded_local_tensor.fsdp_post_all_gather((data,), gather.with_scale(scale), dtype)[0]


def describe_gather(param: Any, gather: ScaledGather) -> None:
    """Tell FSDP what a gather that did not happen would have said, so that it makes a gathered parameter without it."""
    param._extensions_data.all_gather_metadata = gather.with_scale(torch.ones((), device=param.device))
    param._extensions_data.all_gather_input_sizes = [param.padded_sharded_param_size]


def scales_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in float32 at which largest magnitudes `amax` become the largest number of an 8-bit dtype."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=SMALLEST_AMAX)).float()


def _recognised(param: Any) -> ScaledGather | str:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    name = "fsdp_pre_all_gather"
    if not isinstance(param.mesh_info, FSDPMeshInfo) or param.is_dtensor or param.fsdp_placement.dim != 0:
        return f"all-gather extensions ({name}) of parameters that are not sharded by rows alone"
    local = param._sharded_local_tensor
    if not (hasattr(local, PRECOMPUTED) and is_wrapper(local) and not is_wrapper(plain(local))):
        return f"parameters bring all-gather extensions ({name})"
    with torch.no_grad():
        shape = (TRIED_SIDE,) * plain(local).dim()
        tried = torch.linspace(-1, 1, TRIED_SIDE ** len(shape), device=param.device).view(shape).to(param.orig_dtype)
        amax = tried.abs().max()
        scale = TRIED_PAST_THE_LARGEST * scales_of(amax, torch.float8_e4m3fn)
        found = _scaled_gather(tried, scale, *_sent_alone(param, tried, scale))
        if found is None:
            return f"parameters bring all-gather extensions ({name}) that do more than scale and cast"
        if not _has_scale(_sent_alone(param, tried, None)[1], scales_of(amax, found.dtype)):
            return f"parameters bring all-gather extensions ({name}) with scales by a rule of their own"
    return found


def _sent_alone(param: Any, shard: torch.Tensor, scale: torch.Tensor | None) -> tuple[Any, Any]:
    """What the extension sends of `shard`, and its metadata, as if there were no other ranks.

    `scale`: as if the user had computed it.
    """
    local = param._sharded_local_tensor
    inside = local.__tensor_flatten__()[0][0]
    hook, before = local.fsdp_pre_all_gather, (getattr(local, inside), getattr(local, PRECOMPUTED))
    given: tuple[Any, ...] = (param.shard_mesh_from_root,)
    if len(inspect.signature(hook).parameters) > 1:
        given = (*given, param._orig_size, param._contiguous_orig_stride, param._module_info.module, param.mp_policy)
    try:
        setattr(local, inside, shard)
        setattr(local, PRECOMPUTED, scale)
        with absent_ranks.without_other_ranks():
            sent, metadata = hook(*given)
    finally:
        setattr(local, inside, before[0])
        setattr(local, PRECOMPUTED, before[1])
    return sent, metadata


def _scaled_gather(shard: torch.Tensor, scale: torch.Tensor, sent: Any, metadata: Any) -> ScaledGather | None:
    """The extension that has sent this, if it has done what `ScaledGather` describes."""
    if len(sent) != 1 or sent[0].shape != shard.shape:
        return None
    dtype = sent[0].dtype
    if str(dtype) not in SENT:
        return None
    expected = scaled_cast(shard, scale, dtype)
    if not torch.equal(sent[0].view(torch.uint8), expected.view(torch.uint8)):
        return None
    leaves, structure = tree_flatten(metadata)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) != 1 or tensors[0] is not scale or any(leaf is None for leaf in leaves):
        return None
    return ScaledGather(dtype, ([None if leaf is scale else leaf for leaf in leaves], structure))


def _has_scale(metadata: Any, expected: torch.Tensor) -> bool:
    (found,) = (leaf for leaf in tree_leaves(metadata) if isinstance(leaf, torch.Tensor))
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
