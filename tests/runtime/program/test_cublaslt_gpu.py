"""cuBLASLt's algorithms on a GPU: each computes what torch.mm does, and max_autotune takes the faster ones."""

import pytest
import torch

import dcompile
from dcompile.compiler import autotune
from dcompile.ir.gemm import Geometry
from dcompile.runtime.program.cublaslt import GemmCall, GemmDescription

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_every_algorithm_multiplies(turned, dtype):
    a, b = turned
    geometry = Geometry(dtype, 384, 256, 512, a, b, 512 if a else 392, 256 if b else 520, 400)
    left, right, out = autotune.operands(geometry, torch.device("cuda", 0))
    want = left.float() @ right.float()
    products = GemmDescription(geometry, 0)
    algorithms = products.algorithms()
    assert algorithms
    for algorithm in algorithms:
        product = GemmCall(products, algorithm)
        for factor in (1.0, 0.5):
            out.fill_(float("nan"))
            product(left, right, out, factor)
            torch.testing.assert_close(out.float(), want * factor, rtol=2e-2, atol=0.3)


def test_a_matrix_that_begins_elsewhere_is_copied(monkeypatch):
    monkeypatch.setattr(autotune, "fastest", lambda g, device: GemmDescription(g, 0).algorithms()[-1])
    left, right = (torch.randn(512 * 512 + 1, device="cuda").to(torch.bfloat16) for _ in range(2))
    call = torch.compile(lambda a, b: a @ b, backend="dcompile", options={"max_autotune": True})
    whole = right[:-1].view(512, 512)
    for matrix in (left[:-1].view(512, 512), left[1:].view(512, 512)):
        torch.testing.assert_close(call(matrix, whole), matrix @ whole, rtol=2e-2, atol=0.3)


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_a_model_trains_with_chosen_algorithms(mode, monkeypatch):
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", 100.0)  # another algorithm wherever there is one, faster or not
    monkeypatch.setattr(autotune, "MAX_FINALISTS", 1)
    monkeypatch.setattr(autotune, "fastest", lambda g, device: GemmDescription(g, 0).algorithms()[-1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False), torch.nn.GELU(), torch.nn.Linear(512, 128))
    model = model.to("cuda", torch.bfloat16)
    call = dcompile.compile(model, mode=mode)
    for _ in range(4):
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
        results = []
        for function in (model, call):
            model.zero_grad()
            y = function(x)
            y.float().square().mean().backward()
            results.append([y.detach().clone(), *(p.grad.clone() for p in model.parameters())])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    assert any("another algorithm than ATen's" in note for note in dcompile.receipt(call).notes)


def test_nothing_is_measured_where_algorithms_are_to_be_deterministic(monkeypatch):
    monkeypatch.setattr(autotune, "choose", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        call = dcompile.compile(torch.nn.Linear(512, 512, bias=False).to("cuda", torch.bfloat16), mode="max-autotune")
        call(torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("nothing is measured" in note for note in dcompile.receipt(call).notes)


def test_kernels_left_to_aten_are(monkeypatch):
    monkeypatch.setattr(autotune, "choose", lambda *_: pytest.fail("it was measured"))
    model = torch.nn.Linear(512, 512, bias=False).to("cuda", torch.bfloat16)
    call = dcompile.compile(model, options={"max_autotune": True, "kernels": "aten"})
    call(torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)).sum().backward()


def test_measuring_draws_from_no_generator_of_the_users():
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    geometry = Geometry("bfloat16", 512, 512, 512, True, False, 512, 512, 512)
    found = autotune.choose([geometry], torch.device("cuda", 0))
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert set(found) <= {geometry}
