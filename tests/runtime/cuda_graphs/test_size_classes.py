"""One CUDA graph for each class of sizes, on a recorder that overwrites all memory it may."""

import random

import pytest
import torch

from dcompile.runtime.cuda_graphs.trees import MAX_CLASSES, MIN_CALLS_TO_REPLACE, OTHER_SIZES, SizeClasses
from tests.runtime.recorder import Program, Worst


@pytest.fixture
def program():
    return Program(Worst(), lambda n, x: [x * n], results=1, classes=SizeClasses((16, 32, 64)), sizes=(0,))


def run(program, size):
    x = torch.randn(size)
    (result,) = program.replayed([size, x])
    assert torch.equal(result, x * size)
    return program.report.replays


@pytest.mark.parametrize(("bounds", "most"), [((1024, 2048, 4096, 8192), 4), ((), MAX_CLASSES)])
def test_400_lengths_have_few_graphs(bounds, most):
    program = Program(Worst(), lambda n, x: [x * n], results=1, classes=SizeClasses(bounds), sizes=(0,))
    draws = random.Random(0)
    lengths = draws.sample(range(512, 8193), 400)
    for _ in range(3):
        draws.shuffle(lengths)
        for length in lengths:
            run(program, length)
    assert sum(map(bool, program.replayed._recordings.values())) <= most
    assert len(program.replayed._recordings) <= most
    assert OTHER_SIZES in program.report.notes


def test_batches_padded_to_the_bounds_are_all_replayed(program):
    for size in (16, 32, 64) * 4:
        run(program, size)
    assert (program.plain, program.report.recordings, program.report.replays) == (3, 3, 9)
    assert not program.report.notes


def test_a_size_that_comes_often_takes_the_place_of_one_that_comes_no_more(program):
    for _ in range(2):
        run(program, 17)
    assert (program.plain, program.report.replays) == (1, 1)
    before = [run(program, 30) for _ in range(MIN_CALLS_TO_REPLACE + 1)]
    assert before[:-1] == [1] * MIN_CALLS_TO_REPLACE, "the first of its calls is as the first of any"
    assert before[-1] == 2 and program.report.recordings == 2
    assert run(program, 17) == 2, "it has no graph any more"
    assert len(program.replayed._recordings) == 1


def test_a_size_keeps_its_graph_while_it_is_used(program):
    for _ in range(3 * MIN_CALLS_TO_REPLACE):
        run(program, 17)
        run(program, 30)
    assert program.report.recordings == 1


def test_sizes_above_all_classes_have_no_graph(program):
    for _ in range(3):
        run(program, 65)
    assert (program.plain, program.report.recordings) == (3, 0) and program.report.notes == [OTHER_SIZES]


def test_where_no_input_is_a_size_every_call_may_be_recorded():
    program = Program(Worst(), lambda x: [x * 2], results=1, classes=SizeClasses((16,)), sizes=())
    for _ in range(3):
        program.replayed([torch.randn(40)])
    assert program.report.replays == 2


def test_bounds():
    classes = SizeClasses()
    assert [classes.bound(size) for size in (1, 2, 3, 512, 513)] == [1, 2, 4, 512, 1024]
    assert [SizeClasses((4, 9)).bound(size) for size in (1, 4, 5, 9, 10)] == [4, 4, 9, 9, None]
