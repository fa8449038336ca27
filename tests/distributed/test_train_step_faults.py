"""A step that fails leaves parameters and state as they were, on two Gloo ranks, and training goes on or ends."""

import json

import pytest

from tests.job import run, torchrun

CASES = "tests.distributed.step_fault_cases:"
WAYS = pytest.mark.parametrize("way", ["ddp", "fsdp2"])


@pytest.mark.parametrize(
    ("way", "by", "where"),
    [
        ("ddp", "error", "after loss"),
        ("ddp", "interrupt", "loss"),
        ("ddp", "interrupt", "program"),
        ("fsdp2", "error", "loss"),
        ("fsdp2", "interrupt", "after loss"),
    ],
)
def test_a_step_that_is_interrupted_on_all_ranks_has_not_happened(ranks, way, by, where):
    for found in ranks.run(CASES + "interrupted", 150, way=way, by=by, where=where):
        error = "KeyboardInterrupt" if by == "interrupt" else "Unlucky"
        assert found == {"said": f"3 {error}", "kept": True, "no_gradients": True, "goes_on": True}, found


@WAYS
def test_a_loss_that_is_no_number_on_one_rank_leaves_all_ranks_as_they_were(ranks, way):
    for found in ranks.run(CASES + "not_a_number", 150, way=way):
        assert found["kept"] and found["goes_on"] and found["scale"] == 2.0**7, found


@WAYS
def test_a_rank_that_is_killed_is_restarted_and_training_ends_as_if_undisturbed(tmp_path, way):
    results = []
    for kill in (False, True):
        folder = tmp_path / ("killed" if kill else "undisturbed")
        folder.mkdir()
        if kill:
            (folder / "kill").touch()
        command = torchrun(2, "tests/distributed/step_script.py", str(folder), way, restarts=1)
        status, output = run(command, folder, 150)
        assert status == 0, output
        line = next(line for line in output.splitlines() if line.startswith("RESULT"))
        done, _, numbers = line.removeprefix("RESULT from step ").partition(": ")
        assert int(done) == (3 if kill else 0), output
        results.append(json.loads(numbers))
    assert results[1] == pytest.approx(results[0], abs=1e-5)
