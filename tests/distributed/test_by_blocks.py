"""FSDP2 by blocks on two Gloo ranks: the order of collectives, and ranks that disagree. Trainings: `test_matrix.py`."""

import pytest

from tests.distributed.harness import Ranks

CASES = "tests.distributed.by_blocks_cases:"
LAYERS = ["layers.0", "layers.1", "layers.2", "layers.3"]


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


def started(events, what):
    """Modules whose gathers or reductions start, in order."""
    return [event.removeprefix(f"start {what} of ") for event in events if event.startswith(f"start {what}")]


def hidden(events):
    """Modules with a matmul between the start of their gather and the wait for it."""
    found = []
    for module in started(events, "gather"):
        flight = events[events.index(f"start gather of {module}") : events.index(f"wait gather of {module}")]
        found += [module] if any("mm" in event for event in flight) else []
    return found


@pytest.mark.parametrize("by", ["block.compile", pytest.param("whole", marks=pytest.mark.full)])
@pytest.mark.parametrize("checkpointed", ["", "outside"])
def test_gathers_start_before_the_block_that_needs_them_in_every_phase(ranks, by, checkpointed):
    first, second = ranks.run(CASES + "order", 150, by=by, checkpointed=checkpointed)
    assert first == second, "ranks run the same in the same order"
    assert first.keys() == {"evaluation", "forward", "evaluation between", "backward"}, "and so does every step"
    for phase in ("evaluation", "forward", "evaluation between"):
        assert started(first[phase], "gather") == ["first, last", *LAYERS]
        assert hidden(first[phase]) == LAYERS
    assert started(first["backward"], "gather") == LAYERS[::-1]
    assert hidden(first["backward"]) == LAYERS[::-1]
    assert started(first["backward"], "scatter") == [*LAYERS[::-1], "first, last"]
    recomputed = first["backward"].count("addmm")  # of each block the first; the last is behind nothing that is kept
    assert recomputed >= len(LAYERS) if checkpointed else recomputed == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"by": "whole"}, "ranks disagree on their sharded collectives of a model"),
        ({"by": "block.compile"}, "ranks disagree on their sharded collectives of a model"),
        ({"by": "block.compile", "alike": 0}, "needs options={'promote': False}"),
        ({"by": "block.compile", "checkpointed": "hooks"}, "ranks disagree on their sharded collectives of a model"),
        ({"by": "block.compile", "breaks": True}, "ranks do not run the same collectives in the same order"),
        ({"by": "block.compile", "apart": True}, "ranks do not run the same collectives in the same order"),
        ({"by": "block.compile", "apart": True, "alike": 0}, "ranks disagree on their sharded collectives of a model"),
    ],
    ids=str,
)
def test_ranks_that_leave_out_other_blocks_all_raise_an_error_that_says_so(ranks, how, said):
    for outcome in ranks.outcomes(CASES + "ranks_leave_out", 100, **how):
        assert outcome.kind == "PlanMismatchError" and said in outcome.error
