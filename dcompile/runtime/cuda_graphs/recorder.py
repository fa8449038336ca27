"""CUDA graphs as `runtime.graph_trees` wants them: a few pools and one capturing stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcompile.compat.tensors import forget_blas_workspaces


class CudaRecorder:
    """Records on a stream of its own, with memory from pools of the caching allocator.

    The default generator is registered by torch when a capture begins, so replays draw new random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[int, Any] = {}
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def record(self, function: Callable[[], list[Any]], pool: int) -> tuple[Callable[[], None], list[Any]]:
        """See `Recorder`. Other threads may go on using CUDA meanwhile (loaders, NCCL's watchdog).

        What cuBLAS works in is the recording's own, as in torch's own trees: torch would keep it for the stream, and
        the whole pool with it when the graph is gone (65 MiB a model on an H100); and newer versions give it back with
        any graph that was recorded on that stream (pytorch issue 193402), while others go on writing there.
        """
        graph = torch.cuda.CUDAGraph()
        handle = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        current = torch.cuda.current_stream(self.device)
        forget_blas_workspaces()
        try:
            with torch.cuda.graph(graph, pool=handle, stream=self._stream, capture_error_mode="thread_local"):
                results = function()
        except RuntimeError:
            torch.cuda.set_stream(current)  # of a capture that cannot end, torch leaves the stream current,
            del self._pools[pool]  # and the pool in use: nothing could be recorded into it any more
            raise
        finally:
            forget_blas_workspaces()
        return graph.replay, results

    def takes(self, tensor: torch.Tensor) -> bool:
        """Only tensors on this device."""
        return tensor.device == self.device
