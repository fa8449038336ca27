"""A tour of one minute: a small model, followed from the user's call to its kernels and its all-reduce.

Read from top to bottom. Each test shows one stage, with the tool that shows it to you in your own model, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.ir.parse import parse
from dcompile.ir.text import show
from dcompile.pipeline import GRAPH_WRAPPERS, JOINT_PASSES, loop_passes

QUIET = {"receipt": False}


class Net(nn.Module):
    """A norm, a linear layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.up(self.norm(x)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone: collectives run, with nobody to wait for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_1_a_compiled_model_is_the_same_object_with_eagers_values() -> None:
    model, x = Net(), torch.randn(8, 16)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    compiled = dcompile.compile(model, options=QUIET)
    assert compiled is model, "nothing is wrapped, so state_dict and optimizers stay as they are"
    result = compiled(x)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)


def test_2_explain_shows_the_program_after_each_pass() -> None:
    report = dcompile.explain(Net(), torch.randn(8, 16))
    forward = report.programs["forward0"]
    assert forward.passes[0] == "lower", "ATen operations become loops over named buffers"
    assert "fuse" in forward.passes and forward.change("fuse").startswith("--- before")
    assert {"fuse", "plan_memory_for_peak"} <= {row.name for row in loop_passes()}, "the lists are in pipeline.py"


def test_3_a_program_is_text_that_can_be_read_back() -> None:
    text = dcompile.explain(Net(), torch.randn(8, 16)).programs["forward0"].after("fuse")
    program = parse(text)
    assert show(program) == text and program.steps, "a program is a list of steps: loops, library calls, collectives"


def test_4_a_dump_has_graphs_programs_and_kernels(tmp_path: Path) -> None:
    dcompile.compile(Net(), options={**QUIET, "dump": str(tmp_path)})(torch.randn(8, 16))
    folder = tmp_path / "rank0"
    assert (folder / "forward0" / "host.py").exists(), "the host program, which launches the kernels"
    assert [*(folder / "forward0" / "kernels").iterdir()], "their sources"
    assert "the compiled graph" in (folder / "graph0" / "wrappers.txt").read_text()
    assert len(GRAPH_WRAPPERS) < len(JOINT_PASSES), "what stands around a graph, and what rewrites it: lists, too"


def test_5_the_all_reduce_of_ddp_is_a_step_of_the_backward(one_rank: None) -> None:
    model = DistributedDataParallel(Net())
    dcompile.compile(model, options=QUIET)
    model(torch.randn(8, 16)).sum().backward()
    receipt = dcompile.receipt(model)
    assert receipt is not None and receipt.eligible and receipt.collectives == 1
    backward = dcompile.explain(model, torch.randn(8, 16)).programs["backward0"]
    assert "all_reduce" in backward.after(backward.passes[-1])


def test_6_what_cannot_be_done_is_said_with_a_reason(one_rank: None) -> None:
    model = DistributedDataParallel(Net())
    dcompile.compile(model, options={**QUIET, "distributed": "stock"})
    model(torch.randn(8, 16)).sum().backward()
    receipt = dcompile.receipt(model)
    assert receipt is not None and not receipt.eligible and receipt.reasons == ("option distributed='stock'",)
