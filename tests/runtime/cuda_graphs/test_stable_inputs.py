"""Inputs that lie still are read where they lie; those that move are copied."""

import gc
import weakref

import pytest
import torch
import torch.nn.attention

from dcompile.runtime.cuda_graphs import trees
from dcompile.runtime.cuda_graphs.trees import COPY_US, MIN_COPIES_US, WATCHED_CALLS
from tests.runtime.recorder import Program, Worst

BYTES_A_US = 2_000
"""A thousandth of a GPU's: what is worth a recording is then 40 kB to fill again and again, not 40 MB."""
COUNT = int(MIN_COPIES_US * BYTES_A_US) // 4
"""Elements of which one copy is worth a recording."""


@pytest.fixture(autouse=True)
def slow_copies(monkeypatch):
    monkeypatch.setattr(trees, "BYTES_A_US", BYTES_A_US)


def update(g, x, step):
    """As an optimizer: writes a tensor by a gradient, beside a small input that is another each time."""
    x.sub_(g * step)
    return []


@pytest.fixture
def program():
    return Program(Worst(), update, mutated=(1,))


def run(program, g, x, value):
    g.fill_(value)
    expected = x - g * value
    program.step = torch.tensor(float(value))  # made while the last one is there: elsewhere
    program.replayed([g, x, program.step])
    assert torch.equal(x, expected)


def slots(program):
    return [[slot.position for slot in recording.slots] for recording in program.replayed._recordings[()]]


def test_after_a_few_replays_they_are_read_where_they_lie(program):
    g, x = torch.empty(COUNT), torch.zeros(COUNT)
    for value in range(1 + WATCHED_CALLS - 1):
        run(program, g, x, value)
    assert slots(program) == [[0, 1, 2]], "one plain call, then a recording with copies"
    for value in range(5):
        run(program, g, x, value)
    assert slots(program) == [[2]] and program.report.recordings == 2
    assert program.plain == 1


@pytest.mark.parametrize("count", [0, 1])
def test_copies_that_are_not_needed_any_more_are_let_go_of(count):
    program = Program(Worst(), lambda x: [x + 1][:count])
    x = torch.full((COUNT,), 5.0)
    for _ in range(2):
        program.replayed([x])
    kept = program.replayed([x])
    copies = [weakref.ref(slot.tensor) for r in program.replayed._recordings[()] for slot in r.slots]
    for value in range(WATCHED_CALLS):
        x.fill_(value)
        program.replayed([x])
    assert copies and slots(program)[-1] == [], "read where it lies, whatever the caller keeps"
    assert all(copy() is not None for copy in copies) == bool(kept)
    assert all(torch.equal(y, torch.full_like(y, 6.0)) for y in kept)
    kept.clear()
    program.replayed([x])
    program.replayed([x])
    program.recorder.programs.clear()
    gc.collect()
    assert not any(copy() is not None for copy in copies)


def test_what_moves_then_is_copied_again(program):
    x = torch.zeros(COUNT)
    places = [torch.empty(COUNT) for _ in range(4)]
    for value in range(WATCHED_CALLS + 3):
        run(program, places[0], x, value)
    for value in range(4 * WATCHED_CALLS):
        run(program, places[1 + value % 3], x, value)
    assert slots(program) == [[2], [0, 2]] and program.report.recordings == 3
    run(program, places[0], x, 1)
    assert program.report.recordings == 3 and program.plain == 1


def test_what_moves_meanwhile_has_a_copy(program):
    x, places = torch.zeros(COUNT), [torch.empty(COUNT) for _ in range(2)]
    for value in range(3 * WATCHED_CALLS):
        run(program, places[value % 2], x, value)
    assert slots(program) == [[0, 2]], "the other one stays"


@pytest.mark.parametrize("many", [False, True])
def test_small_inputs_are_copied_unless_they_are_many(many):
    count = int(MIN_COPIES_US / COPY_US) if many else 3
    little = Program(Worst(), lambda *inputs: [sum(inputs)])
    inputs = [torch.full((2,), float(n)) for n in range(count)]
    for _ in range(3 * WATCHED_CALLS):
        (total,) = little.replayed([*inputs])
        assert torch.equal(total, sum(inputs))
        del total
    assert slots(little) == [[]] if many else [[*range(count)]]
    assert little.report.recordings == 1 + many


def test_what_moves_once_leaves_the_others_where_they_lie():
    program = Program(Worst(), lambda *inputs: [sum(inputs)])
    inputs = [torch.ones(COUNT) for _ in range(3)]
    for position in (None, 0, None, 1, None, 2, None):
        if position is not None:
            inputs[position] = torch.full((COUNT,), position + 2.0)
        for _ in range(2 * WATCHED_CALLS):
            (total,) = program.replayed([*inputs])
            assert torch.equal(total, sum(inputs))
            del total
    assert slots(program) == [[], [0], [0, 1, 2]] and program.report.recordings == 4


def test_a_recording_that_fails_then_leaves_plain_calls(program):
    g, x = torch.empty(COUNT), torch.zeros(COUNT)
    for value in range(3):
        run(program, g, x, value)
    program.recorder.fails = "out of memory"
    for value in range(2 * WATCHED_CALLS):
        run(program, g, x, value)
    assert program.report.notes == ["runs without a CUDA graph: out of memory"] and program.plain > WATCHED_CALLS


def test_what_a_dropped_recording_has_handed_out_is_left_alone():
    program = Program(Worst(), lambda x: [x + 1])
    x = torch.empty(COUNT)
    for value in range(WATCHED_CALLS + 5):
        x.fill_(value)
        (y,) = program.replayed([x])
        assert torch.equal(y, torch.full_like(y, value + 1.0))
        if value == WATCHED_CALLS - 1:
            kept = y
        del y
    assert torch.equal(kept, torch.full_like(kept, float(WATCHED_CALLS)))
    assert slots(program) == [[]], "of two recordings, the one in use has taken both their places"


def test_another_implementation_of_flash_attention_has_a_recording_of_its_own(program, monkeypatch):
    g, x = torch.empty(COUNT), torch.zeros(COUNT)
    for value, chosen in enumerate((None, None, "FA3", "FA3", None)):
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda name=chosen: name, raising=False)
        run(program, g, x, value)
    assert {key: len(found) for key, found in program.replayed._recordings.items()} == {(): 1, ("FA3",): 1}
