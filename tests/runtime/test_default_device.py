"""`torch.set_default_device` and `with torch.device(...)` say where a model's factories put tensors, not where ours do.

The device is `meta` here, whose tensors have no memory: a kernel that was given one would write to address 0.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dcompile
from dcompile.runtime.program.arena import RECYCLE_BYTES, RecycledResultMemory, ReusedResultMemory

ROWS = RECYCLE_BYTES // 4 // 64
"""Rows of 64 float32 that make a result large enough to be given out again."""


def test_memory_of_results_is_the_cpus():
    fresh, recycled = ReusedResultMemory(torch.float32, (3,), (1,)), RecycledResultMemory()
    with torch.device("meta"):
        results = [
            fresh(),
            *(recycled.of(torch.float32, *layout)() for layout in (((3,), (1,)), ((ROWS, 64), (64, 1)))),
        ]
        with torch.inference_mode():
            results.append(fresh())
    assert {result.device.type for result in results} == {"cpu"}


def model(x, weight):
    """Results large and small, a random number and a constant causal mask, each on the device of `x`."""
    rows = torch.arange(x.shape[0] // 64, device=x.device)
    q = (x.sin() * weight).view(1, -1, 64, 64).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=rows[None] <= rows[:, None])
    return mixed, mixed.exp(), mixed.sum(-1), torch.rand(4, device=x.device) + x[0, 0]


def run(call, sizes, device, training, dtype=torch.float32):
    """Results, and gradients in training, for each number of rows, with the factories' default as said.

    No weight is near 0: its gradient would be what is left of terms a thousand times as large, off by their roundings.
    """
    torch.manual_seed(0)
    inputs = [(torch.randn(rows, 64).to(dtype), torch.rand(64).add(0.5).to(dtype)) for rows in sizes]
    inputs = [(x, weight.requires_grad_(training)) for x, weight in inputs]
    found = []
    with torch.device(device):
        for x, weight in inputs:
            torch.manual_seed(1)
            results = call(x, weight)
            if training:
                sum(result.square().sum() for result in results).backward()
            found += [*(result.detach() for result in results), weight.grad]
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
def test_calls_under_another_default_device(dynamic, training):
    """Memory of results is given out again in inference alone.

    Against eager in float64: in float32 its own sum over all rows is 2.7e-6 off (AVX2), ours 0.6e-6.
    """
    sizes = (ROWS, 2 * ROWS) if dynamic else (ROWS,)
    call = dcompile.compile(model, dynamic=dynamic, fullgraph=True, options={"fallback_random": True})
    expected = run(model, sizes, "cpu", training, torch.float64)
    torch.testing.assert_close(run(call, sizes, "meta", training), expected, check_dtype=False)
