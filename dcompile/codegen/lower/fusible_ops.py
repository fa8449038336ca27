"""Classify ops for the partitioner: those that become part of a loop, and those of them that it may recompute.

torch's own list describes its own compiler. Ops missing there count as library calls, so the values that they read in
the backward are saved, since they "must be in memory anyway". The table holds names only, as for decompositions. It is
needed before the cache is consulted, and lowering's rules take longer to import.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dcompile import random_ops

AGAIN = (
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

ONCE = (
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
def table() -> tuple[frozenset[Any], frozenset[Any]]:
    """Return (ops that become part of a loop, those of them that may be recomputed), as overload packets."""
    again = frozenset(getattr(torch.ops.aten, name) for name in AGAIN if hasattr(torch.ops.aten, name))
    once = frozenset(getattr(torch.ops.aten, name) for name in ONCE if hasattr(torch.ops.aten, name))
    again |= frozenset(random_ops.operators())  # maps a key and a position to a number
    return again | once, again
