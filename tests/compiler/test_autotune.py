"""What max_autotune has measured for products that may end in loops, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dcompile.codegen.schedule.fusion import matmul_epilogue
from dcompile.codegen.schedule.fusion.matmul_epilogue import LIBRARY, choose_skinny_matmuls
from dcompile.collectives.contract import Request
from dcompile.compiler import autotune
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.ir.nodes import Loop
from dcompile.ir.verify import verify
from tests.codegen.emit import products

GPU = torch.device("cuda", 0)


@pytest.fixture
def contests(monkeypatch):
    """What has been measured: adding is faster by the second tile, nothing else is faster."""
    seen = []

    def fastest(contest, usual, launcher, device):
        seen.append(contest)
        _, second, *_ = contest.rivals
        assert usual is None and contest.copies == 1 and launcher == Path("gpu_launch") and device == GPU
        return second if len(contest.buffers) == 5 else None

    monkeypatch.setattr(matmul_epilogue, "MIN_EPILOGUE_FLOPS", 0)
    monkeypatch.setattr(autotune, "fastest_tile", fastest)
    monkeypatch.setattr(autotune, "choose", lambda geometries, device: {g: (7,) for g in geometries if g.k == 64})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return seen


def build(sources):
    return {name: Path(name) for name in (*(source.name for source in sources), "gpu_launch")}


def layers(x, w, v, r):
    x = r + x @ w
    x = r + x @ v
    return (x @ w).relu()


PROGRAM = products.program(layers, *[(64, 64)] * 4)


def test_each_kind_is_measured_once_and_the_receipt_says_what_it_came_to(contests):
    tuner = autotune.Tuner()
    chosen, notes = tuner.epilogues(PROGRAM, GPU, 90, build)
    again, _ = tuner.epilogues(PROGRAM, GPU, 90, build)
    assert again == chosen and len(chosen) == 1 and len(contests) == 2
    (tile,) = chosen.values()
    assert tile == autotune.tiles(90, 132)[1]
    assert notes == [f"max_autotune: 2 of 3 products end in the loop behind them: 2 of 64x64x64 in add ({tile})"]
    assert autotune.forecast_notes(PROGRAM) == [
        "max_autotune: 3 products may end in the loop behind them, which compiling measures: "
        "2 of 64x64x64 in add, 1 of 64x64x64 in relu"
    ]


def test_what_runs_otherwise_is_the_chosen_algorithm_and_the_loop(contests):
    autotune.Tuner().epilogues(PROGRAM, GPU, 90, build)
    for contest in contests:
        (matmul,) = contest.matmuls
        shape, algorithm = matmul.algorithm
        assert (shape.m, shape.n, shape.k) == (64, 64, 64) and algorithm == (7,)
        (loop,) = contest.separate
        names = {buffer.name for buffer in contest.buffers}
        assert matmul.out in loop.arguments and set(loop.arguments) < names
        for rows in contest.rivals.values():
            assert {name for row in rows for name in row.arguments} == names - {matmul.out}


def test_kernels_that_cannot_be_compiled_are_named_and_left_out(contests):
    def fail(sources):
        raise BuildError("dcompile: Triton cannot compile k1\nmore")

    chosen, notes = autotune.Tuner().epilogues(PROGRAM, GPU, 90, fail)
    assert chosen == {} and not contests
    assert notes == [
        "max_autotune: no epilogue is fused, since kernels to measure failed: dcompile: Triton cannot compile k1",
        "max_autotune: 0 of 3 products end in the loop behind them",
    ]


def test_a_kind_that_there_is_no_room_to_measure_is_named(contests, monkeypatch):
    def fastest(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(autotune, "fastest_tile", fastest)
    chosen, notes = autotune.Tuner().epilogues(PROGRAM, GPU, 90, build)
    assert chosen == {} and notes[0] == "max_autotune: the GPU has no room to measure what 64x64x64 ends in"
    assert len(notes) == 3


def test_tiles_of_older_gpus_need_no_copy_engine():
    assert not any(tile.descriptors for tile in autotune.tiles(89, 128))
    assert all(tile.programs in (0, 132, 264) for tile in autotune.tiles(90, 132))


def few_rows(x, w, v, b):
    h = torch.nn.functional.silu(x @ w.t())
    return h @ v.t() + x @ w.t(), torch.addmm(b, x, v.t())


@pytest.fixture
def skinny_contests(monkeypatch):
    """What has been measured: with one product the last tile is fastest, with two the library."""
    seen = []

    def fastest(contest, usual, launcher, device):
        seen.append(contest)
        assert usual in contest.rivals and launcher == Path("gpu_launch") and device == GPU
        return None if len(contest.matmuls) == 2 else [*contest.rivals][-1]

    monkeypatch.setattr(autotune, "fastest_tile", fastest)
    return seen


FEW = products.program(few_rows, (4, 512), (512, 512), (512, 512), (512,))


def test_products_of_few_rows_are_measured_with_what_surrounds_them(skinny_contests):
    tuner = autotune.Tuner()
    chosen, notes = tuner.skinny(FEW, GPU, 90, build)
    again, _ = tuner.skinny(FEW, GPU, 90, build)
    assert again == chosen and len(skinny_contests) == len(chosen) >= 2
    tiles = sorted(map(str, chosen.values()))
    assert "8x128x64, 8 warps" in tiles
    assert notes[0].startswith("max_autotune: products of few rows: ") and "4x512x512 by" in notes[0]
    for contest in skinny_contests:
        names = {buffer.name for buffer in contest.buffers}
        for rows in contest.rivals.values():
            assert {name for row in rows for name in row.arguments} <= names
        if contest.matmuls:
            results = {matmul.out for matmul in contest.matmuls}
            assert results <= names
            assert all(results & set(row.arguments) for row in contest.separate)
    after = choose_skinny_matmuls(FEW, chosen)
    verify(after)
    assert [step.tile for step in after.steps if isinstance(step, Loop) and step.tile] == [
        tile for tile in chosen.values() if tile != LIBRARY
    ]


def test_few_rows_keep_their_tiles_where_kernels_cannot_be_compiled(skinny_contests):
    def fail(sources):
        raise BuildError("no compiler\nat all")

    chosen, notes = autotune.Tuner().skinny(FEW, GPU, 90, fail)
    assert not chosen and not skinny_contests
    assert notes == ["max_autotune: products of few rows keep their tiles, since kernels failed: no compiler"]


@pytest.mark.parametrize("config", [Config(verify=True), Config(verify=True, skip="fuse_matmul_epilogues")], ids=str)
def test_what_was_measured_enters_the_schedule_as_a_value(contests, config):
    seen = []

    def measure(program):
        seen.append(program)
        return {ending.kind: products.SMALL for ending in matmul_epilogue.epilogues(program)}

    def schedule(measure=None):
        *_, (_, program) = Pipeline(config).stages(PROGRAM, Request("forward", "forward"), measure=measure)
        return program

    plain, after = schedule(), schedule(measure)
    if config.skip:
        assert after == plain and not seen
        return
    assert len(seen) == 1 and all(buffer.storage is None for buffer in seen[0].buffers), "before memory is planned"
    assert all(isinstance(step, Loop) and step.product for step in after.steps)
    assert not any(isinstance(step, Loop) and step.product for step in plain.steps)
    assert sum(b.storage == "arena" for b in after.buffers) < sum(b.storage == "arena" for b in plain.buffers)


def test_a_gain_below_noise_changes_nothing(monkeypatch):
    times = {"usual": 1.0, "near": 0.99, "slow": 2.0, "fast": 0.5}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(autotune, "medians", lambda calls, *_: {name: times[name] for name in calls})

    def winner(*names):
        return autotune.winner(dict.fromkeys(names, lambda: None), "usual")

    assert winner("usual", "near", "slow") == "usual" and winner("usual", "near", "fast", "slow") == "fast"
