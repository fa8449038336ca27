"""Mixtures of experts on a GPU: one graph under autocast, eager's losses and gradients, whatever routers choose."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import dcompile
from dcompile.operators import grouped_ops
from tests.models.test_experts import MODELS, SAMPLE
from tests.subject import anew

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def gradients(model: torch.nn.Module, call: Any, batch: Any) -> torch.Tensor:
    """The loss and all gradients of one step under autocast, as one vector."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = call(**batch).loss
    loss.backward()
    values = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return torch.cat([value.reshape(-1).double() for value in values])


def held_to_eager(name: str, dtype: torch.dtype, loop: bool, limit: float, **options: Any) -> Any:
    with anew():
        theirs = MODELS[name].make().train().cuda().to(dtype)
        theirs.set_experts_implementation("eager" if loop else "grouped_mm")
        model = copy.deepcopy(theirs)
        call = dcompile.compile(model, fullgraph=True, options={"receipt": False, **options})
        batches = [MODELS[name].draw(2, 8) for _ in range(2)]
        batches.append({key: value[:, :1].expand(2, 8).contiguous() for key, value in batches[0].items()})
        for drawn in batches:
            batch = {key: value.cuda() for key, value in drawn.items()}
            found, wanted = gradients(model, call, batch), gradients(theirs, theirs, batch)
            assert float((found - wanted).norm() / wanted.norm()) < limit
        return dcompile.receipt(call)


def grouped(receipt: Any) -> list[str]:
    """Grouped matmuls that are fallbacks."""
    return sorted(name for name in receipt.fallbacks if "grouped" in name)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("loop", [False, True], ids=["grouped", "loop"])
def test_float32_experts_under_autocast_are_one_graph(name, loop):
    receipt = held_to_eager(name, torch.float32, loop, 5e-2)
    assert receipt.graphs == 1 and receipt.graph_breaks == 0
    counted = [] if loop else ["dcompile_grouped.mm_each.default", "dcompile_grouped.outer_each.default"]
    assert grouped(receipt) == counted, str(receipt)


@pytest.mark.parametrize("name", SAMPLE)
def test_bfloat16_experts_are_grouped_gemms(name):
    receipt = held_to_eager(name, torch.bfloat16, False, 1e-1)
    assert receipt.graphs == 1 and receipt.graph_breaks == 0 and not grouped(receipt), str(receipt)


@pytest.mark.parametrize("options", [{"autocast_experts": True}, {"autocast_experts": True, "triton.cudagraphs": True}])
def test_experts_in_autocasts_dtype_are_recorded(options):
    receipt = held_to_eager("olmoe", torch.float32, False, 1e-1, **options)
    assert receipt.graphs == 1 and not grouped(receipt), str(receipt)
    assert "triton.cudagraphs" not in options or receipt.recordings, str(receipt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("ends", [(8, 24, 24, 40), (0, 0, 40, 40)])
def test_grouped_matmuls_are_those_of_each_group(dtype, ends):
    torch.manual_seed(0)
    input, weight = torch.randn(40, 64, device="cuda"), torch.randn(4, 32, 64, device="cuda")
    offsets, grad = torch.tensor(ends, dtype=torch.int32, device="cuda"), torch.randn(40, 32, device="cuda")
    results = []
    for kind, has in ((dtype, grouped_ops.has_grouped_gemm), (torch.float64, None)):
        x, w = (t.to(dtype).to(kind, copy=True).requires_grad_() for t in (input, weight))
        assert has is None or has(x, w.transpose(1, 2)) is (dtype == torch.bfloat16)
        found = grouped_ops.grouped_mm(x, w.transpose(1, 2), offsets)
        found.backward(grad.to(dtype).to(kind))
        results.append([t.double() for t in (found.detach(), x.grad, w.grad)])
    for mine, theirs in zip(*results, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < {torch.float32: 1e-5}.get(dtype, 1e-2)


def test_the_grouped_gemm_does_not_wait_for_the_gpu():
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([8, 16, 32, 64], dtype=torch.int32, device="cuda")
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("PyTorch's grouped GEMM reads offsets on the host there")
    grouped_ops.grouped_mm(x, w, offsets).sum().backward()
    try:
        with warnings.catch_warnings():  # that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        grouped_ops.grouped_mm(x, w, offsets).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
