"""Batches of other lengths on each of two Gloo ranks: no rank compiles alone."""

CASES = "tests.distributed.length_cases:"


def test_with_size_classes_all_ranks_compile_in_their_first_step(ranks):
    for found in ranks.run(CASES + "classes", 120, options={"size_classes": [8, 16, 32]}):
        assert found["graphs"] == [1, 1, 1, 1]
        assert (found["grad"], found["ranks"]) == (0, 0) and found["receipt"].eligible


def test_ranks_that_were_given_other_classes_say_so(ranks):
    for outcome in ranks.outcomes(CASES + "other_classes", 60):
        assert outcome.kind == "PlanMismatchError" and "size_classes=8,16" in outcome.error
