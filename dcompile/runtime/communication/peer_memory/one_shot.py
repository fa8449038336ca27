"""Small all-reduces as one kernel, which writes into the memory of the other ranks' GPUs.

NCCL's all-reduce of a few kilobytes takes longer than the GPUs need to exchange them, and moves to a stream of its own
and back. In a decoded token of a Llama of 8B parameters there are 64. The kernel is
`codegen.emit.triton.one_shot_all_reduce`; this module gives it inboxes, and lets ranks agree whether they use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.machine_model import MAX_ONE_SHOT_BYTES
from dcompile.runtime.communication.peer_memory.mapped_regions import MappedRegions, PeerMemoryAccess, reach_of
from dcompile.runtime.coordination.heartbeat import PeerCoordinator, peers_of
from dcompile.runtime.program.cuda_launch import LaunchTable

MAX_RANKS = 8
"""Ranks above which the sends of all to all take longer than a ring."""
MAX_SENT_BYTES = 512 << 10
"""Bytes that a rank may send: they take about as long as NCCL's fixed time (two H200: 5.1 us for 128 KiB, of 12.3)."""
EXCHANGED = 7
"""Arguments of a kernel after those of the loop that it ends with."""
ALIGNMENT = 16
"""Bytes of which an operand's address is a multiple."""


class InboxGroup:
    """Inboxes of the ranks of one process group, mapped into this process, for kernels with so many words a program.

    All ranks of the group construct theirs at the same point, and get the same `reason`.
    """

    def __init__(self, group: Any, device: torch.device, reach: PeerMemoryAccess | None, words: int) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.reason = ""
        """Why the ranks do not use them; empty if they do."""
        self._peers: Callable[[], PeerCoordinator | None] = weakref.ref(peers_of(group))
        self._stream: Any = None
        """Stream of the last launch: calls follow one another."""
        if reach is None or self.ranks > MAX_RANKS:
            self.reason = "GPUs of this kind" if reach is None else f"{self.ranks} ranks"
            return
        slots = MAX_ONE_SHOT_BYTES // 4
        self.inbox = torch.zeros(self.ranks * 2 * slots, dtype=torch.int64, device=device)
        self.calls = torch.zeros(-(-slots // words), dtype=torch.int32, device=device)
        """Number of the last call of each program of the kernel."""
        self.ended = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        """1 once the job was called off: a kernel that waits for a rank then ends."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the inbox is empty before a rank writes into it
        self._mapped = MappedRegions(group, reach, "inboxes", {"inbox": self.inbox})
        self.reason = self._mapped.reasons.get("inbox", "")
        if not self.reason:
            self.addresses = torch.tensor(self._mapped.addresses["inbox"], dtype=torch.int64, device=device)
            compat.groups.before_groups_end(self.release_waiting, first=True)

    def release_waiting(self) -> None:
        """Let kernels end that wait for a rank, if the job was called off. Called before groups end."""
        peers = self._peers()
        if peers is not None and peers.aborted:
            self.ended.fill_(1)

    def follow(self, stream: Any) -> None:
        """Order the next call after the last one, which may have been on another stream."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


class OneShotLaunch:
    """Launches of the kernel for one of a program's all-reduces.

    `launch` takes a stream, the kernel's arguments in its order (first the addresses for a loop that it ends with), and
    the number of programs. A program has `words` words of the operand.
    """

    def __init__(
        self,
        launch: Callable[..., Any],
        device: int,
        notes: list[str],
        tables: Sequence[LaunchTable],
        words: int,
        has_epilogue: bool = False,
    ) -> None:
        self._launch, self._device, self._notes = launch, torch.device("cuda", device), notes
        self._tables = tables
        """All launches of the prepared call. They follow in turn where the group's own collective is between them."""
        self._words, self.has_epilogue = words, has_epilogue

    def peers(self, group: Any, nbytes: int) -> InboxGroup | None:
        """Inboxes of a group's ranks; None where they use the group's own collective. All ranks get the same answer.

        `nbytes`: size of the operand, which is sent to each other rank. The first question makes the inboxes, which
        cannot be done while a CUDA graph is recorded.
        """
        found = self._found(group, nbytes)
        if found is None:
            for table in self._tables:
                table.start_in_turn()
        return found

    def _found(self, group: Any, nbytes: int) -> InboxGroup | None:
        peers = peers_of(group)
        if peers is None or nbytes * (peers.world - 1) > MAX_SENT_BYTES:
            return None
        key = f"{self._device}, {self._words} words"
        found = peers.inboxes.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                return None
            with compat.tensors.real_tensors(), torch.inference_mode(False), torch.no_grad():
                found = peers.inboxes[key] = self._make(group)
        if found.reason:
            note = f"small all-reduces are not one kernel: {found.reason}"
            if note not in self._notes:
                self._notes.append(note)
            return None
        return found

    def _make(self, group: Any) -> InboxGroup:
        return InboxGroup(group, self._device, reach_of(self._device), self._words)

    def start(self, inboxes: InboxGroup, operand: torch.Tensor, given: Sequence[int] = ()) -> LaunchedWork:
        """Sum a tensor over the ranks, in place, on the current stream. `given`: addresses for the loop after it.

        With a loop, the tensor has the sum only if later steps read it.
        """
        dense = operand.is_contiguous() and operand.data_ptr() % ALIGNMENT == 0
        words = operand if dense else operand.clone(memory_format=torch.contiguous_format)
        count = words.nbytes // 4
        stream = torch.cuda.current_stream(self._device)
        inboxes.follow(stream)
        self._launch(
            stream.cuda_stream,
            *given,
            words.data_ptr(),
            inboxes.addresses.data_ptr(),
            inboxes.calls.data_ptr(),
            inboxes.ended.data_ptr(),
            count,
            inboxes.rank,
            inboxes.ranks,
            -(-count // self._words),
        )
        if not dense:
            operand.copy_(words)
        return LaunchedWork(stream)


class LaunchedWork:
    """Work of a collective that runs on `stream`, with the interface of a torch.distributed.Work."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def wait(self) -> bool:
        """Order the current stream after it. What follows on its own stream is after it anyway."""
        here = torch.cuda.current_stream(self._stream.device)
        if here != self._stream:
            here.wait_stream(self._stream)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return bool(self._stream.query())

    def get_future(self) -> Any:
        """Raise RuntimeError, like a collective that does not notify when it ends."""
        raise RuntimeError("a kernel on the caller's stream has no future")
