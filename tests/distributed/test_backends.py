"""Option `kernels` on two Gloo ranks: another compiler's regions under collectives of ours, bit for bit as stock's."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Ranks
from tests.kernel_backends import matrix
from tests.kernel_backends.test_matrix import check, skip_without

CASES = "tests.distributed.backend_cases:"


def trained(ranks: Ranks, case: str, **keywords) -> dict:
    """The case on both ranks: one graph, as stock's bit for bit, nothing left to other kernels."""
    found = ranks.run(CASES + case, 280, **keywords)
    for each in found:
        receipt = each["receipt"]
        assert each["same"] and receipt.eligible and not receipt.fallbacks
        assert (receipt.graphs, receipt.graph_breaks, receipt.kernel_calls) == (1, 0, 0)
    return found[0]


def test_ddp_as_stock_with_inductor(ranks: Ranks) -> None:
    """An all-reduce runs beside the region of the layer before: in the program, and as measured."""
    found = trained(ranks, "ddp")
    assert found["receipt"].regions == 3 and found["receipt"].buckets == 2
    assert found["overlaps"] == [("bucket0", "region 1 of backward0")]
    assert found["kinds"] == [("all_reduce", "backward0")] * 2
    backward = found["sources"][-1]
    second = backward.index("region 1 of backward0")
    assert backward.index("buckets.start('bucket0'") < second < backward.index("buckets.wait('bucket0'")


def test_fsdp2_as_stock_with_inductor(ranks: Ranks) -> None:
    """As many regions as stock compiles layers, forward and backward; gathers and reductions run beside them."""
    found = trained(ranks, "fsdp2")
    assert found["receipt"].regions == 4
    assert {("gather1", "region 0 of forward0"), ("gather1", "region 0 of backward0")} <= {*found["overlaps"]}
    assert ("scatter0", "region 1 of backward0") in found["overlaps"]


@pytest.mark.backends
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["ddp", "fsdp2"])
def test_blocks_as_stock_with_inductor(ranks: Ranks, case: str) -> None:
    """Norms, activations and biases: kernels that inductor fuses."""
    trained(ranks, case, layer="block")


@pytest.mark.backends
def test_torch_compile_is_a_door(ranks: Ranks) -> None:
    trained(ranks, "ddp", kernels="callable", stock="aot_eager", door="torch.compile")


@pytest.mark.backends
@pytest.mark.parametrize("column", matrix.RANKS)
@pytest.mark.parametrize("name", matrix.NAMES)
def test_matrix(ranks: Ranks, name: str, column: str, update_golden: bool) -> None:
    skip_without(name)
    found = ranks.run(CASES + "cell", 280, name=name, case=matrix.RANKS[column])
    assert len({*found}) == 1
    check(name, column, found[0], update_golden)
