"""What a program for a GPU computes on the CPU, which a replay of the GPU's work would leave out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.lower.decompositions.table import table
from dcompile.compiler import driver
from dcompile.compiler.caching import CachingCompiler
from dcompile.config import Config

CASES: dict[str, tuple[Any, str]] = {
    "all on the GPU": (lambda x: (x.exp(), x.sum()), ""),
    "random numbers of the GPU": (lambda x: F.dropout(x, 0.5, True) + torch.rand_like(x), ""),
    "a number": (lambda x: x * torch.tensor(3.0), ""),
    "random numbers of the CPU": (lambda x: (torch.rand(3), x * 2), "dcompile_random.uniform.default"),
    "a constant of the CPU": (lambda x: (x + 1, torch.zeros(()), torch.tensor(3.0), torch.arange(4)), ""),
    "a kernel on the CPU": (lambda x: (x.sum(), torch.rand(3).sum()), "dcompile_random.uniform.default"),
}


def graph_of(function: Any) -> tuple[FakeTensorMode, Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return mode, make_fx(function, decomposition_table=table())(torch.empty(8, device="cuda"))


def text_of(mode: FakeTensorMode, gm: Any) -> str:
    with mode, mock.patch.object(driver, "why_no_kernels", lambda devices: None):
        plan = driver.Pipeline(Config.make()).plan(gm, driver.Request("inference0", "inference"))
    return host_program.emit(plan.program, plan.kernels)


@pytest.mark.parametrize("case", CASES)
def test_a_program_for_a_gpu_says_what_it_computes_on_the_cpu(case: str) -> None:
    function, expected = CASES[case]
    found = [line for line in text_of(*graph_of(function)).splitlines() if line.startswith("on_host")]
    assert found == ([f"on_host = {expected!r}"] if expected else [])


def test_a_program_for_the_cpu_says_nothing_of_it() -> None:
    gm = make_fx(lambda x: x.exp())(torch.ones(3))
    plan = driver.Pipeline(Config.make()).plan(gm, driver.Request("inference0", "inference"))
    assert "on_host" not in host_program.emit(plan.program, plan.kernels)


def test_it_is_not_recorded() -> None:
    """Random numbers of the CPU would be the first call's in each replay."""
    _, gm = graph_of(CASES["random numbers of the CPU"][0])
    program: Any = SimpleNamespace(late_sizes=0, on_host="aten.rand.default", report=SimpleNamespace(notes=[]))
    request = driver.Request("inference0", "inference")
    assert CachingCompiler._replayed(mock.Mock(), program, gm, request) is program
    (note,) = program.report.notes
    assert "without a CUDA graph: it computes on the CPU, too (aten.rand.default)" in note
