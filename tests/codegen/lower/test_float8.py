"""8-bit floats through the whole compiler: casts and copies are kernels of its own, with eager's bits."""

from __future__ import annotations

import pytest
import torch

import dcompile
from dcompile import compat
from dcompile.ir.float8 import FLOAT8, OPAQUE
from dcompile.ir.nodes import Apply, Extern, Loop
from tests.codegen.emit import float8
from tests.codegen.lower import float8_recipe as recipe
from tests.codegen.lower.test_lower import program_of

CAST = "aten._to_copy.default"
DTYPES = [getattr(torch, name) for name in FLOAT8]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def compiled(function):
    return dcompile.compile(function, options={"receipt": False, "verify": True})


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_same(function, *args, fallbacks=()):
    """Eager's bits in eager's layout, with no other operations left to ATen than these."""
    ours = compiled(function)
    got, want = ours(*args), function(*args)
    for number, (a, b) in enumerate(zip(*(x if isinstance(x, list) else [x] for x in (got, want)), strict=True)):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(raw(a), raw(b)), f"result {number}"
    assert dcompile.receipt(ours).fallbacks.keys() == set(fallbacks)


def assert_each_same(functions, x):
    """Several functions in one graph, each of a tensor of its own, so that each has its own loop."""
    assert_same(
        lambda *xs: [function(x) for function, x in zip(functions, xs, strict=True)], *(x.clone() for _ in functions)
    )


def casts(*targets):
    return [lambda x, target=target: x.to(target) for target in targets]


def eights(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).view(*shape)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_floats_become_the_bytes_that_eager_makes(source):
    numbers = float8.bfloat16s() if source is torch.bfloat16 else float8.values("float32")
    x = torch.from_numpy(numbers).to(source)
    assert_each_same(casts(*DTYPES), x[~x.isnan()] if source is torch.bfloat16 else x)


@pytest.mark.parametrize("x", [torch.arange(-600, 600), torch.arange(9) % 2 == 0], ids=["integers", "truth values"])
def test_integers_and_truth_values_become_eights(x):
    assert_each_same(casts(*DTYPES), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_become_the_numbers_that_eager_makes(dtype):
    x = eights(dtype, 16, 16)
    assert_same(lambda x: x.to(torch.float32), x)
    assert_each_same(casts(torch.bfloat16, torch.float64, torch.bool), x[:, :12].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_eights_become_other_eights(dtype):
    assert_each_same(casts(*DTYPES), eights(dtype, 256))


@pytest.mark.parametrize("saturates", [False, True])
def test_what_is_too_large_is_what_this_torch_makes_of_it(saturates, monkeypatch):
    """The largest number from torch 2.13 on, NaN before."""
    x = torch.tensor([464.0, 464.5, -1e30, torch.inf, torch.nan])
    if saturates == compat.tensors.saturates_float8():
        assert_same(lambda x: x.to(torch.float8_e4m3fn), x)
        return
    monkeypatch.setattr(compat.tensors, "saturates_float8", lambda: saturates)
    made = compiled(lambda x: x.to(torch.float8_e4m3fn))(x).float()
    assert made[0] == 448 and (made[1:4].abs() == 448).all() == saturates and made[1:4].isnan().all() != saturates


@pytest.mark.parametrize(("most", "bounds"), [(448.0, 0), (100.0, 0), (460.0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_clamped_is_not_bounded_again(dtype, most, bounds, monkeypatch):
    monkeypatch.setattr(compat.tensors, "saturates_float8", lambda: True)
    program = program_of(lambda x: x.clamp(-most, most).to(torch.float8_e4m3fn), torch.randn(9).to(dtype))
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    assert sum(isinstance(value, Apply) and value.op == "where" for value in loop.body) == bounds


COPIES = [
    lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x.t().contiguous(),
    lambda x: x.t().contiguous().t(), lambda x: x[3:, 2:5].clone(), lambda x: x[:0].clone(),
    lambda x: x[:1].expand(4, 16).contiguous(), lambda x: x.view(4, 4, 16).permute(2, 0, 1).contiguous(),
    lambda x: x.view(1, 4, 4, 16).clone(memory_format=torch.channels_last),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [*FLOAT8, *OPAQUE])
def test_copies_keep_every_byte(dtype):
    assert_each_same(COPIES, eights(getattr(torch, dtype), 16, 16))


def test_what_loops_know_only_as_bytes_is_converted_by_the_library():
    x = eights(torch.float8_e4m3fnuz, 16, 16)
    assert_same(lambda x: x.t().to(torch.float32), x, fallbacks=[CAST])


@pytest.mark.parametrize("compute", [lambda x: x == x, lambda x: x.abs(), lambda x: torch.cat([x, x])])
def test_eager_computes_what_is_no_conversion(compute):
    x = eights(torch.float8_e4m3fn, 256)
    ours = compiled(compute)
    assert torch.equal(raw(ours(x)), raw(compute(x))) and dcompile.receipt(ours).fallbacks


def test_what_eager_refuses_is_refused():
    x = eights(torch.float8_e4m3fn, 256)
    with pytest.raises(Exception, match="not implemented"):
        compiled(lambda x: x + x)(x)


def test_inputs_are_overwritten_with_eights():
    target, x = torch.zeros(256).to(torch.float8_e5m2), torch.linspace(-1e5, 1e5, 256)
    ours = compiled(lambda target, x: target.copy_(x))
    ours(target, x)
    assert torch.equal(raw(target), raw(x.to(target.dtype))) and not dcompile.receipt(ours).fallbacks


# --- float8 training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_of_products_have_eagers_bits(dtype):
    torch.manual_seed(0)
    args = [torch.randn(48, 80), torch.randn(64, 80), torch.randn(48, 64) * 1e-4]
    assert_same(recipe.parts, *(x.to(dtype) for x in args))


def test_a_cast_and_its_copies_are_one_kernel():
    def function(x, scale):
        eight = recipe.rounded(x, scale, torch.float8_e4m3fn)
        return eight, recipe.by_columns(eight), eight.t().contiguous()

    ours = compiled(function)
    ours(torch.randn(64, 96).bfloat16(), torch.tensor(3.0))
    receipt = dcompile.receipt(ours)
    assert receipt.kernel_calls == 1 and not receipt.fallbacks


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_layer_trains_as_in_eager():
    torch.manual_seed(0)
    model, x = recipe.Layers([32, 48, 16], recipe.in_float32), torch.randn(24, 32)
    gradients = []
    for module in (model, compiled(model)):
        module(x).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.weights])
        model.zero_grad()
    torch.testing.assert_close(*gradients)
    assert not dcompile.receipt(module).fallbacks


def test_the_librarys_product_takes_its_second_factor_by_columns():
    """Which it requires."""

    def function(x, weight, scale):
        first, second = (recipe.rounded(each, scale, torch.float8_e4m3fn) for each in (x, weight))
        return recipe.scaled(first, recipe.by_columns(second), scale, scale, torch.bfloat16)

    program = program_of(function, torch.randn(32, 64), torch.randn(64, 16), torch.tensor(1.0))
    (call,) = (step for step in program.steps if isinstance(step, Extern))
    assert call.op == "aten._scaled_mm.default" and not call.fallback
    first, second = call.args[:2]
    assert (first.strides, second.strides) == ((64, 1), (1, 64))
    assert all(isinstance(step, Loop) for step in program.steps if step is not call)
