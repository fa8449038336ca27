"""Start collectives and wait for them under supervision of `coordination.heartbeat`.

A waiting rank has patience with peers that compile, and ends when another rank calls the job off. On a timeout, its
error names the collective and the late rank.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.errors import DcompileError
from dcompile.logs import flush_streams
from dcompile.runtime.coordination.heartbeat import PeerCoordinator, end_at_exit, peers_of
from dcompile.runtime.coordination.wait_policy import BEAT_S, PATIENCE_S, PeerWait

_STUCK: list[Any] = []
"""Collectives that were given up. Gloo cannot abort them, and its threads would keep the process from ending."""


class PendingCollective:
    """One collective in flight. `label` names it, in the same words on every rank.

    `start` starts it and returns its torch.distributed.Work. Its argument is the number of seconds after which the
    collective is to fail; None leaves that to the backend.
    """

    def __init__(self, group: Any, device: torch.device, label: str, start: Callable[[float | None], Any]) -> None:
        self.group, self.label, self._device = group, label, device.type
        self._peers = peers_of(group)
        self._limit_s: float | None = None
        """Time limit in seconds of Gloo's collectives, which the host waits for; None for others."""
        self._index = 0
        recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._marked = device.type == "cuda" and not recorded
        if self._peers is None:
            self.work = start(None)
            return
        if not recorded:  # a recording is counted when it is replayed
            self._peers.count(label)
        self._index = self._peers.started
        if compat.groups.is_gloo(group, device.type):
            self._limit_s = compat.groups.time_limit(group, device.type)
        self.work = self._started(self._peers, start)

    def _started(self, peers: PeerCoordinator, start: Callable[[float | None], Any]) -> Any:
        peers.starting = self._index, self.label
        try:
            if self._limit_s is None:
                return start(None)
            patience_s = self._limit_s + PATIENCE_S
            with compat.groups.patient(self.group, self._device, self._limit_s, patience_s):
                return start(patience_s)
        except RuntimeError as error:
            self._raise(error)
        finally:
            peers.starting = None

    def wait(self) -> None:
        """Wait for the collective. Raises the error that ended it, whose message or note names the collective."""
        if self._peers is None or self._limit_s is None:
            self._let_the_stream_wait()
            return
        work = self.work if _takes_limits(self.work) else _UnlimitedWork(self.work)
        try:
            work.wait(timedelta(seconds=min(BEAT_S, self._limit_s)))
        except RuntimeError as error:
            if work.is_completed():
                self._finish(work, error)
            else:
                self._wait_long(work, self._peers, self._limit_s)

    def _let_the_stream_wait(self) -> None:
        """Make the current stream wait.

        The host goes on; `coordination.heartbeat` notices if the collective never ends.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            self._raise(error)
        if self._peers is not None and self._marked:
            self._peers.marks.put(self._index, self.label)

    def _wait_long(self, work: Any, peers: PeerCoordinator, limit_s: float) -> None:
        """Wait while another rank is late, until it comes, ends, or the time limit is up."""
        others = PeerWait(peers, limit_s)
        others.waited(min(BEAT_S, limit_s))
        while True:
            try:
                work.wait(timedelta(seconds=others.slice_s()))
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._finish(work, error)
                    return
            try:
                peers.check()
                late = {
                    rank for rank, status in others.poll().items() if status is None or status.started < self._index
                }
                self._see_who_has_ended(peers, others, late)
                if others.out_of_patience(late):
                    raise DcompileError(
                        f"dcompile: rank {peers.rank} waited {others.total_s():.1f} s for {self._name()} (the group's "
                        f"limit is {limit_s:g} s beyond what others compile); {others.describe(late)}"
                    )
            except DcompileError:
                _give_up(work)
                raise

    def _see_who_has_ended(self, peers: PeerCoordinator, others: PeerWait, late: set[int]) -> None:
        for rank in sorted(late):
            status = others.last(rank)
            if status is not None and status.ended:
                peers.call_off(
                    f"dcompile: rank {rank} has ended after {status.started} collectives, but rank {peers.rank} has "
                    f"started {self._name()}: every rank must run the same steps"
                )

    def _finish(self, work: Any, error: RuntimeError) -> None:
        """Complete a work that reported an error: it may have succeeded just after its timeout."""
        try:
            work.wait()
        except RuntimeError as failure:
            self._raise(failure, None if failure is error else error)

    def _raise(self, error: RuntimeError, cause: RuntimeError | None = None) -> NoReturn:
        """Raise why the job was called off, if it was, since aborted communicators only follow; else the error."""
        self._annotate(error)
        if self._peers is not None and (reason := self._peers.called_off()) is not None:
            raise reason from error
        raise error from cause

    def _annotate(self, error: RuntimeError) -> None:
        rank = dist.get_rank(self.group)
        why = self._peers.failure() if self._peers is not None else ""
        error.add_note(
            f"dcompile: rank {rank} was waiting for {self._name()}; "
            f"{why or 'another rank has failed, stalled, or does not run this step'}"
        )

    def _name(self) -> str:
        return f"the {self.label}" + (f", number {self._index} of this group" if self._index else "")


class _UnlimitedWork:
    """Wrapper of a torch.distributed.Work that ignores limits and misreports `is_completed`: a thread waits for it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait, name="dcompile waiting", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._over.set()

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait like a Work that honours its limit."""
        if not self._over.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("it has not ended in time")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._over.is_set()


def _takes_limits(work: Any) -> bool:
    """Whether a Work of Gloo's honours a limit. Its reduce-scatter does not, as it is composed of others."""
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


def start_sum(group: Any, tensor: torch.Tensor, label: str) -> PendingCollective:
    """Start an all-reduce (sum) of a tensor, in place."""

    def start(limit_s: float | None) -> Any:
        if limit_s is None:
            return dist.all_reduce(tensor, group=group, async_op=True)
        return compat.groups.start_all_reduce(group, [tensor], dist.ReduceOp.SUM, limit_s)

    return PendingCollective(group, tensor.device, label, start)


def label_of_model(label: str, group: Any, numbers: dict[Any, int]) -> str:
    """Return a collective's label with the number of its model, so that equal models have different checksums.

    `numbers`: process group -> the model's number, counted from the models that have started a collective over the
    group. Ranks count alike, because they start the same collectives in the same order.
    """
    peers = peers_of(group)
    if peers is None:
        return label
    if group not in numbers:
        peers.models += 1
        numbers[group] = peers.models
    return f"{label} of model {numbers[group]}"


def count_replayed(group: Any, labels: Sequence[str]) -> None:
    """Count the collectives of one replay, which have been launched together."""
    peers = peers_of(group)
    if peers is None or not labels:
        return
    first = peers.started + 1
    for label in labels:
        peers.count(label)
    more = f" (or one of {len(labels) - 1} behind it in the same CUDA graph)" if len(labels) > 1 else ""
    if peers.on_gpu:
        peers.marks.put(first, labels[0] + more)


def _give_up(work: Any) -> None:
    if not _STUCK:
        atexit.register(_leave)
    _STUCK.append(work)


def _leave() -> None:
    """End the process while collectives are stuck.

    The peers' collectives then fail at once instead of waiting for this rank.
    """
    if any(not work.is_completed() for work in _STUCK):
        end_at_exit()  # tells them why, if they are to be told; the store may end with this process
        flush_streams()
        os._exit(1)
