"""FSDP2 over tensor parallelism on two GPUs over NCCL, against stock."""

import pytest

from tests.distributed.cases import GRAPHS
from tests.distributed.test_tp_fsdp import WIDE, holds

pytestmark = pytest.mark.gpu
CASES = "tests.distributed.tp_cases:"
CLOSE = 1e-5
"""Where CUDA adds with atomics, in the gradients of embeddings, and where kernels are ours."""


@pytest.mark.parametrize(
    ("how", "within"),
    [
        ({"name": "mlp", "shape": (1, 2), "accumulate": True}, 0),
        ({"name": "mlp", "shape": (2, 1)}, 0),
        ({"name": "mixed", "shape": (1, 2), "mp_policy": WIDE}, 0),
        ({"name": "sequence", "shape": (1, 2), "wrap": "root"}, CLOSE),
        ({"name": "llama", "shape": (1, 2)}, CLOSE),
    ],
    ids=str,
)
def test_training_equals_stock(ranks, how, within):
    for found in ranks.run(CASES + "against_stock", 150, **how):
        holds(found, within)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("recorded", [False, True])
def test_training_with_our_kernels_stays_close(ranks, shape, recorded):
    options = {"triton.cudagraphs": True} if recorded else {}
    for found in ranks.run(CASES + "against_stock", 150, name="sequence", shape=shape, options=options):
        receipt = found["receipt"]
        print(receipt)
        assert receipt.eligible and receipt.kernels > 0
        assert receipt.replays >= 2 * recorded, str(receipt)
        assert found["ranks"] == 0 and found["relative"] <= CLOSE


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
def test_recorded_steps_equal_stock(ranks, shape):
    for found in ranks.run(CASES + "against_stock", 150, name="mlp", shape=shape, options=GRAPHS):
        print(found["receipt"])
        holds(found)
        assert found["receipt"].replays >= 2, str(found["receipt"])
