"""CUDA implementation of `cuda_graphs.recording.GraphRecorder`: memory pools and one capturing stream."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dcompile.compat.tensors import forget_blas_workspaces


class CudaRecorder:
    """Record on a stream of its own, with memory from pools of the caching allocator.

    torch registers the default generator when a capture begins, so replays draw new random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[int, Any] = {}
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def record(self, function: Callable[[], list[Any]], pool: int) -> tuple[Callable[[], None], list[Any]]:
        """Record a function; see `GraphRecorder`. Other threads may use CUDA meanwhile (loaders, NCCL's watchdog).

        Each recording has its own cuBLAS workspaces, as in torch's trees. Otherwise torch would keep them for the
        stream, and with them the whole pool of a deleted graph (65 MiB a model on an H100). Newer versions free them
        with any graph recorded on that stream (pytorch issue 193402), while other graphs still write there.
        """
        graph = torch.cuda.CUDAGraph()
        handle = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        current = torch.cuda.current_stream(self.device)
        forget_blas_workspaces()
        try:
            with (
                without_garbage_collection(),  # first: a collection that is due may run until the capture begins
                torch.cuda.graph(graph, pool=handle, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = function()
        except RuntimeError:
            torch.cuda.set_stream(current)  # after a capture that cannot end, torch leaves its stream current,
            del self._pools[pool]  # its pool in use, so that nothing more could be recorded into it,
            self._end_capture_of_random_numbers()
            raise
        finally:
            forget_blas_workspaces()
        return graph.replay, results

    def _end_capture_of_random_numbers(self) -> None:
        """Give the default generator a state that no capture uses: the old one refuses any draw outside of it."""
        generator: Any = torch.cuda.default_generators[self.device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())

    def can_read(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""
        return tensor.device == self.device


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: an old model's objects may unmap memory of other ranks, which breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
