"""8-bit floats on a GPU: casts with eager's bits, copies in every layout, and float8 training. `pytest -m gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dcompile
from dcompile.ir.float8 import FLOAT8, OPAQUE
from dcompile.ir.interpret import interpret
from tests.codegen.emit import float8
from tests.codegen.lower import float8_recipe as recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DTYPES = [getattr(torch, name) for name in FLOAT8]
COPIES = [
    lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x.t().contiguous().t(),
    lambda x: x.t().contiguous(), lambda x: x[3:, 2:5].clone(),
    lambda x: x.view(4, 4, 16).permute(2, 0, 1).contiguous(),
]  # fmt: skip
WIDTHS = [256, 512, 256]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def compiled(function):
    return dcompile.compile(function, options={"receipt": False})


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes in order; what is no number has one form."""
    x = x.contiguous().view(-1)
    wide = x.dtype in (torch.float32, torch.bfloat16)
    return (torch.where(x.isnan(), torch.nan, x) if wide else x).view(torch.uint8)


def assert_same(function, *args):
    """Eager's bits in eager's layout, and nothing left to ATen."""
    ours = compiled(function)
    got, want = ours(*args), function(*args)
    for a, b in zip(*(x if isinstance(x, list) else [x] for x in (got, want)), strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(bits(a), bits(b))
    assert not dcompile.receipt(ours).fallbacks


@pytest.fixture(scope="module")
def results():
    """What the interpreter and the GPU make of each program; kernels are built together."""
    from tests.codegen.emit import on_gpu

    made = {name: (on_gpu.for_gpu(program), inputs) for name, (program, inputs) in float8.programs().items()}
    libraries = on_gpu.compiled([program for program, _ in made.values()])
    return {name: (interpret(p, inputs), on_gpu.run(p, inputs, libraries)) for name, (p, inputs) in made.items()}


def canonical(name: str, values: list) -> list:
    """Bytes without the sign of NaN where float16 is converted: GPUs drop it on the way to float32, eager's too."""
    if name not in ("float16 to float8_e4m3fn", "float16 to float8_e5m2"):
        return values
    return [np.where(np.asarray(value) == 0xFF, np.uint8(0x7F), value) for value in values]


@pytest.mark.parametrize("name", float8.programs())
def test_kernels_convert_and_copy_bit_for_bit(name, results):
    want, got = (canonical(name, values) for values in results[name])
    assert [float8.differs(np.asarray(a), np.asarray(b)) for a, b in zip(want, got, strict=True)] == [""] * len(want)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_become_the_bytes_that_eager_makes(source, dtype):
    x = torch.from_numpy(float8.values("float32")).to(source)
    assert_same(lambda x: x.to(dtype), x[~x.isnan()].cuda())


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_none(dtype):
    x = torch.tensor([torch.nan, -torch.nan], device="cuda")
    assert compiled(lambda x: x.to(dtype))(x).float().isnan().all()


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_become_the_numbers_that_eager_makes(dtype, target):
    assert_same(lambda x: x.to(target), torch.arange(256, dtype=torch.uint8).cuda().view(dtype))


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", [*FLOAT8, *OPAQUE])
def test_copies_keep_every_byte(dtype, copy):
    assert_same(copy, torch.arange(256, dtype=torch.uint8).cuda().view(getattr(torch, dtype)).view(16, 16))


def test_factors_of_products_have_eagers_bits():
    torch.manual_seed(0)
    args = [torch.randn(480, 800), torch.randn(640, 800), torch.randn(480, 640) * 1e-4]
    assert_same(recipe.parts, *(x.bfloat16().cuda() for x in args))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_float8_training_leaves_nothing_to_aten():
    """And comes to eager's gradients."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products of 8-bit floats before compute capability 8.9")
    torch.manual_seed(0)
    model = recipe.Layers(WIDTHS, recipe.scaled).bfloat16().cuda()
    x = torch.randn(128, WIDTHS[0], device="cuda", dtype=torch.bfloat16)
    gradients = []
    for module in (model, compiled(model)):
        module(x).float().square().mean().backward()
        gradients.append([weight.grad.clone() for weight in model.weights])
        model.zero_grad()
    for ours, eagers in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=2e-2, atol=2e-2 * eagers.abs().max().item())
    receipt = dcompile.receipt(module)
    assert not receipt.fallbacks and receipt.library_calls == 3 * (len(WIDTHS) - 1) - 1
