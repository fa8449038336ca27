"""Small all-reduces as one kernel: how ranks meet over inboxes; sums and faults on GPUs."""

import pytest

CASES = "tests.distributed.one_shot_cases:"


def test_ranks_map_the_inboxes_of_all(ranks):
    for found in ranks.run(CASES + "inboxes", kind="reached"):
        assert found == {"reason": "", "own": True, "addresses": 2}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("unreachable", "rank 1 cannot reach them (another container)"), ("none", "GPUs of this kind")],
)
def test_none_uses_them_where_one_cannot(ranks, kind, reason):
    for found in ranks.run(CASES + "inboxes", kind=kind):
        assert found == {"reason": reason, "own": False, "addresses": 0}
