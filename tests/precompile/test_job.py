"""Precompiling a job in one process: what lies ready, the same for every rank; and what is refused, and why."""

import json
import os
import sys

import pytest
import torch
import torch.distributed as dist

import dcompile
from dcompile.errors import OptionError, PrecompileError
from dcompile.precompile.job import mesh_shape
from tests.precompile import jobs

# Dynamo itself looks at .grad of a non-leaf when it goes on after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
ATEN = {"options": {"kernels": "aten"}}
"""No kernels to build: for what is asked about plans and refusals alone."""


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_rank_777_of_1024_has_the_plan_of_rank_0(name, tmp_path):
    build, _ = jobs.JOBS[name]
    folders = {rank: tmp_path / f"{rank}" for rank in (0, 777)}
    for rank, folder in folders.items():
        report = dcompile.precompile(build, world_size=1024, ranks=[rank], path=folder, **ATEN)
        assert [program.name for program in report.ranks[0].programs] == ["forward0", "backward0"]
        assert report.ranks[0].adapters == (name,) and not report.left
    first, last = ({path.name: path.read_text() for path in f.glob("*.graph")} for f in folders.values())
    assert len(first) == 2 and first == last
    assert not dist.is_initialized() and "RANK" not in os.environ


def test_a_step_without_memory_comes_to_the_programs_of_one_that_runs(tmp_path):
    build, how = jobs.JOBS["ddp-unused"]
    real, fake = (
        dcompile.precompile(build, world_size=4, step=jobs.step, path=tmp_path, fake=fake, **how | ATEN)
        for fake in (False, True)
    )
    assert real.ranks[0].keys == fake.ranks[0].keys and real.programs == 2
    assert [program.report.graphs_cached for program in fake.ranks[0].programs] == [1, 1]
    assert str(fake).splitlines()[0].startswith("Net (ddp), precompiled for 4 ranks in ")
    assert "0 planned; 0 kernels built" in str(fake)


@pytest.mark.full
@pytest.mark.parametrize("name", jobs.JOBS)
def test_every_wrapper_comes_to_the_programs_of_a_step_that_runs(name, tmp_path):
    build, how = jobs.JOBS[name]
    real, fake = (
        dcompile.precompile(build, world_size=4, step=jobs.step, path=tmp_path, fake=fake, **how)
        for fake in (False, True)
    )
    assert real.ranks[0].keys == fake.ranks[0].keys and not fake.left and not fake.built


@pytest.mark.full
def test_no_kernel_and_no_trace_depends_on_the_world_size_where_shards_are_uneven(tmp_path):
    build, how = jobs.JOBS["fsdp2-uneven"]
    report = dcompile.precompile(build, world_size=(2, 4, 1024), path=tmp_path, **how)
    assert report.built == report.kernels > 0
    assert [sum(program.report.built for program in rank.programs) for rank in report.ranks[1:]] == [0, 0]
    assert len([*tmp_path.glob("*.trace")]) == 1, "a world size is traced anew"


def test_the_manifest_says_what_a_folder_is_for(tmp_path):
    def build(mesh):
        assert mesh.mesh_dim_names == ("dp", "tp") and mesh.size() == dist.get_world_size() == 8
        return torch.nn.Linear(4, 4), (torch.randn(2, 4),)

    dcompile.precompile(build, world_size=8, mesh={"dp": -1, "tp": 2}, path=tmp_path, **ATEN)
    (manifest,) = tmp_path.glob("*.manifest")
    (job,) = json.loads(manifest.read_text())["jobs"]
    assert (job["model"], job["world_size"], job["mesh"]) == ("Linear", 8, [["dp", -1], ["tp", 2]])
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in tmp_path.iterdir())


def test_the_shape_of_a_mesh():
    assert mesh_shape({"dp": -1, "tp": 8}, 1024) == (128, 8)
    for mesh in ({"dp": 3}, {"dp": -1, "tp": -1}, {"dp": -1, "tp": 3}, {"dp": 0}):
        with pytest.raises(OptionError, match="does not come to 4 ranks"):
            mesh_shape(mesh, 4)


# --- refusals ---------------------------------------------------------------------------------------------------------


def linear(*_):
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"world_size": 0}, "give a number of ranks"),
        ({"world_size": 2, "ranks": [2]}, "a job of 2 ranks has none of these"),
        ({"world_size": 2, "mode": "fastest"}, "unknown mode"),
        ({"world_size": 3, "mesh": {"dp": 2}}, "does not come to 3 ranks"),
    ],
)
def test_bad_arguments_are_errors_at_the_call(keywords, message):
    with pytest.raises(OptionError, match=message):
        dcompile.precompile(linear, **keywords)


def refused(build=linear, step=None, **keywords):
    with pytest.raises(PrecompileError) as error:
        dcompile.precompile(build, world_size=4, step=step, **keywords)
    assert not dist.is_initialized()
    return str(error.value)


def test_reading_a_value_is_refused_with_the_line():
    def step(model, x):
        loss = model(x).sum()
        dist.all_reduce(loss)
        return loss.item()  # what ranks agree on

    message = refused(step=step)
    assert "test_job.py:" in message and "return loss.item()" in message and "fake=False" in message


def test_objects_of_other_ranks_are_refused():
    def step(model, x):
        told = [model(x).shape]
        dist.broadcast_object_list(told, src=0)  # this rank's own
        dist.all_gather_object([None] * 4, told)

    message = refused(step=step, fake=False)
    assert "all_gather_object at " in message and "dist.all_gather_object([None] * 4, told)" in message


def test_groups_of_a_backend_of_their_own_are_made_of_ranks_that_are_not_there():
    def build():
        dist.init_process_group("gloo")
        group = dist.new_group([0, 1], backend="gloo")
        assert dist.get_backend(group) == "fake" and group.size() == 2
        return linear()

    assert dcompile.precompile(build, world_size=4, **ATEN).programs == 1 + torch.is_grad_enabled()


def test_a_job_in_which_nothing_is_compiled_is_refused():
    def build():
        return dcompile.compile(torch.nn.Linear(4, 4)), ()

    assert (
        refused(build, step=lambda model: None)
        == "dcompile: nothing of Linear was compiled: no compiled model was called"
    )


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    message = refused(lambda: (torch.nn.Linear(4, 4).cuda(), ()))
    assert "uses a GPU" in message and "one GPU of the job's kind" in message


def test_settings_belong_to_whoever_compiles():
    def build():
        return dcompile.compile(torch.nn.Linear(4, 4)), (torch.randn(2, 4),)

    with pytest.raises(OptionError, match="compiled the model already"):
        dcompile.precompile(build, world_size=2, mode="default")


def test_a_process_with_a_group_is_no_place_for_it(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(PrecompileError, match="has one already"):
            dcompile.precompile(linear, world_size=2)
    finally:
        dist.destroy_process_group()
    assert sys.excepthook is not None
