"""dcompile.bisect names the planted place, and finds nothing in a correct model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dcompile
from dcompile.bisect.repro import MAX_LINES
from tests.faults.fault_models import FEW, make
from tests.faults.planted import FAULTS, Fault


@pytest.mark.parametrize("model", FEW)
def test_a_correct_model_has_no_difference(model: str) -> None:
    module, x = make(model)
    found = dcompile.bisect(module, x)
    assert not found and "no difference found" in str(found)
    assert found.compared["forward0"] > 1 and found.compared["backward0"] > 1


# Dynamo itself looks at .grad of a non-leaf when it goes on after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Autocast(nn.Module):
    """A LayerNorm of 16-bit numbers with float32 weights, for which tracing and ATen disagree about a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.down(self.norm(nn.functional.gelu(self.up(x)))).float().mean()


class Broken(nn.Module):
    """A graph break, a buffer that counts, results of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x).tanh()
        torch._dynamo.graph_break()
        self.calls += 1
        return (y * y).cumsum(-1).sum(), y.argmax(-1), y.double().std()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (Autocast, (40, 16)),
        (Broken, (5, 8)),
        (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 7, 16)),  # with dropout
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), (4, 3, 8, 8)),
        (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 2, 3)), (2, 3, 8)),
        (lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Softmax(-1)).bfloat16(), (128, 64)),
    ],
)
def test_other_correct_models_have_no_difference(build: Callable[[], Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = build()
    dtype = next(model.parameters()).dtype
    before = [value.clone() for value in model.state_dict().values()]
    assert not (found := dcompile.bisect(model, torch.randn(shape, dtype=dtype))), found
    assert all(map(torch.equal, before, model.state_dict().values())), "its state is what it was"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not dcompile.is_compiled(model)


@pytest.mark.parametrize("way", ("compile", "torch"))
def test_a_compiled_model_stays_compiled(way: str) -> None:
    layer, x = nn.Sequential(nn.Linear(3, 2), nn.GELU()), torch.randn(4, 3)
    model = dcompile.compile(layer) if way == "compile" else torch.compile(layer, backend="dcompile")
    model(x).sum().backward()
    before = dcompile.receipt(model)
    assert not (found := dcompile.bisect(model, x)), found
    assert found.compared["forward0"] and dcompile.is_compiled(model)
    assert dcompile.receipt(model).graphs == before.graphs == 1
    model(x).sum().backward()


def test_a_function_is_searched_like_a_module() -> None:
    found = dcompile.bisect(lambda x: torch.fft.rfft(x).abs().sum(), torch.randn(4, 16))
    assert not found and set(found.compared) == {"the model", "inference0"}


def test_expected_results_replace_eagers() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad():
        right = layer(x)
    assert not dcompile.bisect(layer, x, expected=right)
    found = dcompile.bisect(layer, x, expected=right + 1)
    assert found.finding is not None and found.finding.place.result == "result 0"


def test_what_cannot_be_called_is_an_error() -> None:
    with pytest.raises(TypeError, match="bisect needs a module or a function, not int"):
        dcompile.bisect(3)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_planted_place_is_named(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = make(fault.model)
    monkeypatch.setenv("DCOMPILE_VERIFY", "0")  # which would find some of them at once
    with fault.plant():
        found = dcompile.bisect(module, x)
    assert found.finding is not None, "the fault was not found"
    place = found.finding.place
    assert place.kind == fault.kind, str(found)
    assert fault.place in " ".join((place.name, *place.notes)), str(found)
    if place.kind in ("kernel", "lowering rule"):
        assert found.finding.repro is not None, "no script shows it"
        assert found.finding.repro.script.count("\n") <= MAX_LINES
