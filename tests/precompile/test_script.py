"""A training script, run as one rank of a job whose other ranks are not there, as far as its first step."""

import sys

import pytest
import torch.distributed as dist

from dcompile.precompile.__main__ import main

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import dcompile

dist.init_process_group("gloo")
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 64
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
dcompile.compile(model, options={"kernels": "aten"})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(2, 4)).square().mean()
    if "early" in sys.argv:
        print(loss.item())
    loss.backward()
    if "late" in sys.argv:
        print(loss.item())
    optimizer.step()
    raise SystemExit("the first step is the last")
"""


@pytest.fixture
def run(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*arguments):
        before = [*sys.argv], sys.path[0]
        given = ("--world-size", "64", "--path", str(tmp_path / "folder"))
        status = main([*given, *(a for a in arguments if a == "--fake"), str(script), *arguments])
        assert not dist.is_initialized() and ([*sys.argv], sys.path[0]) == before
        return status, capsys.readouterr()

    return run


def test_a_script_ends_with_its_first_step(run):
    status, said = run("late")
    assert status == 0 and "train.py (ddp), precompiled for 64 ranks in " in said.out
    assert "2 programs, 0 kernels" in said.out and not said.err


def test_without_memory_a_script_is_left_where_it_reads_a_value_behind_a_backward(run):
    status, said = run("--fake", "late")
    assert status == 0 and "note: the script was left where it reads a value: " in said.out
    assert "train.py:17 in <module>: print(loss.item())" in said.out
    status, said = run("--fake", "early")
    assert status == 2 and "train.py:14 in <module>: print(loss.item()) reads the value of a tensor" in said.err


@pytest.mark.parametrize(
    "wrong", [["--world-size", "0"], ["--world-size", "many"], ["--world-size", "2", "--rank", "2"]]
)
def test_bad_arguments_are_errors(wrong, capsys):
    assert main([*wrong, "train.py"]) == 2
    assert "dcompile: --" in capsys.readouterr().err
