"""Steps of a program for a GPU that no CUDA graph can record, and how its text marks them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.host.program import unrecordable_steps
from dcompile.codegen.lower.decompositions.table import table
from dcompile.collectives.contract import APART, TOGETHER
from dcompile.compiler import driver
from dcompile.config import Config
from dcompile.ir.attention import FLEX
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Extern, Program, View
from tests.runtime.cuda_graphs import waiting

CASES: dict[str, tuple[Any, list[str]]] = {
    "all on the GPU": (lambda x: (x.exp(), x.sum()), []),
    "random numbers of the GPU": (lambda x: F.dropout(x, 0.5, True) + torch.rand_like(x), []),
    "a number": (lambda x: x * torch.tensor(3.0), []),
    "random numbers of the CPU": (lambda x: (torch.rand(3), x * 2), ["dcompile_random.uniform works on the CPU"]),
    "a constant of the CPU": (lambda x: (x + 1, torch.zeros(()), torch.tensor(3.0), torch.arange(4)), []),
    "a kernel on the CPU": (
        lambda x: (x.sum(), torch.rand(3).sum()),
        ["dcompile_random.uniform works on the CPU", "aten.sum.dim_IntList works on the CPU"],
    ),
    "a copy to the CPU": (lambda x: x.exp().cpu(), ["aten._to_copy works on the CPU"]),
    "a size that depends on values": (
        lambda x: (torch.ops.aten.nonzero(x).sum(), x.exp()),
        ["aten.nonzero waits for the size of its result", "aten.sum.dim_IntList has sizes that depend on values"],
    ),
    "a number that depends on values": (
        lambda x: x * x.sum().item(),
        [
            "aten._local_scalar_dense waits for a value of the device",
            "aten.mul.Tensor reads a number that depends on values",
        ],
    ),
    "a tagged operator": (
        lambda x: waiting.tagged(x.exp()).exp(),
        ["dcompile_tests.tagged is tagged cudagraph_unsafe"],
    ),
}


def graph_of(function: Any) -> tuple[FakeTensorMode, Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        return mode, make_fx(function, decomposition_table=table())(torch.empty(8, device="cuda"))


def text_of(mode: FakeTensorMode, gm: Any) -> str:
    with mode, mock.patch.object(driver, "why_no_kernels", lambda devices: None):
        plan = driver.Pipeline(Config.make()).plan(gm, driver.Request("inference0", "inference"))
    return host_program.emit(plan.program, plan.kernels)


def marks(text: str) -> list[str]:
    return [line.strip().removeprefix(APART) for line in text.splitlines() if line.strip().startswith(APART)]


@pytest.mark.parametrize("case", CASES)
def test_a_program_for_a_gpu_marks_what_cannot_be_recorded(case: str) -> None:
    function, expected = CASES[case]
    text = text_of(*graph_of(function))
    assert marks(text) == expected
    assert text.count(TOGETHER) == bool(expected)


def test_a_program_for_the_cpu_marks_nothing() -> None:
    gm = make_fx(lambda x: (x.exp(), torch.rand(3)))(torch.ones(3))
    plan = driver.Pipeline(Config.make()).plan(gm, driver.Request("inference0", "inference"))
    assert not marks(host_program.emit(plan.program, plan.kernels))


def test_launches_before_a_mark_are_not_batched_with_later_ones() -> None:
    """A batch is one call, which is recorded or not."""
    text = text_of(*graph_of(lambda x: (waiting.tagged(x.exp()) + x.sin()).exp()))
    calls = [
        line.strip().split("(")[0]
        for line in text.split("def call")[1].splitlines()
        if "_launch" in line or "= _op" in line
    ]
    assert [call.startswith("_launch") for call in calls] == [True, False, True]


def test_attention_by_a_kernel_of_ours_is_recorded() -> None:
    """It stands in the program as a call that torch does not have."""
    buffers = tuple(Buffer(name, "float32", (8,), (1,), "cuda:0") for name in ("x", "y"))
    view = View("x", (8,), (1,))
    steps = (Extern(FLEX, (view,), (), ("y",), "out"),)
    assert not unrecordable_steps(Program("forward", ("x",), (View("y", (8,), (1,)),), buffers, steps))
