"""Calls recorded in pieces, on a recorder for the CPU in which some operators cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import dcompile
from dcompile.collectives.contract import ProgramReport
from dcompile.runtime.cuda_graphs import trees
from dcompile.runtime.cuda_graphs.trees import refill
from tests.fuzz import recordings
from tests.runtime.cuda_graphs import waiting
from tests.runtime.cuda_graphs.waiting import Waiting, batch, train
from tests.runtime.recorder import Program, Worst


class Capturing(recordings.Repeats):
    """As `Repeats`; operators see that they are captured."""

    def record(self, function: Callable[[], list[Any]], pool: int) -> tuple[Callable[[], None], list[Any]]:
        with captured():
            replay, results = super().record(function, pool)
        return replay, results


class captured:
    def __enter__(self) -> None:
        waiting.CAPTURING.append(None)

    def __exit__(self, *_: object) -> None:
        waiting.CAPTURING.pop()


@pytest.fixture(autouse=True)
def recorded() -> Iterator[None]:
    torch._dynamo.reset()
    waiting.CALLS.clear()
    with mock.patch.object(recordings, "Repeats", Capturing), recordings.recorded():
        yield


def pair(*operators: Any) -> tuple[Any, Any, Any]:
    ours = Waiting(*operators)
    compiled = dcompile.compile(ours, options={"triton.cudagraphs": True, "receipt": False})
    return Waiting(*operators), ours, compiled


@pytest.mark.parametrize("count", [1, 2])
def test_training_with_steps_that_cannot_be_recorded(count: int) -> None:
    eager, ours, compiled = pair(*[waiting.wait] * count)
    train(eager, ours, compiled, 8)
    receipt = dcompile.receipt(compiled)
    assert receipt.recordings == 2 and receipt.replays == 12, receipt.details()
    assert receipt.pieces == 2 * (count + 1)
    assert receipt.notes == (
        "dcompile_tests.wait cannot be recorded: operation not permitted when stream is capturing",
        f"runs as {count + 1} CUDA graphs; between or around: dcompile_tests.wait failed in a recording",
    )


def test_a_second_failure_ends_the_recording_and_not_the_step() -> None:
    """The first piece has run by then, with its change of a buffer: the rest of the step goes on as it is."""
    eager, ours, compiled = pair(waiting.wait, waiting.wait_again)
    train(eager, ours, compiled, 8)
    receipt = dcompile.receipt(compiled)
    assert float(ours.calls[0]) == 8 and receipt.pieces == 6 and receipt.recordings == 2, receipt.details()
    assert sum("cannot be recorded" in note for note in receipt.notes) == 2
    assert waiting.CALLS.count("wait") == waiting.CALLS.count("wait_again") == 2 * 16, "each runs once a call"


def test_errors_of_a_step_between_pieces_are_the_users() -> None:
    eager, _, compiled = pair(waiting.refuse)
    with torch.no_grad():
        for step in range(6):
            torch.testing.assert_close(compiled(batch(step)), eager(batch(step)))
        with pytest.raises(RuntimeError, match="all is negative"):
            compiled(torch.full((16, 64), -1e6))
        torch.testing.assert_close(compiled(batch(7)), eager(batch(7)))
    assert dcompile.receipt(compiled).pieces == 2


def test_results_of_steps_between_pieces_are_the_callers() -> None:
    """They are new in each call, so that they may be kept."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(4):
            x = torch.softmax(x @ w, -1)
        y = waiting.wait(x)
        for _ in range(4):
            x = torch.softmax(x @ w, -1)
        return x.sum(), y

    compiled = dcompile.compile(function, options={"triton.cudagraphs": True, "receipt": False})
    kept, w = [], batch(9, rows=64)
    for step in range(8):
        kept.append((compiled(batch(step), w), function(batch(step), w)))
        for own, theirs in kept:
            torch.testing.assert_close(own, theirs)
    receipt = dcompile.receipt(compiled)
    assert receipt.recordings == 1 and receipt.replays == 6, receipt.details()


def test_a_program_without_a_piece_worth_a_graph_says_so() -> None:
    compiled = dcompile.compile(
        lambda x: waiting.wait(x.sin()).cos(), options={"triton.cudagraphs": True, "receipt": False}
    )
    for step in range(4):
        torch.testing.assert_close(compiled(batch(step)), (batch(step).sin() * 2).cos())
    note = dcompile.receipt(compiled).notes[-1]
    assert note == (
        "runs without a CUDA graph: no 4 launches follow each other without dcompile_tests.wait failed in a recording"
    )


def test_a_result_of_another_shape_is_an_error() -> None:
    kept = torch.zeros(2, 2)
    refill(kept, torch.ones(2, 2).t())
    assert bool(kept.all())
    with pytest.raises(RuntimeError, match=r"returned torch.float32 \(3,\), where it returned torch.float32 \(2, 2\)"):
        refill(kept, torch.ones(3))


def test_a_callers_own_capture_records_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = Worst()
    program = Program(worst, lambda x: [x * 2])
    program.replayed.on_gpu = True
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    for _ in range(3):
        (result,) = program.replayed([torch.ones(3)])
        assert float(result.sum()) == 6
    report: ProgramReport = program.report
    assert (program.plain, report.recordings, report.notes) == (3, 0, [trees.CAPTURED])
    capturing[0] = False
    for _ in range(3):
        program.replayed([torch.ones(3)])
    assert (report.recordings, report.replays) == (1, 2)
