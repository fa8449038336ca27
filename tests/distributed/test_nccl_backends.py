"""TorchInductor's kernels between our collectives on two GPUs, as stock has them; regions are measured there."""

import pytest

from tests.distributed.backend_cases import as_stock

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_as_stock_with_inductor(ranks, case):
    found = as_stock(ranks, case, layer="block")
    print(found["receipt"], found["overlaps"], found["predicted"])
    assert found["receipt"].regions >= 3
