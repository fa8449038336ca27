"""Option `kernels` on two Gloo ranks, all of it; `test_settings.py` has what runs by default."""

from __future__ import annotations

from pathlib import Path

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


def test_received_graphs_have_regions(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(CASES + "shared", 120, folder=str(tmp_path))
    assert sum(each["received"] for each in found) == 2  # a forward and a backward
    assert all(each["same"] and each["regions"] == 3 for each in found)


def test_ranks_agree_on_the_compiler(ranks: Ranks) -> None:
    """Last: the job is over for both."""
    for told in ranks.run(CASES + "disagreeing", 120):
        assert "kernels=tests.kernel_backends.fakes.eager" in told
        assert "kernels=tests.distributed.backend_cases.other" in told
