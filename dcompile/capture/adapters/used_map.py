"""Map of used parameters that DDP's reducer keeps with find_unused_parameters, where programs reduce in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dcompile.capture.services import GradientBuckets


class UsedParameterMap:
    """Number of ranks on which each parameter got a gradient, in the last backward that reduced."""

    def __init__(self, places: Mapping[int, int], params: Mapping[int, Callable[[], Any]]) -> None:
        """`places`: parameter number -> its place in DDP's reducer. `params`: number -> weak reference."""
        self._places, self._params = places, params
        self._reduced: tuple[GradientBuckets, ...] = ()

    def record(self, reduced: Sequence[GradientBuckets]) -> None:
        """Record the buckets that a backward has reduced."""
        self._reduced = tuple(reduced)

    def tensor(self) -> torch.Tensor | None:
        """Return the map as the reducer does: int32, by place, on the parameters' device. None before a reduction.

        If several programs have reduced in one backward, the one with most ranks counts for a parameter.
        """
        if not self._reduced:
            return None
        found = [0] * len(self._places)
        for buckets in self._reduced:
            for number, ranks in buckets.ranks_with_gradients().items():
                if (place := self._places.get(number)) is not None:
                    found[place] = max(found[place], ranks)
        device = next((param.device for ref in self._params.values() if (param := ref()) is not None), None)
        return torch.tensor(found, dtype=torch.int32, device=device)
