"""Start and wait for the collectives that the model's own code requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from dcompile import compat
from dcompile.compat.groups import (
    reduce_op,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_reduce_scatter,
)
from dcompile.errors import DcompileError
from dcompile.ir.collective_kinds import CollectiveKind
from dcompile.ir.functional_collectives import kind_of
from dcompile.runtime.communication.gather_scatter import start_gather
from dcompile.runtime.communication.peer_memory.one_shot import OneShotLaunch
from dcompile.runtime.communication.work import PendingCollective

_RECORDED: ContextVar[list[tuple[Any, str]] | None] = ContextVar("recorded collectives", default=None)
"""Collectives that start on this thread while a call is recorded, or None outside of a recording."""


class ModelCollective:
    """One of the model's own collectives in one prepared call: `self(sent, filled, ...)` starts it, `wait()` ends it.

    `op` is torch's functional collective. A start takes its further arguments as they are in the graph. `one_shot`
    launches it as one kernel, where all ranks' GPUs reach each other's memory. That kernel may also be the loop after
    it; `run_epilogue` launches the loop where it was not.
    """

    def __init__(self, op: str, name: str, one_shot: OneShotLaunch | None = None) -> None:
        kind = kind_of(op)
        assert kind is not None, f"{op} is no collective"
        self.kind: CollectiveKind = kind
        self.name = name
        self._one_shot = one_shot
        self.nbytes = 0
        """Bytes of the whole, of the last start."""
        self._ran_epilogue = False
        self._pending: PendingCollective | None = None

    def __call__(
        self, sent: Sequence[torch.Tensor], filled: Sequence[torch.Tensor], *how: Any, given: Sequence[int] = ()
    ) -> None:
        """Start it. `filled`: its outputs; empty where it works on `sent` in place.

        `given`: addresses for the loop that its one kernel ends with.
        """
        *rest, group_name = how
        group = compat.groups.group_by_name(group_name)
        if group is None:
            raise DcompileError(
                f"dcompile: process group {group_name}, of the model's own {self._words()} {self.name}, was destroyed; "
                "make a new mesh and a new model, and compile that"
            )
        self.nbytes = max(sum(tensor.nbytes for tensor in tensors) for tensors in (sent, filled))
        inboxes = None if self._one_shot is None else self._one_shot.peers(group, self.nbytes)
        self._ran_epilogue = inboxes is not None and self._one_shot is not None and self._one_shot.has_epilogue

        def start(limit_s: float | None) -> Any:
            if inboxes is not None and self._one_shot is not None:
                return self._one_shot.start(inboxes, sent[0], given)
            return _start(self.kind, group, sent, filled, rest, limit_s)

        self._pending = PendingCollective(group, sent[0].device, f"model's own {self._words()}", start)
        if (recorded := _RECORDED.get()) is not None:
            recorded.append((group, self._pending.label))

    def _words(self) -> str:
        """Words for messages, the same on every rank.

        Names are not: they count other nodes of the graph, which sizes may change.
        """
        return self.kind.replace("_", "-")

    @property
    def work(self) -> Any:
        """The torch.distributed.Work that `wait` waits for."""
        assert self._pending is not None, f"{self.name} is not in flight"
        return self._pending.work

    def wait(self) -> None:
        """Wait for the collective that was started last."""
        pending, self._pending = self._pending, None
        assert pending is not None, f"{self.name} is not in flight"
        pending.wait()

    def run_epilogue(self, launch: Callable[..., object], *values: int) -> None:
        """Launch the loop after the collective that was started last, unless the collective's kernel was that, too."""
        if not self._ran_epilogue:
            launch(*values)


def _start(
    kind: CollectiveKind,
    group: Any,
    sent: Sequence[torch.Tensor],
    filled: Sequence[torch.Tensor],
    how: Sequence[Any],
    limit_s: float | None,
) -> object:
    """Start one, and return its torch.distributed.Work. Not `Any`: mypy would miss no case."""
    match kind:
        case "all_reduce":
            return start_all_reduce(group, sent, reduce_op(how[0]), limit_s)
        case "broadcast":
            return start_broadcast(group, sent[0], how[0], limit_s)
        case "all_gather":
            return start_gather(group, _flat(filled), _flat(sent), limit_s)
        case "reduce_scatter":
            return start_reduce_scatter(group, filled, sent, reduce_op(how[0]), limit_s)
        case "all_to_all":
            return start_all_to_all(group, filled[0], sent[0], how[0], how[1], limit_s)
        case "offload" | "load":
            raise AssertionError("copies to and from host memory are no collectives of a group: see `HostCopy`")


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1) for tensor in tensors]


@contextlib.contextmanager
def recording_collectives() -> Iterator[list[tuple[Any, str]]]:
    """Collect (process group, label) of each of the model's own collectives that this thread starts in the context."""
    found: list[tuple[Any, str]] = []
    token = _RECORDED.set(found)
    try:
        yield found
    finally:
        _RECORDED.reset(token)
