"""What counts as a refusal of eager's own, and what never does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import plan
from tests.models.architecture import Architecture


class Mixed(nn.Module):
    """A product of two dtypes: eager refuses it when it runs."""

    def forward(self, x):
        return {"loss": torch.mv(x.float(), torch.ones(3, dtype=torch.float64)).sum()}


MIXED = Architecture(Mixed, lambda rows, length: {"x": torch.randn(rows, 3)})


def raising(error, otherwise=None):
    """An aspect that raises with dcompile; with backends that compile nothing it raises `otherwise`, if anything."""

    def aspect(architecture, backend="dcompile"):
        if backend == "dcompile":
            raise error
        if otherwise is not None:
            raise otherwise

    return aspect


def test_what_eager_refuses_is_expected(monkeypatch):
    monkeypatch.setitem(
        plan.ASPECTS, "run", lambda architecture, backend="dcompile": architecture.make()(**architecture.batch(2, 3))
    )
    with pytest.raises(pytest.xfail.Exception, match="with eager, too"):
        plan.check("mixed", MIXED, "run")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (AssertionError("off by 0.1"), AssertionError("off by 0.1")),
        (RuntimeError("out of memory"), None),
        (RuntimeError("one thing"), RuntimeError("another")),
        (RuntimeError("one thing"), ValueError("one thing")),
        (torch._dynamo.exc.Unsupported("a call of print"), torch._dynamo.exc.Unsupported("a call of print")),
        (
            torch._dynamo.exc.Unsupported(f"{plan.UNTRACEABLE}\n unsupported operator: aten.a"),
            torch._dynamo.exc.Unsupported(f"{plan.UNTRACEABLE}\n unsupported operator: aten.b"),
        ),
    ],
    ids=["a wrong value", "ours alone", "other words", "another error", "a graph break", "another operator"],
)
def test_what_is_ours_stays_a_failure(ours, theirs, monkeypatch):
    monkeypatch.setitem(plan.ASPECTS, "run", raising(ours, theirs))
    with pytest.raises(type(ours)):
        plan.check("mixed", MIXED, "run")


def test_an_operator_that_torch_cannot_trace_is_expected(monkeypatch):
    error = torch._dynamo.exc.Unsupported(f"{plan.UNTRACEABLE}\n unsupported operator: aten.a")
    monkeypatch.setitem(plan.ASPECTS, "run", raising(error, error))
    with pytest.raises(pytest.xfail.Exception, match=r"unsupported operator: aten\.a"):
        plan.check("mixed", MIXED, "run")
