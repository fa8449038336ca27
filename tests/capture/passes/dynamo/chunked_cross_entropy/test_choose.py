"""Choice of how a loss is computed, by the cost model alone, and the memory that the plan for a GPU then has."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.dynamo.chunked_cross_entropy.choose import HeadShape, choose_plan
from dcompile.codegen.schedule.memory.memory_summary import summarize_memory
from dcompile.driver import Pipeline
from dcompile.explain import plan_only
from tools.collect_programs import relabel_devices


def shape(rows, classes, width, dtype="bfloat16", device="cuda", **more):
    learns = {"hidden_learns": True, "weight_learns": True, "is_one_sum": True} | more
    return HeadShape(rows, classes, width, dtype, device, **learns)


FROZEN = {"weight_learns": False}


@pytest.mark.parametrize(
    ("sizes", "more", "saves", "kind"),
    [
        ((16384, 248320, 2048), {}, False, "rows"),
        ((16384, 128256, 4096), {}, False, "rows"),
        ((16384, 32768, 1024), {}, False, "rows"),  # those of test_match_gpu.py
        ((4096, 128256, 4096), {}, False, "whole"),  # the weight's sums in float32 take more than the logits
        ((4096, 128256, 4096), {}, True, "whole"),  # checkpoints save more memory for as many FLOPs
        ((4096, 128256, 4096), FROZEN, False, "rows"),
        ((16384, 248320, 2048), {"is_one_sum": False}, False, "whole"),
        ((16384, 248320, 2048), {"is_one_sum": False}, True, "classes"),
        ((16384, 248320, 2048), {"hidden_learns": False, **FROZEN}, False, "classes"),
        ((8192, 50304, 768), {"dtype": "float32", "device": "cpu"}, False, "rows"),
        ((8192, 50304, 768), {"device": "cpu"}, False, "whole"),
        ((64, 1000, 512), FROZEN, True, "whole"),
    ],
)
def test_what_gains_memory_for_little_time_is_chosen(sizes, more, saves, kind):
    plan = choose_plan(shape(*sizes, **more), saves)
    assert plan.kind == kind
    large = sizes[0] * sizes[1] * 2 >= 1 << 28
    assert (" GB for " in plan.reason) == large, "what is small needs no reason"


@pytest.mark.parametrize(
    ("sizes", "more", "kind", "share"),
    [
        ((16384, 248320, 2048), {}, "rows", 0.5),
        ((8192, 128256, 4096), {}, "classes", 0.2),  # the weight's sums in float32 take as much as the logits
        ((16384, 248320, 2048), {"is_one_sum": False}, "classes", 0.1),
        ((8192, 50304, 768), {"device": "cpu"}, "rows", 0.5),
        ((64, 1000, 512), {}, "classes", 1.6),  # too small for either: sums take more than the logits
    ],
)
def test_who_asks_for_chunks_gets_what_gains_memory(sizes, more, kind, share):
    plan = choose_plan(shape(*sizes, **more), False, True)
    assert plan.kind == kind
    assert plan.peak_bytes <= share * 2 * sizes[0] * sizes[1]


def test_reasons_for_whole_logits_name_what_would_save_memory():
    assert "16-bit factors" in choose_plan(shape(8192, 50304, 768, device="cpu"), False).reason
    reason = choose_plan(shape(16384, 248320, 2048, is_one_sum=False), False).reason
    assert "not one sum" in reason and "chunked_loss=16 would take 0.64 GB for 8.14" in reason


@pytest.fixture(scope="module")
def planned():
    """Programs for an H100 of 16384 tokens, 248320 classes and a width of 2048, and the note."""
    programs, plan = {}, Pipeline.plan

    def plan_for_gpu(pipeline, gm, request, *more):
        with relabel_devices(gm, torch.device("cuda:0")):
            found = plan(pipeline, gm, request, *more)
        programs[request.name] = found.program
        return found

    def loss(hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    torch._dynamo.reset()
    with (
        mock.patch.object(Pipeline, "plan", plan_for_gpu),
        mock.patch.object(plan_only, "PLANNED", replace(plan_only.PLANNED, planned_for="cuda", needs_data=False)),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        hidden, weight = (torch.empty(size, 2048, dtype=torch.bfloat16, requires_grad=True) for size in (16384, 248320))
        report = dcompile.explain(dcompile.compile(loss), hidden, weight, torch.zeros(16384, dtype=torch.int64))
    return programs, report


def test_planned_memory_of_a_large_vocabulary_on_a_gpu(planned):
    programs, report = planned
    gradients = 2 * 2048 * (16384 + 248320)
    peaks = [summarize_memory(programs[name]).peak_bytes - gradients for name in ("forward0", "backward0")]
    assert max(peaks) < 2.2e9, "below the 3.1 GB of cut cross-entropy"
    assert "8 parts of at most 1017.1 MB are there one after another" in str(report)
