"""Keep the gradients that one run of a backward program has reduced until the whole backward ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from dcompile.compat.storage_holders import storage_use_count


class ReducedRun:
    """Reduced gradients of one run, by parameter number.

    A gradient is intact while autograd holds it as the run returned it. A sum with another gradient is a new tensor,
    and drops its reference to the memory here. `flats`: the memory of each bucket that the run reduced. `places`:
    parameter number -> its bucket, of all buckets, and its offset there in elements. `parameter`: the parameter of a
    number. `absent`: parameters whose gradient no rank has.
    """

    def __init__(
        self,
        flats: Mapping[str, torch.Tensor],
        places: Mapping[int, tuple[str, int]],
        parameter: Callable[[int], Any],
        absent: Collection[int] = frozenset(),
    ) -> None:
        self._flats, self._places, self._parameter = flats, places, parameter
        self._absent = frozenset(absent)
        self._copies: dict[int, torch.Tensor] = {}
        """Gradients in the layout of a parameter that is not contiguous, as autograd would copy them."""
        self._uses: dict[str, int] = {}
        self._stream: Any = None

    def __contains__(self, number: int) -> bool:
        return number in self._places and self._places[number][0] in self._flats and number not in self._absent

    def gradient(self, number: int) -> torch.Tensor:
        """Return a parameter's gradient, as its memory is now."""
        if number in self._copies:
            return self._copies[number]
        (bucket, offset), parameter = self._places[number], self._parameter(number)
        view: torch.Tensor = self._flats[bucket][offset : offset + parameter.numel()].view(parameter.shape)
        return view

    def lay_out(self, results: list[Any], grads: Iterable[tuple[int, int]]) -> None:
        """Give results of the program the layout of their parameters. `grads`: (position of a result, number)."""
        for place, number in grads:
            parameter = self._parameter(number) if number in self else None
            if parameter is not None and results[place] is not None and not parameter.is_contiguous():
                copy = torch.empty_like(parameter, requires_grad=False).copy_(results[place])
                results[place], self._copies[number] = copy, copy.detach()

    def hand_on(self) -> None:
        """Count the references to each memory, just before autograd gets the results."""
        self._uses = {bucket: storage_use_count(flat) for bucket, flat in self._flats.items()}
        self._stream = _stream(self._flats)

    def intact(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return those of these parameters whose gradients autograd holds as they were returned, to be added to."""
        if self._stream != _stream(self._flats):
            return frozenset()
        whole = {bucket for bucket, flat in self._flats.items() if storage_use_count(flat) == self._uses[bucket]}
        return frozenset(number for number in numbers if self._is_held(number, whole))

    def _is_held(self, number: int, whole: Collection[str]) -> bool:
        if number in self._copies:
            return storage_use_count(self._copies[number]) == 2  # autograd's tensor, and the one here
        return self._places[number][0] in whole


def _stream(flats: Mapping[str, torch.Tensor]) -> Any:
    device = next((flat.device for flat in flats.values()), None)
    return torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
