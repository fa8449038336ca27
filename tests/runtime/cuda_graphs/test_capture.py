"""What surrounds a capture, with a CUDA of mocks: no garbage collection, and a generator that works after a failure."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from dcompile.runtime.cuda_graphs import recording


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CUDA without a device: captures run their function."""
    names = ("Stream", "CUDAGraph", "graph_pool_handle", "current_stream", "set_stream")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, mock.Mock(name=name))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **keywords: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "default_generators", (mock.Mock(name="generator"),))
    monkeypatch.setattr(recording, "forget_blas_workspaces", lambda: None)
    return torch.cuda


@pytest.fixture(params=[True, False], ids=["collected", "not collected"])
def collected(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether garbage is collected before."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_no_garbage_is_collected_in_a_capture(cuda: Any, collected: bool) -> None:
    made = recording.CudaRecorder(torch.device("cuda", 0))
    _, results = made.record(lambda: [gc.isenabled()], 0)
    assert results == [False] and gc.isenabled() == collected


def test_random_numbers_are_drawn_after_a_capture_that_failed(cuda: Any, collected: bool) -> None:
    made = recording.CudaRecorder(torch.device("cuda", 0))

    def fails() -> list[Any]:
        raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError, match="previous error"):
        made.record(fails, 0)
    (generator,) = cuda.default_generators
    generator.graphsafe_set_state.assert_called_once_with(generator.clone_state())
    assert gc.isenabled() == collected
