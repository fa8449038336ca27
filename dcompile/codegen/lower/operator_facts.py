"""Facts of ATen operators: names, what they write, what else they affect, and which become part of a loop.

The latter are for the partitioner, which may recompute some of them. torch's own list describes its own compiler. Ops
missing there count as library calls, so the values that they read in the backward are saved, since they "must be in
memory anyway". The table holds names only, as for decompositions. It is needed before the cache is consulted, and
lowering's rules take longer to import.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.operators import random_ops


def op_text(target: Any) -> str:
    """Return the name that the emitter calls: `aten.mm.default`, `higher_order.cond`, `operator.mul`, ..."""
    if hasattr(target, "_schema"):
        return str(target)
    if hasattr(target, "namespace"):
        return f"{target.namespace}.{target}"
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module.lstrip('_')}.{getattr(target, '__name__', target)}"


def is_in_place(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and (bool(schema.is_mutable) or compat.storage_offsets.resizes(target))


def written_names(schema: Any) -> list[str]:
    """Return the arguments that a call changes, also those that it resizes without saying so in its schema."""
    if schema.name == compat.storage_offsets.RESIZE:
        return [schema.arguments[0].name]
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def written_arguments(node: Node) -> list[Node]:
    """Return the nodes that a call overwrites, if it returns exactly these, unchanged in shape (unlike squeeze_)."""
    schema = getattr(node.target, "_schema", None)
    if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
        return []
    if schema is None or not schema.is_mutable or any(result.alias_info is None for result in schema.returns):
        return []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    written = [given.get(name) for name in written_names(schema)]
    return [n for item in written for n in (item if isinstance(item, (tuple, list)) else [item]) if isinstance(n, Node)]


def returns_alias(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


COMPUTING = {"aten._conj.default": "aten._conj_physical.default", "aten._neg_view.default": "aten.neg.default"}
"""Views that change values when read -> the operation that computes these, into the same layout."""


def copying_variant(target: Any) -> str | None:
    """Return the copying variant of a view op if it exists: `aten.view_copy.dtype` for `aten.view.dtype`."""
    if str(target) in COMPUTING:
        return COMPUTING[str(target)]
    namespace, name, overload = str(target).split(".")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_copy", None)
    return f"{namespace}.{name}_copy.{overload}" if packet is not None and overload in packet.overloads() else None


def has_effect(node: Node) -> bool:
    """Return whether a call affects more than its results: random numbers, collectives, assertions, mutation."""
    target: Any = node.target
    tags = getattr(target, "tags", ())
    return bool(
        "c10d" in op_text(target)
        or torch.Tag.nondeterministic_seeded in tags
        or node.meta.get("val") is None
        or is_in_place(target)
        or node.is_impure()
    )


RECOMPUTABLE = (
    "embedding", "index_select",  # a row of a table that is there anyway is read as fast as a saved copy
    # pointwise operations and views
    "constant_pad_nd", "flip", "roll", "repeat", "tril", "slice_scatter", "select_scatter", "copy", "signbit",
    "alias_copy", "detach_copy", "expand_copy", "permute_copy", "select_copy", "slice_copy", "squeeze_copy", "t_copy",
    "transpose_copy", "unsqueeze_copy", "view_copy", "_reshape_alias_copy", "diagonal_copy", "narrow_copy",
    "diagonal_scatter", "_reshape_alias", "detach", "diagonal", "lift", "split_with_sizes", "transpose", "unbind",
    "leaky_relu", "split_copy", "split_with_sizes_copy", "unbind_copy", "unfold_copy", "lift_fresh", "floor_divide",
    "unfold", "fill", "new_full", "new_ones", "ones_like", "new_empty", "new_empty_strided", "empty_strided",
    "empty_permuted", "_efficientzerotensor",
)  # fmt: skip
"""Loops that cost no more than reading their saved results."""

FUSIBLE_ONLY = (
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
    "all", "amin", "argmin", "linalg_vector_norm", "logsumexp", "prod", "cat", "stack",
    "_unsafe_index", "_unsafe_index_put", "embedding_dense_backward", "index_put",
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "index_reduce", "scatter", "scatter_add", "scatter_reduce",
    "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward", "_adaptive_avg_pool2d",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d", "adaptive_max_pool3d_backward", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
)  # fmt: skip
"""Loops that read much more than they write, or that change the shape: their inputs are fused into them, but their
results are saved."""


@lru_cache(maxsize=1)
def fusible_ops() -> tuple[frozenset[Any], frozenset[Any]]:
    """Return (ops that become part of a loop, those of them that may be recomputed), as overload packets."""
    again = frozenset(getattr(torch.ops.aten, name) for name in RECOMPUTABLE if hasattr(torch.ops.aten, name))
    once = frozenset(getattr(torch.ops.aten, name) for name in FUSIBLE_ONLY if hasattr(torch.ops.aten, name))
    again |= frozenset(random_ops.operators())  # maps a key and a position to a number
    return again | once, again
