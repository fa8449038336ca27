"""GradScaler in the program of a step under DDP and FSDP2, on two Gloo ranks: all skip together, and equal stock."""

import pytest

PARITY = "tests.distributed.scaler_cases:parity"
CASES = [
    ("ddp", "AdamW", None, 1, "rank 1", ""),
    ("ddp", "SGD", 0.05, 3, "all ranks", ""),
    ("ddp", "AdamW", 0.05, 1, "rank 1", "train_step"),
    ("fsdp2", "AdamW", None, 1, "rank 1", ""),
    ("fsdp2", "SGD", None, 3, "rank 1", "unscaled"),
    ("fsdp2", "AdamW", 0.05, 3, "all ranks", ""),
    ("fsdp2", "AdamW", 0.05, 3, "shard", ""),
    ("fsdp2", "SGD", None, 3, "shard", ""),
    ("fsdp2", "SGD", 0.05, 3, "rank 1", "train_step"),
    ("uneven", "AdamW", None, 1, "rank 1", ""),
]


def _check(found, joined):
    assert found["scalers"] and found["halved"] and found["kept"], found
    assert found["norms"] < 2e-6 and found["state"] < 1e-6, found
    assert found["joined"] == joined, found


@pytest.mark.parametrize(("way", "kind", "clip", "accumulate", "where", "more"), CASES)
def test_an_infinite_step_is_skipped_by_all_ranks_and_others_are_stocks(
    ranks, way, kind, clip, accumulate, where, more
):
    given = {"way": way, "kind": kind, "clip": clip, "accumulate": accumulate, "where": where, "more": more}
    for found in ranks.run(PARITY, 150, **given):
        _check(found, 5)


def test_a_rank_that_reads_the_norm_before_the_step_agrees_with_the_others_programs(ranks):
    given = {"way": "fsdp2", "kind": "AdamW", "clip": 0.05, "accumulate": 1, "where": "rank 1"}
    both = ranks.run(PARITY, 150, **given, more="norm read on rank 0")
    for found, joined in zip(both, (0, 5), strict=True):
        _check(found, joined)


@pytest.mark.parametrize("kind", ["SGD", "AdamW fused"])
def test_ranks_agree_before_a_step_that_runs_apart(ranks, kind):
    given = {"way": "fsdp2", "kind": kind, "clip": None, "accumulate": 3, "where": "shard"}
    for found in ranks.run(PARITY, 150, **given, more="a gradient's norm read"):
        _check(found, 0)


def test_a_scaler_that_has_collectives_of_its_own_runs_apart(ranks):
    given = {"way": "ddp", "kind": "AdamW", "clip": 0.05, "accumulate": 1, "where": "rank 1"}
    for found in ranks.run(PARITY, 150, **given, more="sharded scaler"):
        _check(found, 0)
        assert found["separate"]["ShardedGradScaler has its own way to unscale, check or step"] == 4, found
