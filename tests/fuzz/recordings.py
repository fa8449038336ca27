"""CUDA graphs without a GPU: what is recorded is computed again at each replay, into the memory it was recorded in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from dcompile import compat
from dcompile.capture import graph_programs
from dcompile.compiler import caching
from dcompile.runtime.cuda_graphs import recording
from dcompile.runtime.program.arena import copy_elements
from dcompile.runtime.program.executable import HostParts


class Repeats:
    """A `Recorder` of calls on the CPU. As a stream that captures, it leaves all as it was while it records."""

    def __init__(self, device: torch.device) -> None:
        self._kept: list[torch.Tensor] = []
        """Results as recorded, whose memory stays theirs: as that of a pool, and nobody else may have it."""

    def record(self, function: Callable[[], list[Any]], pool: int) -> tuple[Callable[[], None], list[Any]]:
        """See `Recorder`."""
        given = _boxed(function)
        looks = [_look(x) for x in given[-1]]
        before, state = [(x, x.clone()) for x in _memories(looks)], torch.get_rng_state()
        try:
            results = function()
        finally:
            for memory, bytes_before in before:
                memory.copy_(bytes_before)
            torch.set_rng_state(state)
        theirs = {memory.data_ptr() for memory, _ in before}
        mine = (x for x in results if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in theirs)
        self._kept += (x.detach() for x in mine)
        own = [_look(x) for x in results]

        def replay() -> None:
            given.append([_look(x) for x in looks])
            again = function()
            for to, made in zip(own, again, strict=True):
                if isinstance(to, torch.Tensor) and to.data_ptr() != made.data_ptr():
                    (_write_again if _lie_alike(to, made) else copy_elements)(to, made)

        return replay, results

    def can_read(self, tensor: torch.Tensor) -> bool:
        """As if the CPU were the device."""
        return tensor.device.type == "cpu"


def _boxed(function: Any) -> list[list[Any]]:
    """What `Replayed` passes to a program that is recorded: a list that it pops the arguments from."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    inside: list[list[Any]] = cells["inside"].cell_contents
    return inside


def _look(x: Any) -> Any:
    """The same memory, held by nobody."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    outside = compat.tensors.storage_at(storage.data_ptr(), storage.nbytes(), x.device)
    return torch.empty(0, dtype=x.dtype).set_(outside, x.storage_offset(), x.shape, x.stride())


def _memories(looks: list[Any]) -> Iterator[torch.Tensor]:
    """All bytes of the storages under these tensors, once each."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in looks if isinstance(x, torch.Tensor)}
    for storage in storages.values():
        yield torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    sizes = {x.untyped_storage().nbytes() for x in (one, other)}
    return len(sizes) == 1 and one.storage_offset() == other.storage_offset()


def _write_again(to: torch.Tensor, made: torch.Tensor) -> None:
    """All of the storage: kernels write what lies around a result, too."""
    for memory, source in zip(_memories([to]), _memories([made]), strict=True):
        memory.copy_(source)


def _keeping(prepare: Any) -> Any:
    """`HostParts.prepare` whose arenas are kept, as a pool's memory is."""
    arenas: list[Any] = []

    def keep(parts: Any, device: int, sizes: tuple[int, ...]) -> Any:
        functions, arena = prepare(parts, device, sizes)
        arenas.append(arena)
        return functions, arena

    return keep


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Programs on the CPU are recorded and replayed as those on a GPU are."""
    with (
        mock.patch.object(recording, "CudaRecorder", Repeats),
        mock.patch.object(caching, "gpus", lambda gm: {"cpu"}),
        mock.patch.object(graph_programs, "donated_positions", lambda gm: ()),
        mock.patch.object(HostParts, "prepare", _keeping(HostParts.prepare)),
    ):
        yield
