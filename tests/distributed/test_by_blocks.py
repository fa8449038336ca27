"""FSDP2 by blocks on two Gloo ranks: the order of collectives, and ranks that disagree. Trainings: `test_matrix.py`."""

import pytest

from dcompile.compat.versions import torch_version
from tests.distributed.harness import Ranks
from tests.distributed.matrix import MIXED

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
    for place, event in enumerate(events):
        if event.startswith("start gather"):
            end = events.index(event.replace("start", "wait"), place)
            found += [event.removeprefix("start gather of ")] if any("mm" in e for e in events[place:end]) else []
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


@pytest.mark.parametrize("how", [{"by": "apart"}, {"by": "block.compile", "setting": "breaks"}], ids=str)
@pytest.mark.parametrize("checkpointed", ["", "outside"])
def test_a_program_starts_the_next_ones_gather_where_blocks_are_apart(ranks, how, checkpointed):
    first, second = ranks.run(CASES + "order", 150, checkpointed=checkpointed, **how)
    assert first == second, "ranks run the same in the same order"
    assert first.keys() == {"evaluation", "forward", "evaluation between", "backward"}, "and so does every step"
    for phase in ("evaluation", "forward", "evaluation between"):
        assert started(first[phase], "gather") == LAYERS
        assert hidden(first[phase]) == LAYERS[1:]
    backward = [layer for layer in LAYERS[::-1] for _ in range(2 if checkpointed else 1)]  # once to recompute it
    assert started(first["backward"], "gather") == backward
    assert hidden(first["backward"]) == backward[1:]
    assert started(first["backward"], "scatter") == LAYERS[::-1]


@pytest.mark.parametrize("how", [{}, {"checkpointed": "outside", "train": "leaving out"}], ids=str)
def test_the_next_ones_gather_may_be_copies(ranks, how):
    for found in ranks.run(CASES + "copied", 150, by="apart", steps=2, **how):
        differences = [found[what] for what in ("loss", "grad", "param", "after loading", "ranks")]
        assert differences == [0] * 5 and found["copied"] > 0
        assert any("of them in vain" in note for note in found["receipt"].notes)


@pytest.mark.skipif(torch_version() < "2.12", reason="torch 2.11 traces each of FSDP2's layers")
@pytest.mark.parametrize("how", [{"sequential": True}, {"checkpointed": "wrapper"}, {"checkpointed": "hooks"}], ids=str)
def test_promoted_blocks_are_traced_twice(ranks, how):
    for found in ranks.run(CASES + "with_copied_layers", 150, by="block.compile", steps=2, **how):
        assert found["copies"] == len(LAYERS) - 2
        assert [found[what] for what in ("loss", "grad", "param", "ranks")] == [0] * 4


TURNS = [
    {"case": "by_blocks_cases", "by": "block.compile"},
    pytest.param({"case": "by_blocks_cases", "by": "apart", "replicas": 2}, marks=pytest.mark.full),
    pytest.param({"case": "by_blocks_cases", "by": "whole", "reshard_after_forward": False}, marks=pytest.mark.full),
    pytest.param({"case": "fsdp_cases", "name": "mlp", "placement": 1}, marks=pytest.mark.full),
    {"case": "fsdp_cases", "name": "mlp", "mp_policy": MIXED},
    {"case": "tp_cases", "name": "two", "shape": (1, 2)},
]


@pytest.mark.parametrize("how", TURNS, ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["eager first", "eager last"])
def test_gradients_of_eager_and_compiled_steps_are_reduced_together(ranks, how, first):
    for found in ranks.run(CASES + "eager_by_turns", 150, first=first, **how):
        assert found["receipt"].eligible and found["ranks"] == 0
        assert [found[what] for what in ("loss", "grad", "param", "after loading")] == [0] * 4


@pytest.mark.parametrize(
    ("case", "how", "said"),
    [
        ("by_blocks_cases:partly_reduced_eagerly", {}, "a step that ran eagerly are left, summed up among some ranks"),
        ("fsdp1_cases:eager_by_turns", {"first": "eager"}, "a step under no_sync that ran eagerly are left with FSDP1"),
        ("fsdp1_cases:eager_by_turns", {"first": "compiled"}, "gradients of a step under no_sync are left"),
    ],
    ids=str,
)
def test_gradients_of_eager_steps_that_cannot_be_added_are_an_error(ranks, case, how, said):
    for outcome in ranks.outcomes(f"tests.distributed.{case}", 100, **how):
        assert outcome.kind == "DcompileError" and said in outcome.error


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param({"by": "whole"}, "ranks disagree on their sharded collectives of a model", marks=pytest.mark.full),
        ({"by": "block.compile"}, "ranks disagree on their sharded collectives of a model"),
        ({"by": "block.compile", "alike": 0}, "needs options={'promote': False}"),
        pytest.param(
            {"by": "block.compile", "checkpointed": "hooks"},
            "ranks disagree on their sharded collectives of a model",
            marks=pytest.mark.full,
        ),
        ({"by": "block.compile", "setting": "breaks"}, "ranks disagree on their order of gathers"),
        ({"by": "apart"}, "ranks disagree on their order of gathers"),
        ({"by": "apart", "alike": 0}, "ranks disagree on their sharded collectives of a model"),
    ],
    ids=str,
)
def test_ranks_that_leave_out_other_blocks_all_raise_an_error_that_says_so(ranks, how, said):
    for outcome in ranks.outcomes(CASES + "ranks_leave_out", 100, **how):
        assert outcome.kind == "PlanMismatchError" and said in outcome.error
