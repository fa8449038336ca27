"""Find replicas that have drifted apart: digests of parameters, compared between ranks over the store.

Ranks that average gradients hold the same bits of every parameter. In a few steps that all ranks count alike, each rank
computes a checksum of every parameter on the device. The coordinator's thread reads them, publishes rank 0's, and
compares the others with them once both are there. No rank waits for another one in this, and none runs a collective: a
rank that stops, or saves a checkpoint alone, delays a comparison, which then happens at a later step. A drift does not
heal, so that a later step shows it as well (docs/decisions/0049-drifting-replicas.md).
"""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.logs import report
from dcompile.runtime.coordination.heartbeat import peers_of

EVERY = 1024
"""Steps between two digests. Before that, the first steps and those whose number is a power of two have one."""
MAX_PENDING = 8
"""Digests that wait for rank 0's. More would be of steps long past."""
MAX_NAMED = 8
"""Parameters that a message names."""

Named = Sequence[tuple[str, torch.Tensor]]
"""(name, this rank's part) of each parameter."""


def is_due(step: int) -> bool:
    """Whether a step has a digest, counted from 1."""
    return step % EVERY == 0 or (step < EVERY and step & (step - 1) == 0)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's bits as 32-bit integers, wrapped around: the same in any order of adding. An int32 scalar."""
    flat = compat.tensors.local_part(tensor.detach()).reshape(-1)
    size = flat.element_size()
    if flat.numel() * size % 4 or flat.storage_offset() * size % 4:
        data = flat.clone().view(torch.uint8)
        flat = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    return flat.view(torch.int32).sum(dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class ReplicaDigest:
    """Checksums of a model's parameters at one point of all ranks' work."""

    at: int
    """Number of collectives that the group had started: the same moment on all ranks has the same."""
    step: int
    """Number of the training step."""
    names: tuple[str, ...]
    values: torch.Tensor
    """Checksums in memory of the host: they are there once `event` is."""
    event: Any

    @property
    def is_there(self) -> bool:
        """Whether the device has computed it."""
        return self.event is None or self.event.query()

    def to_text(self) -> str:
        """Text for other ranks."""
        return json.dumps([self.at, zlib.crc32("\n".join(self.names).encode()), self.values.tolist()])


def take_digest(at: int, step: int, parameters: Named) -> ReplicaDigest:
    """Begin to compute checksums; on a GPU, the host does not wait for them."""
    with torch.no_grad():
        values = torch.stack([checksum(value) for _, value in parameters])
    event = None
    if values.is_cuda:
        host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        values, event = host.copy_(values, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return ReplicaDigest(at, step, tuple(name for name, _ in parameters), values, event)


class ReplicaWatch:
    """Digests of one model's parameters, which all ranks of a process group hold alike."""

    def __init__(self, group: Any, parameters: Callable[[], Named]) -> None:
        """`parameters` is asked in each step that has a digest."""
        self._peers, self._parameters = peers_of(group), parameters
        self._key = ""
        self._seen = -1
        self._steps = 0
        self._pending: deque[ReplicaDigest] = deque(maxlen=MAX_PENDING)
        self._difference = ""

    def on_call(self) -> None:
        """Note a training call, in which all ranks hold the parameters that their last reduction led to.

        The first call after a reduction is a step; ranks count them alike, whatever else they call.
        """
        peers = self._peers
        if peers is None or peers.started == self._seen:
            return
        self._seen = peers.started
        self._steps += 1
        if self._difference or not is_due(self._steps):
            return
        if not self._key:  # now, as all ranks train their models in the same order
            peers.watches.append(weakref.ref(self))
            self._key = f"replicas/{len(peers.watches)}"
        if parameters := [(name, value) for name, value in self._parameters() if value.numel()]:
            self._pending.append(take_digest(peers.started, self._steps, parameters))

    def exchange(self, store: Any) -> None:
        """In the coordinator's thread: publish rank 0's newest digest, or compare this rank's with it."""
        assert self._peers is not None, "a process without peers has no thread"
        there = [digest for digest in list(self._pending) if digest.is_there]
        if not there:
            return
        if self._peers.rank == 0:
            store.set(self._key, there[-1].to_text())
            self._forget(there[-1].at)
        elif store.check([self._key]):
            at, names, values = json.loads(store.get(self._key))
            for digest in there:
                if digest.at == at and json.loads(digest.to_text())[1] == names:
                    self._compare(store, digest, values)
            self._forget(at)

    def _forget(self, until: int) -> None:
        while self._pending and self._pending[0].at <= until:
            self._pending.popleft()

    def _compare(self, store: Any, digest: ReplicaDigest, first: list[int]) -> None:
        both = zip(digest.names, digest.values.tolist(), first, strict=True)
        differing = [name for name, mine, other in both if mine != other]
        if not differing or self._difference:
            return
        rank = self._peers.rank if self._peers is not None else 0
        named = ", ".join(differing[:MAX_NAMED])
        more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        self._difference = (
            f"replicas have drifted apart: rank {rank} has other bits than rank 0 in {len(differing)} of "
            f"{len(digest.names)} parameters, as training step {digest.step} begins: {named}{more}"
        )
        store.compare_set(f"{self._key}/apart", "", self._difference)
        report(logging.WARNING, f"rank {rank}: {self._difference}")

    def status(self) -> str:
        """What was found on any rank, so far; empty if nothing was."""
        peers = self._peers
        if not self._difference and peers is not None and self._key:
            with contextlib.suppress(RuntimeError):  # the store may be gone with its owner
                if peers.store.check([f"{self._key}/apart"]):
                    self._difference = peers.store.get(f"{self._key}/apart").decode()
        return self._difference
