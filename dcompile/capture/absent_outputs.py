"""Results of a backward that depend on absent gradients alone: None, or zeros for leaves with hooks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.passes.joint.absent_gradients import absent_results, zeros_of


class AbsentOutputs:
    """Which results of one backward are absent, for each set of absent gradients.

    `grads`: (position among the results, parameter) of gradients that ranks reduce. `unsure`: parameters whose
    gradients may be absent. `numbers`: positions of the forward's inputs that are numbers, which are no leaves.
    """

    def __init__(
        self,
        gm: Any,
        sync: GradientSync,
        grads: tuple[tuple[int, int], ...],
        unsure: tuple[int, ...],
        numbers: tuple[int, ...],
    ) -> None:
        self._gm, self._sync, self._grads, self._unsure, self._numbers = gm, sync, grads, unsure, numbers
        self._reduced = frozenset(place for place, _ in grads)
        self._follows: dict[frozenset[int], tuple[int, ...]] = {}
        """Absent gradients -> positions of results that depend on them alone."""

    def of(self, absent: frozenset[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return (positions of results that become None, positions of results that become zeros) for absent gradients.

        Gradients that DDP's own reducer waits for are in neither.
        """
        if absent not in self._follows:
            self._follows[absent] = absent_results(self._gm, absent)
        follows = self._follows[absent]
        hooked = compat.aot.hooked_leaves() if follows else frozenset[int]()
        if not hooked and not self._grads:
            return follows, ()
        expected, gone, zeros = self._sync.awaited(self._grads, self._unsure), list[int](), list[int]()
        for place in follows:
            # eager calls no hook for an absent gradient; in a compiled graph the edge exists, and the hook gets None
            stays = hooked and place - sum(number < place for number in self._numbers) in hooked
            if stays and place not in self._reduced:  # gradients that ranks reduce are zeros already
                zeros.append(place)
            elif not stays and place not in expected:
                gone.append(place)
        return gone, zeros

    def fill(self, results: list[Any], gone: Collection[int], zeros: Collection[int]) -> None:
        """Put None and zeros in the places that `of` has found."""
        for place in zeros:
            known = results[place] is not None
            results[place] = torch.zeros_like(results[place]) if known else zeros_of(self._gm, place)
        for place in gone:
            results[place] = None

    def without_any(self, absent: frozenset[int]) -> list[Any]:
        """Return the results of a backward whose gradients are all absent."""
        _, zeros = self.of(absent)
        results: list[Any] = [None] * len(self._gm.graph.output_node().args[0])
        self.fill(results, (), zeros)
        return results
