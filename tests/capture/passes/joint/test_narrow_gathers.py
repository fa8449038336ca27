"""What is read by index is read in the dtype it lies in, where that changes no value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.capture.passes.joint.narrow_gathers import narrow_gathers

aten = torch.ops.aten
PLACES = torch.arange(8) // 2


def traced(function, *args):
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def enlarged(x):
    wide = x.to(torch.float32)
    return aten._unsafe_index(wide, [None, None, PLACES[:, None], PLACES]).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_enlarged_image_is_not_widened(dtype):
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    gm = traced(enlarged, x)
    assert narrow_gathers(gm).changes == 1
    assert not [node for node in gm.graph.nodes if node.target is aten._to_copy.default]
    assert torch.equal(gm(x), enlarged(x)) and torch.equal(gm(x), F.interpolate(x, scale_factor=2.0))


@pytest.mark.parametrize("how", ["read wide as well", "was wide", "another dtype"])
def test_what_would_come_out_otherwise_stays(how):
    def function(x):
        found = aten._unsafe_index(x.to(torch.float32), [None, PLACES % 4])
        narrow = found.to(torch.float16 if how == "another dtype" else torch.bfloat16)
        return (narrow, found) if how == "read wide as well" else narrow

    x = torch.randn(4, 4, dtype=torch.float32 if how == "was wide" else torch.bfloat16)
    gm = traced(function, x)
    before = gm.code
    assert narrow_gathers(gm).changes == 0 and gm.code == before
