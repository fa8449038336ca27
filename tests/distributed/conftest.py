"""Two processes for all cases of a file: on two GPUs over NCCL where the file is marked so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.harness import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """They start with the first case."""
    on_gpus = request.node.get_closest_marker("gpu") is not None
    if on_gpus and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pair = Ranks(backend="nccl" if on_gpus else "gloo")
    yield pair
    pair.stop()
