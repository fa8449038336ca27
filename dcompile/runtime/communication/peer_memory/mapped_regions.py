"""Map memory of the other ranks of a group into this process: all ranks agree what all of them can reach."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcompile.runtime.communication.peer_memory.cuda_ipc import PeerMemoryAccess, close_all
from dcompile.runtime.coordination.agreement import exchange_texts

Offer = Sequence[Any]
"""[name of the allocation, offset in it, bytes], or a text that says why there is none."""


class MappedRegions:
    """Regions of memory that each rank of a group has under the same names.

    All ranks construct theirs at the same point, and get the same `reasons`. A region is a tensor, or the reason why it
    cannot be shared. `what` names them all in messages. The mapping ends with this object.
    """

    def __init__(
        self, group: Any, reach: PeerMemoryAccess, what: str, regions: Mapping[str, torch.Tensor | str]
    ) -> None:
        self.addresses: dict[str, list[int]] = {}
        """Region -> its address in this process, for each rank."""
        self._rank, self._reach = dist.get_rank(group), reach
        self._opened: list[int] = []
        self.held: dict[str, torch.Tensor] = {}
        """This rank's regions as the others have mapped them: they must live as long as those may use them."""
        offer = json.dumps({"place": reach.place(), "regions": self._offers(regions)})
        offers = [json.loads(text) for text in exchange_texts(group, f"memory of {what}", offer)]
        self.reasons = _objections(offers, regions)
        """Region -> why some rank cannot reach it. All ranks can reach the others."""
        if self.reasons.keys() < regions.keys():
            trouble = self._open([one["regions"] for one in offers])
            answers = exchange_texts(group, f"access to {what}", trouble)
            found = [(rank, answer) for rank, answer in enumerate(answers) if answer]
            if found:
                self.reasons = dict.fromkeys(regions, f"rank {found[0][0]} cannot reach them ({found[0][1]})")
        for name in self.reasons:
            self.held.pop(name, None)
            self.addresses.pop(name, None)

    def _offers(self, regions: Mapping[str, torch.Tensor | str]) -> dict[str, Offer]:
        """Return what this rank offers, for a message to the others."""
        offers: dict[str, Offer] = {}
        for name, region in regions.items():
            if isinstance(region, str):
                offers[name] = region
                continue
            try:
                offers[name] = [*self._reach.export(region), region.numel() * region.element_size()]
                self.held[name] = region
            except RuntimeError as error:
                offers[name] = f"{error}"
        return offers

    def _open(self, offers: Sequence[Mapping[str, Offer]]) -> str:
        """Map the other ranks' memory. Return an error text, or an empty string."""
        known: dict[str, int] = {}
        try:
            for name, held in self.held.items():
                if name in self.reasons:
                    continue
                self.addresses[name] = [
                    held.data_ptr() if rank == self._rank else self._mapped(one[name][0], known) + one[name][1]
                    for rank, one in enumerate(offers)
                ]
        except RuntimeError as error:
            return str(error) or type(error).__name__
        finally:
            weakref.finalize(self, close_all, self._reach, self._opened).atexit = False
        return ""

    def _mapped(self, allocation: str, known: dict[str, int]) -> int:
        """Return the address of another rank's allocation, which is mapped once."""
        if allocation not in known:
            known[allocation] = self._reach.open(allocation)
            self._opened.append(known[allocation])
        return known[allocation]


def _objections(offers: Sequence[Any], regions: Mapping[str, object]) -> dict[str, str]:
    """Return the regions that some rank does not offer, with the reason."""
    places = [one["place"] for one in offers]
    if not all(places) or len({*places}) > 1:
        return dict.fromkeys(regions, f"ranks are on {len({*places})} machines" if all(places) else "no place")
    found = {}
    for name in regions:
        of_ranks = [one["regions"].get(name, "another rank does not have it") for one in offers]
        refused = [reason for reason in of_ranks if isinstance(reason, str)]
        if refused:
            found[name] = refused[0]
        elif len({nbytes for *_, nbytes in of_ranks}) > 1:
            found[name] = "its size differs between ranks"
    return found
