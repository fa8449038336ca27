"""What the partitioner knows of operations, and who finds its minimum cut."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any


def minimum_cut_by(minimum_cut: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """While graphs are partitioned, have `minimum_cut` answer in networkx's place, which it is given as well."""
    try:
        import networkx  # type: ignore[import-untyped, unused-ignore]
    except ImportError:  # the partitioner reports that itself
        return contextlib.nullcontext()
    if minimum_cut is None:
        return contextlib.nullcontext()
    own = networkx.minimum_cut

    def cut(graph: Any, source: Any, sink: Any) -> Any:
        return minimum_cut(graph, source, sink, own)

    return unittest.mock.patch.object(networkx, "minimum_cut", cut)  # type: ignore[no-any-return, unused-ignore]


@contextlib.contextmanager
def more_fusible_ops(fusible: frozenset[Any], recomputable: frozenset[Any]) -> Iterator[None]:
    """While graphs are partitioned, count these overload packets among those that loops hold, or compute again."""
    from torch._functorch import partitioners

    own: Any = getattr(partitioners, "get_default_op_list", None)
    if own is None:
        yield
        return
    parts = _parts()

    def op_list() -> Any:
        found = own()
        return dataclasses.replace(
            found,
            fusible_ops=found.fusible_ops | fusible,
            recomputable_ops=found.recomputable_ops | recomputable,
            view_ops=found.view_ops - parts,
        )

    with unittest.mock.patch.object(partitioners, "get_default_op_list", op_list):
        yield


def _parts() -> frozenset[Any]:
    """Views of a part of a tensor: saving the whole instead may take more memory."""
    import torch

    aten = torch.ops.aten
    return frozenset((aten.slice, aten.select, aten.split, aten.as_strided))
