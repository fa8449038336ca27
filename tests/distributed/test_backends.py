"""Option `kernels` on two Gloo ranks, all of it; `test_settings.py` has what runs by default."""

from __future__ import annotations

import pytest

from tests.distributed.backend_cases import CASES, as_stock
from tests.distributed.harness import Ranks
from tests.kernel_backends import matrix
from tests.kernel_backends.test_matrix import check, skip_without

pytestmark = pytest.mark.backends


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_blocks_as_stock_with_inductor(ranks: Ranks, case: str) -> None:
    """Norms, activations and biases: kernels that inductor fuses."""
    as_stock(ranks, case, layer="block")


def test_torch_compile_is_a_door(ranks: Ranks) -> None:
    as_stock(ranks, "ddp", kernels="callable", stock="aot_eager", door="torch.compile")


@pytest.mark.parametrize("column", matrix.RANKS)
@pytest.mark.parametrize("name", matrix.NAMES)
def test_matrix(ranks: Ranks, name: str, column: str, update_golden: bool) -> None:
    skip_without(name)
    found = ranks.run(CASES + "cell", 280, name=name, case=matrix.RANKS[column])
    assert len({*found}) == 1
    check(name, column, found[0], update_golden)
