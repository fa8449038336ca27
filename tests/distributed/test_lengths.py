"""Batches of other lengths on each of two Gloo ranks: no rank compiles alone."""

CASES = "tests.distributed.length_cases:"


def test_with_size_classes_all_ranks_compile_in_their_first_step(ranks, tmp_path):
    """In a later start, with other lengths on either rank, AOTAutograd traces nothing."""
    options = {"size_classes": [8, 16, 32]}
    for cold, warm in ranks.run(CASES + "two_starts", 120, options=options, cache=str(tmp_path)):
        assert cold["graphs"] == [1, 1, 1, 1] and warm["graphs"] == [1, 1]
        for found in (cold, warm):
            assert (found["grad"], found["ranks"]) == (0, 0) and found["receipt"].eligible
        assert (warm["receipt"].traces_cached, warm["receipt"].traces_uncacheable) == (1, {})


def test_ranks_that_were_given_other_classes_say_so(ranks):
    for outcome in ranks.outcomes(CASES + "other_classes", 60):
        assert outcome.kind == "PlanMismatchError" and "size_classes=8,16" in outcome.error


def test_programs_of_other_sizes_gather_branches_in_the_same_order(ranks, tmp_path):
    """A loop that reads `x` beside the last part may merge with the norm in front of the first one."""
    for worst in ranks.run(CASES + "branches", 120, cache=str(tmp_path)):
        assert len(worst) == 3 and max(worst) <= 2e-6


def test_random_models_are_trained_on_batches_that_differ(ranks, tmp_path):
    """Each rank compiles what its own sizes ask for. In three of these models, it had another order of collectives."""
    for worst in ranks.run(CASES + "random_models", 240, seeds=[0, 1, 11, 35, 37], cache=str(tmp_path)):
        assert len(worst) == 5 and max(worst.values()) <= 4e-6, worst
