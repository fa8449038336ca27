"""Rows of the numerics matrix on two GPUs over NCCL, against stock: FSDP1, hooks and groups of DDP, SyncBatchNorm."""

import pytest

from tests.distributed.cases import GRAPHS
from tests.distributed.matrix import DDP_ROWS, FSDP1_ROWS
from tests.distributed.test_matrix import run

pytestmark = pytest.mark.gpu
CASES = "tests.distributed.cases:"
WANTED = ("hook", "group", "LoRA, no_sync", "a limit for each bucket", "half precision", "layer shared")
ROWS = [row for row in DDP_ROWS if row.always and any(word in row.name for word in WANTED)]
ROWS += [row for row in FSDP1_ROWS if row.always]
CLOSE = 1e-5
"""Relative difference of losses where CUDA adds with atomics: gradients of embeddings and of convolutions."""


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_training_equals_stock(ranks, row):
    for found in run(ranks, row, "aten"):
        exact = "llama" not in row.how["name"] and row.how["name"] != "norm" and not row.tolerance
        assert found["relative"] <= (0 if exact else CLOSE)
        assert not exact or (found["param"], found["grad"], found["after loading"]) == (0, 0, 0)


def test_sync_batch_norm_equals_stock(ranks):
    for found in ranks.run(CASES + "against_stock_sync_norm", 150):
        assert found["receipt"].eligible and found["receipt"].graphs == 1
        assert found["relative"] <= CLOSE and found["ranks"] == 0
        assert found["buffer"] <= CLOSE


@pytest.mark.parametrize(
    ("case", "how"),
    [
        (CASES, {"hook": "bf16_compress_hook"}),
        (CASES, {"hook": "fp16_compress_hook", "bucket_cap_mb": 0.002}),
        ("tests.distributed.fsdp1_cases:", {}),
        ("tests.distributed.fsdp1_cases:", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ],
    ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_recorded_steps_equal_stock(ranks, case, how):
    for found in ranks.run(case + "against_stock", 150, name="mlp", options=GRAPHS, **how):
        assert found["receipt"].eligible and found["receipt"].replays >= 2, str(found["receipt"])
        assert (found["loss"], found["param"], found["ranks"]) == (0, 0, 0)
