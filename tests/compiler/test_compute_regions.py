"""Models whose kernels another compiler makes: what it is handed, what it refuses, what is kept of it."""

from __future__ import annotations

import copy
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.entry import find_model
from dcompile.collectives.contract import Request
from dcompile.compiler.compute_regions import RegionCompiler
from dcompile.config import Config
from dcompile.errors import DcompileError
from dcompile.kernel_backends.names import NAMED
from dcompile.runtime.coordination.heartbeat import SingleProcess
from dcompile.runtime.measure.region_times import RegionTimes
from tests.kernel_backends.fakes import FAKED, installed

pytestmark = pytest.mark.usefixtures("compiled_anew")

ASKED: list[tuple[int, bool]] = []
"""(operations, whether inputs were fake tensors) of each region that `eager` was handed."""


def eager(gm, example_inputs):
    """A compiler by torch's contract that runs the graph as it is."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    ASKED.append((len(nodes), all(isinstance(x, torch._subclasses.FakeTensor) for x in example_inputs)))
    return gm.forward


def forward_only(gm, example_inputs):
    """One that knows no product of matrices but a linear layer's."""
    if any(str(node.target) == "aten.mm.default" for node in gm.graph.nodes):
        raise NotImplementedError("no rule for aten.mm\nand more that nobody needs to read")
    return eager(gm, example_inputs)


class Dropped(nn.Module):
    """Two equal layers with dropout between."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(8, 8), nn.Linear(8, 8), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.dropout(self.a(x).relu(), self.p, self.training)).relu()


def trained(model: nn.Module, call, x: torch.Tensor) -> list[torch.Tensor]:
    y = call(x)
    y.square().sum().backward()
    return [y, *(parameter.grad for parameter in model.parameters())]


def against_aten(kernels, model: nn.Module | None = None):
    """Train once with a compiler and once with ATen's kernels, which are eager's: (receipt, whether bits are equal)."""
    ASKED.clear()
    torch.manual_seed(0)
    model, x = model or Dropped(), torch.randn(4, 8)
    expected = trained(twin := copy.deepcopy(model), twin, x)
    call = dcompile.compile(model, options={"kernels": kernels, "receipt": False})
    got = trained(model, call, x)
    return dcompile.receipt(call), all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_callable_gets_regions_with_fake_inputs() -> None:
    receipt, same = against_aten(eager)
    assert same and receipt.regions == 2 and not receipt.fallbacks
    assert receipt.library_calls == receipt.kernel_calls == 0 and len(ASKED) == 2
    assert all(fake for _, fake in ASKED)


def test_refused_region_runs_on_own_kernels_and_is_named() -> None:
    receipt, same = against_aten(forward_only)
    assert receipt.regions == 1 and receipt.kernel_calls > 0
    reason = "NotImplementedError: no rule for aten.mm"
    (left,) = receipt.fallbacks
    assert left.startswith("region left by") and left.endswith(reason) and receipt.fallbacks[left] == 1
    assert f"fallback: {left} x1: kernels of dcompile's own run it" in str(receipt).splitlines()
    assert "1 of 2 regions by another compiler" in str(receipt)
    assert same or receipt.kernel_calls  # own kernels add in another order


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_any_backend_of_torchs_registry_is_found_by_name(name: str) -> None:
    receipt, same = against_aten(name)
    assert same and receipt.regions == 2 and not receipt.fallbacks
    assert "all regions by another compiler" in str(receipt)


def test_random_numbers_stay_outside() -> None:
    torch.manual_seed(0)
    model, x = Dropped(0.5), torch.ones(64, 8)
    call = dcompile.compile(model, options={"kernels": eager, "receipt": False})
    y, *gradients = trained(model, call, x)
    receipt = dcompile.receipt(call)
    assert receipt.regions >= 2 and receipt.kernel_calls >= 1 and not receipt.fallbacks
    with torch.no_grad():
        hidden = model.a(x).relu()
    mask = model.b.weight.grad.T.abs().sum(1) > 0  # columns that any row has kept
    assert mask.any() and y.shape == (64, 8) and hidden.shape == (64, 8)
    assert all(gradient is not None for gradient in gradients)


def test_wrong_result_is_an_error() -> None:
    def halved(gm, example_inputs):
        return lambda *values: [value.double() for value in gm(*values)]

    model = dcompile.compile(Dropped(), options={"kernels": halved, "receipt": False})
    with torch.no_grad(), pytest.raises(DcompileError, match=r"torch.float64 as result 0.*kernels.*auto"):
        model(torch.randn(4, 8))


def test_graph_comes_from_the_cache_with_regions_made_anew(tmp_path) -> None:
    model, x = Dropped(), torch.randn(4, 8)
    counts = []
    for _ in range(2):
        ASKED.clear()
        torch._dynamo.reset()
        settings = {"kernels": eager, "receipt": False, "verify": False, "cache_dir": str(tmp_path)}
        call = dcompile.compile(copy.deepcopy(model), options=settings)
        with torch.no_grad():
            assert torch.equal(call(x), model(x))
        counts.append((dcompile.receipt(call).graphs_cached, dcompile.receipt(call).regions, len(ASKED)))
    assert counts == [(0, 1, 1), (1, 1, 1)]


def test_compiler_without_a_stable_name_is_not_cached(tmp_path) -> None:
    settings = {"kernels": lambda gm, inputs: gm.forward, "receipt": False, "cache_dir": str(tmp_path)}
    call = dcompile.compile(Dropped(), options=settings | {"verify": False})
    with torch.no_grad():
        call(torch.randn(4, 8))
    receipt = dcompile.receipt(call)
    assert receipt.graphs_uncacheable == 1 and any(
        "nothing tells that from another by name" in n for n in receipt.notes
    )
    assert not list(tmp_path.glob("*.graph"))


@pytest.fixture
def new_name_for_precision():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    yield
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.usefixtures("new_name_for_precision")
def test_equal_layers_are_made_once() -> None:
    """A random number between layers cuts them apart. torch refuses to read an old name of a setting meanwhile."""
    torch.manual_seed(0)
    ASKED.clear()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5)) for _ in range(5)))
    call = dcompile.compile(model, options={"kernels": eager, "receipt": False, "fallback_random": True})
    call(torch.randn(4, 8))
    receipt = dcompile.receipt(call)
    assert receipt.regions >= 5 and len(ASKED) <= 3, (receipt, ASKED)


@pytest.mark.parametrize("name", FAKED)
def test_registered_compilers_are_found_by_name(name: str) -> None:
    """The package registers a backend with torch when it is imported."""
    with installed(name, eager):
        receipt, same = against_aten(name)
        trains = NAMED[name].trains
        assert receipt.regions == (2 if trains else 0) and (same or not trains)
        assert trains or receipt.fallbacks == {f"region left by {name}: training graph": 2}
        model, x = Dropped().eval(), torch.randn(4, 8)
        call = dcompile.compile(model, options={"kernels": name, "receipt": False})
        with torch.no_grad():
            assert torch.equal(call(x), model.b(model.a(x).relu()).relu())
    assert dcompile.receipt(call).regions == 1
    assert f"kernels={name} 1.2.3" in find_model(call).settings.config.key().splitlines()


def test_inputs_that_nobody_else_needs_are_freed_inside_a_region() -> None:
    """The last region has what the one before made; once it has taken that out of its list, it is gone."""
    freed: list[bool] = []

    def boxed(gm, example_inputs):
        def call(values):
            seen = [weakref.ref(value) for value in values]
            results = gm(*values)
            values.clear()
            freed.extend(ref() is None for ref in seen)
            return results

        call._boxed_call = True
        return call

    def f(x):
        return nn.functional.dropout(x.exp(), 0.5, True).sin()

    call = dcompile.compile(f, options={"kernels": boxed, "receipt": False, "fallback_random": True})
    freed.clear()
    call(torch.randn(4, 8))
    assert any(freed) and not all(freed)


def test_explain_counts_regions() -> None:
    call = dcompile.compile(Dropped(), options={"kernels": eager, "receipt": False})
    assert "dcompile.region" in str(dcompile.explain(call, torch.randn(4, 8)))


def test_torch_compile_is_a_door_too() -> None:
    model, x = Dropped(), torch.randn(4, 8)
    call = torch.compile(model, backend="dcompile", options={"kernels": eager, "receipt": False})
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    assert dcompile.receipt(call).regions == 1


def test_symbolic_sizes_go_to_who_takes_them() -> None:
    model = Dropped()
    call = dcompile.compile(model, dynamic=True, options={"kernels": eager, "receipt": False})
    with torch.no_grad():
        for rows in (4, 7, 9):
            x = torch.randn(rows, 8)
            assert torch.equal(call(x), model.b(model.a(x).relu()).relu())
    assert dcompile.receipt(call).regions == 1


def test_measured_times_are_costs_of_steps() -> None:
    """Two equal regions are measured once; with symbolic sizes they keep their estimates."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        drawn = torch.rand_like(x.sin() + 1)  # outside of regions
        return (drawn.sin() + 1,)

    def slow(gm, example_inputs):
        def call(*values):
            time.sleep(0.003)
            return gm.forward(*values)

        return call

    config = Config.make(None, {"kernels": slow})
    request, times = Request("inference0", "inference"), RegionTimes(None, SingleProcess())

    def calls_of(mode: str) -> list[float]:
        regions, gm = RegionCompiler(config, config.backend), make_fx(function, tracing_mode=mode)(torch.randn(4, 8))
        measured = replace(request, region_us=regions.measure(gm, request, times))
        costs = [call.cost_us for call in regions.compile(gm, measured).calls.values()]
        estimates = [call.cost_us for call in regions.compile(gm, request).calls.values()]
        assert len(costs) == 2 and all(cost < 3e3 for cost in estimates)
        assert [us for _, us in measured.region_us] == ([] if mode == "symbolic" else costs[:1])
        return costs

    assert min(calls_of("fake")) >= 3e3
    assert max(calls_of("symbolic")) < 3e3
