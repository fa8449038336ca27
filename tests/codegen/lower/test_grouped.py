"""Grouped matmuls in programs for a GPU, planned where there is none: who is called, and what counts as a fallback."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.emit.host import program
from dcompile.collectives.contract import Request
from dcompile.compiler import driver
from dcompile.config import Config
from dcompile.operators.grouped_ops import grouped_mm

GROUPS, WIDTH, RESULT, ROWS = 4, 32, 16, 64


def planned(dtype: torch.dtype, monkeypatch) -> tuple[driver.ProgramPlan, str]:
    """(plan, host program) of two matmuls of the same groups, the second with the weight's gradient."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def layer(x, weight, sizes, grad):
        offsets = sizes.cumsum(0, dtype=torch.int32)
        result = grouped_mm(x * 2, weight.transpose(1, 2), offsets).sigmoid()
        if dtype == torch.bfloat16:
            return result, torch.ops.dcompile_grouped.outer(grad, x, offsets) * 2
        return result, torch.ops.dcompile_grouped.outer_each(grad, x, torch.ops.dcompile_grouped.ends(offsets)) * 2

    with FakeTensorMode():
        gm = make_fx(layer)(
            torch.empty(ROWS, WIDTH, dtype=dtype, device="cuda"),
            torch.empty(GROUPS, RESULT, WIDTH, dtype=dtype, device="cuda"),
            torch.empty(GROUPS, dtype=torch.int64, device="cuda"),
            torch.empty(ROWS, RESULT, dtype=dtype, device="cuda"),
        )
    plan = driver.Pipeline(Config(verify=True)).plan(gm, Request(name="layer", kind="inference"))
    return plan, program.emit(plan.program, plan.kernels, recycle=True)


def test_the_grouped_gemm_is_no_fallback_and_leaves_offsets_on_the_device(monkeypatch):
    plan, text = planned(torch.bfloat16, monkeypatch)
    assert not plan.report.fallbacks and "dcompile_grouped.mm.default" in text and "ends" not in text
    assert all(buffer.device.startswith("cuda") for buffer in plan.program.buffers if buffer.name != "i0")


def test_what_it_does_not_take_is_a_fallback_with_offsets_on_the_host(monkeypatch):
    plan, text = planned(torch.float32, monkeypatch)
    assert plan.report.fallbacks == {"dcompile_grouped.mm_each.default": 1, "dcompile_grouped.outer_each.default": 1}
    assert "dcompile_grouped.ends.default" in text
    ends = [buffer for buffer in plan.program.buffers if buffer.name.startswith("ends")]
    assert ends and all(buffer.device == "cpu" for buffer in ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pointwise_work_around_is_ours(dtype, monkeypatch):
    plan, _ = planned(dtype, monkeypatch)
    assert len(plan.kernels.calls) >= 3 and all(kernel.launches for kernel in plan.kernels.calls)
