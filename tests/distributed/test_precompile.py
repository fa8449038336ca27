"""Two Gloo ranks that find everything in a folder that one process has filled before."""

import pytest

import dcompile
from tests.precompile import jobs


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_ranks_build_nothing_and_train_as_stock_does(ranks, tmp_path, name):
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    build, how = jobs.JOBS[name]
    report = dcompile.precompile(build, world_size=(2, 1024), path=folder, **how)
    two, many = report.ranks
    assert sum(program.report.built for program in two.programs) == report.kernels > 0
    assert sum(program.report.built for program in many.programs) == 0
    assert len(list(folder.glob("*.trace"))) == 1, "the same for every world size"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    for found in ranks.run("tests.precompile.jobs:trained", 150, name=name, folder=str(folder), cache=str(cache)):
        receipt = found["receipt"]
        assert (
            receipt.eligible
            and (receipt.built, receipt.graphs_cached, receipt.traces_cached) == (0, 2, 1)
            and not receipt.notes
        )
        assert found["worst"] <= 1e-6 * max(found["largest"], 1) and found["seen"] == 2 * 13
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before, "nobody writes to it"
    assert not list(cache.glob("*/*.graph"))
