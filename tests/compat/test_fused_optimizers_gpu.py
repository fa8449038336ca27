"""The compiled step of fused optimizers on a GPU, against eager's own kernels."""

import pytest
import torch
from torch import nn

import dcompile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES = ((257, 129), (7,), (64, 64), (64, 64), (4096,))
HOW = [
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": "tensor"}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]


def trained(name, how, dtype, compiles, steps=6, **options):
    torch.manual_seed(0)
    how = {**how, "lr": torch.tensor(1e-2, device="cuda")} if how["lr"] == "tensor" else how
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype, device="cuda")) for shape in SHAPES]
    optimizer = getattr(torch.optim, name)(parameters, fused=True, **how)
    step = dcompile.compile(optimizer.step, options={"receipt": False, **options}) if compiles else optimizer.step
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        step()
    return parameters, [optimizer.state[parameter] for parameter in parameters], step


@pytest.mark.parametrize(("name", "how"), HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["", "recorded"])
def test_it_equals_eagers_kernels(name, how, dtype, options):
    torch._dynamo.reset()
    expected, state, _ = trained(name, how, dtype, compiles=False)
    found, own_state, step = trained(name, how, dtype, compiles=True, **options)
    to = {"rtol": 4e-6, "atol": 4e-6} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 4e-3}  # a rounding of 1
    torch.testing.assert_close((found, own_state), (expected, state), **to)
    receipt = dcompile.receipt(step)
    assert receipt.graph_breaks == 0 and receipt.library_calls == 0 and receipt.kernel_calls > 0
